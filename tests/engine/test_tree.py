"""Draft trees against brute force, and the walk along the target's choices."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from ddtree_engine.tree import Tree, ancestor_bits, best_first, chain, root_only
from hypothesis import given
from hypothesis import strategies as st

ROOT = 50


@st.composite
def marginals(draw: st.DrawFn) -> tuple[list[list[float]], list[list[int]]]:
    """Descending log-probabilities with ties, and distinct tokens per depth; token 0 is as likely as any."""
    depths, k = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    level = st.lists(st.sampled_from([0.0, -0.25, -0.5, -1.0, -1.5, -3.0]), min_size=k, max_size=k)
    logprobs = [sorted(draw(level), reverse=True) for _ in range(depths)]
    tokens = [draw(st.permutations(range(k + 2)))[:k] for _ in range(depths)]
    return logprobs, tokens


def paths(tree: Tree) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = [()]
    for token, parent in zip(tree.token_ids[1:], tree.parents[1:], strict=True):
        found.append((*found[parent], token))
    return found[1:]


def brute_force(logprobs: list[list[float]], tokens: list[list[int]], budget: int) -> list[tuple[int, ...]]:
    """Every prefix, the most probable first, ties by ranks; the first `budget`."""
    prefixes = [
        ranks for depth in range(1, len(logprobs) + 1) for ranks in itertools.product(range(len(logprobs[0])), repeat=depth)
    ]

    def cost(ranks: tuple[int, ...]) -> float:
        total = 0.0
        for depth, rank in enumerate(ranks):
            total += logprobs[depth][rank]
        return -total

    ordered = sorted(prefixes, key=lambda ranks: (cost(ranks), ranks))
    return [tuple(tokens[d][r] for d, r in enumerate(ranks)) for ranks in ordered[:budget]]


@given(marginals(), st.integers(1, 40))
def test_heap_gives_the_most_probable_prefixes(m: tuple[list[list[float]], list[list[int]]], budget: int) -> None:
    assert paths(best_first(ROOT, *m, budget)) == brute_force(*m, budget)


@given(marginals(), st.integers(1, 40))
def test_tree_is_prefix_closed_and_within_its_bounds(m: tuple[list[list[float]], list[list[int]]], budget: int) -> None:
    tree = best_first(ROOT, *m, budget)
    assert tree.nodes <= budget
    assert tree.token_ids[0] == ROOT
    assert len(set(paths(tree))) == tree.nodes
    for row in range(1, tree.rows):
        assert 0 <= tree.parents[row] < row
        assert tree.depths[row] == tree.depths[tree.parents[row]] + 1 <= len(m[0])
        assert tree.scores[row] <= tree.scores[tree.parents[row]]


@given(marginals(), st.integers(1, 40), st.integers(0, 40))
def test_first_nodes_of_a_tree_are_the_tree_of_the_smaller_budget(
    m: tuple[list[list[float]], list[list[int]]], budget: int, smaller: int
) -> None:
    smaller = min(smaller, budget)
    expected = best_first(ROOT, *m, smaller) if smaller else root_only(ROOT)
    assert best_first(ROOT, *m, budget).first(smaller) == expected


@given(marginals())
def test_heavy_discount_off_the_spine_leaves_branches_without_children(
    m: tuple[list[list[float]], list[list[int]]],
) -> None:
    tree = best_first(ROOT, *m, 40, off_spine=-math.inf, floor=-100.0)
    assert all(tree.on_spine[parent] for parent in tree.parents[1:])


@given(marginals(), st.integers(1, 40))
def test_row_sees_its_ancestors_and_itself_only(m: tuple[list[list[float]], list[list[int]]], budget: int) -> None:
    tree = best_first(ROOT, *m, budget)
    for row in range(tree.rows):
        ancestors, at = set(), row
        while at >= 0:
            ancestors.add(at)
            at = tree.parents[at]
        assert set(np.flatnonzero(tree.visible()[row])) == ancestors


@given(marginals(), st.integers(1, 64))
def test_mask_bits_say_the_same_as_the_matrix(m: tuple[list[list[float]], list[list[int]]], budget: int) -> None:
    visible = best_first(ROOT, *m, budget).visible()
    bits = ancestor_bits(visible)
    for row, node in itertools.product(range(len(visible)), range(1, len(visible))):
        assert bool(int(bits[row]) >> (node - 1) & 1) == visible[row, node]


def test_64_nodes_fit_the_mask_and_65_are_refused() -> None:
    bits = ancestor_bits(chain(1, range(64)).visible())
    assert int(bits[64]) == -1  # all 64 bits
    with pytest.raises(ValueError, match="65 nodes"):
        ancestor_bits(chain(1, range(65)).visible())


@given(marginals(), st.integers(1, 40), st.data())
def test_walk_follows_the_choices_as_far_as_the_tree_goes(
    m: tuple[list[list[float]], list[list[int]]], budget: int, data: st.DataObject
) -> None:
    tree = best_first(ROOT, *m, budget)
    choices = data.draw(st.lists(st.integers(0, 5), min_size=tree.rows, max_size=tree.rows))
    path = tree.walk(choices)
    assert path[0] == 0
    for parent, child in itertools.pairwise(path):
        assert tree.parents[child] == parent
        assert tree.token_ids[child] == choices[parent]
    assert not any(tree.parents[i] == path[-1] and tree.token_ids[i] == choices[path[-1]] for i in range(1, tree.rows))


def test_token_zero_is_a_draft_like_any_other() -> None:
    tree = best_first(7, [[-0.1, -3.0], [-0.1, -3.0]], [[0, 5], [0, 6]], 4)
    assert paths(tree)[:2] == [(0,), (0, 0)]
    assert tree.walk([0, 0, 9, 9, 9]) == [0, 1, 2]


def test_chain_has_the_drafters_first_choices_in_order() -> None:
    tree = chain(9, [4, 0, 4])
    assert paths(tree) == [(4,), (4, 0), (4, 0, 4)]
    assert tree.visible().tolist() == np.tri(4, dtype=bool).tolist()


def test_budget_of_the_block_gives_the_chain_when_the_drafter_is_sure() -> None:
    sure = [[-0.01, -9.0, -9.0]] * 5
    tree = best_first(9, sure, [[1, 2, 3]] * 5, 5)
    assert (tree.token_ids, tree.parents) == (chain(9, [1] * 5).token_ids, chain(9, [1] * 5).parents)


def test_nothing_drafted_is_a_tree_of_the_root() -> None:
    assert best_first(3, [], [], 16) == root_only(3)
