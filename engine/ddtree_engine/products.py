"""Matrix products of few rows as Triton kernels: a plain step, a chain or a tree of a small model.

A product of few rows is bound by reading its weights, and a small model by launching kernels. So what surrounds a product is
done in the same pass: RMSNorm before it (its weights are applied to the inputs, its factor to the sums), the residual or
SwiGLU after it. One row needs no matrix unit: every program reads whole rows of a few columns at memory speed, where
libraries choose tiles for many rows and leave the memory idle when columns are few. Where neither helps, `takes` says no and
callers use cuBLAS.

Needs triton, and CUDA to run: imported only where the device is CUDA.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl

from ddtree_engine.model import Norm
from ddtree_engine.overlap import announce, overlapping, wait

MOST_ROWS = 48  # of a small matrix: a pass of the bundled model takes 181 us for 210 at 33 rows, 236 for 218 at 65
SMALL = 1 << 20  # weights: launching the kernels takes longer than reading them
LEAST_DEPTH = 32  # a power of two that must divide the depth: whole tiles need no mask
LEAST_LARGE_DEPTH = 256  # the same for a large matrix: reads of less do not keep the memory busy


@dataclass(frozen=True, slots=True)
class Tile:
    """What one program computes at once."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int = 1  # tiles on their way; with one the first weights are read before the kernel waits for its inputs


@cache
def tile_for(rows: int, cols: int, depth: int, *, gated: bool) -> Tile | None:
    """None: leave it to cuBLAS. `cols` of the result: half of the weight's where gated."""
    whole = depth & -depth  # the largest power of two that divides the depth
    small = cols * depth <= SMALL
    if whole < (LEAST_DEPTH if small else LEAST_LARGE_DEPTH) or rows > (MOST_ROWS if small else 1):
        return None
    if small:
        return _small_tile(rows, whole)
    if gated or cols > 1 << 14:  # programs enough to hide each other's waiting
        return Tile(1, 16 if gated else 32, 256, 8)
    return Tile(1, 16, min(whole, 512), 8, stages=4)


def _small_tile(rows: int, whole: int) -> Tile:
    """Tiles as small as keeps programs few enough to run at once: the longest of them is what a pass waits for."""
    if rows == 1:
        return Tile(1, 4, min(whole, 256), 4)
    return Tile(16 if rows <= 16 else 32, 16, min(whole, 256), 4)


