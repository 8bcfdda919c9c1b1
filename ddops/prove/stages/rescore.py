"""Stage: every greedy token so far is scored again by prefill."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ddops.prove.evidence import Evidence, Fault, Outcome
from ddops.prove.judging import Bench, replay_of
from ddops.prove.scores import Judgement, second_best, too_many_near
from ddops.prove.session import Turn
from ddops.prove.stages.stage import not_scored, unready
from ddops.prove.wire import EngineError


def rescore_early_stage(bench: Bench) -> list[Evidence]:
    """The replies so far, so that damage is seen early. A clean result waits for the replies that are still to come."""
    found = rescore_stage(bench)
    if found[0].outcome not in (Outcome.FAIL, Outcome.ERROR):
        return []
    bench.session.notes["rescored"] = True
    return found


def rescore_stage(bench: Bench) -> list[Evidence]:
    """Every greedy token so far by prefill: warm first (the cache holds what decoding wrote), then cold."""
    session = bench.session
    if session.notes.get("rescored"):
        return []
    if not bench.ready():
        return [unready(bench, "rescore")]
    scorer = bench.scorer
    assert scorer is not None
    assert scorer.limit is not None
    warm = _warm(bench)
    turns = session.greedy()
    bench.judge(turns)
    judged = [t for t in turns if t.judged is not None]
    if bench.why_broken:
        return [unready(bench, "rescore")]
    if not judged:
        return [not_scored("rescore", session.notes.get("unscored", "no reply could be scored"))]
    if len(judged) < len(turns):
        session.shorten("rescore", f"{len(judged)} of {len(turns)} replies could be scored")
    tokens = sum(t.judged.scored for t in judged if t.judged)
    near = sum(t.judged.near for t in judged if t.judged)
    worst = max(t.judged.worst for t in judged if t.judged)
    over = [t for t in judged if t.judged and t.judged.wrong]
    base = Evidence(
        "rescore",
        Outcome.PASS,
        expected="every greedy token at the top",
        threshold=str(scorer.limit),
        sample=len(judged),
        got=f"{tokens} tokens of {_of(judged, turns)} replies, worst gap {worst:.2g} nat, {near} near ties, {len(over)} over",
        detail="; ".join([f"known text {scorer.known_logprob:.2f} nat a token", *warm[1:]]),
        replay=replay_of(over or judged),
        values={"rescored": float(len(judged)), "near_ties": float(near)},
    )
    if over:
        return [confirm_over(bench, over, base)]
    off = [t.judged for t in judged if t.ask.mode == "off" and t.judged]
    on = [t.judged for t in judged if t.ask.mode != "off" and t.judged]
    if too_many_near(*_near(on), *_near(off)):
        detail = f"{_near(on)[0]} near ties in {_near(on)[1]} tokens, {_near(off)[0]} in {_near(off)[1]} with speculation off"
        return [replace(base, outcome=Outcome.FAIL, fault=Fault.OUTPUT, detail=detail)]
    if second := second_best([*on, *off], scorer.limit):
        return [replace(base, outcome=Outcome.FAIL, fault=Fault.OUTPUT, detail=second)]
    if warm[0] is Outcome.FAIL:
        return [replace(base, outcome=Outcome.FAIL, fault=Fault.OUTPUT, got=warm[1], replay=())]
    return [base]


def _of(judged: Sequence[Turn], turns: Sequence[Turn]) -> str:
    return str(len(judged)) if len(judged) == len(turns) else f"{len(judged)} of {len(turns)}"


def _near(judged: Sequence[Judgement]) -> tuple[int, int]:
    return sum(j.near for j in judged), sum(j.scored for j in judged)


def confirm_over(bench: Bench, over: Sequence[Turn], base: Evidence) -> Evidence:
    """Score the worst reply once more: the same tokens must be wrong again, or the scorer is what wavers."""
    worst = max(over, key=lambda t: t.judged.worst if t.judged else 0.0)
    assert worst.reply is not None
    assert bench.scorer is not None
    assert worst.judged is not None
    again = bench.scorer.judge(worst.reply)
    off = sum(t.ask.mode == "off" for t in over)
    detail = f"request {worst.index}: {_what(worst.judged)}; {base.detail}"
    detail += f"; {off} of them with speculation off" if off else ""
    if [o[:2] for o in again.over[:1]] != [o[:2] for o in worst.judged.over[:1]] or again.cut != worst.judged.cut:
        return replace(base, outcome=Outcome.ERROR, fault=Fault.DETECTOR, detail=f"scored again it is clean; {detail}")
    return replace(base, outcome=Outcome.FAIL, fault=Fault.OUTPUT, detail=detail)


def _what(judged: Judgement) -> str:
    if not judged.over:
        return "it stopped where the model would have gone on"
    at, token, gap = judged.over[0]
    return f"token {token} at {at} lies {gap:.2f} nat below the top"


def _warm(bench: Bench) -> tuple[Any, ...]:
    """(outcome, words...) of cold against warm scores over a few replies."""
    scorer = bench.scorer
    assert scorer is not None
    assert scorer.limit is not None
    differences = []
    for turn in bench.session.greedy()[-bench.session.scale.warm :]:
        try:
            assert turn.reply is not None
            difference = scorer.warm_difference(turn.reply)
        except EngineError:
            continue
        if difference is not None:
            differences.append(difference)
    if not differences:
        return Outcome.NOT_SCORED, "nothing was scored from the cache"
    # A log-probability moves with both sides' rounding, so twice the gap of one side is allowed.
    limit = 2 * max(scorer.limit.nats, 0.01)
    outcome = Outcome.FAIL if max(differences) > limit else Outcome.PASS
    return (
        outcome,
        f"cache against cold: {max(differences):.2g} nat over {len(differences)} replies (limit {limit:.2g})",
    )
