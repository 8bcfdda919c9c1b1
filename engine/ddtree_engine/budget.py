"""How much to draft and to verify: a fixed budget, or `auto`.

`auto` is CaDDTree's rule (arXiv 2606.01813) for a batch: the nodes of all trees compete for one row budget, and the pass is
as large as maximises expected committed tokens per second under measured costs. Node probabilities are the drafter's,
calibrated online; requests that speculation does not pay for decode plainly and are tried again now and then.

Pure decisions over probabilities, costs and counts: no tensors, no clocks. `costs.py` measures.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence as Many
from dataclasses import dataclass, field, replace
from typing import Protocol

from ddtree_engine.config import SpecMode
from ddtree_engine.sequence import Sequence
from ddtree_engine.tree import Tree


@dataclass(frozen=True, slots=True)
class Round:
    """What a decoding round cost (rounds with prefill chunks are not reported)."""

    requests: int  # decoded
    rows: int  # verified
    verify_seconds: float  # everything but drafting
    drafted: int  # requests drafted at its end
    draft_seconds: float | None  # None: one with verifying, as in a replayed round


class Policy(Protocol):
    off_spine: float  # added to the log-probability of steps below a node that is not on the spine
    floor: float  # paths below this summed log-probability are not built

    def to_draft(self, live: Many[Sequence]) -> list[Sequence]:
        """Of everything that goes on decoding, what shall be drafted for the next round."""
        ...

    def fit(self, trees: list[Tree], sequences: Many[Sequence]) -> list[Tree]:
        """Cut the trees of a round to what is worth verifying."""
        ...

    def learn(self, sequence: Sequence, tree: Tree, path: Many[int]) -> None:
        """One tree was verified and `path` accepted."""
        ...

    def observe(self, spent: Round) -> None:
        """A round without prefill is over."""
        ...

    def forget(self) -> None:
        """Drop what was learnt (after a warm-up)."""
        ...


class Fixed:
    """Every drafting request every round, every tree as large as the budget says."""

    off_spine = 0.0
    floor = -math.inf

    def to_draft(self, live: Many[Sequence]) -> list[Sequence]:
        return [s for s in live if s.drafts]

    def fit(self, trees: list[Tree], sequences: Many[Sequence]) -> list[Tree]:
        return trees

    def learn(self, sequence: Sequence, tree: Tree, path: Many[int]) -> None:
        return None

    def observe(self, spent: Round) -> None:
        return None

    def forget(self) -> None:
        return None


# Costs ----------------------------------------------------------------------------------------------------------


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
        """Never cheaper for more: measuring noise must not make a size look free."""
        best = list(self.seconds)
        for i in range(len(best) - 2, -1, -1):
            best[i] = min(best[i], best[i + 1])
        return CostTable(self.sizes, tuple(best), self.staircase)


class Costs:
    """Start-up tables, corrected by what rounds really take at each batch size."""

    STEP = 0.05  # weight of one observation
    OUTLIER = 3.0  # a round that took this much longer than expected was disturbed

    def __init__(self, verify: CostTable, draft: CostTable) -> None:
        self._verify, self._draft = verify, draft
        self._scale: dict[tuple[str, int], float] = {}

    @property
    def row_sizes(self) -> tuple[int, ...]:
        return self._verify.sizes

    @property
    def staircase(self) -> bool:
        return self._verify.staircase

    def verify(self, rows: int, requests: int) -> float:
        kind = "plain" if rows == requests else "tree"
        return self._verify.at(rows) * self._scaled(kind, requests)

    def draft(self, requests: int) -> float:
        return self._draft.at(requests) * self._scaled("draft", requests)

    def observe(self, spent: Round) -> None:
        kind, seconds = "plain" if spent.rows == spent.requests else "tree", spent.verify_seconds
        if spent.draft_seconds is None:  # what is not drafting, as far as is known
            seconds = max(seconds * 0.1, seconds - self.draft(spent.drafted))
        self._correct(kind, spent.requests, seconds, self._verify.at(spent.rows))
        if spent.drafted and spent.draft_seconds is not None:
            self._correct("draft", spent.drafted, spent.draft_seconds, self._draft.at(spent.drafted))

    def _scaled(self, kind: str, requests: int) -> float:
        """The correction of this batch size, or of the nearest one seen."""
        if (scale := self._scale.get((kind, requests))) is not None:
            return scale
        near = [(abs(n - requests), s) for (k, n), s in self._scale.items() if k == kind]
        return min(near)[1] if near else 1.0

    def _correct(self, kind: str, requests: int, seconds: float, expected: float) -> None:
        seen, ratio = self._scale.get((kind, requests)), seconds / expected
        if seen is None:
            self._scale[kind, requests] = min(ratio, self.OUTLIER * self._scaled(kind, requests))
        else:
            ratio = min(ratio, self.OUTLIER * seen)
            self._scale[kind, requests] = seen + self.STEP * (ratio - seen)


# Probabilities --------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Tally:
    """A share that forgets: hits of tries, shrunk towards a prior."""

    hits: float = 0.0
    tries: float = 0.0

    MEMORY = 500.0
    PRIOR = 5.0

    def add(self, hit: float, tries: float = 1.0) -> None:
        self.hits += hit
        self.tries += tries
        if self.tries > self.MEMORY:
            self.hits /= 2
            self.tries /= 2

    def share(self, prior: float) -> float:
        return (self.hits + self.PRIOR * prior) / (self.tries + self.PRIOR)


class Calibration:
    """How often nodes with a given score are really accepted, on the spine and off it."""

    BINS = 16

    def __init__(self) -> None:
        self._cells = {(spine, i): Tally() for spine in (True, False) for i in range(self.BINS)}
        self._off_spine = Tally()  # children of accepted nodes off the spine: accepted, of expected

    def probability(self, score: float, spine: bool) -> float:
        return self._cells[spine, self._bin(score)].share(math.exp(score))

    @property
    def off_spine(self) -> float:
        """Log-factor on steps below a node off the spine; never a bonus."""
        t = self._off_spine
        return min(0.0, math.log((t.hits + Tally.PRIOR) / (t.tries + Tally.PRIOR)))

    def learn(self, tree: Tree, path: Many[int]) -> None:
        taken = set(path)
        for row in range(1, tree.rows):
            score, spine, parent = tree.scores[row], tree.on_spine[row], tree.parents[row]
            self._cells[spine, self._bin(score)].add(row in taken)
            if parent in taken and not tree.on_spine[parent]:
                expected = math.exp(score - tree.scores[parent] - self.off_spine)
                self._off_spine.add(row in taken, min(1.0, expected))

    def _bin(self, score: float) -> int:
        return min(self.BINS - 1, int(-score * 4)) if score > -math.inf else self.BINS - 1


# Auto -----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Habit:
    """What speculation has brought one request lately (or everyone, for newcomers)."""

    gain: float  # accepted drafts a pass
    nodes: float  # verified for it
    passes: int = 0  # speculative ones
    idle: int = 0  # rounds since it was drafted
    patience: int = 32  # idle rounds before it is tried again
    trial: int = 4  # passes that it still gets before it is judged
    drafted: bool = False  # for the coming round

    LEAST_STEP = 0.03

    def learn(self, gain: int, nodes: int) -> None:
        """A mean at first, later forgetting slowly: judged too fast, a request would stop on bad luck."""
        self.passes += 1
        step = max(self.LEAST_STEP, 1.0 / (self.passes + 1))
        self.gain += step * (gain - self.gain)
        self.nodes += step * (nodes - self.nodes)


@dataclass(slots=True)
class Auto:
    """Largest expected tokens per second, for the batch as a whole."""

    costs: Costs
    depth: int  # block size - 1
    calibration: Calibration = field(default_factory=Calibration)
    habits: dict[str, Habit] = field(default_factory=dict)
    floor: float = math.log(0.01)  # a node less likely than this never pays for its row
    usual: Habit | None = None
    drafting_rounds: int = 0  # in a row, without a plain one

    RETRIAL = 4
    PATIENCE = 32
    MAX_PATIENCE = 128
    PLAIN_AGAIN = 256  # after so many drafting rounds one plain round re-measures what plain decoding costs

    @property
    def off_spine(self) -> float:
        return self.calibration.off_spine

    # What to draft ----------------------------------------------------------------------------------------------

    def to_draft(self, live: Many[Sequence]) -> list[Sequence]:
        self._keep_only(live)
        candidates = [s for s in live if s.drafts and s.left_to_say > 1]
        if not candidates:
            return []
        if self.drafting_rounds >= self.PLAIN_AGAIN:
            self.drafting_rounds = 0
            for s in candidates:
                self._habit(s).drafted = False
            return []
        best = {s.request.id for s in self._paying(candidates, len(live))}
        chosen = [s for s in candidates if self._tried(self._habit(s), paying=s.request.id in best)]
        self.drafting_rounds = self.drafting_rounds + 1 if chosen else 0
        return chosen

    def _paying(self, candidates: list[Sequence], requests: int) -> list[Sequence]:
        """The set with the best expected rate: those that gain most first, as many as pay."""
        ordered = sorted(candidates, key=lambda s: (-self._habit(s).gain, s.request.id))
        best, best_rate = 0, requests / self.costs.verify(requests, requests)
        tokens, rows = float(requests), float(requests)
        for count, s in enumerate(ordered, start=1):
            tokens += self._habit(s).gain
            rows += self._habit(s).nodes
            seconds = self.costs.verify(max(requests + 1, round(rows)), requests) + self.costs.draft(count)
            if tokens / seconds > best_rate:
                best, best_rate = count, tokens / seconds
        return ordered[:best]

    def _tried(self, habit: Habit, *, paying: bool) -> bool:
        """Whether to draft: it pays, or it is on trial, or it was idle for long enough to be tried again."""
        if paying:
            habit.patience = self.PATIENCE
        elif habit.trial == 0 and habit.idle >= habit.patience:
            habit.patience = min(self.MAX_PATIENCE, habit.patience * 2)
            habit.trial = self.RETRIAL
            habit.passes = min(habit.passes, self.RETRIAL)  # what it finds now counts more than what was
        drafted = paying or habit.trial > 0
        habit.trial = max(0, habit.trial - 1)
        habit.idle = 0 if drafted else habit.idle + 1
        habit.drafted = drafted
        return drafted

    # How large the trees are ------------------------------------------------------------------------------------

    def fit(self, trees: list[Tree], sequences: Many[Sequence]) -> list[Tree]:
        """All trees share one row budget: the most probable nodes first, as many as maximise the rate."""
        tree_mode = [s.request.mode is SpecMode.TREE for s in sequences]
        nodes = sorted(
            (-p, i, n) for i, tree in enumerate(trees) if tree_mode[i] for n, p in enumerate(self._expected(tree), start=1)
        )
        if not nodes:
            return trees
        fixed = sum(tree.rows for tree, fits in zip(trees, tree_mode, strict=True) if not fits)
        roots = sum(tree_mode)
        drafted = sum(tree.nodes > 0 for tree in trees)
        count = self._best_count([-p for p, _, _ in nodes], fixed + roots, len(trees), drafted)
        keep = [0] * len(trees)
        for _, i, n in nodes[:count]:
            keep[i] = max(keep[i], n)
        return [t.first(n) if fits else t for t, n, fits in zip(trees, keep, tree_mode, strict=True)]

    def _expected(self, tree: Tree) -> list[float]:
        """Acceptance probability of each node, never rising along the heap's order (so that any cut is a tree)."""
        least, found = 1.0, []
        for score, spine in zip(tree.scores[1:], tree.on_spine[1:], strict=True):
            least = min(least, self.calibration.probability(score, spine))
            found.append(least)
        return found

    def _best_count(self, gains: list[float], rows: int, requests: int, drafted: int) -> int:
        """How many of the nodes, most probable first, give the best rate. On a staircase only full steps can."""
        draft, tokens = self.costs.draft(drafted), float(requests)
        ends = set(self.costs.row_sizes) if self.costs.staircase else None
        best, best_rate = 0, 0.0
        for count in range(len(gains) + 1):
            if count:
                tokens += gains[count - 1]
            if ends is not None and rows + count not in ends and count < len(gains):
                continue
            rate = tokens / (self.costs.verify(rows + count, requests) + draft)
            if rate > best_rate:
                best, best_rate = count, rate
        return best

    # Learning ---------------------------------------------------------------------------------------------------

    def learn(self, sequence: Sequence, tree: Tree, path: Many[int]) -> None:
        habit = self._habit(sequence)
        if not sequence.drafts or not habit.drafted:  # nothing was drafted
            return
        if sequence.request.mode is SpecMode.TREE:
            self.calibration.learn(tree, path)
        if self.usual is None:
            self.usual = replace(habit)
        for h in (habit, self.usual):
            h.learn(len(path) - 1, tree.nodes)

    def observe(self, spent: Round) -> None:
        self.costs.observe(spent)

    def forget(self) -> None:
        self.calibration = Calibration()
        self.habits.clear()
        self.usual = None
        self.drafting_rounds = 0

    def _habit(self, s: Sequence) -> Habit:
        if s.request.id not in self.habits:
            if self.usual:
                self.habits[s.request.id] = Habit(self.usual.gain, self.usual.nodes)
            else:  # nothing is known yet: hope
                self.habits[s.request.id] = Habit(self.depth / 2, float(self.depth))
        return self.habits[s.request.id]

    def _keep_only(self, live: Many[Sequence]) -> None:
        ids = {s.request.id for s in live}
        if len(self.habits) > 2 * len(ids) + 16:
            self.habits = {i: h for i, h in self.habits.items() if i in ids}
