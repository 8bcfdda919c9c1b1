"""How much to draft and to verify: what a policy is, and the fixed one. `auto.py` is the other.

Pure decisions over probabilities, costs and counts: no tensors, no clocks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Protocol

from ddtree_engine.forest import Forest
from ddtree_engine.sequence import Sequence

MOST_NODES = 1 << 30  # as many as the engine has room for


@dataclass(frozen=True, slots=True)
class Round:
    """What a decoding round cost (rounds with prefill chunks are not reported)."""

    requests: int  # decoded
    rows: int  # verified
    drafted: int  # requests that the drafter ran for
    seconds: float


class Policy(Protocol):
    chains: bool  # whether requests in tree mode get the chain
    nodes: int  # of the next trees, at most
    off_spine: float  # added to the log-probability of steps below a node that is not on the spine
    floor: float  # paths below this summed log-probability are not built

    def to_draft(self, live: Many[Sequence]) -> list[Sequence]:
        """Of everything that goes on decoding, what shall be drafted for the next round."""
        ...

    def fit(self, forest: Forest, sequences: Many[Sequence]) -> Forest:
        """Cut the trees of a round to what is worth verifying. Called once a round, before anything else."""
        ...

    def learn(self, forest: Forest, sequences: Many[Sequence], paths: Many[Many[int]]) -> None:
        """The trees were verified and `paths` accepted."""
        ...

    def meanwhile(self) -> None:
        """Once a round, where the host would wait for the device if it can: time to think about what was seen."""
        ...

    def observe(self, spent: Round) -> None:
        """A round without prefill is over."""
        ...

    def anew(self) -> Policy:
        """The same without what was learnt of texts (after a warm-up)."""
        ...


class Fixed:
    """Every drafting request every round, every tree as large as the budget says."""

    chains = False
    nodes = MOST_NODES
    off_spine = 0.0
    floor = -math.inf

    def to_draft(self, live: Many[Sequence]) -> list[Sequence]:
        return [s for s in live if s.drafts]

    def fit(self, forest: Forest, sequences: Many[Sequence]) -> Forest:
        return forest

    def learn(self, forest: Forest, sequences: Many[Sequence], paths: Many[Many[int]]) -> None:
        return None

    def meanwhile(self) -> None:
        return None

    def observe(self, spent: Round) -> None:
        return None

    def anew(self) -> Policy:
        return self
