"""The CUDA runner: the passes of `runner.py` with tiled attention, and pure decoding rounds replayed as CUDA graphs.

Two graphs make a round, launched back to back without waiting: `verify` (per bucket of rows: target, logits, greedy choices)
and `settle` (per bucket of requests: walk the trees, compact the cache, extend the drafter's context, draft, top-k). Then
one copy brings choices and candidates to the host, which walks the same trees again for its own books. Rounds with
prefill chunks run without graphs. Without a capture the same steps are computed as they are (on CPU, in tests).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ddtree_engine import tiles
from ddtree_engine.attention import Attend
from ddtree_engine.cache import Cache
from ddtree_engine.drafter import Drafter
from ddtree_engine.model import Target
from ddtree_engine.rows import RowBatch, Segment, batch_rows
from ddtree_engine.runner import Replay, Runner, Settle
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
    ) -> None:
        super().__init__(target, drafter, cache, device)
        if device.type == "cuda":
            # Over cuBLAS's own choices, 33 and 65 rows of an 8B model's shape take 4 and 2 % less, one row the same.
            torch.backends.cuda.preferred_blas_library("cublaslt")
        self.attention = attention
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

    # Graphs -------------------------------------------------------------------------------------------------------

    def capture(self, shape: Shape, progress: Callable[[float], None]) -> None:
        """Capture every bucket; about a second each for a large model."""
        self._graphs = Graphs(self, shape)
        if self.device.type == "cuda":
            self._graphs.capture(progress)
        self.staircase = True
        self.row_sizes, self.request_sizes = shape.row_buckets, shape.request_buckets

    def replays(self, rows: RowBatch) -> bool:
        self.used_graph = self._graphs is not None and self._graphs.take(rows)
        return self.used_graph

    def replay(self, rows: RowBatch, samplings: Sequence[RowSampling], settle: Sequence[Settle]) -> Replay:
        assert self._graphs is not None
        self.featured = self.drafter is not None
        return self._graphs.replay(rows, samplings, settle)


def _attend_with(attention: TiledAttention, sight: RowSight, table: Tiles) -> Attend:
    return lambda queries, keys, values: attention(queries, keys, values, sight, table)


class Graphs:
    """All captured graphs, their static inputs and the one output buffer."""

    def __init__(self, runner: CudaRunner, shape: Shape) -> None:
        self._runner, self._shape, self._device = runner, shape, runner.device
        rows, vocab = shape.row_buckets[-1], runner.target.config.stack.vocab
        self.logits = torch.zeros(rows, vocab, dtype=torch.float32, device=self._device)
        self.choices = torch.zeros(rows, dtype=torch.int64, device=self._device)
        candidates = shape.max_requests * (shape.block - 1) * shape.k
        # int32 so that choices, candidates and (as bits) log-probabilities leave in one copy.
        self.out = torch.zeros(rows + 2 * candidates, dtype=torch.int32, device=self._device)
        self._out_host = torch.zeros_like(self.out, device="cpu", pin_memory=self._device.type == "cuda")
        self._verify = {n: _Verify(runner, self, n, shape) for n in shape.row_buckets}
        self._settle: dict[int, _Settle] = {}
        if runner.drafter is not None:
            self._settle = {n: _Settle(runner, runner.drafter, self, n, shape) for n in shape.request_buckets}

    def capture(self, progress: Callable[[float], None]) -> None:
        pool = torch.cuda.graph_pool_handle()
        parts = [*reversed(self._verify.values()), *reversed(self._settle.values())]  # the largest first: they share
        for i, part in enumerate(parts):
            part.capture(pool)
            progress((i + 1) / len(parts))

    def take(self, rows: RowBatch) -> bool:
        return (
            rows.rows <= self._shape.row_buckets[-1]
            and len(rows.segments) <= self._shape.max_requests
            and tiles.fits(rows.segments)
        )

    def replay(self, rows: RowBatch, samplings: Sequence[RowSampling], settle: Sequence[Settle]) -> Replay:
        bucket = next(n for n in self._shape.row_buckets if n >= rows.rows)
        self._verify[bucket].run(rows.segments)
        logits = self.logits[: rows.rows]
        if samplings:
            self.choices[: rows.rows].copy_(choose(logits, samplings))
        if not settle:
            return Replay(logits, self.choices[: rows.rows].tolist(), [], [])
        size = next(n for n in self._shape.request_buckets if n >= len(settle))
        part = self._settle[size]
        part.run(settle)
        self._out_host.copy_(self.out, non_blocking=True)
        self._runner.synchronise()  # the round's one wait
        return self._read(rows.rows, len(settle), part, logits)

    def _read(self, rows: int, requests: int, part: _Settle, logits: torch.Tensor) -> Replay:
        out, first = self._out_host, self.choices.shape[0]
        count = part.requests * (self._shape.block - 1) * self._shape.k
        shape = (part.requests, self._shape.block - 1, self._shape.k)
        ids = out[first : first + count].view(shape)[:requests]
        logprobs = out[first + count : first + 2 * count].view(torch.float32).view(shape)[:requests]
        return Replay(logits, out[:rows].tolist(), logprobs.tolist(), ids.tolist())


class _Captured:
    """One graph: `_compute` reads and writes static tensors only."""

    def __init__(self) -> None:
        self._graph: torch.cuda.CUDAGraph | None = None

    def _compute(self) -> None:
        raise AssertionError  # pragma: no cover (both subclasses have one)

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

    def run(self, segments: Sequence[Segment]) -> None:
        fill, trash = self._inputs.fill, self._runner.cache.shape.slots - 1
        fill("token", np.concatenate([np.asarray(s.token_ids) for s in segments]), 0)
        fill("position", np.concatenate([np.asarray(s.positions) for s in segments]), 0)
        fill("slot", np.concatenate([s.base + s.past + np.arange(s.rows) for s in segments]), trash)
        base, visible, bits = tiles.sight_table(segments)
        fill("base", base, 0)
        fill("visible", visible, 0)
        fill("bits", bits, 0)
        first, rows, seen = tiles.tile_table(segments, self._per_tile)
        fill("tile_first", first, 0)
        fill("tile_rows", rows, 0)
        fill("tile_seen", seen, 0)
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


class _Settle(_Captured):
    """Walk, compact, extend the context, draft: for up to `requests` requests."""

    def __init__(self, runner: CudaRunner, drafter: Drafter, shared: Graphs, requests: int, shape: Shape) -> None:
        super().__init__()
        self._runner, self._drafter, self._shared, self._shape = runner, drafter, shared, shape
        self.requests = requests
        self._width, device = shape.max_nodes + 1, runner.device
        sizes = dict.fromkeys(("first", "count", "base", "past"), requests)
        sizes |= dict.fromkeys(("parent", "token"), requests * self._width)
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

    def run(self, settle: Sequence[Settle]) -> None:
        parent = np.zeros((self.requests, self._width), dtype=np.int64)
        token = np.zeros((self.requests, self._width), dtype=np.int64)
        for i, s in enumerate(settle):
            parent[i, 1 : s.tree.rows] = s.tree.parents[1:]  # the root is its own parent here
            token[i, : s.tree.rows] = s.tree.token_ids
        fill = self._inputs.fill
        fill("first", np.array([s.first_row for s in settle]), 0)
        fill("count", np.array([s.tree.rows for s in settle]), 0)  # 0 rows: a request that is not there
        fill("base", np.array([s.base for s in settle]), 0)
        fill("past", np.array([s.past for s in settle]), 0)
        fill("parent", parent.ravel(), 0)
        fill("token", token.ravel(), 0)
        self._inputs.send()
        self.launch()

    def _compute(self) -> None:
        x, shared, n = self._inputs.device, self._shared, self.requests
        real = x["count"] > 0
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
        root = choices.gather(1, path.gather(1, (length - 1)[:, None]))
        past = torch.where(real, x["past"] + length, 0)
        logprobs, ids = self._draft(root, past, real)
        count, first = n * (self._shape.block - 1) * self._shape.k, shared.choices.shape[0]
        shared.out[:first].copy_(shared.choices)
        shared.out[first : first + count].copy_(ids.flatten())
        shared.out[first + count : first + 2 * count].copy_(logprobs.contiguous().view(torch.int32).flatten())

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
