"""What drafts are expected to bring, for budget `auto`: by request, by size of tree, and how far to trust it. Pure.

A request's next draft is not seen when its round is chosen: what is hoped for rests on the drafts before it. Hopes are
compared with what came, so that a choice made because one request looked good just then does not stay better than it is.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

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
