"""The key-value cache: one contiguous slab of slots per running request, and which prefix each slab still holds.

`Slabs` is pure bookkeeping (who has which slab, what can be reused); `Cache` owns the tensors. A slab has
context_length + window slots, where the window takes the rows of one verify pass (budget + 1) or of one drafted block.
The last slot of the pool is the trash slot, where padding rows write. Memory is allocated once and bounded by
slots x bytes per slot; see `bytes_per_slot`.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ddtree_engine.checkpoint import DrafterConfig, StackConfig


@dataclass(frozen=True, slots=True)
class Resident:
    """What a slab holds from its start."""

    token_ids: np.ndarray  # int64; tokens with target keys and values
    features: int  # leading tokens that also have drafter features
    drafted: int  # leading tokens that also have drafter keys and values


@dataclass(frozen=True, slots=True)
class Lease:
    """A slab given to a request, and the prefix to copy into it first."""

    slab: int
    source: int  # the slab that holds the prefix; may be `slab` itself (nothing to copy)
    reused: int
    features: int
    drafted: int


NOTHING = Resident(np.empty(0, dtype=np.int64), 0, 0)


class Slabs:
    """Least recently used slabs are given out first; busy ones lend their prefix too."""

    def __init__(self, count: int, *, reuse: bool) -> None:
        self._resident = [NOTHING] * count
        self._busy = [False] * count
        self._used = list(range(count))  # larger: more recently
        self._clock = count
        self._reuse = reuse

    @property
    def free(self) -> int:
        return self._busy.count(False)

    def resident_tokens(self, slab: int) -> int:
        return len(self._resident[slab].token_ids)

    def acquire(self, prompt: Sequence[int], limit: int, *, features: bool) -> Lease:
        """Take a free slab for `prompt`, reusing at most `limit` leading tokens.

        `features`: the request drafts, so only a prefix that has the drafter's features helps.
        """
        source, reused = self._longest(np.asarray(prompt, dtype=np.int64), limit, features=features)
        free = [i for i, busy in enumerate(self._busy) if not busy]
        slab = min(free, key=lambda i: (len(self._resident[i].token_ids) > 0, self._used[i]))
        if reused and slab != source and not self._busy[source] and self._held(source) - reused < self._held(slab):
            slab = source  # taking the source itself forgets less than evicting another
        held = self._resident[source] if reused else NOTHING
        self._busy[slab] = True
        self._resident[slab] = NOTHING
        if not reused:
            source = slab
        return Lease(slab, source, reused, min(held.features, reused), min(held.drafted, reused))

    def hold(self, slab: int, resident: Resident) -> None:
        """Say what a busy slab holds by now, so that others can copy it."""
        self._resident[slab] = resident if self._reuse else NOTHING

    def release(self, slab: int) -> None:
        self._busy[slab] = False
        self._clock += 1
        self._used[slab] = self._clock

    def forget(self) -> None:
        self._resident = [NOTHING] * len(self._resident)

    def _held(self, slab: int) -> int:
        return len(self._resident[slab].token_ids)

    def _longest(self, prompt: np.ndarray, limit: int, *, features: bool) -> tuple[int, int]:
        best, best_slab = 0, 0
        for slab, held in enumerate(self._resident):
            n = min(len(prompt), len(held.token_ids), limit)
            if features:
                n = min(n, held.features)
            if n <= best:
                continue
            differ = np.flatnonzero(prompt[:n] != held.token_ids[:n])
            common = int(differ[0]) if differ.size else n
            if common > best:
                best, best_slab = common, slab
        return best_slab, best


@dataclass(frozen=True, slots=True)
class CacheShape:
    slabs: int
    slab_slots: int

    @property
    def slots(self) -> int:
        return self.slabs * self.slab_slots + 1  # the trash slot

    def base(self, slab: int) -> int:
        return slab * self.slab_slots


def bytes_per_slot(target: StackConfig, drafter: DrafterConfig | None, dtype: torch.dtype) -> int:
    """Keys and values of every target layer; with a drafter also its own and one feature vector."""
    numbers = 2 * target.layers * target.kv_heads * target.head_dim
    if drafter:
        s = drafter.stack
        numbers += 2 * s.layers * s.kv_heads * s.head_dim + s.hidden
    return numbers * dtype.itemsize


def _zeros(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros, since a masked slot must hold finite numbers (0 x NaN is NaN).

    On CPU straight from the system in small pages, so that slots which are never used take no memory (torch would
    write every one, and a huge page takes hundreds of slots for the first).
    """
    if device.type != "cpu":
        return torch.zeros(size, dtype=dtype, device=device)
    count = int(np.prod(size, dtype=np.int64))
    pages = mmap.mmap(-1, count * dtype.itemsize)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages has nothing to be told
            pages.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype, count=count).view(size)


class LayerCache:
    """Keys and values of one stack: two tensors [layers, slots, kv heads, head dim]."""

    def __init__(self, stack: StackConfig, slots: int, dtype: torch.dtype, device: torch.device) -> None:
        size = (stack.layers, slots, stack.kv_heads, stack.head_dim)
        self.keys, self.values = _zeros(size, dtype, device), _zeros(size, dtype, device)
        self.layers = tuple(zip(self.keys.unbind(), self.values.unbind(), strict=True))  # views, made once

    def move(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy slots source -> target (int64 each) in every layer; the gather is complete before the write."""
        for pool in (self.keys, self.values):
            pool.index_copy_(1, target, pool.index_select(1, source))

    def copy_prefix(self, source: int, target: int, count: int) -> None:
        for pool in (self.keys, self.values):
            pool[:, target : target + count] = pool[:, source : source + count]


class Cache:
    """All tensors that outlive a round: target keys and values, and for a drafter its own and the features."""

    def __init__(
        self,
        shape: CacheShape,
        target: StackConfig,
        drafter: DrafterConfig | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.shape = shape
        self.target = LayerCache(target, shape.slots, dtype, device)
        self.drafter: LayerCache | None = None
        self.features: torch.Tensor | None = None  # [slots, hidden]: hidden_norm(fc(tapped target layers))
        if drafter:
            self.drafter = LayerCache(drafter.stack, shape.slots, dtype, device)
            self.features = _zeros((shape.slots, drafter.stack.hidden), dtype, device)

    def copy_prefix(self, lease: Lease) -> None:
        """Bring a leased prefix into its slab."""
        source, target = self.shape.base(lease.source), self.shape.base(lease.slab)
        if source == target:
            return
        self.target.copy_prefix(source, target, lease.reused)
        if self.drafter is not None and self.features is not None:
            self.drafter.copy_prefix(source, target, lease.drafted)
            self.features[target : target + lease.features] = self.features[source : source + lease.features]

    def compact(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Move accepted rows to the front of their window, features included."""
        self.target.move(source, target)
        if self.features is not None:
            self.features.index_copy_(0, target, self.features.index_select(0, source))
