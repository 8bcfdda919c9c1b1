"""Trees as arrays say what single trees say, and `grow` gives the heap's (`tests/gpu` has the kernel's)."""

from __future__ import annotations

import itertools
import math

import numpy as np
from ddtree_engine.forest import Growth, Proposal, Sizes, gather, grow
from ddtree_engine.tree import ancestor_bits, best_first, chain, root_only
from hypothesis import given
from hypothesis import strategies as st

SIZES = Sizes(width=20, depths=5)


@st.composite
def candidates(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, Growth]:
    """A batch with many ties, requests near their end, chains and requests that draft nothing."""
    n, deep, k = draw(st.integers(1, 3)), draw(st.integers(1, SIZES.depths)), draw(st.integers(1, 4))
    value = st.sampled_from([0.0, -0.25, -0.5, -1.0, -1.5, -3.0, -math.inf]) | st.floats(-4, 0, width=32)
    flat = draw(st.lists(value, min_size=n * deep * k, max_size=n * deep * k))
    logprobs = -np.sort(-np.array(flat, dtype=np.float32).reshape(n, deep, k), axis=-1)
    tokens = np.array([draw(st.permutations(range(k + 2)))[:k] for _ in range(n * deep)]).reshape(n, deep, k)

    def each(low: int, high: int) -> list[int]:
        return draw(st.lists(st.integers(low, high), min_size=n, max_size=n))

    ranks = [draw(st.sampled_from([1, k])) for _ in range(n)]
    return logprobs, tokens, Growth(
        each(0, 99), each(0, deep), ranks, each(0, SIZES.width - 1),
        draw(st.sampled_from([0.0, -0.5, -math.inf])), draw(st.sampled_from([-math.inf, -2.0]))
    )  # fmt: skip


@given(candidates())
def test_grown_forest_holds_the_heaps_trees(drawn: tuple[np.ndarray, np.ndarray, Growth]) -> None:
    logprobs, tokens, growth = drawn
    forest = grow(logprobs, tokens, growth, SIZES)
    for i in range(len(logprobs)):
        deep, ranks, tree = growth.depths[i], growth.ranks[i], forest.tree(i)
        if not deep or not growth.nodes[i]:
            assert tree == root_only(growth.roots[i])
        elif ranks == 1:
            expected = chain(growth.roots[i], tokens[i, : min(deep, growth.nodes[i]), 0].tolist())
            assert (tree.token_ids, tree.parents) == (expected.token_ids, expected.parents)
        else:
            expected = best_first(
                growth.roots[i], logprobs[i, :deep].tolist(), tokens[i, :deep].tolist(), growth.nodes[i],
                off_spine=growth.off_spine, floor=growth.floor,
            )  # fmt: skip
            assert tree == expected
        assert np.array_equal(forest.bits[i, : tree.rows], ancestor_bits(tree.visible()))
        assert np.allclose(forest.spines[i, : logprobs.shape[1]], np.cumsum(logprobs[i, :, 0].astype(float)), equal_nan=True)


@given(candidates(), st.lists(st.integers(1, 20), min_size=3, max_size=3))
def test_cut_trees_are_the_first_rows_and_flatten_in_order(
    drawn: tuple[np.ndarray, np.ndarray, Growth], rows: list[int]
) -> None:
    forest = grow(*drawn, SIZES)
    cut = forest.cut(np.array(rows[: len(forest)]))
    trees = [forest.tree(i).first(r - 1) for i, r in enumerate(rows[: len(forest)])]
    assert [cut.tree(i) for i in range(len(cut))] == trees
    assert cut.tokens[cut.inside].tolist() == list(itertools.chain.from_iterable(t.token_ids for t in trees))


@given(candidates())
def test_gathered_batch_has_every_requests_own_tree(drawn: tuple[np.ndarray, np.ndarray, Growth]) -> None:
    forest = grow(*drawn, SIZES)
    proposals: list[Proposal | None] = [Proposal(forest, i) for i in range(len(forest))]
    assert gather(proposals, [0] * len(forest)) is forest
    mixed = [None, *reversed(proposals), None]
    got = gather(mixed, list(range(len(mixed))))
    for i, p in enumerate(mixed):
        assert got.tree(i) == (root_only(i) if p is None else p.tree)
    assert [gather([None] * 2, [4, 5]).tree(i) for i in range(2)] == [root_only(4), root_only(5)]
