"""Measures what passes cost on this machine, for budget `auto`. A few hundred milliseconds at start-up.

Every size is timed on an empty cache with a context of a few hundred tokens; `budget.Costs` corrects the tables by what real
rounds take.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from ddtree_engine.budget import CostTable
from ddtree_engine.rows import Segment, Sight, batch_rows
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
    batch = batch_rows(segments, runner.device)
    hidden = runner.verify(batch, features=True)
    runner.logits(hidden, range(batch.rows)).argmax(-1).tolist()


def measure_draft(runner: Runner, sizes: Sequence[int], block: int, context: int, k: int) -> CostTable:
    """Seconds of a drafter pass with its candidates, by requests."""

    def once(requests: int) -> None:
        past = min(CONTEXT, context - 1)
        runner.extend(range(min(8, past)), range(min(8, past)))
        positions = range(past, past + block)
        bases = [runner.cache.shape.base(i) for i in range(requests)]
        segments = [Segment(base, past, runner.block(0), positions, Sight.FULL) for base in bases]
        logprobs, _ = runner.draft(batch_rows(segments, runner.device), k)
        logprobs.tolist()

    seconds = [_least(lambda n=n: once(n), runner) for n in sizes]
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
