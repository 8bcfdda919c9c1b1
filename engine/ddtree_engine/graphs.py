"""The CUDA runner: the passes of `runner.py` with tiled attention, and pure decoding rounds replayed as CUDA graphs.

Two graphs make a round, launched back to back without waiting: `verify` (per bucket of rows: target, logits, greedy choices)
and `settle` (per bucket of requests: walk the trees, compact the cache, extend the drafter's context, draft, grow the next
trees). Then one copy brings paths, tokens and trees to the host. Rounds with prefill chunks run without graphs. Without a
capture the same steps are computed as they are (on CPU, in tests).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from ddtree_engine import tiles
from ddtree_engine.attention import Attend
from ddtree_engine.cache import Cache
from ddtree_engine.drafter import Drafter
from ddtree_engine.forest import MASK_NODES, Forest, Growth, Sizes
from ddtree_engine.model import Target
from ddtree_engine.rows import RowBatch, Segment, batch_rows
from ddtree_engine.runner import EXTEND_ROWS, Decoding, Replay, Runner, Settle
from ddtree_engine.sampling import RowSampling, choose
from ddtree_engine.tiles import AttentionShape, RowSight, TiledAttention, Tiles


@dataclass(frozen=True, slots=True)
class Shape:
    """What graphs are captured for."""

    max_requests: int
    max_nodes: int
    block: int  # 1 without a drafter
    k: int  # candidates a depth

    @property
    def trees(self) -> Sizes:
        return Sizes(self.max_nodes + 1, self.block - 1)

    @property
    def row_buckets(self) -> tuple[int, ...]:
        """Powers of two and whole trees of 1, 2, 4, ... requests: about 14 sizes."""
        limit = self.max_requests * (self.max_nodes + 1)
        sizes, n = {limit}, 1
        while n < limit:
            sizes |= {n, min(limit, n * (self.max_nodes + 1))}
            n *= 2
        return tuple(sorted(sizes))

    @property
    def request_buckets(self) -> tuple[int, ...]:
        sizes, n = {self.max_requests}, 1
        while n < self.max_requests:
            sizes.add(n)
            n *= 2
        return tuple(sorted(sizes))


class Grow(Protocol):
    def __call__(
        self,
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
        """As `tree_kernel.grow_into`, which is what CUDA has."""
        ...


class _Inputs:
    """Named int64 arrays in one pinned buffer, copied to the device at once."""

    def __init__(self, sizes: dict[str, int], device: torch.device) -> None:
        total = sum(sizes.values())
        self._host = torch.zeros(total, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._device = torch.zeros(total, dtype=torch.int64, device=device)
        flat, start = self._host.numpy(), 0
        self.host: dict[str, np.ndarray] = {}
        self.device: dict[str, torch.Tensor] = {}
        for name, size in sizes.items():
            self.host[name] = flat[start : start + size]
            self.device[name] = self._device[start : start + size]
            start += size

    def fill(self, name: str, values: np.ndarray, rest: int) -> None:
        self.host[name][: len(values)] = values
        self.host[name][len(values) :] = rest

    def send(self) -> None:
        self._device.copy_(self._host, non_blocking=True)


class CudaRunner(Runner):
    """Tiled attention up to 64 nodes a tree (SDPA above), graphs where they were captured."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        cache: Cache,
        device: torch.device,
        attention: Callable[[AttentionShape, torch.device], TiledAttention],
        grow_into: Grow,
    ) -> None:
        super().__init__(target, drafter, cache, device)
        if device.type == "cuda":
            # Over cuBLAS's own choices, 33 and 65 rows of an 8B model's shape take 4 and 2 % less, one row the same.
            torch.backends.cuda.preferred_blas_library("cublaslt")
        self.attention = attention
        self.grow_into = grow_into
        self._graphs: Graphs | None = None

    def batch(self, segments: Sequence[Segment]) -> RowBatch:
        return batch_rows(segments, self.device)

    def _attend(self, rows: RowBatch, heads: int, kv_heads: int) -> Attend:
        if not tiles.fits(rows.segments):
            return super()._attend(rows, heads, kv_heads)
        per_tile = tiles.rows_per_tile(heads // kv_heads)
        sight, table = tiles.sight_table(rows.segments), tiles.tile_table(rows.segments, per_tile)
        packed = torch.from_numpy(np.concatenate([sight.ravel(), table.ravel()])).to(self.device)
        base, visible, bits = packed[: sight.size].view(3, -1)
        first, count, seen = packed[sight.size :].view(3, -1)
        shape = AttentionShape(rows.rows, table.shape[1], heads, kv_heads, self.target.config.stack.head_dim)
        return _attend_with(
            self.attention(shape, self.device),
            RowSight(base, visible, bits),
            Tiles(first, count, seen),
        )

    def grow(self, logprobs: torch.Tensor, token_ids: torch.Tensor, growth: Growth, sizes: Sizes) -> Forest:
        if sizes.width > MASK_NODES + 1:
            return super().grow(logprobs, token_ids, growth, sizes)
        wanted = [growth.roots, growth.depths, growth.ranks, [min(n, sizes.width - 1) for n in growth.nodes]]
        packed = torch.tensor(wanted, dtype=torch.int64).to(self.device)
        bounds = torch.tensor([growth.off_spine, growth.floor], dtype=torch.float64).view(torch.int64).to(self.device)
        out = torch.zeros(len(growth.roots), sizes.record, dtype=torch.int64, device=self.device)
        self.grow_into(out, logprobs.contiguous(), token_ids.contiguous(), *packed, bounds, sizes)
        return Forest.of(out.numpy(force=True), sizes)

    # Graphs -------------------------------------------------------------------------------------------------------

    def capture(self, shape: Shape, progress: Callable[[float], None]) -> None:
        """Capture every bucket; about a second each for a large model."""
        self._graphs = Graphs(self, shape)
        if self.device.type == "cuda":
            self._graphs.capture(progress)
        self.staircase = True
        self.row_sizes, self.request_sizes = shape.row_buckets, shape.request_buckets

    def extend(self, positions: Sequence[int], slots: Sequence[int]) -> None:
        if self._graphs is None:
            super().extend(positions, slots)
        else:
            self._graphs.extend(np.array(positions), np.array(slots))

    def replays(self, forest: Forest) -> bool:
        self.used_graph = self._graphs is not None and self._graphs.take(forest)
        return self.used_graph

    def replay(self, decoding: Decoding, samplings: Sequence[RowSampling], settle: Settle | None) -> Replay:
        assert self._graphs is not None
        self.featured = self.drafter is not None
        return self._graphs.replay(decoding, samplings, settle)


def _attend_with(attention: TiledAttention, sight: RowSight, table: Tiles) -> Attend:
    return lambda queries, keys, values: attention(queries, keys, values, sight, table)


class Graphs:
    """All captured graphs, their static inputs and the one output buffer."""

    def __init__(self, runner: CudaRunner, shape: Shape) -> None:
        self._runner, self._shape, self._device = runner, shape, runner.device
        rows, vocab = shape.row_buckets[-1], runner.target.config.stack.vocab
        self.logits = torch.zeros(rows, vocab, dtype=torch.float32, device=self._device)
        # A settled request: accepted rows, their path, the tokens said, the next tree. After the choices, for one copy.
        self.request_out = 1 + 2 * shape.block + shape.trees.record
        self.out = torch.zeros(rows + shape.max_requests * self.request_out, dtype=torch.int64, device=self._device)
        self.choices = self.out[:rows]
        self._out_host = torch.zeros_like(self.out, device="cpu", pin_memory=self._device.type == "cuda")
        self._verify = {n: _Verify(runner, self, n, shape) for n in shape.row_buckets}
        self._settle: dict[int, _Settle] = {}
        self._extend: dict[int, _Extend] = {}
        if runner.drafter is not None:
            self._extend = {n: _Extend(runner, runner.drafter, n) for n in (EXTEND_ROWS // 16, EXTEND_ROWS)}
            self._settle = {n: _Settle(runner, runner.drafter, self, n, shape) for n in shape.request_buckets}

    def capture(self, progress: Callable[[float], None]) -> None:
        pool = torch.cuda.graph_pool_handle()
        kinds = (self._verify, self._settle, self._extend)
        parts = [part for kind in kinds for part in reversed(kind.values())]  # the largest first: they share
        for i, part in enumerate(parts):
            part.capture(pool)
            progress((i + 1) / len(parts))

    def take(self, forest: Forest) -> bool:
        rows, requests = self._shape.row_buckets[-1], self._shape.max_requests
        return int(forest.rows.sum()) <= rows and len(forest) <= requests and forest.sizes.width <= MASK_NODES + 1

    def settled(self, requests: int) -> torch.Tensor:
        """Where the settle graph of so many requests writes: int64 [requests, request_out]."""
        first = self.choices.shape[0]
        return self.out[first : first + requests * self.request_out].view(requests, -1)

    def extend(self, positions: np.ndarray, slots: np.ndarray) -> None:
        for first in range(0, len(slots), EXTEND_ROWS):
            if first:
                self._runner.synchronise()  # the inputs are still being read
            part = slice(first, first + EXTEND_ROWS)
            self._extend[_fitting(tuple(self._extend), len(slots[part]))].run(positions[part], slots[part])

    def replay(self, decoding: Decoding, samplings: Sequence[RowSampling], settle: Settle | None) -> Replay:
        rows = int(decoding.forest.rows.sum())
        self._verify[_fitting(self._shape.row_buckets, rows)].run(decoding)
        logits = self.logits[:rows]
        if samplings:
            self.choices[:rows].copy_(choose(logits, samplings))
        requests = 0
        if settle is not None:
            part = self._settle[_fitting(self._shape.request_buckets, len(settle.index))]
            part.run(decoding, settle)
            requests = part.requests
        used = self.choices.shape[0] + requests * self.request_out if requests else rows
        self._out_host[:used].copy_(self.out[:used], non_blocking=True)
        self._runner.synchronise()  # the round's one wait
        return self._read(rows, 0 if settle is None else len(settle.index), logits)

    def _read(self, rows: int, settled: int, logits: torch.Tensor) -> Replay:
        out, first, block = self._out_host.numpy(), self.choices.shape[0], self._shape.block
        table = out[first : first + settled * self.request_out].reshape(settled, self.request_out).copy()
        lengths, paths, said, records = np.split(table, [1, 1 + block, 1 + 2 * block], axis=1)
        forest = Forest.of(records, self._shape.trees) if settled else None
        return Replay(logits, out[:rows].copy(), lengths[:, 0], paths, said, forest)


def _fitting(buckets: Sequence[int], size: int) -> int:
    return next(n for n in buckets if n >= size)


class _Captured(ABC):
    """One graph: `_compute` reads and writes static tensors only."""

    def __init__(self) -> None:
        self._graph: torch.cuda.CUDAGraph | None = None

    @abstractmethod
    def _compute(self) -> None: ...

    def capture(self, pool: tuple[int, int]) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._compute()  # compiles kernels and plans matrix products outside the capture
            self._compute()
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=pool):
            self._compute()

    def launch(self) -> None:
        if self._graph is None:  # not captured: run as it is (tests of the arithmetic without CUDA)
            self._compute()
        else:
            self._graph.replay()


class _Verify(_Captured):
    """Target pass, features, logits and greedy choices of up to `rows` rows."""

    def __init__(self, runner: CudaRunner, shared: Graphs, rows: int, shape: Shape) -> None:
        super().__init__()
        self._runner, self._shared, self._rows = runner, shared, rows
        stack = runner.target.config.stack
        self._per_tile = tiles.rows_per_tile(stack.heads // stack.kv_heads)
        count = tiles.tiles_at_most(rows, shape.max_requests, self._per_tile)
        names = ("token", "position", "slot", "base", "visible", "bits")
        sizes = dict.fromkeys(names, rows) | dict.fromkeys(("tile_first", "tile_rows", "tile_seen"), count)
        self._inputs = _Inputs(sizes, runner.device)
        self._attention = runner.attention(
            AttentionShape(rows, count, stack.heads, stack.kv_heads, stack.head_dim), runner.device
        )
        self._inputs.fill("slot", np.empty(0), runner.cache.shape.slots - 1)
        self._inputs.send()

    def run(self, decoding: Decoding) -> None:
        fill, forest, trash = self._inputs.fill, decoding.forest, self._runner.cache.shape.slots - 1
        inside, past = forest.inside, decoding.past
        fill("token", forest.tokens[inside], 0)
        fill("position", (past[:, None] + forest.depths)[inside], 0)
        fill("slot", ((decoding.base + past)[:, None] + np.arange(forest.sizes.width))[inside], trash)
        for name, values in zip(("base", "visible", "bits"), tiles.forest_sight(forest, decoding.base, past), strict=True):
            fill(name, values, 0)
        table = tiles.forest_tiles(forest, past, self._per_tile)
        for name, values in zip(("tile_first", "tile_rows", "tile_seen"), table, strict=True):
            fill(name, values, 0)
        self._inputs.send()
        self.launch()

    def _compute(self) -> None:
        x, runner = self._inputs.device, self._runner
        attend = _attend_with(
            self._attention,
            RowSight(x["base"], x["visible"], x["bits"]),
            Tiles(x["tile_first"], x["tile_rows"], x["tile_seen"]),
        )
        drafter, cache = runner.drafter, runner.cache
        taps = drafter.taps if drafter else ()
        hidden = runner.target.forward(x["token"], x["position"], x["slot"], cache.target, attend, taps)
        if drafter is not None and cache.features is not None:
            cache.features.index_copy_(0, x["slot"], drafter.features(hidden.tapped))
        logits = runner.target.logits(hidden.last)
        self._shared.logits[: self._rows].copy_(logits)
        self._shared.choices[: self._rows].copy_(logits.argmax(-1))


class _Extend(_Captured):
    """Append up to `rows` committed tokens to the drafter's context."""

    def __init__(self, runner: CudaRunner, drafter: Drafter, rows: int) -> None:
        super().__init__()
        self._runner, self._drafter = runner, drafter
        self._inputs = _Inputs(dict.fromkeys(("position", "slot"), rows), runner.device)
        self._inputs.fill("slot", np.empty(0), runner.cache.shape.slots - 1)
        self._inputs.send()

    def run(self, positions: np.ndarray, slots: np.ndarray) -> None:
        self._inputs.fill("position", positions, 0)
        self._inputs.fill("slot", slots, self._runner.cache.shape.slots - 1)
        self._inputs.send()
        self.launch()

    def _compute(self) -> None:
        x, cache = self._inputs.device, self._runner.cache
        assert cache.features is not None
        assert cache.drafter is not None
        self._drafter.extend(cache.features.index_select(0, x["slot"]), x["position"], x["slot"], cache.drafter)


class _Settle(_Captured):
    """Walk, compact, extend the context, draft, grow the next trees: for up to `requests` requests."""

    def __init__(self, runner: CudaRunner, drafter: Drafter, shared: Graphs, requests: int, shape: Shape) -> None:
        super().__init__()
        self._runner, self._drafter, self._shared, self._shape = runner, drafter, shared, shape
        self.requests = requests
        self._width, device = shape.max_nodes + 1, runner.device
        sizes = dict.fromkeys(("first", "count", "base", "past", "left", "ranks", "nodes"), requests)
        sizes |= dict.fromkeys(("parent", "token"), requests * self._width) | {"bounds": 2}
        self._inputs = _Inputs(sizes, device)
        stack, block = drafter.config.stack, shape.block
        per_tile = tiles.rows_per_tile(stack.heads // stack.kv_heads)
        parts = math.ceil(block / per_tile)
        shape_here = AttentionShape(requests * block, requests * parts, stack.heads, stack.kv_heads, stack.head_dim)
        self._attention = runner.attention(shape_here, device)
        starts = torch.arange(parts, device=device) * per_tile
        self._tile_first = (torch.arange(requests, device=device)[:, None] * block + starts).flatten()
        self._tile_rows = (block - starts).clamp(max=per_tile).repeat(requests)
        self._parts = parts
        self._in_tree = torch.arange(self._width, device=device)
        self._in_block = torch.arange(block, device=device)

    def run(self, decoding: Decoding, settle: Settle) -> None:
        forest, i, fill = decoding.forest, settle.index, self._inputs.fill
        fill("first", (np.cumsum(forest.rows) - forest.rows)[i], 0)
        fill("count", forest.rows[i], 0)  # 0 rows: a request that is not there
        fill("base", decoding.base[i], 0)
        fill("past", decoding.past[i], 0)
        fill("left", settle.left, 0)
        fill("ranks", settle.ranks, 1)
        fill("nodes", settle.nodes, 0)
        fill("bounds", np.array([settle.off_spine, settle.floor]).view(np.int64), 0)
        width = forest.sizes.width
        for name, column in (("parent", forest.parents), ("token", forest.tokens)):
            self._inputs.host[name].reshape(self.requests, -1)[: len(i), :width] = column[i]
        self._inputs.send()
        self.launch()

    def _compute(self) -> None:
        x, n, block = self._inputs.device, self.requests, self._shape.block
        out, real = self._shared.settled(n), x["count"] > 0
        choices, path, length = self._walk()
        # Accepted rows move to the front of their window; whatever is not there goes to the trash slot.
        trash, start = self._runner.cache.shape.slots - 1, x["base"] + x["past"]
        taken = (self._in_block < length[:, None]) & real[:, None]
        source = torch.where(taken, start[:, None] + path, trash).flatten()
        target = torch.where(taken, start[:, None] + self._in_block, trash).flatten()
        cache = self._runner.cache
        cache.compact(source, target)
        assert cache.features is not None
        assert cache.drafter is not None
        positions = torch.where(taken, x["past"][:, None] + self._in_block, 0).flatten()
        self._drafter.extend(cache.features.index_select(0, target), positions, target, cache.drafter)
        said = choices.gather(1, path)  # the choice after an accepted row is the token of the next, and then the last
        root = said.gather(1, (length - 1)[:, None])
        past = torch.where(real, x["past"] + length, 0)
        logprobs, ids = self._draft(root, past, real)
        out[:, 0].copy_(length)
        out[:, 1 : 1 + block].copy_(path)
        out[:, 1 + block : 1 + 2 * block].copy_(said)
        depths = (x["left"] - length - 1).clamp(0, block - 1)  # a path of d nodes commits d + 1 tokens
        grown = out[:, 1 + 2 * block :]
        limits = (root.flatten(), depths, x["ranks"], x["nodes"], x["bounds"])
        self._runner.grow_into(grown, logprobs.contiguous(), ids.contiguous(), *limits, self._shape.trees)

    def _walk(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(choices [requests, width], accepted rows by depth [requests, block], how many [requests])."""
        x, n, i = self._inputs.device, self.requests, self._in_tree
        parent, token = x["parent"].view(n, -1), x["token"].view(n, -1)
        last = (x["count"] - 1).clamp(min=0)[:, None]
        choices = self._shared.choices[x["first"][:, None] + torch.minimum(i, last)]
        accepted = (i < x["count"][:, None]) & (choices.gather(1, parent) == token)
        accepted[:, 0] = True
        ancestor = parent
        for _ in range(max(1, math.ceil(math.log2(self._shape.block)))):  # a node counts when all above it do
            accepted = accepted & accepted.gather(1, ancestor)
            ancestor = ancestor.gather(1, ancestor)
        # Parents come before children, so the accepted rows in row order are the path from the root down.
        depth = torch.where(accepted, accepted.cumsum(1) - 1, self._shape.block)
        path = torch.zeros(n, self._shape.block + 1, dtype=torch.int64, device=i.device)
        path.scatter_(1, depth.clamp(max=self._shape.block), i.expand(n, -1))
        return choices, path[:, :-1], accepted.sum(1)

    def _draft(self, root: torch.Tensor, past: torch.Tensor, real: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        n, block, cache = self.requests, self._shape.block, self._runner.cache
        masks = root.new_full((n, block - 1), self._drafter.config.mask_token_id)
        at = past[:, None] + self._in_block
        base, trash = self._inputs.device["base"], cache.shape.slots - 1
        slots = torch.where(real[:, None], base[:, None] + at, trash).flatten()
        seen = past + block
        rows_of = torch.repeat_interleave(torch.stack([base, seen]), block, dim=1)
        attend = _attend_with(
            self._attention,
            RowSight(rows_of[0], rows_of[1], torch.zeros_like(rows_of[0])),
            Tiles(
                self._tile_first,
                self._tile_rows * torch.repeat_interleave(real, self._parts),
                torch.repeat_interleave(seen, self._parts),
            ),
        )
        assert cache.drafter is not None
        tokens = torch.cat([root, masks], 1).flatten()
        return self._drafter.draft(tokens, at.flatten(), slots, cache.drafter, attend, self._shape.k)
