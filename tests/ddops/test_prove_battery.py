"""The battery through its front, against a fake engine that tells the truth or lies in one particular way."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import httpx
import pytest

from ddops.errors import ConnectionLost
from ddops.prove import battery, golden
from ddops.prove.client import EngineClient
from ddops.prove.evidence import Baseline, Evidence, Fault, Level, Outcome, Verdict, VerdictKind
from ddops.prove.session import SCALES, Session
from ddops.prove.stages.shapes import wave_sizes
from ddops.prove.verdicts import Gates, Policy
from tests.ddops.prove_fake import FakeEngine, Lies

POLICY = Policy(request_seconds=15, stall_seconds=1, seed=11)  # a busy machine is no hung engine
IMPATIENT = replace(POLICY, request_seconds=3)


def prove(engine: FakeEngine | None = None, policy: Policy = POLICY, **options: Any) -> Verdict:
    engine = engine or FakeEngine()
    return battery.run(EngineClient(engine.client(), engine.kind), policy=policy, **options)


def lying(**lies: Any) -> FakeEngine:
    return FakeEngine(Lies(**lies))


def outcome(verdict: Verdict, probe: str) -> Outcome:
    found = verdict.find(probe)
    assert found is not None, f"{probe} left no evidence"
    return found.outcome


# ---- healthy engines


@pytest.mark.parametrize("kind", ["ddtree", "sglang", "vllm"])
def test_healthy_engine_passes_and_says_what_was_not_scored(kind: str) -> None:
    verdict = prove(FakeEngine(kind=kind))
    assert verdict.kind is VerdictKind.PASS, verdict.why
    not_switchable = () if kind == "ddtree" else ("modes",)
    assert set(verdict.not_scored) == {"golden", *not_switchable}
    assert "golden" in verdict.why
    assert "one boot is a sample of one" in verdict.power
    coding = verdict.find("coding")
    assert coding is not None
    assert coding.got.startswith("5/5 passed, ")
    assert coding.got.endswith(" tok/s avg")


@pytest.mark.parametrize("max_running", [1, 2, 3])
def test_small_batches_are_asked_every_kind_of_question(max_running: int) -> None:
    verdict = prove(FakeEngine(max_running=max_running), only=["isolation", "copy", "answers", "shapes"])
    assert verdict.kind is VerdictKind.PASS, verdict.why
    assert verdict.not_scored == ()


@pytest.mark.parametrize("seed", range(4))
def test_healthy_engine_passes_whatever_prompts_are_drawn(seed: int) -> None:
    verdict = prove(policy=replace(POLICY, seed=seed))
    assert verdict.kind is VerdictKind.PASS, verdict.why
    assert verdict.policy["seed"] == seed


def test_speculation_off_is_no_fault() -> None:
    verdict = prove(FakeEngine(algorithm="NONE"))
    assert verdict.kind is VerdictKind.PASS, verdict.why
    assert outcome(verdict, "acceptance") is Outcome.NOT_SCORED


@pytest.mark.parametrize(
    ("lies", "unscored"),
    [
        ({"no_scores": True}, {"rescore"}),
        ({"no_ids": True}, {"stream"}),  # /generate gives them still
        ({"no_meta": True}, set()),
        ({"no_tokenize": True}, set()),
        ({"no_info": True}, set()),
        ({"queue_full_first": 4}, set()),
        ({"reasoning": True}, set()),
    ],
)
def test_what_an_engine_cannot_answer_is_not_scored_by_name(lies: dict[str, Any], unscored: set[str]) -> None:
    verdict = prove(lying(**lies))
    assert verdict.kind is VerdictKind.PASS, verdict.why
    assert set(verdict.not_scored) == unscored | {"golden"}
    for probe in unscored:
        found = verdict.find(probe)
        assert found is not None
        assert found.detail, f"{probe} does not say why"


def test_requests_always_carry_their_sampling() -> None:
    engine = FakeEngine()
    prove(engine)
    for body in engine.seen:
        params = body.get("sampling_params", body)
        assert {"temperature", "top_p"} <= params.keys()
        assert {"max_tokens", "max_new_tokens"} & params.keys()


# ---- corrupt engines

CORRUPT = {
    "garbage": ({"kind": "garbage"}, "coding"),
    "one wrong character": ({"kind": "typo"}, "coding"),
    "wrong character in a tenth of the replies": ({"kind": "typo", "share": 0.1}, "rescore"),
    "wrong character in full batches only": ({"kind": "typo", "min_batch": 5}, "rescore"),
    "text of another request": ({"kind": "leak"}, "isolation"),
    "loops, accepted whole": ({"kind": "loop", "accept": 16.0}, "alarms"),
    "words dropped in streams only": ({"kind": "drop_in_stream"}, "stream"),
    "decay after 200 tokens": ({"kind": "decay", "after": 200}, "long"),
    "empty replies": ({"kind": "empty"}, "coding"),
    "special tokens as text": ({"kind": "special"}, "alarms"),
    "another script": ({"kind": "script"}, "alarms"),
    "wrong without speculation too": ({"kind": "typo", "modes": ("off", "chain", "tree")}, "coding"),
    "wrong tree only": ({"kind": "typo", "modes": ("tree",)}, "coding"),
    "cache holds damaged values": ({"warm_scores_off": True}, "rescore"),
    "sampled tokens differ under speculation": ({"sampled_off": True}, "sampled"),
    "replies are cut and say that they stopped": ({"kind": "cut"}, "rescore"),
    "stop words are not looked at": ({"ignores_stop": True}, "options"),
    "the limit is not looked at": ({"ignores_limit": True}, "options"),
    "seeds are not looked at": ({"ignores_seed": True}, "sampled"),
    "one noise for all requests": ({"one_noise": True}, "options"),
    "the temperature is not looked at": ({"no_noise": True}, "options"),
    "an end token does not end a reply": ({"goes_on": True, "kind": "late"}, "alarms"),
    "earlier turns are forgotten": ({"forgets_history": True}, "isolation"),
    "tokens after the 550th are wrong": ({"kind": "decay", "after": 550}, "long"),
    "only the last 900 tokens of a prompt are seen": ({"window": 900}, "long"),
    "a blank end of the text is lost": ({"trims": True}, "stream"),
    "one token more than /generate was asked for": ({"over_by": 1}, "alarms"),
    "close decisions at T=0 are drawn": ({"drawn_at_zero": True}, "repeatability"),
    "prompts are counted without what is cached": ({"counts_uncached": True}, "alarms"),
    "every reply says that it stopped by itself": ({"calls_all": "stop"}, "rescore"),
    "every reply says that its limit ended it": ({"calls_all": "length"}, "alarms"),
    "streams lose what stands before a stop word": ({"stops_early": 15}, "options"),
    "scores of generated tokens are their neighbours'": ({"scores_of_next": True}, "options"),
}


@pytest.mark.parametrize("case", CORRUPT)
def test_corruption_is_caught(case: str) -> None:
    lies, probe = CORRUPT[case]
    started = time.monotonic()
    verdict = prove(lying(**lies))
    assert verdict.kind is VerdictKind.CORRUPT, verdict.why
    assert outcome(verdict, probe) is Outcome.FAIL, [(e.probe, e.outcome) for e in verdict.evidence]
    assert verdict.power == ""
    assert time.monotonic() - started < 30


@pytest.mark.parametrize("case", ["garbage", "one wrong character", "text of another request"])
def test_corruption_is_caught_where_nothing_can_be_scored(case: str) -> None:
    lies, _ = CORRUPT[case]
    assert prove(lying(**lies, no_scores=True)).kind is VerdictKind.CORRUPT


def test_fault_only_in_the_chain_shows_when_the_server_runs_the_tree() -> None:
    verdict = prove(lying(kind="typo", modes=("chain",)))
    assert verdict.kind is VerdictKind.CORRUPT
    assert outcome(verdict, "modes") is Outcome.FAIL


def test_gross_damage_ends_the_run_early_and_the_rest_is_not_scored() -> None:
    engine = lying(kind="garbage")
    verdict = prove(engine)
    assert outcome(verdict, "long") is Outcome.NOT_SCORED
    assert len(engine.seen) < 40


def test_one_bad_token_in_the_whole_run_is_convicted_by_prefill() -> None:
    verdict = prove(lying(kind="typo", skip=9, times=1))
    assert verdict.kind is VerdictKind.CORRUPT
    assert outcome(verdict, "rescore") is Outcome.FAIL


def test_a_fault_seen_once_that_nothing_can_score_stays_open() -> None:
    # Five requests are the first glance; the lie falls into the coding stage.
    verdict = prove(lying(kind="typo", skip=6, times=1, no_scores=True))
    assert verdict.kind is VerdictKind.INCONCLUSIVE
    coding = verdict.find("coding")
    assert coding is not None
    assert coding.outcome is Outcome.ERROR
    assert "seen once and not again" in coding.detail


def test_what_the_model_itself_answers_is_not_held_against_the_engine() -> None:
    verdict = prove(lying(wrong_model=True))
    assert verdict.kind in (VerdictKind.PASS, VerdictKind.INCONCLUSIVE)
    assert all(e.outcome is not Outcome.FAIL for e in verdict.evidence)


def test_evidence_keeps_wrong_replies_for_replay() -> None:
    verdict = prove(lying(kind="typo"))
    coding = verdict.find("coding")
    assert coding is not None
    turn = coding.replay[0]
    assert turn["ask"]["messages"][0][1].startswith("Write a Python function")
    assert turn["ok"] is False
    assert turn["text"]
    assert turn["ids"]


# ---- detectors that break


@pytest.mark.parametrize("lies", [{"polluted_scores": True}, {"wavering_scores": True}, {"cached_scores": True}])
def test_a_scorer_that_contradicts_itself_makes_the_run_inconclusive(lies: dict[str, Any]) -> None:
    verdict = prove(lying(**lies))
    assert verdict.kind is VerdictKind.INCONCLUSIVE
    found = verdict.find("rescore")
    assert found is not None
    assert (found.outcome, found.fault) == (Outcome.ERROR, Fault.DETECTOR)


def test_a_broken_scorer_does_not_hide_corruption() -> None:
    assert prove(lying(polluted_scores=True, kind="typo")).kind is VerdictKind.CORRUPT


def test_without_a_sandbox_nothing_is_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    from ddops.prove import sandbox
    from ddops.prove.sandbox_runtime import SandboxUnavailable

    def absent() -> None:
        raise SandboxUnavailable("no interpreter here")

    monkeypatch.setattr(sandbox, "shared_runtime", absent)
    verdict = prove()
    assert verdict.kind is VerdictKind.INCONCLUSIVE
    assert outcome(verdict, "coding") is Outcome.ERROR


# ---- crashes

CRASHED = {
    "dies at once": {"dies_after": 0},
    "dies in the coding wave": {"dies_after": 8},
    "dies later": {"dies_after": 20},
    "answers 500 to everything": {"always": 500},
    "answers 500 now and then": {"fails_every": 6},
    "hangs now and then": {"hangs_every": 7},
    "streams that never end": {"trickles_every": 9},
    "answers no protocol": {"nonsense": True},
}


@pytest.mark.parametrize("case", CRASHED)
def test_crash_is_called_a_crash(case: str) -> None:
    verdict = prove(lying(**CRASHED[case]), IMPATIENT)
    assert verdict.kind is VerdictKind.CRASHED, verdict.why
    assert any(e.fault is Fault.CRASH for e in verdict.evidence)


def test_an_engine_that_hangs_but_calls_itself_healthy_is_left_soon() -> None:
    started = time.monotonic()
    verdict = prove(lying(hangs_every=1))
    assert verdict.kind is VerdictKind.CRASHED
    assert "gives no token" in str([e.detail for e in verdict.evidence])
    assert time.monotonic() - started < 20


def test_one_request_cut_and_answered_again_stays_open() -> None:
    verdict = prove(lying(cuts_first=1))
    assert verdict.kind is VerdictKind.INCONCLUSIVE
    assert outcome(verdict, "served") is Outcome.ERROR


def test_a_lost_connection_to_the_host_is_not_the_engines_fault() -> None:
    def lost(request: httpx.Request) -> httpx.Response:
        raise ConnectionLost("the connection broke")

    http = httpx.Client(transport=httpx.MockTransport(lost), base_url="http://engine")
    with pytest.raises(ConnectionLost):
        battery.run(EngineClient(http, "ddtree"), policy=POLICY)


# ---- speed


def test_dead_drafter_is_degraded_not_corrupt() -> None:
    verdict = prove(lying(accept=1.0))
    assert verdict.kind is VerdictKind.DEGRADED
    assert outcome(verdict, "acceptance") is Outcome.DEGRADED
    assert outcome(verdict, "coding") is Outcome.PASS


def test_acceptance_far_below_the_last_known_good_is_degraded() -> None:
    baseline = Baseline.of(prove(lying(accept=9.0)))
    verdict = prove(lying(accept=4.0), baseline=baseline)
    assert verdict.kind is VerdictKind.DEGRADED
    assert "last known-good" in str(verdict.find("acceptance"))


def test_honest_acceptance_at_the_cap_is_no_finding() -> None:
    verdict = prove(lying(accept=16.0))
    assert outcome(verdict, "acceptance") is Outcome.PASS


def test_much_slower_than_the_last_known_good_is_degraded() -> None:
    baseline = Baseline.of(prove(lying(token_seconds=0.0002), only=["throughput"]))
    verdict = prove(lying(token_seconds=0.002), baseline=baseline, only=["throughput"])
    assert verdict.kind is VerdictKind.DEGRADED, verdict.why
    assert outcome(verdict, "throughput") is Outcome.DEGRADED
    assert "confirmed on fresh rounds" in str(verdict.find("throughput"))


def test_acceptance_is_read_even_when_the_time_is_used_up() -> None:
    verdict = prove(lying(accept=1.0, token_seconds=0.002), replace(POLICY, battery_seconds=0.7))
    assert outcome(verdict, "acceptance") is Outcome.DEGRADED
    assert outcome(verdict, "repeatability") is Outcome.ERROR


def test_a_proof_that_ran_out_of_time_is_no_proof() -> None:
    verdict = prove(lying(token_seconds=0.002), replace(POLICY, battery_seconds=0.7))
    assert verdict.kind is VerdictKind.INCONCLUSIVE, verdict.why
    assert "used up" in str(verdict.find("repeatability"))


def test_a_slow_engine_gets_every_probe_and_a_shorter_sweep() -> None:
    verdict = prove(lying(token_seconds=0.002), replace(POLICY, battery_seconds=5.0))
    assert verdict.kind is VerdictKind.PASS, verdict.why
    swept = verdict.find("sweep")
    assert swept is not None
    assert 0 < swept.sample < SCALES[Level.QUICK].sweep


def test_scores_are_asked_for_when_nothing_came_before_them() -> None:
    verdict = prove(only=["options", "rescore"])
    assert outcome(verdict, "rescore") is Outcome.PASS


# ---- golden recordings


def recorded(engine: FakeEngine) -> golden.Golden:
    session = Session(EngineClient(engine.client(), "sglang"), Level.QUICK, POLICY)
    return golden.record(session, golden.reference_prompts(session, 6), source="unit 1234")


def test_recorded_answers_convict_where_nothing_can_be_scored() -> None:
    take = recorded(FakeEngine(kind="sglang", algorithm="NONE"))
    assert len(take.takes) == 6
    assert golden.Golden.from_json(take.to_json()) == take
    healthy = prove(FakeEngine(Lies(no_scores=True), kind="sglang"), golden=take)
    assert outcome(healthy, "golden") is Outcome.PASS
    corrupt = prove(FakeEngine(Lies(no_scores=True, kind="typo"), kind="sglang"), golden=take, only=["golden"])
    # Without gaps in the recording a difference cannot be told from a near tie: it is not a pass.
    assert outcome(corrupt, "golden") in (Outcome.FAIL, Outcome.NOT_SCORED)


def test_a_parting_at_a_near_tie_is_told_from_a_fault() -> None:
    from ddops.prove.dialects import Meta
    from ddops.prove.session import Turn
    from ddops.prove.stages.golden import _parting
    from ddops.prove.wire import Ask, Reply

    take = golden.Take("p", 9, "abc", (1, 2, 3), (5.0, 0.1, 4.0))

    def turn(text: str, ids: tuple[int, ...]) -> Turn:
        ask = Ask.user("p")
        return Turn(0, "golden", ask, reply=Reply(ask, text, "stop", Meta(output_ids=ids), 0.1))

    assert _parting(take, turn("abc", (1, 2, 3))) == "same"
    assert _parting(take, turn("abd", (1, 9, 3))) == "tie"
    assert _parting(take, turn("xbc", (9, 2, 3))) == "fault"
    assert _parting(take, turn("xyz", (1, 2, 3))) == "fault"
    assert _parting(replace(take, gaps=()), turn("xbc", (9, 2, 3))) == "unknown"


# ---- the front itself


def test_only_named_probes_run() -> None:
    engine = FakeEngine()
    verdict = prove(engine, only=["stream"])
    assert verdict.kind is VerdictKind.PASS
    assert {e.probe for e in verdict.evidence} <= {"stream", "served"}


def test_an_unknown_probe_is_refused() -> None:
    with pytest.raises(ValueError, match="vibes"):
        prove(only=["vibes"])


def test_events_come_as_evidence_does_and_may_stop_the_run() -> None:
    seen: list[str] = []

    class Stop(Exception):
        pass

    def on_event(evidence: Evidence) -> None:
        seen.append(evidence.probe)
        if evidence.probe == "coding":
            raise Stop

    with pytest.raises(Stop):
        prove(on_event=on_event, applied=Evidence("applied", Outcome.PASS))
    assert seen == ["applied", "coding"]


def test_verdict_is_bound_to_unit_and_start() -> None:
    verdict = prove(only=["coding"], digest="d1", invocation="i1")
    assert verdict.about("d1", "i1")
    assert Verdict.from_json(verdict.to_json()) == verdict


def test_another_unit_running_is_never_a_pass() -> None:
    other = Evidence("applied", Outcome.FAIL, fault=Fault.IDENTITY, got="budget 8, expected 32")
    assert prove(applied=other).kind is VerdictKind.INCONCLUSIVE


def test_a_gate_below_one_lets_a_weak_model_through() -> None:
    policy = replace(POLICY, gates=Gates(coding=0.0, copy=0.0, answers=0.0))
    assert outcome(prove(policy=policy), "coding") is Outcome.PASS


def test_the_same_seed_asks_the_same() -> None:
    def asked() -> list[Any]:
        engine = FakeEngine()
        prove(engine, only=["copy"])
        return sorted(str(body.get("messages")) for body in engine.seen)

    assert asked() == asked()


@pytest.mark.parametrize(("max_running", "cap", "waves"), [(1, 16, 1), (2, 16, 4), (8, 16, 1), (64, 16, 4), (48, 64, 24)])
def test_waves_hold_the_full_batch_and_odd_sizes(max_running: int, cap: int, waves: int) -> None:
    sizes = wave_sizes(max_running, cap, waves)
    assert max(sizes) == min(max_running, cap)
    assert all(1 <= s <= max_running for s in sizes)
    assert len(sizes) == len(set(sizes))
    if max_running >= 8:
        assert any(s % 2 for s in sizes)


def test_standard_asks_more_than_quick() -> None:
    quick, standard = FakeEngine(), FakeEngine()
    prove(quick)
    verdict = prove(standard, level=Level.STANDARD)
    assert verdict.kind is VerdictKind.PASS, verdict.why
    assert len(standard.seen) > 2 * len(quick.seen)


def test_seeds_that_are_not_kept_show_in_bfloat16_too_where_single_differences_do_not_count() -> None:
    verdict = prove(FakeEngine(Lies(ignores_seed=True), dtype="bfloat16"))
    assert verdict.kind is VerdictKind.CORRUPT, verdict.why
    found = verdict.find("sampled")
    assert found is not None
    assert "are not kept" in found.detail


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
def test_probes_asked_for_by_name_that_come_to_nothing_prove_nothing(kind: str) -> None:
    """Every request was answered, which nobody asked about."""
    verdict = prove(FakeEngine(kind=kind), only=["modes"])
    assert verdict.kind is VerdictKind.INCONCLUSIVE, verdict.why
