"""The pure halves of the probes: alarms, answers, copying, isolation, scores, acceptance, throughput, applied."""

from __future__ import annotations

import hashlib
import math
import random
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddops.engines import PROFILES, Settings
from ddops.prove import acceptance, alarms, answers, applied, copying, isolation, prompts, scores, throughput
from ddops.prove.dialects import Meta
from ddops.prove.divergence import first_difference
from ddops.prove.evidence import Baseline, Fault, Outcome
from ddops.prove.prompts import Item, Kind, Maker
from ddops.prove.session import Turn, most_in_flight
from ddops.prove.verdicts import Gates
from ddops.prove.wire import Ask, Chunk, Reply, Scored
from ddops.state import Observed, UnitState
from tests.ddops.prove_fake import SOLUTIONS, answer_of

# ---- alarms

BAD = {
    "empty": "  \n",
    "replacement": "The capital is Os\ufffdlo.",
    "special": "def f():<|im_end|> return 1",
    "dominance": "!" * 80,
    "loop": "It is a good question and I think " + "that is the way of it and " * 12,
    "doubled": "This functionction returnreturns the numbernumber of wordswords",
    "script": "def add(a, b):\n    return a + b  # 返回结果",
    "control": "The answer\x07 is 4\x00.",
}


@pytest.mark.parametrize("kind", BAD)
def test_each_kind_of_damage_raises_its_alarm(kind: str) -> None:
    assert kind in [a.kind for a in alarms.check(BAD[kind])]


GOOD = [
    *SOLUTIONS.values(),
    "\n\n\n".join(SOLUTIONS.values()),
    "The capital of Surland is Tomar.",
    '{"name": "Alice", "age": 31}',
    "| a | b |\n|---|---|\n| 1 | 2 |\n" + "-" * 60,
    "# Title\n" + "=" * 70 + "\ntext",
    "x = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]",
    "if a:\n    pass\nelif b:\n    pass\nelif c:\n    pass\nelse:\n    pass",
    "Möglicherweise ist α ≤ β; naïve café, 5 €.",
    "The guests murmured about a couscous with bananas and papaya.",
    "<think>hm</think>The answer is 4.",
    "print('ok')\n" * 3,
]


@pytest.mark.parametrize("text", GOOD)
def test_ordinary_text_raises_none(text: str) -> None:
    assert alarms.check(text) == []


def test_what_the_prompt_gave_is_not_held_against_the_reply() -> None:
    for text in ("返回结果", "!" * 40, "<|im_end|>", "\ufffd"):
        assert alarms.check(text, prompt=f"Repeat: {text}") == []


def test_copied_ids_raise_no_alarm() -> None:
    for seed in range(20):
        item = Maker(random.Random(seed)).copy(40)
        assert alarms.check("\n".join(item.expect["ids"]), prompt=item.prompt) == []


def test_a_reply_that_ran_to_its_limit_needs_fewer_repeats_for_a_loop() -> None:
    text = "A sentence to begin with. " + "return the value of it " * 5
    assert alarms.loop(text) is None
    assert alarms.loop(text, finish="length") is not None


@given(st.text(max_size=300))
def test_alarms_read_any_text(text: str) -> None:
    assert isinstance(alarms.check(text), list)


# ---- answers


@pytest.mark.parametrize(
    ("text", "expected", "ok"),
    [
        ("42", 42, True), ("The answer is 42.", 42, True), ("17 + 25 = 42", 42, True), ("**42**", 42, True), ("-3", -3, True),
        ("\u22123", -3, True), ("1,204", 1204, True), ("42.0", 42, True), ("43", 42, False), ("", 42, False),
        ("forty-two", 42, False), ("<think>17 + 25 = 43?</think>42", 42, True), ("421", 42, False),
    ],
)  # fmt: skip
def test_numbers_are_read_from_short_answers(text: str, expected: int, ok: bool) -> None:
    assert answers.number(text, expected).ok is ok


@pytest.mark.parametrize(
    ("text", "ok"), [("Tomar", True), ("Tomar.", True), ("The capital is Tomar!", True), ("Veska", False),
                     ("Tomar or Veska", False), ("Tomara", False), ("tomar", False), ("", False)],
)  # fmt: skip
def test_facts_are_whole_words(text: str, ok: bool) -> None:
    assert answers.word(text, "Tomar", ("Veska",)).ok is ok


