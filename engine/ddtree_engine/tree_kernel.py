"""Grows draft trees on the device: one program a request, the same trees as `tree.best_first`, node by node.

The frontier has one place a popped node: the node's sibling takes its place, its first child a new one. Places are also
numbered in the lexicographic order of their rank paths, which breaks ties as the heap does: a popped node's child and
sibling follow each other where the node stood, so everything behind moves up by one. Sums are float64 and in the heap's
order. Writes the records that `forest.py` describes.

Needs triton; without CUDA its interpreter runs the same kernel.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ddtree_engine.forest import Sizes

_NOBODY = tl.constexpr(1 << 20)  # the order of an empty place


@triton.jit
def _grow(
    logprob_ptr,
    token_ptr,
    root_ptr,
    depth_ptr,
    ranks_ptr,
    nodes_ptr,
    bounds_ptr,
    out_ptr,
    out_row,
    depths,
    k,
    WIDTH: tl.constexpr,
    PLACES: tl.constexpr,
    DEPTHS_PAD: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    logprob_ptr += request * depths * k
    token_ptr += request * depths * k
    out_ptr += request * out_row
    deepest, ranks, nodes = tl.load(depth_ptr + request), tl.load(ranks_ptr + request), tl.load(nodes_ptr + request)
    off_spine = tl.load(bounds_ptr).to(tl.float64, bitcast=True)
    floor = tl.load(bounds_ptr + 1).to(tl.float64, bitcast=True)
    floor = tl.where(ranks == 1, float("-inf"), floor)  # a chain goes all the way
    d = tl.arange(0, DEPTHS_PAD)
    first = tl.load(logprob_ptr + d * k, mask=d < depths, other=0.0).to(tl.float64)
    tl.store(out_ptr + 1 + 6 * WIDTH + d, tl.cumsum(first, 0).to(tl.int64, bitcast=True), mask=d < depths)
    # The root.
    row_ptr = out_ptr + 1
    tl.store(row_ptr, tl.load(root_ptr + request))
    tl.store(row_ptr + WIDTH, 0)
    tl.store(row_ptr + 2 * WIDTH, 0)
    tl.store(row_ptr + 3 * WIDTH, 1)
    tl.store(row_ptr + 4 * WIDTH, 0)
    tl.store(row_ptr + 5 * WIDTH, 0)
    # The frontier: score, score and ancestors of the parent, order, and packed: rank, depth, parent's row, its spine.
    place = tl.arange(0, PLACES)
    score = tl.zeros([PLACES], tl.float64) + tl.load(logprob_ptr).to(tl.float64)
    base = tl.zeros([PLACES], tl.float64)
    seen = tl.zeros([PLACES], tl.int64)
    order = tl.where(place == 0, 0, _NOBODY)
    what = tl.zeros([PLACES], tl.int64) + (1 << 16) + 1  # depth 1, below the root, which is on the spine
    row = 1
    going = (deepest > 0) & (nodes > 0)
    while going:
        live = order < _NOBODY
        best = tl.max(tl.where(live, score, float("-inf")), 0)
        pick = tl.min(tl.where(live & (score == best), order * PLACES + place, _NOBODY * PLACES), 0)
        at = pick % PLACES
        here = place == at
        going = (pick < _NOBODY * PLACES) & (best >= floor)
        if going:
            mine = tl.sum(tl.where(here, what, 0), 0)
            ground = tl.sum(tl.where(here, base, 0.0), 0)
            above = tl.sum(tl.where(here, seen, 0), 0)
            spine_above = mine & 1
            parent = (mine >> 1) & 0x7FFF
            depth = (mine >> 16) & 0xFFFF
            rank = mine >> 32
            spine = spine_above & (rank == 0).to(tl.int64)
            bits = above | (tl.full([], 1, tl.int64) << (row - 1))
            step = (depth - 1) * k + rank
            tl.store(row_ptr + row, tl.load(token_ptr + step).to(tl.int64))
            tl.store(row_ptr + WIDTH + row, parent)
            tl.store(row_ptr + 2 * WIDTH + row, depth)
            tl.store(row_ptr + 3 * WIDTH + row, spine)
            tl.store(row_ptr + 4 * WIDTH + row, bits)
            tl.store(row_ptr + 5 * WIDTH + row, best.to(tl.int64, bitcast=True))
            # Sibling and child.
            behind = order > pick // PLACES
            order = tl.where(behind & live, order + 1, order)
            has_sibling, has_child = rank + 1 < ranks, depth < deepest
            next_rank = tl.load(logprob_ptr + step + 1, mask=has_sibling, other=0.0).to(tl.float64)
            next_first = tl.load(logprob_ptr + depth * k, mask=has_child, other=0.0).to(tl.float64)
            penalty = tl.where(spine_above == 1, 0.0, off_spine)
            sibling = ground + next_rank + penalty
            child = best + next_first + tl.where(spine == 1, 0.0, off_spine)
            score = tl.where(here, sibling, score)
            what = tl.where(here, mine + (tl.full([], 1, tl.int64) << 32), what)
            order = tl.where(here, tl.where(has_sibling, pick // PLACES + 1, _NOBODY), order)
            fresh = (place == row) & has_child
            score = tl.where(fresh, child, score)
            base = tl.where(fresh, best, base)
            seen = tl.where(fresh, bits, seen)
            order = tl.where(fresh, pick // PLACES, order)
            what = tl.where(fresh, ((depth + 1) << 16) + (row << 1) + spine, what)
            row += 1
            going = row <= nodes
    tl.store(out_ptr, row)


def grow_into(
    out: torch.Tensor,
    logprobs: torch.Tensor,
    token_ids: torch.Tensor,
    roots: torch.Tensor,
    depths: torch.Tensor,
    ranks: torch.Tensor,
    nodes: torch.Tensor,
    bounds: torch.Tensor,
    sizes: Sizes,
) -> None:
    """Write records int64 [requests, record] (rows may lie apart) for candidates [requests, depths, k], best first.

    `roots`, `depths`, `ranks`, `nodes`: int64 [requests], as in `Growth`; nodes at most width - 1. `bounds`: off_spine and
    floor as the bits of two float64.
    """
    requests, deep, k = logprobs.shape
    _grow[(requests,)](
        logprobs,
        token_ids,
        roots,
        depths,
        ranks,
        nodes,
        bounds,
        out,
        out.stride(0),
        deep,
        k,
        WIDTH=sizes.width,
        PLACES=triton.next_power_of_2(max(2, sizes.width)),
        DEPTHS_PAD=triton.next_power_of_2(max(2, deep)),
        num_warps=1,
    )
