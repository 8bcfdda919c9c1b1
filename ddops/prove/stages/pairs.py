"""Pairs of greedy replies to one prompt: equal, parted at a near tie, or wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ddops.prove.divergence import Divergence, Parting, compare
from ddops.prove.evidence import Evidence, Fault, Outcome
from ddops.prove.judging import Bench, replay_of
from ddops.prove.session import Turn
from ddops.prove.stages.stage import not_scored
from ddops.prove.wire import EngineError


def compare_pairs(bench: Bench, probe: str, pairs: Sequence[tuple[Turn, Turn]], expected: str) -> Evidence:
    """Compare pairs of greedy replies to the same prompt; a difference counts when its tokens are not a near tie."""
    whole = [(a, b) for a, b in pairs if a.whole and b.whole]
    if not whole:
        return not_scored(probe, "no two replies came back")
    turns = list({t.index: t for pair in whole for t in pair}.values())
    parted = [(a, b) for a, b in whole if differ(a, b)]
    base = Evidence(
        probe,
        Outcome.PASS,
        expected=expected,
        got=f"{len(whole)} pairs equal",
        threshold="equal, near ties aside",
        sample=len(whole),
        replay=replay_of(turns),
    )
    if not parted:
        return base
    if not bench.ready():
        return replace(
            base,
            outcome=Outcome.NOT_SCORED,
            got=f"{len(parted)} of {len(whole)} pairs differ",
            detail=f"whether they are near ties cannot be scored: {bench.why_unscored or bench.why_broken}",
        )
    partings = [(pair, parting_of(bench, *pair)) for pair in parted]
    faults = [(pair, p) for pair, p in partings if p is not None and p.kind is Parting.FAULT]
    open_ = sum(p is None for _, p in partings)
    ties = len(parted) - len(faults) - open_
    got = f"{len(whole) - len(parted)} of {len(whole)} pairs equal, {ties} near ties, {len(faults)} wrong"
    if faults:
        (a, b), parting = faults[0]
        detail = f"requests {a.index} ({a.ask.mode or 'default'}) and {b.index} ({b.ask.mode or 'default'}) part at token "
        detail += f"{parting.at}, {parting.gap:.2g} nat below the top"
        replay = tuple(t.to_dict() for t in faults[0][0])
        return replace(base, outcome=Outcome.FAIL, fault=Fault.OUTPUT, got=got, detail=detail, replay=replay)
    if open_:
        return replace(base, outcome=Outcome.NOT_SCORED, got=got, detail=f"{open_} differing pairs could not be scored")
    return replace(base, got=got)


def differ(a: Turn, b: Turn) -> bool:
    assert a.reply is not None
    assert b.reply is not None
    return a.reply.ids != b.reply.ids if a.reply.ids and b.reply.ids else a.reply.text != b.reply.text


def parting_of(bench: Bench, a: Turn, b: Turn) -> Divergence | None:
    """Where two replies to one prompt part, and by how much; None when that cannot be scored."""
    scorer = bench.scorer
    if scorer is None or scorer.limit is None or a.reply is None or b.reply is None:
        return None
    try:
        return compare(scorer, a.reply, b.reply, scorer.limit)
    except EngineError:
        return None
