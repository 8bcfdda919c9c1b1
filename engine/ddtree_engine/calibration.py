"""How probable drafted nodes really are: the drafter's own probabilities, corrected by what was accepted. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ddtree_engine.forest import Forest

BINS = 16  # of a quarter each, in log-probability
MEMORY = 500.0  # nodes of a bin, after which half is forgotten
PRIOR = 5.0  # nodes that the drafter's own probability counts for


class Calibration:
    """Accepted shares of nodes by score, on the spine (every step the drafter's first choice) and off it."""

    def __init__(self) -> None:
        self._hits = np.zeros(2 * BINS)  # off the spine, then on it
        self._tries = np.zeros(2 * BINS)
        self._off_hits = self._off_expected = 0.0  # children of accepted nodes off the spine
        self._weigh()

    def _weigh(self) -> None:
        # A bin's share is (hits + PRIOR * own) / (tries + PRIOR), kept as what is seen and what the drafter's own counts for.
        self._own = PRIOR / (self._tries + PRIOR)
        self._seen = self._hits / (self._tries + PRIOR)

    def probability(self, scores: np.ndarray, on_spine: np.ndarray | int) -> np.ndarray:
        """Of nodes with these scores (any shape)."""
        at = _bins(scores, on_spine)
        return self._seen[at] + self._own[at] * np.exp(scores)

    @property
    def off_spine(self) -> float:
        """Log-factor on steps below a node off the spine; never a bonus."""
        return min(0.0, math.log((self._off_hits + PRIOR) / (self._off_expected + PRIOR)))

    def expected(self, forest: Forest) -> np.ndarray:
        """[trees, width]: acceptance probability of each node. The root and what is not in use: 0."""
        found = self.probability(forest.scores, forest.on_spine)
        found[:, 0] = 0.0
        found[~forest.inside] = 0.0
        return found

    def spine(self, forest: Forest) -> np.ndarray:
        """[trees]: expected accepted nodes of each request's chain."""
        return self.probability(forest.spines, 1).sum(axis=1)

    def learn(self, forest: Forest, paths: Sequence[Sequence[int]]) -> None:
        """Trees were verified and `paths` accepted."""
        taken = np.zeros((len(forest), forest.sizes.width), dtype=bool)
        for mine, path in zip(taken, paths, strict=True):
            mine[path] = True
        nodes = forest.inside
        nodes[:, 0] = False
        at = _bins(forest.scores, forest.on_spine)
        self._tries += np.bincount(at[nodes], minlength=2 * BINS)
        self._hits += np.bincount(at[nodes & taken], minlength=2 * BINS)
        full = self._tries > MEMORY
        self._tries[full] /= 2
        self._hits[full] /= 2
        self._weigh()
        self._learn_off_spine(forest, nodes & (forest.on_spine == 0), taken)

    def _learn_off_spine(self, forest: Forest, off: np.ndarray, taken: np.ndarray) -> None:
        tree, row = np.nonzero(off)
        parent = forest.parents[tree, row]
        below = taken[tree, parent] & (forest.on_spine[tree, parent] == 0)
        if not below.any():
            return
        tree, row, parent = tree[below], row[below], parent[below]
        step = forest.scores[tree, row] - forest.scores[tree, parent] - self.off_spine
        self._off_expected += float(np.exp(np.minimum(step, 0.0)).sum())
        self._off_hits += float(taken[tree, row].sum())
        if self._off_expected > MEMORY:
            self._off_expected, self._off_hits = self._off_expected / 2, self._off_hits / 2


def _bins(scores: np.ndarray, on_spine: np.ndarray | int) -> np.ndarray:
    return np.clip(scores * -4.0, 0.0, BINS - 1.0).astype(np.int64) + on_spine * BINS
