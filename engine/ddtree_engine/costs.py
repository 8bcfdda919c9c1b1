"""What a round costs: tables measured at start-up, corrected by what rounds of each kind really take. Pure.

Only ratios between kinds matter to a decision, and machines are disturbed for seconds or minutes at a time. So a round of
a kind that is seldom run is compared with the rounds around it, never with an absolute time of long ago, and medians are
kept, not means. `measuring.py` makes the tables.
"""

from __future__ import annotations

import bisect
import math
import statistics
from collections import deque
from dataclasses import dataclass, field
from enum import Enum, auto

import numpy as np


class Kind(Enum):
    """What a decoding round does. Only whole rounds of a kind are compared, not the ones in which it changes."""

    OFF = auto()  # nothing is drafted
    CHAIN = auto()
    TREE = auto()  # trees of one size, as a fixed budget has them
    FITTED = auto()  # trees cut by what their nodes are worth, over the whole batch


@dataclass(frozen=True, slots=True)
class CostTable:
    """Measured seconds at a few sizes, ascending. A staircase costs as much as the next size measured (CUDA graphs are
    captured for these sizes); otherwise sizes in between are interpolated. Beyond the last: in proportion.
    """

    sizes: tuple[int, ...]
    seconds: tuple[float, ...]
    staircase: bool

    def __post_init__(self) -> None:
        if not self.sizes or len(self.sizes) != len(self.seconds) or list(self.sizes) != sorted(set(self.sizes)):
            raise ValueError("sizes must be ascending, with one time each")

    def at(self, size: int) -> float:
        if size <= 0:
            return 0.0
        i = bisect.bisect_left(self.sizes, size)
        if i == len(self.sizes):
            return self.seconds[-1] * size / self.sizes[-1]
        if self.staircase or i == 0 or self.sizes[i] == size:
            return self.seconds[i]
        low, high = self.sizes[i - 1], self.sizes[i]
        share = (size - low) / (high - low)
        return self.seconds[i - 1] * (1 - share) + self.seconds[i] * share

    def smoothed(self) -> CostTable:
        """Never cheaper for more, and never dearer than as many passes of a smaller size: disturbances must not make a
        size look free, or so dear that it is never run.
        """
        best = list(self.seconds)
        for i in range(len(best) - 2, -1, -1):
            best[i] = min(best[i], best[i + 1])
        for i, size in enumerate(self.sizes):
            best[i] = min(-(-size // self.sizes[j]) * best[j] for j in range(i + 1))
        return CostTable(self.sizes, tuple(best), self.staircase)


@dataclass(slots=True)
class _Cell:
    """Seconds a request that rounds of a kind take, at about one batch size, beyond what the tables say of rows and drafts."""

    value: float  # at first a guess, which counts as two: the first rounds may be disturbed
    seen: deque[float] = field(default_factory=lambda: deque(maxlen=9))

    GUESS = 2

    def __post_init__(self) -> None:
        self.seen.extend([self.value] * self.GUESS)

    def add(self, sample: float) -> None:
        self.seen.append(sample)
        self.value = statistics.median(self.seen)


class Costs:
    """Seconds of rounds, up to a factor that is the machine's present pace and the same for all of them.

    The tables know rows and drafts. What they miss depends on the batch: long contexts, the host's work for every request.
    """

    RECENT = 5  # rounds that make the present pace

    def __init__(self, verify: CostTable, draft: CostTable) -> None:
        self._tables = (verify, draft)
        self._known: list[np.ndarray] = [np.zeros(1), np.zeros(1)]
        self._cells: dict[tuple[Kind, int], _Cell] = {}
        self._key: tuple[Kind, int] | None = None  # what runs
        self._age = 0  # rounds of it before
        self._recent: deque[float] = deque(maxlen=self.RECENT)  # its pace
        self._before: float | None = None  # the pace of what ran before it

    def seconds(self, kind: Kind, requests: int, rows: np.ndarray | int, drafted: np.ndarray | int) -> np.ndarray:
        """Of rounds of a kind that verify `rows` and draft for `drafted` of `requests` requests (arrays broadcast)."""
        known = self._table(0, rows) + self._table(1, drafted)
        return known + max(self._extra(kind, requests), -0.5 * float(self._table(0, requests)))

    def samples(self, kind: Kind, requests: int) -> int:
        cell = self._cells.get((kind, _about(requests)))
        return len(cell.seen) - _Cell.GUESS if cell else 0

    def observe(self, kind: Kind, requests: int, rows: int, drafted: int, seconds: float | None) -> None:
        """A round of a kind has run; None: for a time that is not to be counted.

        One sample a change of kind or batch: its second round (the first finds caches cold) at the pace before the change.

        So a disturbance counts once however long it lasts, and what runs all the time is not compared with itself.
        """
        key = (kind, _about(requests))
        if key != self._key:
            if self._recent:
                self._before = statistics.median(self._recent)
            self._key, self._age = key, 0
            self._recent.clear()
            return
        self._age += 1
        if seconds is None or (self._age > 4 and self._age % 8):  # what goes on needs no more than a look now and then
            return
        cell = self._cells.setdefault(key, _Cell(self._extra(kind, requests) / requests))
        if self._age == 1 and self._before is not None:
            known = float(self._table(0, rows) + self._table(1, drafted))
            beyond = seconds / self._before - known
            cell.add(max(-0.5 * known, min(known, beyond)) / requests)
        self._recent.append(seconds / float(self.seconds(kind, requests, rows, drafted)))

    def _extra(self, kind: Kind, requests: int) -> float:
        """Of this kind and about this batch size, or of what is nearest to it."""
        size = _about(requests)
        if (cell := self._cells.get((kind, size))) is None:
            near = [(abs(math.log2(n / size)) + 0.7 * (k is not kind), c.value) for (k, n), c in self._cells.items()]
            return min(near)[1] * requests if near else 0.0
        return cell.value * requests

    def _table(self, which: int, sizes: np.ndarray | int) -> np.ndarray:
        known, most = self._known[which], sizes if isinstance(sizes, int) else int(sizes.max())
        if most >= len(known):
            known = np.array([self._tables[which].at(n) for n in range(2 * most + 1)])
            self._known[which] = known
        return known[sizes]  # type: ignore[no-any-return]


def _about(requests: int) -> int:
    """The nearest power of two: batches shrink and grow by one, and must not each be learnt anew."""
    return 1 << round(math.log2(requests))