@pytest.mark.parametrize(
    ("text", "ok"),
    [
        ('{"name": "Alice", "age": 31}', True), ('```json\n{"age": 31, "name": "Alice"}\n```', True),
        ('Here: {"name": "Alice", "age": "31"} as asked', True), ('{"name": "Alice"}', False),
        ('{"name": "Alicé", "age": 31}', False),
        ('{"name": "Alice", "age": 31, "x": 1}', False), ('{"name": "Alice", "age": 31', False), ("[1]", False), ("", False),
        ("{" * 5000, False),
    ],
)  # fmt: skip
def test_json_must_hold_exactly_what_was_asked(text: str, ok: bool) -> None:
    assert answers.json_object(text, {"name": "Alice", "age": 31}).ok is ok


@pytest.mark.parametrize(
    ("text", "ok"),
    [
        ('{"name": "get_weather", "arguments": {"city": "Oslo", "unit": "c"}}', True),
        ('{"tool": "get_weather", "city": "Oslo", "unit": "c"}', True),
        ('[{"function": {"name": "get_weather", "arguments": "{\\"city\\": \\"Oslo\\", \\"unit\\": \\"c\\"}"}}]', True),
        ('{"get_weather": {"city": "Oslo", "unit": "c"}}', True),
        ('{"name": "get_weather", "arguments": {"city": "Oslo</city>", "unit": "c"}}', False),
        ('{"name": "get_wether", "arguments": {"city": "Oslo", "unit": "c"}}', False),
        ('{"name": "get_weather", "arguments": {"city": "Oslo"}}', False),
        ("get_weather(Oslo, c)", False),
    ],
)  # fmt: skip
def test_tool_calls_of_any_layout_are_read_and_values_are_exact(text: str, ok: bool) -> None:
    assert answers.tool_call(text, "get_weather", {"city": "Oslo", "unit": "c"}).ok is ok


# ---- copying and isolation


def test_copies_are_compared_character_by_character() -> None:
    ids = ("kx7f-29ab", "q0zd-7731")
    assert copying.compare(ids, "kx7f-29ab\nq0zd-7731").check().ok
    assert copying.compare(ids, "Here:\n- `kx7f-29ab`\n- `q0zd-7731`").check().ok
    wrong = copying.compare(ids, "kx7f-29ab\nq0zd-7737")
    assert (wrong.right, wrong.wrong) == (1, ("q0zd-7731 -> q0zd-7737",))
    assert not copying.compare(ids, "kx7f-29ab").check().ok
    assert not copying.compare(ids, "kx7f-29ab\nq0zd-7731\nq0zd-7731").check().ok
    assert not copying.compare(ids, "q0zd-7731\nkx7f-29ab").check().ok
    assert not copying.compare(ids, "").check().ok


@given(st.integers(0, 10**6), st.integers(1, 40), st.data())
def test_any_single_wrong_character_is_seen(seed: int, count: int, data: st.DataObject) -> None:
    ids = copying.make_ids(random.Random(seed), count)
    text = "\n".join(ids)
    assert copying.compare(ids, text).check().ok
    at = data.draw(st.integers(0, len(text) - 1))
    if text[at].isalnum():
        swapped = text[:at] + ("x" if text[at] != "x" else "y") + text[at + 1 :]
        assert not copying.compare(ids, swapped).check().ok


@given(st.integers(0, 10**6))
def test_marks_are_all_different_and_leaks_name_reader_and_owner(seed: int) -> None:
    marks = list(islice(isolation.draw_marks(random.Random(seed)), 6))
    assert len(set(marks)) == 6
    owners = {i: (m,) for i, m in enumerate(marks)}
    texts = {i: f"the code word is {m}." for i, m in enumerate(marks)}
    assert isolation.leaks(owners, texts) == []
    texts[2] += f" and {marks[4]}"
    (leak,) = isolation.leaks(owners, texts)
    assert (leak.reader, leak.owner, leak.mark) == (2, 4, marks[4])


# ---- curated prompts


