"""What is captured as CUDA graphs. Each reads named inputs and writes static tensors, nothing else.

Here: what they share, verify and extend; `settling.py` has the one that ends a round. Which of them a round launches, and
when, is `graphs.py`'s decision.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from ddtree_engine import tiles
from ddtree_engine.attention import Attend
from ddtree_engine.drafter import Drafter
from ddtree_engine.forest import Sizes
from ddtree_engine.rows import Segment
from ddtree_engine.runner import Decoding
from ddtree_engine.tiles import AttentionShape, RowSight, TiledAttention, Tiles

if TYPE_CHECKING:
    from ddtree_engine.graphs import CudaRunner


@dataclass(frozen=True, slots=True)
class Shape:
    """What graphs are captured for."""

    max_requests: int
    max_nodes: int
    block: int  # 1 without a drafter
    k: int  # candidates a depth
    prompt_rows: int = 0  # of prompts, beside as many trees as there may be

    @property
    def trees(self) -> Sizes:
        return Sizes(self.max_nodes + 1, self.block - 1)

    @property
    def row_buckets(self) -> tuple[int, ...]:
        """Powers of two and whole trees of 1, 2, 4, ... requests: about 16 sizes."""
        trees = self.max_requests * (self.max_nodes + 1)
        limit = trees + self.prompt_rows
        sizes, n = {trees, limit}, 1
        while n < limit:
            sizes |= {n, min(trees, n * (self.max_nodes + 1))}
            n *= 2
        return tuple(sorted(sizes))

    @property
    def request_buckets(self) -> tuple[int, ...]:
        sizes, n = {self.max_requests}, 1
        while n < self.max_requests:
            sizes.add(n)
            n *= 2
        return tuple(sorted(sizes))


class Inputs:
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


class Board:
    """What graphs of a pass leave for those that follow, and for the host: one buffer, so that one copy brings it."""

    def __init__(self, shape: Shape, vocab: int, device: torch.device) -> None:
        rows = shape.row_buckets[-1]
        self.logits = torch.zeros(rows, vocab, dtype=torch.float32, device=device)
        # A settled request: accepted rows, their path, the tokens said, the next tree. After the choices, for one copy.
        self.request_out = 1 + 2 * shape.block + shape.trees.record
        self.out = torch.zeros(rows + shape.max_requests * self.request_out, dtype=torch.int64, device=device)
        self.choices = self.out[:rows]

    def settled(self, requests: int) -> torch.Tensor:
        """Where the settle graph of so many requests writes: int64 [requests, request_out]."""
        first = self.choices.shape[0]
        return self.out[first : first + requests * self.request_out].view(requests, -1)


def attend_with(attention: TiledAttention, sight: RowSight, table: Tiles) -> Attend:
    return lambda queries, keys, values: attention(queries, keys, values, sight, table)


class Captured(ABC):
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


ROW_INPUTS = ("token", "position", "slot", "base", "visible", "bits")
TILE_INPUTS = ("tile_first", "tile_rows", "tile_seen")


def _tree_rows(decoding: Decoding) -> np.ndarray:
    """int64 [ROW_INPUTS, rows]. Every small model's round waits for this: a few operations on no more than is in use."""
    forest, base, past = decoding.forest, decoding.base[:, None], decoding.past[:, None]
    rows = forest.rows
    width = int(rows.max(initial=0))
    table, at = np.empty((len(ROW_INPUTS), len(forest), width), dtype=np.int64), np.arange(width)
    table[0] = forest.tokens[:, :width]
    table[1] = forest.depths[:, :width] + past
    table[2] = base + past + at
    table[3] = base
    table[4] = past + 1  # the root is seen by all
    table[5] = forest.bits[:, :width]
    if (rows == width).all():
        return table.reshape(len(ROW_INPUTS), -1)
    return table[:, at < rows[:, None]]


def _prompt_rows(prompts: Sequence[Segment]) -> np.ndarray:
    """int64 [ROW_INPUTS, rows]"""
    own = [np.stack([s.token_ids, s.positions, np.arange(s.base + s.past, s.base + s.seen)]) for s in prompts]
    return np.concatenate([np.concatenate(own, axis=1), tiles.sight_table(prompts)])


class Verify(Captured):
    """Target pass, features, logits and greedy choices of up to `rows` rows."""

    def __init__(self, runner: CudaRunner, board: Board, rows: int, shape: Shape) -> None:
        super().__init__()
        self._runner, self._board, self._rows = runner, board, rows
        stack = runner.target.config.stack
        self._per_tile = tiles.rows_per_tile(stack.heads // stack.kv_heads)
        count = tiles.tiles_at_most(rows, 2 * shape.max_requests, self._per_tile)  # each may have a tree and a prompt
        sizes = dict.fromkeys(ROW_INPUTS, rows) | dict.fromkeys(TILE_INPUTS, count)
        self._inputs = Inputs(sizes, runner.device)
        self._attention = runner.attention(
            AttentionShape(rows, count, stack.heads, stack.kv_heads, stack.head_dim), runner.device
        )
        self._inputs.fill("slot", np.empty(0), runner.cache.shape.slots - 1)
        self._inputs.send()

    def run(self, decoding: Decoding) -> None:
        fill, trash = self._inputs.fill, self._runner.cache.shape.slots - 1
        rows, table = _tree_rows(decoding), tiles.forest_tiles(decoding.forest, decoding.past, self._per_tile)
        if decoding.prompts:
            prompts, more = _prompt_rows(decoding.prompts), tiles.tile_table(decoding.prompts, self._per_tile)
            more[0] += rows.shape[1]
            rows, table = np.concatenate([rows, prompts], axis=1), np.concatenate([table, more], axis=1)
        for name, values in zip(ROW_INPUTS, rows, strict=True):
            fill(name, values, trash if name == "slot" else 0)
        for name, values in zip(TILE_INPUTS, table, strict=True):
            fill(name, values, 0)
        self._inputs.send()
        self.launch()

    def _compute(self) -> None:
        x, runner = self._inputs.device, self._runner
        attend = attend_with(
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
        self._board.logits[: self._rows].copy_(logits)
        self._board.choices[: self._rows].copy_(logits.argmax(-1))


class Extend(Captured):
    """Append up to `rows` committed tokens to the drafter's context."""

    def __init__(self, runner: CudaRunner, drafter: Drafter, rows: int) -> None:
        super().__init__()
        self._runner, self._drafter = runner, drafter
        self._inputs = Inputs(dict.fromkeys(("position", "slot"), rows), runner.device)
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
