"""What drafts are expected to bring, for budget `auto`: by request, by size of tree, and how far to trust it. Pure.

Probabilities of single nodes are `calibration.py`'s. A request's next draft is not seen when its round is chosen: what is
hoped for rests on the drafts before it. Hopes are compared with what came, so that a choice made because one request looked
good just then does not stay better than it is.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass, field

import numpy as np

from ddtree_engine.calibration import Calibration
from ddtree_engine.costs import Kind
from ddtree_engine.forest import Forest
from ddtree_engine.sequence import Sequence

SHARES = np.array((1, 2, 3, 5, 7, 9, 11, 13, 15, 19, 23, 27, 31, 39, 47, 55, 63))  # nodes a drafted request; rows with the root


def falling(probabilities: np.ndarray) -> np.ndarray:
    """[trees, nodes], never rising along a tree's order: no node is likelier than one that was taken before it."""
    return np.minimum.accumulate(np.minimum(probabilities, 1.0), axis=1)


@dataclass(slots=True)
class Tally:
    """Accepted nodes over expected ones, of late."""

    prior: float  # nodes as expected that it begins with
    memory: float  # expected nodes, after which half is forgotten
    hits: float = 0.0
    hoped: float = 0.0

    @property
    def ratio(self) -> float:
        return (self.hits + self.prior) / (self.hoped + self.prior)

    def learn(self, accepted: float, expected: float) -> None:
        self.hits += accepted
        self.hoped += expected
        if self.hoped > self.memory:
            self.hits, self.hoped = self.hits / 2, self.hoped / 2


@dataclass(slots=True)
class Habit:
    """What one request's drafts have been worth lately."""

    chain: float  # expected accepted nodes of its chain
    passes: int = 0
    bias: Tally = field(default_factory=lambda: Tally(3.0, 60.0))  # some texts suit the drafter better than it knows

    STEP = 0.12

    def expect(self, chain: float) -> None:
        """What its newest draft is worth."""
        self.passes += 1
        self.chain += max(self.STEP, 1.0 / (self.passes + 1)) * (chain - self.chain)


@dataclass(slots=True)
class Yield:
    """What trees bring beside chains from the same drafts, by nodes: smoothed over rounds of trees."""

    STEP = 0.1

    chain: float = 0.0
    trees: np.ndarray = field(default_factory=lambda: np.zeros(len(SHARES)))
    rounds: int = 0

    def add(self, chain: float, trees: np.ndarray) -> None:
        """Expected accepted nodes a request: of its chain, and of trees of SHARES nodes."""
        self.rounds += 1
        step = max(self.STEP, 1.0 / self.rounds)
        self.chain += step * (chain - self.chain)
        self.trees = self.trees + step * (trees - self.trees)

    def ratio(self, depth: int) -> np.ndarray:
        """[SHARES]: accepted nodes of trees over those of the chain."""
        if not self.rounds or self.chain <= 0:  # nothing is known: a tree of a chain's size is as good
            return np.minimum(1.0, SHARES / depth)
        return self.trees / self.chain


@dataclass(frozen=True, slots=True)
class Lesson:
    """A round to learn from: its trees as they were grown and as they were verified, and what was accepted."""

    kind: Kind
    grown: Forest
    cut: Forest
    sequences: tuple[Sequence, ...]
    paths: list[list[int]]


def _untried() -> dict[Kind, Tally]:
    """How far hopes are to be trusted, by kind of draft."""
    return {kind: Tally(30.0, 400.0) for kind in (Kind.CHAIN, Kind.TREE)}


@dataclass(slots=True)
class Hopes:
    """All that rounds have shown."""

    depth: int  # block size - 1
    calibration: Calibration = field(default_factory=Calibration)
    trees: Yield = field(default_factory=Yield)
    trust: dict[Kind, Tally] = field(default_factory=_untried)
    habits: dict[str, Habit] = field(default_factory=dict)
    usual: float | None = None  # what a request's chain is worth, for newcomers
    passes: int = 0  # of requests, drafted and learnt from
    rounds: int = 0  # with any

    OPENING, OPENING_ROUNDS = 24, 5  # passes of a request, and rounds, that are drafted whatever they promise
    USUAL_STEP = 0.03

    @property
    def opened(self) -> bool:
        """Whether enough was drafted for hopes to rest on."""
        return self.passes >= self.OPENING and self.rounds >= self.OPENING_ROUNDS

    def chains(self, able: Many[Sequence]) -> float:
        """Nodes that chains of all these requests should have accepted."""
        return sum(self._habit(s).chain for s in able)

    def strange(self, able: Many[Sequence]) -> bool:
        """Whether nothing is known of some of these requests."""
        return any(s.request.id not in self.habits for s in able)

    def came(self, kind: Kind, accepted: int, hoped: float) -> None:
        """A round brought so many nodes."""
        if kind is not Kind.OFF and self.opened:
            self.trust[kind].learn(accepted, hoped)

    def learn(self, lesson: Lesson) -> None:
        promised = self.calibration.expected(lesson.grown)
        self._study(lesson, promised)
        expected = np.where(lesson.cut.inside, promised, 0.0).sum(axis=1).tolist()
        self.calibration.learn(lesson.cut, lesson.paths)
        for s, path, hoped in zip(lesson.sequences, lesson.paths, expected, strict=True):
            if hoped > 0.0 and self.opened:  # before, the calibration is still off for all of them
                self._habit(s).bias.learn(len(path) - 1, hoped)

    def _study(self, lesson: Lesson, promised: np.ndarray) -> None:
        """What these drafts promise."""
        drafted = np.flatnonzero(lesson.grown.rows > 1).tolist()
        if not drafted:
            return
        self.passes += len(drafted)
        self.rounds += 1
        chain = self.calibration.spine(lesson.grown)
        for i in drafted:
            habit = self._habit(lesson.sequences[i])
            worth = min(float(self.depth), float(chain[i]) * habit.bias.ratio)
            habit.expect(worth)
            self.usual = worth if self.usual is None else self.usual + self.USUAL_STEP * (worth - self.usual)
        if lesson.kind is not Kind.CHAIN:
            mine = falling(promised[drafted, 1:])
            at = np.minimum(SHARES, mine.shape[1]) - 1
            self.trees.add(float(chain[drafted].mean()), np.cumsum(mine.mean(axis=0))[at])

    def _habit(self, s: Sequence) -> Habit:
        habit = self.habits.get(s.request.id)
        if habit is None:  # nothing is known yet: as usual, or hope
            habit = self.habits[s.request.id] = Habit(self.depth / 2 if self.usual is None else self.usual)
        return habit

    def keep_only(self, live: Many[Sequence]) -> None:
        """Forget requests that are gone, now and then."""
        ids = {s.request.id for s in live}
        if len(self.habits) > 2 * len(ids) + 16:
            self.habits = {i: h for i, h in self.habits.items() if i in ids}