@given(st.integers(0, 10**6))
def test_right_answers_pass_and_wrong_ones_fail_for_every_curated_prompt(seed: int) -> None:
    for item in Maker(random.Random(seed)).mixed(24):
        right = answer_of(item.prompt, item.said)
        found = prompts.check(item, right)
        if item.kind.is_code:
            assert found is None
            assert item.problems
        else:
            assert found is not None
            assert found.ok, (item, right)
            broken = prompts.check(item, "I would rather not say.")
            assert broken is not None
            assert not broken.ok


def test_marks_of_one_run_never_meet() -> None:
    items = Maker(random.Random(5)).mixed(200)
    marks = [m for i in items for m in i.marks]
    assert len(marks) == len(set(marks))


# ---- scores


def scored(*gaps: float) -> list[Scored]:
    return [Scored(7, -0.1 - g, ((-0.1, 7 if g == 0 else 8), (-9.0, 9))) for g in gaps]


def test_tokens_far_below_the_top_are_over_and_near_ones_are_ties() -> None:
    limit = scores.threshold("bfloat16", [])
    found = scores.judge(scored(0, 0.3, 0, 4.0, 0.05), limit)
    assert [(i, round(g, 3)) for i, _, g in found.over] == [(3, 4.0)]
    assert (found.near, found.scored, found.clean) == (1, 5, False)
    assert not scores.judge([Scored(1, None)], limit).clean


@pytest.mark.parametrize(
    ("dtype", "off", "fixed", "low", "high"),
    [
        ("float32", [], None, 1e-3, 1e-3), ("torch.float32", [0.0], None, 1e-3, 1e-3), ("bfloat16", [0.1], None, 0.5, 0.5),
        ("bfloat16", [0.4], None, 0.8, 0.8), ("bfloat16", [9.0], None, 1.5, 1.5), ("float32", [9.0], None, 0.05, 0.05),
        (None, [], None, 0.5, 0.5), ("auto", [], 0.2, 0.2, 0.2),
    ],
)  # fmt: skip
def test_threshold_follows_dtype_and_this_hosts_own_off_answers(
    dtype: str | None, off: list[float], fixed: float | None, low: float, high: float
) -> None:
    assert low <= scores.threshold(dtype, off, fixed).nats <= high


def test_many_more_near_ties_than_with_speculation_off_count() -> None:
    assert not scores.too_many_near(0, 1000, 0, 200)
    assert not scores.too_many_near(12, 1000, 0, 300)  # within what three unseen ties allow
    assert scores.too_many_near(80, 1000, 1, 300)
    assert not scores.too_many_near(80, 1000, 20, 300)
    assert not scores.too_many_near(80, 1000, 0, 10)  # nothing to compare with


def sample(rng: random.Random, logits: list[float], temperature: float, top_p: float) -> int:
    ranked = sorted(range(len(logits)), key=lambda i: -logits[i])
    weights = [math.exp(logits[i] / temperature) for i in ranked]
    kept, mass = [], 0.0
    for i, w in zip(ranked, weights, strict=True):
        kept.append((i, w))
        mass += w
        if mass >= top_p * sum(weights):
            break
    return rng.choices([i for i, _ in kept], [w for _, w in kept])[0]


def positions(rng: random.Random, count: int, *, temperature: float, top_p: float, wrong: float = 0.0) -> list[Scored]:
    out = []
    for _ in range(count):
        logits = [rng.gauss(0, 2.5) for _ in range(12)]
        norm = math.log(sum(math.exp(x) for x in logits))
        chosen = rng.randrange(12) if rng.random() < wrong else sample(rng, logits, temperature, top_p)
        top = sorted(((x - norm, i) for i, x in enumerate(logits)), reverse=True)
        out.append(Scored(chosen, logits[chosen] - norm, tuple(top)))
    return out


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.7, 1.0), (0.6, 0.95), (1.0, 0.5)])
def test_honest_samples_fit_their_distribution_and_others_do_not(temperature: float, top_p: float) -> None:
    rng = random.Random(4)
    honest = scores.surprise(positions(rng, 1500, temperature=temperature, top_p=top_p), temperature, top_p)
    assert honest.tokens == 1500
    assert abs(honest.z) < 4
    assert honest.outside == 0
    assert abs(honest.top_seen - honest.top_expected) < 4 * math.sqrt(honest.top_expected)
    wrong = scores.surprise(positions(rng, 1500, temperature=temperature, top_p=top_p, wrong=0.15), temperature, top_p)
    assert wrong.z > 5 or wrong.outside > 15
    greedy = [replace(s, token=s.top[0][1], logprob=s.top[0][0]) for s in positions(rng, 1500, temperature=1, top_p=1)]
    assert scores.surprise(greedy, temperature, top_p).z < -5 or top_p == 0.5


