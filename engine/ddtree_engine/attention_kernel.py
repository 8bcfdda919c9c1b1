"""Attention of rows over slabs as Triton kernels.

Split-KV ("flash decoding"): each program handles one tile of rows of one request, one key head and one part of
the slab; a second kernel joins the parts. `tiles.py` says what a row sees and defines the result.

Needs triton, and CUDA to run: imported only where the device is CUDA.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ddtree_engine.overlap import announce, overlapping, wait
from ddtree_engine.tiles import AttentionShape, RowSight, Tiles, rows_per_tile

BLOCK_N = 64  # slots read at once
SMALL_M = 16  # rows x query heads of a group up to which a tile is computed as a small one
MAX_SPLITS = 16


def splits_for(tiles: int, kv_heads: int, fill: int) -> int:
    """A power of two that gives `fill` programs, at most MAX_SPLITS."""
    splits = 1
    while splits < MAX_SPLITS and tiles * kv_heads * splits < fill:
        splits *= 2
    return splits


@triton.jit
def _read_slots(
    acc,
    best,
    total,
    q,
    visible,
    bits,
    k_ptr,
    v_ptr,
    base,
    kv_slot,
    low,
    high,
    scale,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    N: tl.constexpr,
    MASKED: tl.constexpr,  # False: every row sees all of low .. high - 1, and N divides their number
    EXACT: tl.constexpr,
):
    """Online softmax over slots low .. high - 1."""
    d = tl.arange(0, DIM_PAD)
    for start in range(low, high, N):
        at = start + tl.arange(0, N)
        inside = at < high
        place = (base + at) * kv_slot
        k = tl.load(k_ptr + place[None, :] + d[:, None], mask=inside[None, :] & (d[:, None] < DIM), other=0.0)
        if EXACT:
            scores = tl.dot(q, k, input_precision="ieee") * scale
        else:
            scores = tl.dot(q, k) * scale
        if MASKED:
            beyond = at[None, :] - visible[:, None]
            bit = (bits[:, None] >> tl.minimum(tl.maximum(beyond, 0), 63)) & 1
            sees = ((beyond < 0) | ((beyond < 64) & (bit == 1))) & inside[None, :]
            scores = tl.where(sees, scores, -1e30)
        new_best = tl.maximum(best, tl.max(scores, 1))
        weights = tl.exp2(scores - new_best[:, None])
        if MASKED:
            weights = tl.where(sees, weights, 0.0)
        fade = tl.exp2(best - new_best)
        v = tl.load(v_ptr + place[:, None] + d[None, :], mask=inside[:, None] & (d[None, :] < DIM), other=0.0)
        if EXACT:
            acc = acc * fade[:, None] + tl.dot(weights, v, input_precision="ieee")
        else:
            acc = acc * fade[:, None] + tl.dot(weights.to(v.dtype), v)
        total = total * fade + tl.sum(weights, 1)
        best = new_best
    return acc, best, total


@triton.jit
def _attend_tile(
    q_ptr,
    k_ptr,
    v_ptr,
    base_ptr,
    visible_ptr,
    bits_ptr,
    part_ptr,
    stat_ptr,
    first,
    count,
    seen,
    kv,
    split,
    splits,
    scale,
    q_row,
    q_head,
    kv_slot,
    kv_head,
    heads,
    GROUPS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    SPLITS: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    EXACT: tl.constexpr,
):
    m = tl.arange(0, M)
    d = tl.arange(0, DIM_PAD)
    in_row = m // GROUPS
    valid = in_row < count
    row = first + tl.where(valid, in_row, 0)
    head = kv * GROUPS + m % GROUPS
    q = tl.load(
        q_ptr + row[:, None] * q_row + head[:, None] * q_head + d[None, :],
        mask=valid[:, None] & (d[None, :] < DIM),
        other=0.0,
    )
    visible = tl.load(visible_ptr + row)
    bits = tl.load(bits_ptr + row)
    base = tl.load(base_ptr + first)
    part = tl.cdiv(tl.cdiv(seen, N), splits) * N
    low = split * part
    high = tl.minimum(low + part, seen)
    # Most slots lie before what any row of the tile sees last, and need no mask.
    plain = tl.maximum(low, tl.minimum(tl.min(visible, 0), high) // N * N)
    best = tl.full([M], -1e30, tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, DIM_PAD], tl.float32)
    k_ptr += kv * kv_head
    v_ptr += kv * kv_head
    acc, best, total = _read_slots(
        acc, best, total, q, visible, bits, k_ptr, v_ptr, base, kv_slot, low, plain, scale, DIM, DIM_PAD, N, False, EXACT
    )
    acc, best, total = _read_slots(
        acc, best, total, q, visible, bits, k_ptr, v_ptr, base, kv_slot, plain, high, scale, DIM, DIM_PAD, N, True, EXACT
    )
    out = (row * heads + head) * SPLITS + split
    tl.store(part_ptr + out[:, None] * DIM + d[None, :], acc, mask=valid[:, None] & (d[None, :] < DIM))
    tl.store(stat_ptr + out * 2, best, mask=valid)
    tl.store(stat_ptr + out * 2 + 1, total, mask=valid)


@triton.jit
def _parts(live_ptr, kv_heads, FILL: tl.constexpr, SPLITS: tl.constexpr):
    """Into how many parts each tile of this pass is cut: few tiles must fill the device too."""
    programs = tl.maximum(tl.load(live_ptr) * kv_heads, 1)
    return tl.maximum(tl.minimum(FILL // programs, SPLITS), 1)


@triton.jit
def _attend_part(
    q_ptr,
    k_ptr,
    v_ptr,
    base_ptr,
    visible_ptr,
    bits_ptr,
    tile_first_ptr,
    tile_rows_ptr,
    tile_seen_ptr,
    live_ptr,
    part_ptr,  # float32 [rows, heads, splits, dim]: not yet normalised
    stat_ptr,  # float32 [rows, heads, splits, 2]: maximum (base 2) and sum
    scale,  # 1 / sqrt(dim) * log2(e)
    q_row,
    q_head,
    kv_slot,
    kv_head,
    heads,
    FILL: tl.constexpr,
    GROUPS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    SPLITS: tl.constexpr,
    M: tl.constexpr,
    SMALL: tl.constexpr,
    N: tl.constexpr,
    EXACT: tl.constexpr,
    PDL: tl.constexpr,
):
    announce(PDL)
    wait(PDL)
    tile, kv, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    count = tl.load(tile_rows_ptr + tile)
    splits = _parts(live_ptr, tl.num_programs(1), FILL, SPLITS)
    if (count > 0) & (split < splits):
        first, seen = tl.load(tile_first_ptr + tile), tl.load(tile_seen_ptr + tile)
        if count * GROUPS <= SMALL:  # a plain step must not pay for the rows of a tree
            _attend_tile(
                q_ptr, k_ptr, v_ptr, base_ptr, visible_ptr, bits_ptr, part_ptr, stat_ptr, first, count, seen, kv, split,
                splits, scale, q_row, q_head, kv_slot, kv_head, heads, GROUPS, DIM, DIM_PAD, SPLITS, SMALL, N, EXACT,
            )  # fmt: skip
        else:
            _attend_tile(
                q_ptr, k_ptr, v_ptr, base_ptr, visible_ptr, bits_ptr, part_ptr, stat_ptr, first, count, seen, kv, split,
                splits, scale, q_row, q_head, kv_slot, kv_head, heads, GROUPS, DIM, DIM_PAD, SPLITS, M, N, EXACT,
            )  # fmt: skip


@triton.jit
def _join_parts(
    part_ptr,
    stat_ptr,
    out_ptr,
    live_ptr,
    kv_heads,
    FILL: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):
    announce(PDL)
    wait(PDL)
    at = tl.program_id(0).to(tl.int64)  # row * heads + head
    d = tl.arange(0, DIM_PAD)
    s = tl.arange(0, SPLITS)
    there = s < _parts(live_ptr, kv_heads, FILL, SPLITS)
    best = tl.load(stat_ptr + (at * SPLITS + s) * 2, mask=there, other=-1e30)
    total = tl.load(stat_ptr + (at * SPLITS + s) * 2 + 1, mask=there, other=0.0)
    weight = tl.exp2(best - tl.max(best, 0))
    parts = tl.load(
        part_ptr + (at * SPLITS + s[:, None]) * DIM + d[None, :], mask=there[:, None] & (d[None, :] < DIM), other=0.0
    )
    out = tl.sum(parts * weight[:, None], 0) / tl.sum(total * weight, 0)
    tl.store(out_ptr + at * DIM + d, out.to(out_ptr.dtype.element_ty), mask=d < DIM)


class TileAttention:
    """Attention over rows for one shape of pass; scratch space is allocated once, so that graphs can replay it."""

    def __init__(self, shape: AttentionShape, device: torch.device) -> None:
        self._shape, self._groups = shape, shape.heads // shape.kv_heads
        cuda = device.type == "cuda"
        self._fill = 2 * (torch.cuda.get_device_properties(device).multi_processor_count if cuda else 132)
        # Room for the parts of the fewest tiles that so many rows can be; the kernels take as few as the pass needs.
        fewest = -(-shape.rows // rows_per_tile(self._groups))
        self._splits = splits = splits_for(fewest, shape.kv_heads, self._fill)
        # Rows that belong to no tile are never written: zeros and a total of one keep them finite.
        self._parts = torch.zeros(shape.rows, shape.heads, splits, shape.dim, dtype=torch.float32, device=device)
        self._stats = torch.ones(shape.rows, shape.heads, splits, 2, dtype=torch.float32, device=device)

    def __call__(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, sight: RowSight, tiles: Tiles
    ) -> torch.Tensor:
        """queries [rows, heads, dim], keys and values [slots, kv heads, dim] -> [rows, heads * dim]."""
        rows, dim = queries.shape[0], self._shape.dim
        pad = triton.next_power_of_2(dim)
        out = torch.empty(rows, self._shape.heads * dim, dtype=queries.dtype, device=queries.device)
        overlap = overlapping(queries.device, rows)
        _attend_part[(self._shape.tiles, self._shape.kv_heads, self._splits)](
            queries,
            keys,
            values,
            sight.base,
            sight.visible,
            sight.bits,
            tiles.first,
            tiles.rows,
            tiles.seen,
            tiles.live,
            self._parts,
            self._stats,
            dim**-0.5 * 1.4426950408889634,
            queries.stride(0),
            queries.stride(1),
            keys.stride(0),
            keys.stride(1),
            self._shape.heads,
            FILL=self._fill,
            GROUPS=self._groups,
            DIM=dim,
            DIM_PAD=pad,
            SPLITS=self._splits,
            M=max(16, triton.next_power_of_2(rows_per_tile(self._groups) * self._groups)),
            SMALL=SMALL_M,
            N=BLOCK_N,
            EXACT=queries.dtype == torch.float32,
            **overlap,
        )
        _join_parts[(rows * self._shape.heads,)](
            self._parts,
            self._stats,
            out,
            tiles.live,
            self._shape.kv_heads,
            FILL=self._fill,
            DIM=dim,
            DIM_PAD=pad,
            SPLITS=self._splits,
            num_warps=1 if self._splits < 4 else 4,
            **overlap,
        )
        return out
