"""The graph that ends a round: walk the trees, compact the cache, extend the drafter's context, draft, grow the next trees.

Everything stays on the device; what the host reads of it is on the `Board`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch

from ddtree_engine import tiles
from ddtree_engine.captured import Board, Captured, Inputs, Shape, attend_with
from ddtree_engine.drafter import Drafter
from ddtree_engine.runner import Decoding, Settle
from ddtree_engine.tiles import AttentionShape, RowSight, Tiles

if TYPE_CHECKING:
    from ddtree_engine.graphs import CudaRunner


class Settling(Captured):
    """Walk, compact, extend the context, draft, grow the next trees: for up to `requests` requests."""

    def __init__(self, runner: CudaRunner, drafter: Drafter, board: Board, requests: int, shape: Shape) -> None:
        super().__init__()
        self._runner, self._drafter, self._board, self._shape = runner, drafter, board, shape
        self.requests = requests
        self._width, device = shape.max_nodes + 1, runner.device
        sizes = dict.fromkeys(("first", "count", "base", "past", "left", "ranks", "nodes"), requests)
        sizes |= dict.fromkeys(("parent", "token"), requests * self._width) | {"bounds": 2}
        self._inputs = Inputs(sizes, device)
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
        out, real = self._board.settled(n), x["count"] > 0
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
        choices = self._board.choices[x["first"][:, None] + torch.minimum(i, last)]
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
        attend = attend_with(
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