def test_positions_whose_tail_is_unknown_are_left_out() -> None:
    half = Scored(1, math.log(0.4), ((math.log(0.4), 1), (math.log(0.3), 2)))
    assert scores.surprise([half] * 10, 0.7).tokens == 0
    assert scores.surprise([half] * 10, 0.0).tokens == 0


@pytest.mark.parametrize(("a", "b", "at"), [((1, 2), (1, 2), -1), ((1, 2), (1, 3), 1), ((1,), (1, 2), 1), ((), (), -1)])
def test_first_difference_of_two_token_lists(a: tuple[int, ...], b: tuple[int, ...], at: int) -> None:
    assert first_difference(a, b) == at


# ---- acceptance


def turn(passes: int | None = None, tokens: int | None = None, chunks: tuple[Chunk, ...] = (), **more: Any) -> Turn:
    meta = Meta(completion_tokens=tokens, verify_passes=passes)
    reply = Reply(Ask.user("p"), more.pop("text", "some text"), "stop", meta, 1.0, chunks=chunks)
    return Turn(0, "x", reply.ask, more.pop("item", None), reply=reply, **more)


def stream(lengths: list[int]) -> tuple[Chunk, ...]:
    total, out = 1, [Chunk(0.0, "a", 1, 0)]
    for i, n in enumerate(lengths, 1):
        total += n
        out.append(Chunk(i * 0.01, "a" * n, total, i))
    return tuple(out)


def test_mid_stream_reading_leaves_warm_up_and_tail_out() -> None:
    chunks = stream([1, 1, *[6] * 10, 2])
    assert acceptance.mid_stream(chunks) == 6.0
    assert acceptance.mid_stream(stream([6, 6])) is None
    assert acceptance.mid_stream((Chunk(0.0, "a"), Chunk(1.0, "b"))) is None


def test_readings_fall_back_from_stream_to_requests_to_counters_to_log_to_report() -> None:
    requests = [turn(10, 61), turn(10, 41)]
    before, after = {"ddtree:verify_passes_total": 0.0, "ddtree:committed_tokens_total": 0.0}, {
        "ddtree:verify_passes_total": 10.0, "ddtree:committed_tokens_total": 30.0}  # fmt: skip
    log = ["accept len: 1.0", "accept len: 4.0", "accept len: 2.0"]
    streamed = [turn(chunks=stream([1, 1, *[6] * 10, 2]))]

    def source(*args: Any, **more: Any) -> tuple[str, float]:
        found = acceptance.read(*args, **more)
        assert found is not None
        return found.source, found.mean

    assert source(streamed) == ("mid-stream counters", 6.0)
    assert source(requests, before, after) == ("per-request counters", 5.0)
    assert source([turn()], before, after) == ("server counters by difference", 3.0)
    assert source([turn()], after, after, log) == ("log lines of this start", 4.0)
    assert source([turn()], None, None, (), 3.3) == ("the engine's mean since its start", 3.3)
    assert acceptance.read([turn()]) is None


def judge(mean: float, turns: list[Turn] | None = None, **more: Any) -> Any:
    options: dict[str, Any] = {"speculates": True, "cap": 16, "baseline": None, "gates": Gates()} | more
    return acceptance.judge(acceptance.Reading(mean, "test", 5, (mean,)), turns or [turn()], **options)


def test_acceptance_is_held_against_one_the_cap_and_the_last_known_good() -> None:
    looping = [turn(text="well " + "over and over again " * 12)]
    assert judge(6.0).outcome is Outcome.PASS
    assert judge(1.02).outcome is Outcome.DEGRADED
    assert judge(15.9, looping).outcome is Outcome.DEGRADED
    assert judge(15.9).outcome is Outcome.PASS
    baseline = Baseline({"acceptance": 6.0})
    assert judge(4.9, baseline=baseline).outcome is Outcome.PASS
    assert judge(4.7, baseline=baseline).outcome is Outcome.DEGRADED
    assert judge(4.7, baseline=baseline).fault is Fault.SPEED
    assert judge(6.0, speculates=False).outcome is Outcome.NOT_SCORED
    none = acceptance.judge(None, [], speculates=True, cap=None, baseline=None, gates=Gates())
    assert none.outcome is Outcome.NOT_SCORED