def takes(x: torch.Tensor, weight: torch.Tensor | None, *, gated: bool = False) -> bool:
    """Whether `product` is the faster way. x [rows, depth], weight [cols, depth]."""
    if weight is None or x.dtype == torch.float32:
        return False
    cols, depth = weight.shape
    return tile_for(x.shape[0], cols // 2 if gated else cols, depth, gated=gated) is not None


def product(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    norm: Norm | None = None,
    gated: bool = False,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """y = norm(x) @ weight.T [rows, cols], for what `takes` takes; x and residual are contiguous.

    gated: silu(gate) * up [rows, cols / 2] of y = [gate, up]. residual: y is added to it in place.
    Everything but the products' inputs is float32; the result is rounded once.
    """
    rows, depth = x.shape
    cols = weight.shape[0] // 2 if gated else weight.shape[0]
    tile = tile_for(rows, cols, depth, gated=gated)
    assert tile is not None
    out = torch.empty(rows, cols, dtype=x.dtype, device=x.device) if residual is None else residual
    given = (x, weight, x if norm is None else norm.weight, out)
    eps = 0.0 if norm is None else norm.eps
    chosen = {
        "NORM": norm is not None,
        "GATED": gated,
        "ADD": residual is not None,
        "N": tile.columns,
        "K": tile.depth,
        "STAGES": tile.stages,
        "num_warps": tile.warps,
        **overlapping(x.device, rows),
    }
    columns = triton.cdiv(cols, tile.columns)
    if rows == 1:
        _one_row[(columns,)](*given, cols, depth, eps, **chosen)
    else:
        _few_rows[(columns, triton.cdiv(rows, tile.rows))](*given, rows, cols, depth, eps, R=tile.rows, **chosen)
    return out


@triton.jit
def _finish(out_ptr, at, inside, acc, gate, GATED: tl.constexpr, ADD: tl.constexpr):
    if GATED:
        acc = gate / (1.0 + tl.exp(-gate)) * acc
    if ADD:
        acc += tl.load(out_ptr + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _one_row(
    x_ptr,  # [depth]
    weight_ptr,  # [cols, depth], or where gated [2 * cols, depth]: gate, then up
    norm_ptr,  # [depth]
    out_ptr,  # [cols]
    cols,
    depth,
    eps,
    NORM: tl.constexpr,
    GATED: tl.constexpr,
    ADD: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    announce(PDL)
    first = tl.program_id(0) * N
    n, k = tl.arange(0, N), tl.arange(0, K)
    at = tl.minimum(n, cols - 1 - first)[:, None] * depth + k[None, :]  # beyond the last column: the last again
    weight_ptr += first.to(tl.int64) * depth
    up_ptr = weight_ptr + tl.cast(cols, tl.int64) * depth
    acc = tl.zeros([N, K], tl.float32)
    gate = tl.zeros([N, K], tl.float32)
    square = tl.zeros([K], tl.float32)
    wait(PDL and STAGES > 1)
    for start in tl.range(0, depth, K, num_stages=STAGES):
        w = tl.load(weight_ptr + start + at)
        up = w
        if GATED:
            up = tl.load(up_ptr + start + at)
        if NORM:
            weight = tl.load(norm_ptr + start + k).to(tl.float32)
        wait(PDL and STAGES == 1)  # at once, after the first time
        x = tl.load(x_ptr + start + k).to(tl.float32)
        if NORM:
            square += x * x
            x *= weight
        if GATED:
            gate += w.to(tl.float32) * x[None, :]
        acc += up.to(tl.float32) * x[None, :]
    sums, gates = tl.sum(acc, 1), tl.sum(gate, 1)
    if NORM:
        scale = 1.0 / tl.sqrt(tl.sum(square, 0) / depth + eps)
        sums *= scale
        gates *= scale
    _finish(out_ptr, first + n, first + n < cols, sums, gates, GATED, ADD)


@triton.jit(do_not_specialize=["rows"])
def _few_rows(
    x_ptr,  # [rows, depth]
    weight_ptr,
    norm_ptr,
    out_ptr,  # [rows, cols]
    rows,
    cols,
    depth,
    eps,
    NORM: tl.constexpr,
    GATED: tl.constexpr,
    ADD: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
    R: tl.constexpr,
):
    """As `_one_row`, in tiles of R rows: the grid is (tiles of columns, tiles of rows)."""
    announce(PDL)
    first = tl.program_id(0) * N
    n, k = tl.arange(0, N), tl.arange(0, K)
    r = tl.program_id(1) * R + tl.arange(0, R)
    at = tl.minimum(n, cols - 1 - first)[None, :] * depth + k[:, None]
    weight_ptr += first.to(tl.int64) * depth
    up_ptr = weight_ptr + tl.cast(cols, tl.int64) * depth
    x_at = tl.minimum(r, rows - 1)[:, None] * depth + k[None, :]
    acc = tl.zeros([R, N], tl.float32)
    gate = tl.zeros([R, N], tl.float32)
    square = tl.zeros([R], tl.float32)
    wait(PDL and STAGES > 1)
    for start in tl.range(0, depth, K, num_stages=STAGES):
        w = tl.load(weight_ptr + start + at)
        up = w
        if GATED:
            up = tl.load(up_ptr + start + at)
        if NORM:
            weight = tl.load(norm_ptr + start + k).to(tl.float32)
        wait(PDL and STAGES == 1)
        x = tl.load(x_ptr + start + x_at)
        if NORM:
            wide = x.to(tl.float32)
            square += tl.sum(wide * wide, 1)
            x = (wide * weight[None, :]).to(x.dtype)
        if GATED:
            gate = tl.dot(x, w, gate)
        acc = tl.dot(x, up, acc)
    if NORM:
        scale = (1.0 / tl.sqrt(square / depth + eps))[:, None]
        acc *= scale
        gate *= scale
    inside = (r < rows)[:, None] & (first + n < cols)[None, :]
    _finish(out_ptr, r[:, None] * cols + (first + n)[None, :], inside, acc, gate, GATED, ADD)
