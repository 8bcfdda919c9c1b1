"""Measures what passes cost on this machine, for budget `auto`. A few hundred milliseconds at start-up.

Every size is timed on an empty cache with a context of a few hundred tokens; `costs.Costs` corrects the tables by what real
rounds take.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from ddtree_engine.costs import CostTable
from ddtree_engine.forest import Forest, Sizes
from ddtree_engine.runner import Decoding, Runner
from ddtree_engine.tree import chain

ROW_SIZES = (1, 2, 4, 8, 12, 16, 20, 24, 32, 40, 48, 64, 96, 128, 192, 256)
SWEEPS, REPEATS = 2, 3  # the least of them counts: disturbances only ever add
LONG = 0.01  # seconds, after which nothing is repeated within a sweep
CONTEXT = 192


def measure_verify(
    runner: Runner, sizes: Sequence[int], trees: Sizes, context: int, progress: Callable[[float], None]
) -> CostTable:
    """Seconds of a target pass with logits and choices, by rows."""
    batches = [_chains(runner, rows, trees, min(CONTEXT, context - 1)) for rows in sizes]
    seconds = [math.inf] * len(sizes)
    for sweep in range(SWEEPS):  # what disturbs for a second disturbs one sweep only
        for i, batch in enumerate(batches):
            seconds[i] = min(seconds[i], _least(partial(runner.probe_verify, batch), runner))
            progress((sweep * len(sizes) + i + 1) / (SWEEPS * len(sizes)))
    return CostTable(tuple(sizes), tuple(seconds), runner.staircase).smoothed()


def _chains(runner: Runner, rows: int, trees: Sizes, past: int) -> Decoding:
    """Rows spread over as few requests as trees of this size allow."""
    counts = [min(trees.width, rows - start) for start in range(0, rows, trees.width)]
    forest = Forest.planted([chain(0, [0] * (n - 1)) for n in counts], trees)
    bases = np.array([runner.cache.shape.base(i) for i in range(len(counts))])
    return Decoding(forest, bases, np.full(len(counts), past))


def measure_draft(runner: Runner, sizes: Sequence[int], context: int, k: int, trees: Sizes) -> CostTable:
    """Seconds of a drafter pass and of growing the largest trees, by requests."""
    past = min(CONTEXT, context - 1)
    seconds = [_least(partial(runner.probe_draft, n, past, k, trees), runner) for n in sizes]
    if runner.staircase:  # a replayed draft comes with a pass over the roots
        roots = Sizes(1, 0)
        plain = [_least(partial(runner.probe_verify, _chains(runner, n, roots, past)), runner) for n in sizes]
        seconds = [max(both - one, both * 0.1) for both, one in zip(seconds, plain, strict=True)]
    return CostTable(tuple(sizes), tuple(seconds), runner.staircase).smoothed()


def _least(call: Callable[[], None], runner: Runner) -> float:
    best = math.inf
    begun = time.perf_counter()
    for _ in range(REPEATS):
        started = time.perf_counter()
        call()
        runner.synchronise()
        ended = time.perf_counter()
        best = min(best, ended - started)
        if ended - begun > LONG:
            break
    return best


def sizes_up_to(limit: int, sizes: Sequence[int]) -> tuple[int, ...]:
    """The sizes below `limit`, and `limit` itself unless it is beyond the largest (which is left to extrapolation)."""
    below = tuple(n for n in sizes if n < limit)
    return (*below, limit) if limit <= sizes[-1] else below
