"""Triton kernels against plain PyTorch. On a machine without CUDA: TRITON_INTERPRET=1 runs them in triton's interpreter."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from ddtree_engine.model import Norm, rotate
from ddtree_engine.tree import ancestor_bits, best_first, chain

pytestmark = pytest.mark.gpu
pytest.importorskip("triton", reason="no triton in this environment")

from ddtree_engine import attention_kernel, step_kernels, tiles  # noqa: E402 (triton may be missing)

INTERPRETED = bool(os.environ.get("TRITON_INTERPRET"))
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
SLAB = 300
SHAPES = [(4, 2, 64), (8, 2, 128), (5, 1, 64), (4, 4, 32), (6, 2, 80)]


def sights(seed: int) -> tuple[list[tuple[int, int, int]], list[tuple[int, int, int]]]:
    """(base, visible, bits) per row and (first, rows, seen) per segment: a tree, a prefill chunk, a step, a block."""
    random = np.random.default_rng(seed)
    logprobs = -np.sort(random.uniform(0.1, 3, (7, 4)), axis=1)
    trees = [best_first(0, logprobs.tolist(), [[0, 1, 2, 3]] * 7, budget) for budget in (1, 16, int(random.integers(2, 65)))]
    trees.append(chain(0, [0] * 64))
    rows, segments = [], []

    def segment(slab: int, seen: int, sight: list[tuple[int, int]]) -> None:
        segments.append((len(rows), len(sight), seen))
        rows.extend((slab * SLAB, visible, bits) for visible, bits in sight)

    for slab, tree in enumerate(trees):
        past = int(random.integers(0, SLAB - 65))
        bits = ancestor_bits(tree.visible())
        segment(slab, past + tree.rows, [(past + 1, int(b)) for b in bits])
    segment(4, 50 + 37, [(50 + i + 1, 0) for i in range(37)])  # a prefill chunk
    segment(5, 200, [(200, 0)])  # a plain step
    segment(6, 33 + 16, [(33 + 16, 0)] * 16)  # a drafted block
    return rows, segments


def table_of(segments: list[tuple[int, int, int]], size: int, capacity: int) -> tiles.Tiles:
    table = [(first + i, min(size, count - i), seen) for first, count, seen in segments for i in range(0, count, size)]
    table += [(0, 0, 0)] * (capacity - len(table))
    first, rows, seen = torch.tensor(table, device=DEVICE).T.contiguous()
    return tiles.Tiles(first, rows, seen)


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_equals_its_reference(heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> None:
    if INTERPRETED and dtype is torch.bfloat16:
        pytest.skip("triton's interpreter has no bfloat16 products")
    torch.manual_seed(heads * dim)
    rows, segments = sights(heads + dim)
    base, visible, bits = torch.tensor(rows, device=DEVICE).T.contiguous()
    sight = tiles.RowSight(base, visible, bits)
    queries = torch.randn(len(rows), heads, dim, dtype=dtype, device=DEVICE)
    keys, values = torch.randn(2, 7 * SLAB + 1, kv_heads, dim, dtype=dtype, device=DEVICE)
    table = table_of(segments, tiles.rows_per_tile(heads // kv_heads), capacity=64)
    shape = tiles.AttentionShape(len(rows), 64, heads, kv_heads, dim)
    attend = attention_kernel.TileAttention(shape, DEVICE)
    got = attend(queries, keys, values, sight, table)
    expected = tiles.ReferenceAttention(shape, DEVICE)(queries, keys, values, sight, table)
    tolerance = 2e-5 if dtype is torch.float32 else 2e-2
    assert torch.allclose(got.float(), expected.float(), atol=tolerance, rtol=tolerance)


def test_rows_without_a_tile_stay_finite() -> None:
    attend = attention_kernel.TileAttention(tiles.AttentionShape(8, 2, 4, 2, 64), DEVICE)
    keys, values = torch.randn(2, 40, 2, 64, device=DEVICE)
    zeros = torch.zeros(8, dtype=torch.int64, device=DEVICE)
    sight = tiles.RowSight(zeros, zeros, zeros)
    none = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    got = attend(torch.randn(8, 4, 64, device=DEVICE), keys, values, sight, tiles.Tiles(none, none, none))
    assert torch.isfinite(got).all()


@pytest.mark.parametrize("count", [1, 4, 64, 4096])
def test_number_of_parts_does_not_change_the_result(count: int) -> None:
    """Fewer rows are split into more parts; here a part may have no slot at all."""
    torch.manual_seed(1)
    shape = tiles.AttentionShape(32 * count, count, 4, 2, 64)
    keys, values = torch.randn(2, SLAB, 2, 64, device=DEVICE)
    one = torch.ones(1, dtype=torch.int64, device=DEVICE)
    sight = tiles.RowSight(one * 0, one * 7, one * 0)
    table = table_of([(0, 1, 7)], 32, capacity=count)
    queries = torch.randn(1, 4, 64, device=DEVICE)
    expected = tiles.ReferenceAttention(shape, DEVICE)(queries, keys, values, sight, table)
    got = attention_kernel.TileAttention(shape, DEVICE)(queries, keys, values, sight, table)
    assert torch.allclose(got, expected, atol=2e-5)


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_rope_store_equals_norm_then_rotate(heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    rows, slots_in_pool = 9, 50
    qkv = torch.randn(rows, (heads + 2 * kv_heads) * dim, dtype=dtype, device=DEVICE) * 3
    weight = torch.rand(heads + kv_heads, dim, device=DEVICE) + 0.5
    angles = torch.rand(40, dim // 2, device=DEVICE) * 6
    turns = torch.polar(torch.ones_like(angles), angles)
    positions = torch.randint(40, (rows,), device=DEVICE)
    slots = torch.randperm(slots_in_pool, device=DEVICE)[:rows]
    keys, values = torch.zeros(2, slots_in_pool, kv_heads, dim, dtype=dtype, device=DEVICE)
    q = step_kernels.norm_rope_store(qkv, weight, 1e-6, turns, positions, slots, keys, values, heads)
    split = qkv.view(rows, -1, dim)
    expected = rotate(Norm(weight, 1e-6).exact(split[:, : heads + kv_heads]), turns[positions][:, None]).to(dtype)
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    assert torch.allclose(q.float(), expected[:, :heads].float(), atol=tolerance, rtol=tolerance)
    assert torch.allclose(keys[slots].float(), expected[:, heads:].float(), atol=tolerance, rtol=tolerance)
    assert torch.equal(values[slots], split[:, heads + kv_heads :])
    untouched = torch.ones(slots_in_pool, dtype=torch.bool, device=DEVICE)
    untouched[slots] = False
    assert not keys[untouched].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [32, 320, 4096])
def test_rms_norm_equals_the_exact_norm(dtype: torch.dtype, dim: int) -> None:
    torch.manual_seed(5)
    x, weight = torch.randn(5, dim, dtype=dtype, device=DEVICE) * 4, torch.rand(dim, device=DEVICE) + 0.5
    expected = Norm(weight, 1e-6).exact(x)
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    assert torch.allclose(step_kernels.rms_norm(x, weight, 1e-6).float(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ff", [96, 768, 12288])
def test_swiglu_equals_silu_times_up(dtype: torch.dtype, ff: int) -> None:
    torch.manual_seed(4)
    gate_up = torch.randn(5, 2 * ff, dtype=dtype, device=DEVICE)
    gate, up = gate_up.float().chunk(2, -1)
    expected = torch.nn.functional.silu(gate) * up
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    assert torch.allclose(step_kernels.swiglu(gate_up).float(), expected, atol=tolerance, rtol=tolerance)
