"""Draft trees: the best-first heap of DDTree, the chain, who sees whom, and the walk along the target's choices.

Pure Python and numpy. Rows: row 0 is the root (the last committed token, which the target has not seen yet), row i >= 1 is
node i in the order in which the heap gave them, so a parent always comes before its children. The root is not counted
in the budget. Algorithm: Ringel et al., DDTree (arXiv 2604.12989): the drafter's marginals are independent, so the most
probable prefixes under their product are the tree that maximises the expected acceptance under it.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Tree:
    """A prefix-closed set of drafted continuations. All tuples have one entry per row, the root's first."""

    token_ids: tuple[int, ...]
    parents: tuple[int, ...]  # the parent's row; the root's is -1
    depths: tuple[int, ...]  # the root's is 0
    scores: tuple[float, ...]  # summed log-probability of the path; the root's is 0.0, chains' are 0.0 throughout
    on_spine: tuple[bool, ...]  # every step down to the node was the drafter's first choice

    @property
    def nodes(self) -> int:
        return len(self.token_ids) - 1

    @property
    def rows(self) -> int:
        return len(self.token_ids)

    def first(self, nodes: int) -> Tree:
        """The tree of the first `nodes` nodes, which is the best-first tree of that budget."""
        n = nodes + 1
        if n >= self.rows:
            return self
        return Tree(self.token_ids[:n], self.parents[:n], self.depths[:n], self.scores[:n], self.on_spine[:n])

    def visible(self) -> np.ndarray:
        """bool [rows, rows]: row i attends to row j, that is j is an ancestor of i or i itself."""
        seen = np.zeros((self.rows, self.rows), dtype=bool)
        for row, parent in enumerate(self.parents):
            if parent >= 0:
                seen[row] = seen[parent]
            seen[row, row] = True
        return seen

    def walk(self, choices: Sequence[int]) -> list[int]:
        """Rows accepted when the target chooses choices[i] after row i: from the root down while it agrees.

        The next root is choices[path[-1]], so len(path) tokens are gained.
        """
        children = {(self.parents[i], self.token_ids[i]): i for i in range(1, self.rows)}
        path = [0]
        while (child := children.get((path[-1], choices[path[-1]]))) is not None:
            path.append(child)
        return path


def root_only(root: int) -> Tree:
    """A plain decoding step: nothing drafted."""
    return Tree((root,), (-1,), (0,), (0.0,), (True,))


def chain(root: int, token_ids: Sequence[int]) -> Tree:
    """The drafter's first choices as one path."""
    n = len(token_ids) + 1
    return Tree((root, *token_ids), tuple(range(-1, n - 1)), tuple(range(n)), (0.0,) * n, (True,) * n)


def best_first(
    root: int,
    logprobs: Sequence[Sequence[float]],
    token_ids: Sequence[Sequence[int]],
    budget: int,
    *,
    off_spine: float = 0.0,
    floor: float = -np.inf,
) -> Tree:
    """The `budget` most probable prefixes of the drafter's product distribution, most probable first.

    `logprobs` [depths, k], sorted descending, over the full vocabulary (not renormalised over k), with `token_ids` in the
    same shape. Ties go to the lexicographically smaller path of ranks, so the tree never depends on heap order.
    `off_spine` <= 0 is added to every step below a node that was not the drafter's first choice: marginals are
    conditioned on the first choices in training, so they hold less well elsewhere. 0 is DDTree. Growth stops at
    paths below `floor`.
    """
    depths_max, k = len(logprobs), len(logprobs[0]) if len(logprobs) else 0
    tokens, parents, depths, scores, spine = [root], [-1], [0], [0.0], [True]
    # An entry is one prefix: (-score, ranks, parent row, score of the parent, whether the parent is on the spine).
    heap: list[tuple[float, tuple[int, ...], int, float, bool]] = []
    if depths_max and k:
        heap.append((-logprobs[0][0], (0,), 0, 0.0, True))
    while heap and len(tokens) <= budget:
        cost, ranks, parent, base, parent_spine = heapq.heappop(heap)
        if -cost < floor:
            break
        depth, rank, row = len(ranks), ranks[-1], len(tokens)
        spine_here = parent_spine and rank == 0
        tokens.append(token_ids[depth - 1][rank])
        parents.append(parent)
        depths.append(depth)
        scores.append(-cost)
        spine.append(spine_here)
        penalty = 0.0 if parent_spine else off_spine
        if rank + 1 < k:
            sibling = base + logprobs[depth - 1][rank + 1] + penalty
            heapq.heappush(heap, (-sibling, (*ranks[:-1], rank + 1), parent, base, parent_spine))
        if depth < depths_max:
            child = -cost + logprobs[depth][0] + (0.0 if spine_here else off_spine)
            heapq.heappush(heap, (-child, (*ranks, 0), row, -cost, spine_here))
    return Tree(tuple(tokens), tuple(parents), tuple(depths), tuple(scores), tuple(spine))


def ancestor_bits(visible: np.ndarray) -> np.ndarray:
    """int64 [rows] for the attention kernel: bit j-1 of row i is set when row i sees row j >= 1; the root is implied.

    At most 64 rows besides the root; bit 63 is the sign.
    """
    rows = visible.shape[0]
    if rows > 65:
        raise ValueError(f"{rows - 1} nodes do not fit a 64-bit mask")
    weights = np.left_shift(np.uint64(1), np.arange(rows - 1, dtype=np.uint64))
    return (visible[:, 1:].astype(np.uint64) * weights).sum(axis=1, dtype=np.uint64).view(np.int64)
