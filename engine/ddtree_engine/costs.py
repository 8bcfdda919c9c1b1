"""Measures what passes cost on this machine, for budget `auto`. A few hundred milliseconds at start-up.

Every size is timed on an empty cache with a context of a few hundred tokens; `budget.Costs` corrects the tables by what real
rounds take.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from ddtree_engine.budget import CostTable
from ddtree_engine.rows import Segment, Sight
from ddtree_engine.runner import Runner
from ddtree_engine.tree import chain

ROW_SIZES = (1, 2, 4, 8, 12, 16, 20, 24, 32, 40, 48, 64, 96, 128, 192, 256)
REPEATS = 5  # the least of them counts: disturbances only ever add
CONTEXT = 192


def measure_verify(
    runner: Runner, sizes: Sequence[int], max_nodes: int, context: int, progress: Callable[[float], None]
) -> CostTable:
    """Seconds of a target pass with logits and choices, by rows."""
    seconds = []
    for i, rows in enumerate(sizes):
        seconds.append(_least(lambda rows=rows: _verify_once(runner, rows, max_nodes, context), runner))
        progress((i + 1) / len(sizes))
    return CostTable(tuple(sizes), tuple(seconds), runner.staircase).smoothed()


def _verify_once(runner: Runner, rows: int, max_nodes: int, context: int) -> None:
    """Rows spread over as few requests as trees of `max_nodes` allow."""
    segments, slab = [], 0
    while rows > 0:
        tree = chain(0, [0] * (min(rows, max_nodes + 1) - 1))
        past = min(CONTEXT, context - 1)
        positions = [past + d for d in tree.depths]
        base = runner.cache.shape.base(slab)
        segments.append(Segment(base, past, tree.token_ids, positions, Sight.TREE, tree.visible()))
        rows, slab = rows - tree.rows, slab + 1
    runner.probe_verify(segments)


def measure_draft(runner: Runner, sizes: Sequence[int], context: int, k: int) -> CostTable:
    """Seconds of a drafter pass with its candidates, by requests."""

    past = min(CONTEXT, context - 1)
    seconds = [_least(lambda n=n: runner.probe_draft(n, past, k), runner) for n in sizes]
    if runner.staircase:  # a replayed draft comes with a pass over the roots
        plain = [_least(lambda n=n: _verify_once(runner, n, 0, context), runner) for n in sizes]
        seconds = [max(both - one, both * 0.1) for both, one in zip(seconds, plain, strict=True)]
    return CostTable(tuple(sizes), tuple(seconds), runner.staircase).smoothed()


def _least(call: Callable[[], None], runner: Runner) -> float:
    best = float("inf")
    for _ in range(REPEATS):
        started = time.perf_counter()
        call()
        runner.synchronise()
        best = min(best, time.perf_counter() - started)
    return best


def sizes_up_to(limit: int, sizes: Sequence[int]) -> tuple[int, ...]:
    """The sizes below `limit`, and `limit` itself unless it is beyond the largest (which is left to extrapolation)."""
    below = tuple(n for n in sizes if n < limit)
    return (*below, limit) if limit <= sizes[-1] else below
