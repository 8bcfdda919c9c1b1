"""The DFlash block-diffusion drafter (arXiv 2602.06036): one pass drafts a whole block of tokens.

Its context is the target's hidden states of a few layers, fused to one feature per committed token; its block is the root
(the last committed token, which has no feature yet) followed by mask tokens, attended without a causal mask. Embedding and
head are the target's. Keys and values of the block are overwritten by the context's of the next round, so the drafter's
cache needs no cropping beyond its length.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ddtree_engine.attention import Attend
from ddtree_engine.cache import LayerCache
from ddtree_engine.checkpoint import DrafterConfig
from ddtree_engine.model import Linear, Norm, Stack, Target, Tensors, rotate
from ddtree_engine.sampling import best_few


class Drafter:
    """`block_size` may be below the trained one; it counts the root, so block_size - 1 tokens are drafted."""

    def __init__(
        self,
        tensors: Tensors,
        config: DrafterConfig,
        target: Target,
        *,
        block_size: int,
        positions: int,
        device: torch.device,
    ) -> None:
        self.config = config
        self.block_size = block_size
        self.taps = config.target_layer_ids
        self._target = target
        self._stack = Stack(tensors, "", config.stack, positions, device)
        self._fuse = Linear(tensors["fc.weight"])
        self._fused_norm = Norm(tensors["hidden_norm.weight"], config.stack.eps)
        self._final_norm = Norm(tensors["norm.weight"], config.stack.eps)
        # Keys and values of every layer come from the same feature: one matrix for all.
        self._context = Linear(torch.cat([layer.kv_weight for layer in self._stack.layers]))
        self._k_norm = Norm(torch.stack([layer.k_norm for layer in self._stack.layers])[:, None], config.stack.eps)

    def features(self, tapped: Sequence[torch.Tensor]) -> torch.Tensor:
        """[rows, hidden] from the tapped target layers' outputs."""
        return self._fused_norm(self._fuse(torch.cat(list(tapped), dim=-1)))

    def extend(self, features: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, cache: LayerCache) -> None:
        """Append committed tokens to the context: features [rows, hidden] at their positions and slots."""
        s = self.config.stack
        kv = self._context(features).view(-1, s.layers, 2, s.kv_heads, s.head_dim)
        keys = rotate(self._k_norm.exact(kv[:, :, 0]), self._stack.rope.at(positions)[:, None]).to(features.dtype)
        cache.keys.index_copy_(1, slots, keys.transpose(0, 1))
        cache.values.index_copy_(1, slots, kv[:, :, 1].transpose(0, 1))

    def block(self, root: int) -> list[int]:
        """The tokens of a block: slot 0 is the real token."""
        return [root] + [self.config.mask_token_id] * (self.block_size - 1)

    def draft(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        cache: LayerCache,
        attend: Attend,
        k: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Blocks [requests * block_size] -> (log-probabilities, token ids) [requests, block_size - 1, k].

        Log-probabilities are over the full vocabulary, best first.
        """
        x, _ = self._stack.forward(self._target.embed(token_ids), positions, slots, cache, attend)
        # Of the roots and of padding rows too: fewer shapes and no copies, and nearly free.
        logits = self._stack.steps.head(x, self._final_norm, self._target.head)
        logprobs = logits.log_softmax(dim=-1, dtype=torch.float32)
        best, ids = best_few(logprobs, k)
        blocks = logprobs.shape[0] // self.block_size
        return self._drafted(best, blocks), self._drafted(ids, blocks)

    def _drafted(self, rows: torch.Tensor, blocks: int) -> torch.Tensor:
        """[padded rows, k] -> [blocks, block_size - 1, k]"""
        return rows[: blocks * self.block_size].view(blocks, self.block_size, -1)[:, 1:]