def test_most_in_flight_counts_overlap() -> None:
    turns = [turn(started=0.0, ended=2.0), turn(started=1.0, ended=3.0), turn(started=2.5, ended=4.0)]
    assert most_in_flight(turns) == 2
    assert most_in_flight([]) == 0


# ---- throughput


def speed(*rates: float, ttft: float = 0.1, itl: float = 0.01) -> throughput.Speed:
    found = throughput.combine([throughput.Round(r, ttft, (itl,) * 50) for r in rates])
    assert found is not None
    return found


def against(now: throughput.Speed, before: throughput.Speed | None) -> Any:
    return throughput.judge(now, Baseline(before.values()) if before else None, Gates())


def test_slower_than_the_gate_and_the_noise_is_degraded() -> None:
    known = speed(300, 301, 299)
    assert against(speed(250, 251, 249), known).outcome is Outcome.DEGRADED
    assert against(speed(280, 281, 279), known).outcome is Outcome.PASS
    assert against(speed(400, 401, 399), known).outcome is Outcome.PASS


def test_a_difference_smaller_than_the_spread_is_a_tie() -> None:
    assert against(speed(200, 300, 255), speed(310, 250, 300)).outcome is Outcome.PASS


def test_latencies_have_gates_of_their_own() -> None:
    known = speed(300, 301, 299)
    assert against(speed(300, 301, 299, ttft=0.5), known).outcome is Outcome.DEGRADED
    assert against(speed(300, 301, 299, itl=0.08), known).outcome is Outcome.DEGRADED
    assert against(speed(300, 301, 299, ttft=0.11, itl=0.015), known).outcome is Outcome.PASS


def test_without_a_baseline_the_numbers_are_recorded_and_nothing_is_held_against_them() -> None:
    found = against(speed(300, 301, 299), None)
    assert found.outcome is Outcome.PASS
    assert found.values["throughput"] == 300
    assert found.expected == "no baseline to compare with"
    assert throughput.judge(None, None, Gates()).outcome is Outcome.NOT_SCORED


def test_a_round_counts_tokens_over_the_wall_clock() -> None:
    turns = [turn(2, 11, started=0.0, ended=1.0), turn(2, 21, started=0.5, ended=2.0)]
    found = throughput.round_of(turns)
    assert found is not None
    assert found.tokens_per_second == 16.0
    assert throughput.round_of([]) is None


def test_gaps_of_a_stream_are_per_token() -> None:
    gaps = throughput.token_gaps(turn(3, 13, stream([4, 4, 4])))
    assert len(gaps) == 12
    assert all(abs(g - 0.0025) < 1e-9 for g in gaps)


# ---- applied


@dataclass(frozen=True)
class FakeUnit:
    """As units.Unit: a name, bytes, their digest, the argument list."""

    name: str
    text: bytes
    digest: str
    argv: tuple[str, ...]


ARGV = ("/opt/py", "-m", "ddtree_engine", "--model-path", "/m", "--speculative-algorithm", "DDTREE",
        "--speculative-draft-model-path", "/d", "--speculative-ddtree-budget", "32",
        "--max-running-requests", "16")  # fmt: skip
TEXT = b"[Service]\n"
UNIT = FakeUnit("ddtree-engine.service", TEXT, hashlib.sha256(TEXT).hexdigest(), ARGV)
WANTED = Settings("DDTREE", budget=32, max_running=16)
INFO = {"speculative_algorithm": "DDTREE", "speculative_ddtree_budget": 32, "max_running_requests": 16}
STATE = UnitState(active_state="active", main_pid=7, invocation_id="inv")
SEEN = Observed("h", "b", 1.0, 252, STATE, TEXT, TEXT, ARGV, (), loaded_fragment=TEXT)


def compare(observed: Observed = SEEN, info: Any = INFO, settings: Settings = WANTED, invocation: str = "inv") -> Any:
    return applied.compare(UNIT, observed, info, PROFILES["ddtree"], settings, invocation)  # type: ignore[arg-type]


