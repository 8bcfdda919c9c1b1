"""The kernel grows the heap's trees, node by node. On a machine without CUDA: TRITON_INTERPRET=1."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from ddtree_engine.forest import Forest, Growth, Sizes
from ddtree_engine.tree import ancestor_bits, best_first, root_only
from hypothesis import given, settings

from tests.engine.test_forest import SIZES, candidates

pytestmark = pytest.mark.gpu
pytest.importorskip("triton", reason="no triton in this environment")

from ddtree_engine import tree_kernel  # noqa: E402 (triton may be missing)

DEVICE = torch.device("cpu" if os.environ.get("TRITON_INTERPRET") else "cuda")


@given(candidates())
@settings(deadline=None, max_examples=150)
def test_kernel_grows_the_heaps_trees(drawn: tuple[np.ndarray, np.ndarray, Growth]) -> None:
    logprobs, tokens, growth = drawn
    out = torch.full((len(logprobs), SIZES.record + 3), -7, device=DEVICE)
    sizes = Sizes(SIZES.width, logprobs.shape[1])
    tree_kernel.grow_into(
        out,
        torch.from_numpy(logprobs).to(DEVICE),
        torch.from_numpy(tokens).to(DEVICE),
        *(torch.tensor(values, device=DEVICE) for values in (growth.roots, growth.depths, growth.ranks, growth.nodes)),
        torch.tensor([growth.off_spine, growth.floor], dtype=torch.float64, device=DEVICE).view(torch.int64),
        sizes,
    )
    got = Forest.of(out[:, : sizes.record].numpy(force=True).copy(), sizes)
    # A chain is the best-first tree of one rank as long as its nodes last.
    expected = [
        best_first(root, lp[:deep, :ranks].tolist(), ids[:deep, :ranks].tolist(), nodes,
                   off_spine=growth.off_spine, floor=growth.floor if ranks > 1 else -np.inf)
        if deep and nodes else root_only(root)
        for root, deep, ranks, nodes, lp, ids in zip(
            growth.roots, growth.depths, growth.ranks, growth.nodes, logprobs, tokens, strict=True)
    ]  # fmt: skip
    assert [got.tree(i) for i in range(len(got))] == expected
    for i, tree in enumerate(expected):
        assert np.array_equal(got.bits[i, : tree.rows], ancestor_bits(tree.visible()))
    assert (out[:, sizes.record :] == -7).all()


def test_largest_trees_of_a_full_batch_are_the_heaps() -> None:
    """64 nodes for each of 32 requests, as the engine has them."""
    random, sizes = np.random.default_rng(2), Sizes(65, 15)
    logprobs = -np.sort(random.exponential(1.5, (32, 15, 8)), axis=2).astype(np.float32)
    tokens = random.integers(0, 50000, (32, 15, 8))
    every = torch.ones(32, dtype=torch.int64, device=DEVICE)
    out = torch.zeros(32, sizes.record, dtype=torch.int64, device=DEVICE)
    bounds = torch.tensor([-0.3, -np.inf], dtype=torch.float64, device=DEVICE).view(torch.int64)
    candidates_ = (torch.from_numpy(x).to(DEVICE) for x in (logprobs, tokens))
    tree_kernel.grow_into(out, *candidates_, every * 7, every * 15, every * 8, every * 64, bounds, sizes)
    forest = Forest.of(out.numpy(force=True), sizes)
    for i in range(32):
        assert forest.tree(i) == best_first(7, logprobs[i].tolist(), tokens[i].tolist(), 64, off_spine=-0.3)
