"""What a round costs: tables of passes, and what whole rounds took at start-up and take since. Pure.

Only ratios between kinds matter to a decision, and machines are disturbed for seconds or minutes at a time. So a round of
a kind that is seldom run is compared with the rounds around it, never with an absolute time of long ago, and medians are
kept, not means. `measuring.py` makes the tables, `rehearsal.py` runs the rounds.
"""

from __future__ import annotations

import bisect
import math
import statistics
from collections import deque
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import cache

import numpy as np

from ddtree_engine.budget import Round


class Kind(Enum):
    """What a decoding round does. Only whole rounds of a kind are compared, not the ones in which it changes."""

    OFF = auto()  # nothing is drafted
    CHAIN = auto()
    TREE = auto()  # trees of one size, as a fixed budget has them


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
    """Seconds a request that rounds of a kind and size take, at about one batch size, beyond what the tables say."""

    value: float
    guesses: int  # how many samples the first value counts as: the first rounds may be disturbed
    seen: deque[float] = field(default_factory=lambda: deque(maxlen=9))

    def __post_init__(self) -> None:
        self.seen.extend([self.value] * self.guesses)

    def add(self, sample: float) -> None:
        self.seen.append(sample)
        self.value = statistics.median(self.seen)


Key = tuple[Kind, int, int]  # about so many requests, about so many rows for each


class Costs:
    """Seconds of rounds, up to a factor that is the machine's present pace and the same for all of them.

    The tables know rows and drafts. What they miss depends on the kind, the batch and the size of trees: long contexts, the
    host's work for every request, how rows are spread over requests.
    """

    RECENT = 5  # rounds that make the present pace
    MOST_SAID = 1024
    GUESS, REHEARSED = 2, 4  # samples that a value from elsewhere counts as, and a rehearsed one

    def __init__(self, verify: CostTable, draft: CostTable) -> None:
        self._tables = (verify, draft)
        self._known: list[np.ndarray] = [np.zeros(1), np.zeros(1)]
        self._cells: dict[Key, _Cell] = {}
        self._nearest: dict[Key, _Cell] = {}  # to keys that were asked for, cells of their own included
        self._said: dict[tuple[Kind, int, bytes, int], np.ndarray] = {}  # what `seconds` said, until a cell changes
        self._key: Key | None = None  # what runs
        self._age = 0  # rounds of it before
        self._recent: deque[float] = deque(maxlen=self.RECENT)  # its pace
        self._before: float | None = None  # the pace of what ran before it

    def seconds(self, kind: Kind, requests: int, nodes: np.ndarray | int, drafted: int) -> np.ndarray:
        """Of rounds of a kind in which `drafted` of `requests` requests have trees of `nodes` (one number or several)."""
        nodes = np.asarray(nodes)
        question = kind, requests, nodes.tobytes(), drafted
        if question not in self._said:
            if len(self._said) >= self.MOST_SAID:
                self._said.clear()
            known = self._table(0, requests + drafted * nodes) + self._table(1, np.asarray(drafted))
            extra = np.array([self._extra(_key(kind, requests, int(n))) * requests for n in np.ravel(nodes)])
            self._said[question] = np.maximum(known + extra.reshape(known.shape), 0.5 * known)
        return self._said[question]

    def samples(self, kind: Kind, requests: int) -> int:
        """Rounds that the cost of a kind rests on, for its best known size."""
        mine = [len(c.seen) - self.GUESS for (k, n, _), c in self._cells.items() if k is kind and n == _about(requests)]
        return max(mine, default=0)

    def rehearsed(self, kind: Kind, nodes: int, spent: Round) -> None:
        """A whole round took this at start-up, at the pace that the tables were measured at."""
        self._known_from_here_on(_key(kind, spent.requests, nodes), self._beyond(spent, 1.0), self.REHEARSED)

    def observe(self, kind: Kind, nodes: int, spent: Round, *, usual: bool = True) -> None:
        """A round of a kind has run; usual: its time counts.

        One sample a change of kind, size or batch: its second round (the first finds caches cold) at the pace before the
        change. So a disturbance counts once however long it lasts, and what runs all the time is not compared with itself.
        """
        key = _key(kind, spent.requests, nodes)
        if key != self._key:
            if self._recent:
                self._before = statistics.median(self._recent)
            self._key, self._age = key, 0
            self._recent.clear()
            return
        self._age += 1
        if not usual or (self._age > 4 and self._age % 8):  # what goes on needs no more than a look now and then
            return
        if (cell := self._cells.get(key)) is None:
            cell = self._known_from_here_on(key, self._extra(key), self.GUESS)
        if self._age == 1 and self._before is not None:
            cell.add(self._beyond(spent, self._before))
            self._said.clear()
        known = self._from_tables(spent)
        self._recent.append(spent.seconds / max(known + cell.value * spent.requests, 0.5 * known))

    def _from_tables(self, spent: Round) -> float:
        verify, draft = self._tables
        return verify.at(spent.rows) + draft.at(spent.drafted)

    def _beyond(self, spent: Round, pace: float) -> float:
        """Seconds a request that this round took beyond the tables', within what is credible."""
        known = self._from_tables(spent)
        return max(-0.5 * known, min(known, spent.seconds / pace - known)) / spent.requests

    def _extra(self, key: Key) -> float:
        """Of this kind, batch and size, or of what is nearest to it."""
        if (cell := self._nearest.get(key)) is None:
            if not self._cells:
                return 0.0
            cell = self._nearest[key] = self._cells[min(self._cells, key=lambda other: _distance(key, other))]
        return cell.value

    def _known_from_here_on(self, key: Key, value: float, guesses: int) -> _Cell:
        cell = self._cells[key] = _Cell(value, guesses)
        self._nearest = dict(self._cells)
        self._said.clear()
        return cell

    def _table(self, which: int, sizes: np.ndarray) -> np.ndarray:
        known, most = self._known[which], int(sizes.max())
        if most >= len(known):
            known = np.array([self._tables[which].at(n) for n in range(2 * most + 1)])
            self._known[which] = known
        return known[sizes]  # type: ignore[no-any-return]


def _key(kind: Kind, requests: int, nodes: int) -> Key:
    return kind, _about(requests), _about(nodes + 1)


def _distance(a: Key, b: Key) -> float:
    return 0.7 * (a[0] is not b[0]) + abs(math.log2(a[1] / b[1])) + 0.5 * abs(math.log2(a[2] / b[2]))


@cache
def _about(count: int) -> int:
    """The nearest power of two: batches shrink and grow by one, and must not each be learnt anew."""
    return 1 << round(math.log2(count))
