"""The CUDA runner: the passes of `runner.py` with tiled attention, and rounds replayed as CUDA graphs (`captured.py`).

Two graphs make a round, launched back to back without waiting: `verify` (per bucket of rows: target, logits, greedy choices)
and `settle` (per bucket of requests: walk the trees, compact the cache, extend the drafter's context, draft, grow the next
trees). Then one copy brings paths, tokens and trees to the host. Prompts are rows of `verify` like any other, as far as they
fit; the drafter's context then grows by theirs in between (`extend`). Longer chunks run without graphs. Without a capture
the same steps are computed as they are (on CPU, in tests).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch

from ddtree_engine import tiles
from ddtree_engine.attention import Attend
from ddtree_engine.cache import Cache
from ddtree_engine.captured import Board, Extend, Shape, Verify, attend_with
from ddtree_engine.drafter import Drafter
from ddtree_engine.forest import MASK_NODES, Forest, Growth, Sizes
from ddtree_engine.model import Target
from ddtree_engine.rows import RowBatch, Segment, batch_rows
from ddtree_engine.runner import EXTEND_ROWS, Decoding, Replay, Runner, Settle
from ddtree_engine.sampling import RowSampling, choose
from ddtree_engine.settling import Settling
from ddtree_engine.tiles import AttentionShape, RowSight, TiledAttention, Tiles


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
        return attend_with(
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

    @property
    def captured(self) -> bool:
        return self._graphs is not None

    def replays(self, forest: Forest, prompts: Sequence[Segment] = ()) -> bool:
        self.used_graph = self._graphs is not None and self._graphs.take(forest, prompts)
        return self.used_graph

    def replay(
        self,
        decoding: Decoding,
        samplings: Sequence[RowSampling],
        settle: Settle | None,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> Replay:
        assert self._graphs is not None
        self.featured = self.drafter is not None
        return self._graphs.replay(decoding, samplings, settle, meanwhile)


class Graphs:
    """All captured graphs and what they write to."""

    def __init__(self, runner: CudaRunner, shape: Shape) -> None:
        self._runner, self._shape = runner, shape
        self._row_buckets, self._request_buckets = shape.row_buckets, shape.request_buckets
        self._board = board = Board(shape, runner.target.config.stack.vocab, runner.device)
        self._out_host = torch.zeros_like(board.out, device="cpu", pin_memory=runner.device.type == "cuda")
        self._verify = {n: Verify(runner, board, n, shape) for n in self._row_buckets}
        self._settle: dict[int, Settling] = {}
        self._extend: dict[int, Extend] = {}
        if runner.drafter is not None:
            self._extend = {n: Extend(runner, runner.drafter, n) for n in (EXTEND_ROWS // 16, EXTEND_ROWS)}
            self._settle = {n: Settling(runner, runner.drafter, board, n, shape) for n in self._request_buckets}

    def capture(self, progress: Callable[[float], None]) -> None:
        pool = torch.cuda.graph_pool_handle()
        kinds = (self._verify, self._settle, self._extend)
        parts = [part for kind in kinds for part in reversed(kind.values())]  # the largest first: they share
        for i, part in enumerate(parts):
            part.capture(pool)
            progress((i + 1) / len(parts))

    def take(self, forest: Forest, prompts: Sequence[Segment]) -> bool:
        rows = int(forest.rows.sum()) + sum(s.rows for s in prompts)
        if rows > self._row_buckets[-1] or forest.sizes.width > MASK_NODES + 1:
            return False
        return max(len(forest), len(prompts)) <= self._shape.max_requests

    def extend(self, positions: np.ndarray, slots: np.ndarray) -> None:
        for first in range(0, len(slots), EXTEND_ROWS):
            if first:
                self._runner.synchronise()  # the inputs are still being read
            part = slice(first, first + EXTEND_ROWS)
            self._extend[_fitting(tuple(self._extend), len(slots[part]))].run(positions[part], slots[part])

    def replay(
        self, decoding: Decoding, samplings: Sequence[RowSampling], settle: Settle | None, meanwhile: Callable[[], None]
    ) -> Replay:
        board, rows = self._board, int(decoding.forest.rows.sum())
        self._verify[_fitting(self._row_buckets, rows + sum(s.rows for s in decoding.prompts))].run(decoding)
        logits = board.logits[:rows]
        if samplings:
            board.choices[:rows].copy_(choose(logits, samplings))
        requests = 0
        if settle is not None:
            self.extend(*settle.behind)
            part = self._settle[_fitting(self._request_buckets, len(settle.index))]
            part.run(decoding, settle)
            requests = part.requests
        used = board.choices.shape[0] + requests * board.request_out if requests else rows
        self._out_host[:used].copy_(board.out[:used], non_blocking=True)
        meanwhile()
        self._runner.synchronise()  # the round's one wait
        return self._read(rows, 0 if settle is None else len(settle.index), logits)

    def _read(self, rows: int, settled: int, logits: torch.Tensor) -> Replay:
        out, first, block = self._out_host.numpy(), self._board.choices.shape[0], self._shape.block
        size = self._board.request_out
        table = out[first : first + settled * size].reshape(settled, size).copy()
        lengths, paths, said, records = np.split(table, [1, 1 + block, 1 + 2 * block], axis=1)
        forest = Forest.of(records, self._shape.trees) if settled else None
        return Replay(logits, out[:rows].copy(), lengths[:, 0], paths, said, forest)


def _fitting(buckets: Sequence[int], size: int) -> int:
    return next(n for n in buckets if n >= size)
