"""How much to draft and verify: a fixed budget, or `auto`.

Pure decisions over probabilities and measured costs; no tensors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Many
from typing import Protocol

from ddtree_engine.sequence import Sequence
from ddtree_engine.tree import Tree


class Policy(Protocol):
    off_spine: float  # added to the log-probability of steps below a node that is not on the spine
    floor: float  # paths below this summed log-probability are not built

    def to_draft(self, live: Many[Sequence]) -> Many[Sequence]:
        """The speculative sequences that shall be drafted for the next round."""
        ...

    def fit(self, trees: list[Tree], sequences: Many[Sequence]) -> list[Tree]:
        """Cut the trees of a round to what is worth verifying."""
        ...

    def learn(self, sequence: Sequence, tree: Tree, path: Many[int]) -> None:
        """One tree was verified and `path` accepted."""
        ...

    def observe(self, rows: int, drafted: int, verify_seconds: float, seconds: float, prefill: bool) -> None:
        """A round took this long; `verify_seconds` of it before drafting."""
        ...

    def forget(self) -> None:
        """Drop what was learnt (after a warm-up)."""
        ...


class Fixed:
    """Every tree as large as the budget says."""

    off_spine = 0.0
    floor = -math.inf

    def to_draft(self, live: Many[Sequence]) -> Many[Sequence]:
        return live

    def fit(self, trees: list[Tree], sequences: Many[Sequence]) -> list[Tree]:
        return trees

    def learn(self, sequence: Sequence, tree: Tree, path: Many[int]) -> None:
        return None

    def observe(self, rows: int, drafted: int, verify_seconds: float, seconds: float, prefill: bool) -> None:
        return None

    def forget(self) -> None:
        return None


def make_policy(checked, runner, progress) -> Policy:
    return Fixed()