def test_all_layers_agreeing_is_a_pass() -> None:
    assert compare().outcome is Outcome.PASS
    assert "does not report" in compare(info=None).detail


MISMATCHES: dict[str, dict[str, Any]] = {
    "another start": {"invocation": "other"},
    "not running": {"observed": replace(SEEN, unit=replace(STATE, active_state="failed"))},
    "a restart during the trial": {"observed": replace(SEEN, unit=replace(STATE, n_restarts=1))},
    "daemon-reload needed": {"observed": replace(SEEN, unit=replace(STATE, need_daemon_reload=True))},
    "another unit file is loaded": {"observed": replace(SEEN, loaded_fragment=b"[Service]\n#\n")},
    "no unit file is loaded": {"observed": replace(SEEN, loaded_fragment=None)},
    "the old arguments run": {"observed": replace(SEEN, argv=(*ARGV[:-3], "8", *ARGV[-2:]))},
    "an argument more": {"observed": replace(SEEN, argv=(*ARGV, "--disable-radix-cache"))},
    "nothing runs": {"observed": replace(SEEN, argv=())},
    "the engine reports another budget": {"info": INFO | {"speculative_ddtree_budget": 8}},
    "the engine switched speculation off": {"info": INFO | {"speculative_algorithm": None}},
    "the engine reset max-running": {"info": INFO | {"max_running_requests": 48}},
    "other settings were wanted": {"settings": replace(WANTED, budget=64)},
}


@pytest.mark.parametrize("case", MISMATCHES)
def test_any_layer_that_differs_is_named_and_is_no_corruption(case: str) -> None:
    found = compare(**MISMATCHES[case])
    assert found.outcome is Outcome.FAIL
    assert found.fault is Fault.IDENTITY
    assert found.got


def test_restarts_of_a_confirmed_unit_are_told_but_do_not_count() -> None:
    found = compare(replace(SEEN, trial_unit=None, unit=replace(STATE, n_restarts=3)))
    assert found.outcome is Outcome.PASS
    assert "restarted 3 times" in found.detail


def test_a_budget_the_engine_chooses_itself_is_not_compared() -> None:
    argv = tuple("auto" if word == "32" else word for word in ARGV)
    unit = replace(UNIT, argv=argv)
    seen = replace(SEEN, argv=argv)
    settings = replace(WANTED, budget="auto")
    info = INFO | {"speculative_ddtree_budget": "auto"}
    found = applied.compare(unit, seen, info, PROFILES["ddtree"], settings, "inv")  # type: ignore[arg-type]
    assert found.outcome is Outcome.PASS, found.got


def test_items_know_the_probe_they_are_evidence_for() -> None:
    assert Item(Kind.COPY, "p").probe == "copy"
    assert {k.probe for k in Kind} == {"coding", "copy", "isolation", "shapes", "answers", "long", "sweep"}


def test_acceptance_is_compared_only_with_the_same_source() -> None:
    """One long stream commits more a pass than many short requests: falling from one to the other is no decline."""
    long = acceptance.Reading(12.0, "mid-stream counters", 1)
    short = acceptance.Reading(8.0, "per-request counters", 9)
    known = Baseline({"acceptance": 12.0, long.key: 12.0})
    options: dict[str, Any] = {"speculates": True, "cap": None, "baseline": known, "gates": Gates()}
    assert acceptance.judge(short, [turn()], **options).outcome is Outcome.PASS
    assert acceptance.judge(replace(long, mean=8.0), [turn()], **options).outcome is Outcome.DEGRADED
    before = options | {"baseline": Baseline({"acceptance": 12.0})}
    assert acceptance.judge(short, [turn()], **before).outcome is Outcome.DEGRADED


def test_two_draws_agree_as_seldom_as_their_likeliest_tokens_allow() -> None:
    even = scores.Scored(1, math.log(0.5), ((math.log(0.5), 1), (math.log(0.5), 2)))
    assert scores.repeat_chance([even] * 10, 1.0) == pytest.approx(10 * math.log(0.5))
    assert scores.repeat_chance([even] * 10, 1.0, top_p=0.5) == pytest.approx(0.0)
    assert scores.repeat_chance([replace(even, top=())], 1.0) is None
    assert scores.repeat_chance([even], 0.0) is None
