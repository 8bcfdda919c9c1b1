"""From row batches to the tables of the attention kernel: what each row sees, and which rows form a tile.

What a row sees is a count and a mask: slots base .. base + visible - 1 of its slab, and slot base + visible + j for every
set bit j of its 64-bit ancestor mask (the root is part of `visible`). Prefill rows, plain steps, drafted blocks and trees
up to 64 nodes are all of this form. `ReferenceAttention` is its definition in plain PyTorch; the kernel: `attention_kernel.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

from ddtree_engine.forest import MASK_NODES, Forest
from ddtree_engine.rows import Segment, Sight
from ddtree_engine.tree import ancestor_bits

MAX_NODES = MASK_NODES
BLOCK_M = 64  # rows x query heads of a group in one tile


@dataclass(frozen=True, slots=True)
class RowSight:
    """Per row, int64 [rows] each: first slot of the slab, slots seen from it, ancestor bits beyond them."""

    base: torch.Tensor
    visible: torch.Tensor
    bits: torch.Tensor


@dataclass(frozen=True, slots=True)
class Tiles:
    """Consecutive rows of one request, int64 [tiles] each. A tile of no rows is skipped, so tables may be padded."""

    first: torch.Tensor
    rows: torch.Tensor
    seen: torch.Tensor  # slots of the slab that any row of the tile may see
    live: torch.Tensor = field(init=False)  # int64 []: tiles that have rows

    def __post_init__(self) -> None:
        object.__setattr__(self, "live", (self.rows > 0).sum())


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The sizes of a pass that an attention is set up for."""

    rows: int
    tiles: int
    heads: int
    kv_heads: int
    dim: int


class TiledAttention(Protocol):
    def __call__(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, sight: RowSight, tiles: Tiles
    ) -> torch.Tensor:
        """queries [rows, heads, dim], keys and values [slots, kv heads, dim] -> [rows, heads * dim]."""
        ...


class ReferenceAttention:
    """The definition, in float32: dense over the longest sight. Rows that see nothing give zeros; `tiles` are not used."""

    def __init__(self, shape: AttentionShape, device: torch.device) -> None:
        self._groups = shape.heads // shape.kv_heads

    def __call__(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, sight: RowSight, tiles: Tiles
    ) -> torch.Tensor:
        at = torch.arange(int(sight.visible.max()) + MAX_NODES, device=queries.device)
        beyond = at - sight.visible[:, None]
        bit = (sight.bits[:, None] >> beyond.clamp(0, MAX_NODES - 1)) & 1
        sees = (beyond < 0) | ((beyond < MAX_NODES) & (bit == 1))
        slots = (sight.base[:, None] + at).clamp(max=keys.shape[0] - 1)
        k = keys[slots].float().repeat_interleave(self._groups, 2)  # [rows, seen, heads, dim]
        v = values[slots].float().repeat_interleave(self._groups, 2)
        scores = torch.einsum("rhd,rshd->rhs", queries.float(), k) * queries.shape[-1] ** -0.5
        weights = scores.masked_fill(~sees[:, None], -torch.inf).softmax(-1).nan_to_num()
        return torch.einsum("rhs,rshd->rhd", weights, v).flatten(1).to(queries.dtype)


def rows_per_tile(groups: int) -> int:
    """`groups`: query heads per key head."""
    return max(1, BLOCK_M // groups)


def sight_table(segments: Sequence[Segment]) -> np.ndarray:
    """int64 [3, rows]: first slot of the slab, slots seen from it on, ancestor bits beyond them."""
    parts = []
    for s in segments:
        base, bits = np.full(s.rows, s.base), np.zeros(s.rows, dtype=np.int64)
        if s.sight is Sight.TREE and s.visible is not None:
            visible, bits = np.full(s.rows, s.past + 1), ancestor_bits(s.visible)  # the root is seen by all
        elif s.sight is Sight.FULL:
            visible = np.full(s.rows, s.seen)
        else:
            visible = s.past + 1 + np.arange(s.rows)
        parts.append(np.stack([base, visible, bits]).astype(np.int64))
    return np.concatenate(parts, axis=1)


def tile_table(segments: Sequence[Segment], rows_per_tile: int) -> np.ndarray:
    """int64 [3, tiles]: first row, number of rows, slots that any row of it may see."""
    table, first = [], 0
    for s in segments:
        for start in range(0, s.rows, rows_per_tile):
            end = min(start + rows_per_tile, s.rows)
            seen = s.past + end if s.sight is Sight.CAUSAL else s.seen  # later rows are not read for earlier ones
            table.append((first + start, end - start, seen))
        first += s.rows
    return np.array(table, dtype=np.int64).T


def forest_tiles(forest: Forest, past: np.ndarray, rows_per_tile: int) -> np.ndarray:
    """`tile_table` of a batch of trees."""
    rows = forest.rows
    if rows.max(initial=0) <= rows_per_tile:
        return np.stack([np.cumsum(rows) - rows, rows, past + rows])
    parts = -(-rows // rows_per_tile)
    start = (np.arange(parts.sum()) - np.repeat(np.cumsum(parts) - parts, parts)) * rows_per_tile
    first = np.repeat(np.cumsum(rows) - rows, parts) + start
    return np.stack([first, np.minimum(np.repeat(rows, parts) - start, rows_per_tile), np.repeat(past + rows, parts)])


def tiles_at_most(rows: int, requests: int, rows_per_tile: int) -> int:
    """The most tiles that so many rows of so many requests can need."""
    return rows // rows_per_tile + min(rows, requests)


def fits(segments: Sequence[Segment]) -> bool:
    """Whether every tree fits a row's mask."""
    return all(s.sight is not Sight.TREE or s.rows <= MAX_NODES + 1 for s in segments)
