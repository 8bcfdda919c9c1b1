"""The trees of a batch as arrays, so that a round costs the host no Python per node: cut, flattened, learnt from at once.

A `Forest` holds what `tree.py` defines, one record of int64 numbers a tree, in the layout that `tree_kernel.py` writes on
the device. `grow` makes one from the drafter's candidates with the heap, for CPU and as what the kernel is tested against.
Not here: what trees are, and how large they should be (`tree.py`, `budget.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ddtree_engine.tree import Tree, best_first, chain, root_only

MASK_NODES = 64  # bits of a row's ancestor mask; larger trees have none
COLUMNS = 6


@dataclass(frozen=True, slots=True)
class Sizes:
    """A record is: rows in use; token, parent, depth, on spine, ancestor bits, score of every row; scores of the spine."""

    width: int  # rows of the largest tree, the root's included
    depths: int  # the drafter's block without its first token

    @property
    def record(self) -> int:
        return 1 + COLUMNS * self.width + self.depths


@dataclass(frozen=True, slots=True)
class Growth:
    """How the next trees are grown, one entry a request."""

    roots: Sequence[int]
    depths: Sequence[int]  # deepest node wanted
    ranks: Sequence[int]  # candidates of a depth that may be used: 1 gives the chain
    nodes: Sequence[int]
    off_spine: float = 0.0
    floor: float = -np.inf  # not for chains


@dataclass(frozen=True, slots=True)
class Forest:
    """`records` int64 [trees, record]; `rows` int64 [trees], at least 1, at most what the record has: a tree's first rows."""

    records: np.ndarray
    rows: np.ndarray
    sizes: Sizes

    @classmethod
    def of(cls, records: np.ndarray, sizes: Sizes) -> Forest:
        return cls(records, records[:, 0], sizes)

    @classmethod
    def planted(cls, trees: Sequence[Tree], sizes: Sizes, spines: np.ndarray | None = None) -> Forest:
        """From single trees. `spines` float64 [trees, depths]: summed log-probability of the drafter's first choices."""
        forest = cls.of(np.zeros((len(trees), sizes.record), dtype=np.int64), sizes)
        for i, tree in enumerate(trees):
            n = tree.rows
            forest.rows[i] = n
            columns = (tree.token_ids, tree.parents, tree.depths, tree.on_spine)
            for at, values in enumerate(columns):
                forest._column(at)[i, :n] = values
            forest.parents[i, 0] = 0  # so that parents can be followed without a case for the root
            forest.scores[i, :n] = tree.scores
            if n <= MASK_NODES + 1:
                forest.bits[i, :n] = _ancestor_bits(tree.parents)
        if spines is not None:
            forest.spines[:] = spines
        return forest

    @classmethod
    def roots(cls, tokens: Sequence[int]) -> Forest:
        """Plain steps."""
        forest = cls.of(np.zeros((len(tokens), Sizes(1, 0).record), dtype=np.int64), Sizes(1, 0))
        forest.rows[:] = 1
        forest.tokens[:, 0], forest.on_spine[:, 0] = tokens, 1
        return forest

    # Columns, [trees, width] each --------------------------------------------------------------------------------

    def _column(self, at: int) -> np.ndarray:
        return self.records[:, 1 + at * self.sizes.width : 1 + (at + 1) * self.sizes.width]

    @property
    def tokens(self) -> np.ndarray:
        return self._column(0)

    @property
    def parents(self) -> np.ndarray:
        """The parent's row; the root is its own."""
        return self._column(1)

    @property
    def depths(self) -> np.ndarray:
        return self._column(2)

    @property
    def on_spine(self) -> np.ndarray:
        """1 where every step down to the node was the drafter's first choice."""
        return self._column(3)

    @property
    def bits(self) -> np.ndarray:
        """Bit j - 1 of a row is set when it sees row j >= 1 of its tree."""
        return self._column(4)

    @property
    def scores(self) -> np.ndarray:
        """float64: summed log-probability of the path."""
        return self._column(5).view(np.float64)

    @property
    def spines(self) -> np.ndarray:
        """float64 [trees, depths]: summed log-probability of the drafter's first choices, whether in the tree or not."""
        return self.records[:, 1 + COLUMNS * self.sizes.width :].view(np.float64)

    # Rows of the pass --------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def inside(self) -> np.ndarray:
        """bool [trees, width]: the rows in use."""
        return np.arange(self.sizes.width) < self.rows[:, None]

    def cut(self, rows: np.ndarray) -> Forest:
        """Every tree's first rows only. Best-first order makes that the best tree of its size."""
        return replace(self, rows=np.minimum(rows, self.rows))

    def tree(self, i: int) -> Tree:
        n = int(self.rows[i])
        tokens, parents, depths, spine, scores = (
            tuple(column[i, :n].tolist())
            for column in (self.tokens, self.parents, self.depths, self.on_spine.astype(bool), self.scores)
        )
        return Tree(tokens, (-1, *parents[1:]), depths, scores, spine)


@dataclass(frozen=True, slots=True)
class Proposal:
    """A request's next tree: one of a forest's."""

    forest: Forest
    index: int

    @property
    def tree(self) -> Tree:
        return self.forest.tree(self.index)


def gather(proposals: Sequence[Proposal | None], roots: Sequence[int]) -> Forest:
    """The forest of a batch; without a proposal a request has its root only."""
    made = [p for p in proposals if p is not None]
    if not made:
        return Forest.roots(roots)
    source = made[0].forest
    if len(made) == len(proposals) == len(source) and all(p.forest is source and p.index == i for i, p in enumerate(made)):
        return source
    records = np.zeros((len(proposals), source.sizes.record), dtype=np.int64)
    forest = Forest.of(records, source.sizes)
    for i, (proposal, root) in enumerate(zip(proposals, roots, strict=True)):
        if proposal is None:
            forest.rows[i], forest.tokens[i, 0], forest.on_spine[i, 0] = 1, root, 1
        else:
            records[i] = proposal.forest.records[proposal.index]
    return forest


def grow(logprobs: np.ndarray, token_ids: np.ndarray, growth: Growth, sizes: Sizes) -> Forest:
    """Trees from candidates [requests, depths, k] by the heap."""
    spines = np.zeros((len(logprobs), sizes.depths))
    spines[:, : logprobs.shape[1]] = np.cumsum(logprobs[:, :, 0].astype(np.float64), axis=1)
    trees = [_grow_one(i, logprobs[i], token_ids[i], growth) for i in range(len(logprobs))]
    return Forest.planted(trees, sizes, spines)


def _grow_one(i: int, logprobs: np.ndarray, token_ids: np.ndarray, growth: Growth) -> Tree:
    depth, ranks = growth.depths[i], growth.ranks[i]
    if depth <= 0 or growth.nodes[i] <= 0:
        return root_only(growth.roots[i])
    if ranks == 1:
        nodes = min(depth, growth.nodes[i])
        own = chain(growth.roots[i], token_ids[:nodes, 0].tolist())
        scores = (0.0, *np.cumsum(logprobs[:nodes, 0].astype(np.float64)).tolist())
        return replace(own, scores=scores)
    return best_first(
        growth.roots[i],
        logprobs[:depth, :ranks].tolist(),
        token_ids[:depth, :ranks].tolist(),
        growth.nodes[i],
        off_spine=growth.off_spine,
        floor=growth.floor,
    )


def _ancestor_bits(parents: Sequence[int]) -> np.ndarray:
    seen = [0]
    for row in range(1, len(parents)):
        seen.append(seen[parents[row]] | 1 << (row - 1))
    return np.array(seen, dtype=np.uint64).view(np.int64)
