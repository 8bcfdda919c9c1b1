"""Stage: the same prompts again, after the cache was emptied, and alone one after another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from ddops.prove.evidence import Evidence, Fault, Outcome
from ddops.prove.judging import Bench, replay_of
from ddops.prove.session import Turn
from ddops.prove.stages.pairs import compare_pairs, differ, parting_of
from ddops.prove.stages.stage import several
from ddops.prove.wire import Unsupported

_ALONE = 2  # prose prompts that are asked alone
_TIMES = 3  # times each
_TOO_OFTEN = 3  # partings beyond rounding that no healthy engine shows in two dozen pairs


def repeat_stage(bench: Bench) -> list[Evidence]:
    """The same prompts again and again after the cache was emptied; then prose, each request alone."""
    session = bench.session
    make, count = session.make, session.scale.repeats
    items = several(count, lambda: make.copy(6), make.nonce_code, make.fact)
    first = session.send_items("repeat 1", items)
    second = session.send_items("repeat 2", items)
    flushed = True
    try:
        session.client.flush()
    except Unsupported:
        flushed = False
    third = session.send_items("after flush", items) if flushed else []
    bench.check([*first, *second, *third])
    pairs = [*zip(first, second, strict=True), *(zip(first, third, strict=True) if flushed else [])]
    expected = "the same answer again" + (" and after a flush" if flushed else "")
    found = compare_pairs(bench, "repeatability", pairs, expected)
    return [found if found.outcome is Outcome.FAIL else _alone(bench, found)]


def _alone(bench: Bench, found: Evidence) -> Evidence:
    """Requests at T=0, one at a time and with the same in the cache, give the same tokens, or part where rounding may.

    An engine that changes its shapes by itself (budget auto) rounds differently each time and parts at close decisions;
    one that draws at T=0 parts at wider ones too, again and again.
    """
    first = _asked_alone(bench, _ALONE, _TIMES)
    told = f"{found.got}; alone {len(first) - len(_parted(first))} of {len(first)} equal"
    if not _parted(first) or not bench.ready():
        return replace(found, got=told)
    more = _asked_alone(bench, 2 * _ALONE, 2 * _TIMES)
    wide = [pair for pair in _parted(more) if _wide(bench, *pair)]
    told += f", then {len(more) - len(_parted(more))} of {len(more)}"
    if len(wide) < _TOO_OFTEN or 8 * len(wide) < len(more):
        return replace(found, got=told)
    return replace(
        found,
        outcome=Outcome.FAIL,
        fault=Fault.OUTPUT,
        got=told,
        detail=f"the same request at T=0, alone, gets other answers, {len(wide)} times beyond rounding: something is drawn",
        replay=replay_of([turn for pair in wide for turn in pair]),
    )


def _asked_alone(bench: Bench, prompts: int, times: int) -> list[tuple[Turn, Turn]]:
    """Neighbouring replies when prose is asked for `times` times, alone; the first one fills the cache and is left out."""
    session = bench.session
    pairs: list[tuple[Turn, Turn]] = []
    for item in [session.make.open() for _ in range(prompts)]:
        turns = [session.send("alone", [(item, session.ask_for(item))], overtime=True)[0] for _ in range(times)]
        pairs += [(a, b) for a, b in pairwise(turns[1:]) if a.whole and b.whole]
    return pairs


def _parted(pairs: Sequence[tuple[Turn, Turn]]) -> list[tuple[Turn, Turn]]:
    return [pair for pair in pairs if differ(*pair)]


def _wide(bench: Bench, a: Turn, b: Turn) -> bool:
    """Whether two replies part where the better token leads by more than rounding usually moves it."""
    parting = parting_of(bench, a, b)
    limit = bench.scorer.limit if bench.scorer else None
    return parting is not None and limit is not None and parting.gap > limit.nats / 5
