"""The sweep: many short replies up and down a staircase of concurrency, so that rare faults are met."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddops.prove import battery, power
from ddops.prove.client import EngineClient
from ddops.prove.evidence import Outcome, Verdict, VerdictKind
from ddops.prove.prompts import Kind
from ddops.prove.session import SCALES
from ddops.prove.stages.sweep import staircase
from ddops.prove.verdicts import Policy
from tests.ddops.prove_fake import FakeEngine, Lies


def sweep(policy: Policy | None = None, **lies: Any) -> tuple[Verdict, FakeEngine]:
    engine = FakeEngine(Lies(**lies))
    policy = policy or Policy(request_seconds=15, stall_seconds=1, seed=11)
    return battery.run(EngineClient(engine.client(), engine.kind), policy=policy, only=("sweep",)), engine


@given(st.integers(1, 300), st.integers(1, 64))
def test_concurrency_climbs_to_the_top_and_back(count: int, top: int) -> None:
    steps = staircase(count, top)
    peak = steps.index(max(steps))
    assert len(steps) == count
    assert min(steps) >= 1
    assert max(steps) <= top
    assert steps[:peak] == sorted(steps[:peak])
    assert steps[peak:] == sorted(steps[peak:], reverse=True)
    assert max(steps) == top or count < 3
    assert steps[-1] == 1


def test_every_reply_is_scored_and_some_prompts_come_back_another_way() -> None:
    verdict, engine = sweep()
    found = verdict.find("sweep")
    assert verdict.kind is VerdictKind.PASS, verdict.why
    assert found is not None
    assert found.sample >= SCALES[verdict.level].sweep
    assert f"{found.sample} scored" in found.got
    assert "pairs equal" in found.got
    assert any("input_ids" in body and body["sampling_params"]["max_new_tokens"] > 1 for body in engine.seen)


@pytest.mark.parametrize("seed", range(6))
def test_a_wrong_character_in_a_twentieth_of_the_replies_is_met(seed: int) -> None:
    policy = Policy(request_seconds=15, stall_seconds=1, seed=seed)
    verdict, _ = sweep(policy, kind="typo", share=0.05)
    found = verdict.find("sweep")
    assert found is not None
    assert found.outcome is Outcome.FAIL, found
    assert verdict.kind is VerdictKind.CORRUPT


def test_it_ends_soon_after_it_met_something() -> None:
    _, engine = sweep(kind="typo")
    assert len(engine.seen) < SCALES[battery.Level.QUICK].sweep


def test_wrong_copies_convict_an_engine_that_cannot_be_scored() -> None:
    verdict, _ = sweep(kind="typo", no_scores=True)
    assert verdict.kind is VerdictKind.CORRUPT, verdict.why


def test_prose_alone_convicts_nobody_who_cannot_be_scored() -> None:
    verdict, _ = sweep(no_scores=True)
    assert verdict.kind is VerdictKind.PASS, verdict.why


def test_a_slow_engine_gets_as_far_as_its_time_allows_and_the_claim_shrinks() -> None:
    policy = Policy(request_seconds=15, stall_seconds=1, seed=3, battery_seconds=1.5)
    verdict, _ = sweep(policy)
    found = verdict.find("sweep")
    assert found is not None
    assert verdict.kind is VerdictKind.PASS, verdict.why
    meant = SCALES[verdict.level].sweep
    assert found.sample < meant
    assert f"in {found.sample} replies" in verdict.power
    for said in (found.got, verdict.power):
        assert f"{found.sample} of the level's {meant} replies" in said


def test_few_replies_rule_nothing_out_and_the_sentence_says_so() -> None:
    text = power.sentence(1, power.Sensitivity("sweep", 0.2, measured=True))
    assert "too few to rule anything out" in text
    assert "more than 100 %" not in text


def test_the_quick_sweep_meets_what_touches_a_twentieth_and_the_standard_one_a_hundredth() -> None:
    seen = 0.5  # of the replies that a fault touches
    assert power.chance(SCALES[battery.Level.QUICK].sweep, 0.05 * seen) > 0.95
    assert power.chance(SCALES[battery.Level.STANDARD].sweep, 0.01 * seen) > 0.95


def test_prose_is_kind_open_and_has_no_right_answer() -> None:
    verdict, _ = sweep()
    found = verdict.find("sweep")
    assert found is not None
    kinds = {turn.get("kind") for turn in found.replay}
    assert str(Kind.COPY) in kinds
