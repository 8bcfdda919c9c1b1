"""What replies say of themselves, which tokens end them, and how long the long questions are."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddops.prove import battery, power
from ddops.prove.client import EngineClient
from ddops.prove.counts import Account, contradictions
from ddops.prove.endings import Endings
from ddops.prove.evidence import Level, Outcome, VerdictKind
from ddops.prove.lengths import ANSWER, CONTEXT, lengths
from ddops.prove.scores import Contest, Judgement, Threshold, judge, second_best
from ddops.prove.verdicts import Policy
from ddops.prove.wire import Scored
from tests.ddops.prove_fake import END, FakeEngine, Lies

POLICY = Policy(request_seconds=15, stall_seconds=1, seed=11)
FINE = Account(0, "p", limit=48, finish="stop", tokens=20, ids=20, prompt_tokens=30, cached_tokens=16)


# ---- numbers


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"finish": "length", "tokens": 48, "ids": 48},
        {"tokens": None},
        {"ids": None},
        {"prompt_tokens": None, "cached_tokens": None},
        {"finish": "length", "tokens": 20, "prompt_tokens": 4076},  # the context is full
        {"cached_tokens": 30},
    ],
)
def test_numbers_that_can_be_are_left_alone(change: dict[str, object]) -> None:
    assert contradictions([replace(FINE, **change)], 4096, exact=True) == []


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"tokens": 49, "ids": 49}, "49 tokens where 48 were the limit"),
        ({"tokens": 48, "ids": 49}, "49 tokens where 48 were the limit"),
        ({"tokens": 21}, "counts 21 tokens and lists 20"),
        ({"finish": "length"}, "its limit ended it, with 20 of 48"),
        ({"cached_tokens": 31}, "31 tokens of a prompt of 30 came from the cache"),
    ],
)
def test_numbers_that_cannot_be_are_named(change: dict[str, object], what: str) -> None:
    found = contradictions([replace(FINE, **change)], 4096, exact=True)
    assert [index for index, _ in found] == [0]
    assert what in found[0][1]


def test_a_prompt_has_one_length_cached_or_not() -> None:
    cached = replace(FINE, index=1, prompt_tokens=14, cached_tokens=0)
    assert contradictions([FINE, cached], 4096, exact=False) == [(1, "the same prompt has 30 tokens, and then 14")]
    assert contradictions([FINE, replace(cached, prompt="q")], 4096, exact=False) == []


def test_other_engines_may_leave_the_end_token_out_of_one_of_the_two() -> None:
    one_more = replace(FINE, tokens=21)
    assert contradictions([one_more], 4096, exact=False) == []
    assert contradictions([replace(FINE, tokens=22)], 4096, exact=False)


# ---- ends


@pytest.mark.parametrize("spelled", [False, True])
def test_an_end_token_is_known_whether_or_not_the_engine_spells_it_out(spelled: bool) -> None:
    client = EngineClient(FakeEngine(Lies(spells_markers=spelled)).client(), "ddtree")
    assert Endings(client).unseen(END)
    assert not Endings(client).unseen(ord("a"))


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
def test_an_engine_that_spells_end_tokens_out_is_healthy(kind: str) -> None:
    engine = FakeEngine(Lies(spells_markers=True), kind=kind)
    verdict = battery.run(EngineClient(engine.client(), kind), policy=POLICY)
    assert verdict.kind is VerdictKind.PASS, verdict.why


# ---- lengths


@given(st.sampled_from(Level), st.integers(1, 300_000))
def test_whatever_is_asked_fits_into_the_context_or_is_said_to_be_short(level: Level, context: int) -> None:
    asked = lengths(level, context)
    assert all(n > 0 and 2 * n <= context for n in asked.answers)
    assert all(0 < n <= context for n in asked.contexts)
    full = bool(asked.answers and asked.contexts) and min(asked.answers) >= ANSWER and max(asked.contexts) >= CONTEXT
    assert bool(asked.short) != full


def test_quick_asks_for_contexts_beyond_a_thousand_tokens_and_answers_beyond_550() -> None:
    engine = FakeEngine()
    verdict = battery.run(EngineClient(engine.client(), "ddtree"), policy=POLICY, only=("long",))
    found = verdict.find("long")
    assert found is not None
    assert found.outcome is Outcome.PASS, found
    replies = [turn for turn in found.replay if turn["kind"] in ("recall", "long_copy")]
    assert max(len(turn["ids"]) for turn in replies) > 550
    assert sum(turn["prompt_tokens"] > 1000 for turn in replies) >= 2


def test_a_small_context_shortens_the_questions_and_the_verdict_says_so() -> None:
    engine = FakeEngine(context=900)
    verdict = battery.run(EngineClient(engine.client(), "ddtree"), policy=POLICY)
    assert verdict.kind is VerdictKind.PASS, verdict.why
    assert "shortened: long: the engine's context of 900 tokens" in verdict.power
    longest = [b for b in engine.seen if "ids exactly" in str(b.get("messages")) and len(str(b["messages"])) > 400]
    assert longest
    assert all(sum(len(m["content"]) for m in b["messages"]) + b["max_tokens"] <= 900 for b in longest)


def test_a_full_run_is_not_called_shortened() -> None:
    verdict = battery.run(EngineClient(FakeEngine().client(), "ddtree"), policy=POLICY)
    assert verdict.kind is VerdictKind.PASS, verdict.why
    assert "shortened" not in verdict.power


def test_the_power_sentence_names_everything_that_was_shortened() -> None:
    by = power.Sensitivity("sweep", 0.75, measured=True)
    text = power.sentence(80, by, shortened=["sweep: 80 of 190", "long: less"])
    assert text.endswith("; shortened: sweep: 80 of 190, long: less")


# ---- close decisions


def _judged(contests: list[Contest]) -> Judgement:
    return Judgement(len(contests), len(contests), 0.4, 0, (), tuple(contests))


def test_close_decisions_that_go_to_the_less_likely_token_show_though_wider_ones_are_right() -> None:
    """All below half a nat are turned, with speculation off too, which has widened the threshold to a whole one."""
    turned = [Contest(0.1 + 0.01 * i, lost=True) for i in range(40)]
    right = [Contest(0.5 + 0.01 * i, lost=False) for i in range(50)]
    found = second_best([_judged(turned), _judged(right)], Threshold(1.0, "test"))
    assert "went to the less likely token" in found
    assert second_best([_judged(right)], Threshold(1.0, "test")) == ""


@pytest.mark.parametrize("seed", range(40))
def test_decisions_that_noise_tosses_convict_nobody(seed: int) -> None:
    rng = random.Random(seed)
    tossed = [Contest(rng.uniform(0.0, 1.0), lost=rng.random() < 0.5) for _ in range(rng.randint(0, 200))]
    assert second_best([_judged(tossed)], Threshold(1.0, "test")) == ""


def test_a_judgement_lists_its_close_decisions() -> None:
    scored = [
        Scored(5, -0.9, ((-0.6, 4), (-0.9, 5))),
        Scored(4, -0.6, ((-0.6, 4), (-0.9, 5))),
        Scored(4, 0.0, ((0.0, 4), (-9.0, 5))),
    ]
    found = judge(scored, Threshold(0.5, "test"))
    assert [c.lost for c in found.contested] == [True, False]
