"""Attention of rows over slabs with PyTorch's SDPA: the CPU path, and the reference of the Triton kernel.

An `Attend` is planned once per pass (masks and index tensors) and called in every layer. Query heads that share a key head are
laid out as extra rows, so that one call serves a whole group without repeating keys.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812

from ddtree_engine.rows import RowBatch, Segment

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(queries [rows, heads, dim], keys [slots, kv heads, dim], values likewise) -> [rows, heads * dim]."""


def plan_sdpa(batch: RowBatch, slab_slots: int, groups: int, dtype: torch.dtype) -> Attend:
    """`groups`: query heads per key head. Many similar segments go as one padded call, others one by one."""
    device = batch.token_ids.device
    if len(batch.segments) > 2 and _worth_padding(batch.segments, slab_slots):
        return _Padded(batch, slab_slots, groups, dtype, device)
    return _OneByOne(batch, groups, dtype, device)


def _mask(segment: Segment, groups: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor | None:
    """Additive [groups * rows, seen]: 0 where a row sees a slot, else -inf. None when everything is seen."""
    if not segment.masked:
        return None
    hidden = np.zeros((segment.rows, segment.seen), dtype=bool)
    np.logical_not(segment.sees(), out=hidden[:, segment.past :])
    return _additive(np.tile(hidden, (groups, 1)), dtype, device)


def _additive(hidden: np.ndarray, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """-inf where something is hidden, else 0."""
    return torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(torch.from_numpy(hidden).to(device), -torch.inf)


@dataclass(frozen=True, slots=True)
class _Lanes:
    """Slots of consecutive slabs of a pool [slots, kv heads, dim] as [slabs, kv heads, seen, dim], in one view.

    Planned for one pool: every layer's has the same strides.
    """

    size: tuple[int, ...]
    strides: tuple[int, ...]
    start: int

    @classmethod
    def of(cls, pool: torch.Tensor, base: int, seen: int, slabs: int = 1, slab_slots: int = 0) -> _Lanes:
        _, kv_heads, dim = pool.shape
        slot, head, one = pool.stride()
        return cls((slabs, kv_heads, seen, dim), (slab_slots * slot, head, slot, one), base * slot)

    def __call__(self, pool: torch.Tensor) -> torch.Tensor:
        return pool.as_strided(self.size, self.strides, pool.storage_offset() + self.start)


class _OneByOne:
    def __init__(self, batch: RowBatch, groups: int, dtype: torch.dtype, device: torch.device) -> None:
        self._segments = batch.segments
        self._ranges = tuple(pairwise(batch.offsets))
        self._masks = [_mask(s, groups, dtype, device) for s in batch.segments]
        self._pad = batch.padded - batch.rows
        self._lanes: list[_Lanes] | None = None

    def __call__(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        if self._lanes is None:
            self._lanes = [_Lanes.of(keys, s.base, s.seen) for s in self._segments]
        if len(self._lanes) == 1 and not self._pad:
            return self._part(queries, self._lanes[0](keys), self._lanes[0](values), self._masks[0])
        outs = [
            self._part(queries[first:end], lane(keys), lane(values), mask)
            for (first, end), lane, mask in zip(self._ranges, self._lanes, self._masks, strict=True)
        ]
        if self._pad:
            outs.append(outs[0].new_zeros(self._pad, outs[0].shape[1]))
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    @staticmethod
    def _part(queries: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        n, heads, dim = queries.shape
        kv_heads = k.shape[1]
        if n == 1:  # nothing to reorder
            out = F.scaled_dot_product_attention(queries.view(1, kv_heads, -1, dim), k, v)
            return out.reshape(1, heads * dim)
        q = queries.view(n, kv_heads, -1, dim).permute(1, 2, 0, 3).reshape(1, kv_heads, -1, dim)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return out.view(kv_heads, -1, n, dim).permute(2, 0, 1, 3).reshape(n, heads * dim)


def _worth_padding(segments: Sequence[Segment], slab_slots: int) -> bool:
    """Whether one call over the range of slabs does less than twice the work of the calls it replaces."""
    lows = [s.base // slab_slots for s in segments]
    if len(set(lows)) != len(lows):
        return False
    rows, seen = [s.rows for s in segments], [s.seen for s in segments]
    padded = (max(lows) - min(lows) + 1) * max(rows) * max(seen)
    # A call costs about as much as 4096 row x slot products before it does any work.
    return padded < sum(r * n for r, n in zip(rows, seen, strict=True)) + 4096 * len(segments)


class _Padded:
    """Every slab between the first and the last used one as one batch; rows and slots padded to the longest."""

    def __init__(self, batch: RowBatch, slab_slots: int, groups: int, dtype: torch.dtype, device: torch.device) -> None:
        slabs = [s.base // slab_slots for s in batch.segments]
        self._first, self._span = min(slabs), max(slabs) - min(slabs) + 1
        self._rows = max(s.rows for s in batch.segments)
        self._seen = max(s.seen for s in batch.segments)
        self._slab_slots = slab_slots
        # Rows and slabs that pad the batch see everything: their (unused) softmax stays finite.
        hidden = np.zeros((self._span, self._rows, self._seen), dtype=bool)
        places: list[int] = []
        for slab, segment in zip(slabs, batch.segments, strict=True):
            rows, first = segment.rows, (slab - self._first) * self._rows
            lane = hidden[slab - self._first, :rows]
            lane[:, segment.seen :] = True
            if segment.masked:
                np.logical_not(segment.sees(), out=lane[:, segment.past : segment.seen])
            places.extend(range(first, first + rows))
        self._mask = _additive(np.tile(hidden, (1, groups, 1))[:, None], dtype, device)
        self._lanes: _Lanes | None = None
        self._moves = places != list(range(self._span * self._rows)) or batch.padded != batch.rows
        if self._moves:
            self._places = torch.tensor(places, device=device)
            self._reads = torch.tensor(places + [0] * (batch.padded - batch.rows), device=device)

    def __call__(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        _rows, heads, dim = queries.shape
        kv_heads, span, n = keys.shape[1], self._span, self._rows
        q = queries
        if self._moves:
            q = queries.new_zeros(span * n, heads, dim).index_copy_(0, self._places, queries[: len(self._places)])
        q = q.view(span, n, kv_heads, -1, dim).permute(0, 2, 3, 1, 4).reshape(span, kv_heads, -1, dim)
        if self._lanes is None:
            self._lanes = _Lanes.of(keys, self._first * self._slab_slots, self._seen, span, self._slab_slots)
        k, v = self._lanes(keys), self._lanes(values)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=self._mask)
        out = out.view(span, kv_heads, -1, n, dim).permute(0, 3, 1, 2, 4).reshape(span * n, heads * dim)
        return out.index_select(0, self._reads) if self._moves else out
