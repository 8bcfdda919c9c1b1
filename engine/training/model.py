"""The target (dense Qwen3) and the DFlash drafter as training modules; parameter names are those of the checkpoints.

Not the engine's model code: no paged cache, no trees. Shapes: B rows, T tokens, H heads, D head_dim, E hidden.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone knows it by
from torch import Tensor, nn

from training.recipe import MASK, DrafterRecipe, ModelShape


def rope_tables(positions: int, shape: ModelShape, device: torch.device | None = None) -> tuple[Tensor, Tensor]:
    """cos and sin, [positions, D] in float32."""
    steps = torch.arange(0, shape.head_dim, 2, device=device).float() / shape.head_dim
    angles = torch.arange(positions, device=device).float()[:, None] / shape.rope_theta**steps
    angles = torch.cat([angles, angles], -1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [..., H, D] with cos, sin [..., 1, D]."""
    first, second = x.float().chunk(2, -1)
    return (x.float() * cos + torch.cat([-second, first], -1) * sin).to(x.dtype)


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), (x.shape[-1],), self.weight.float(), self.eps).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, s: ModelShape) -> None:
        super().__init__()
        self.shape = s
        self.q_proj = nn.Linear(s.hidden, s.heads * s.head_dim, bias=False)
        self.k_proj = nn.Linear(s.hidden, s.kv_heads * s.head_dim, bias=False)
        self.v_proj = nn.Linear(s.hidden, s.kv_heads * s.head_dim, bias=False)
        self.o_proj = nn.Linear(s.heads * s.head_dim, s.hidden, bias=False)
        self.q_norm = RMSNorm(s.head_dim, s.eps)
        self.k_norm = RMSNorm(s.head_dim, s.eps)

    def queries(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[B, T, E] -> [B, H, T, D]; cos and sin [B or 1, T, 1, D]."""
        q = self.q_proj(x).unflatten(-1, (self.shape.heads, self.shape.head_dim))
        return rotate(self.q_norm(q), cos, sin).transpose(1, 2)

    def keys_values(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """[B, T, E] -> two [B, kv heads, T, D]."""
        k = self.k_proj(x).unflatten(-1, (self.shape.kv_heads, self.shape.head_dim))
        v = self.v_proj(x).unflatten(-1, (self.shape.kv_heads, self.shape.head_dim))
        return rotate(self.k_norm(k), cos, sin).transpose(1, 2), v.transpose(1, 2)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Without a mask causal; returns [B, T, E]."""
        group = self.shape.heads // self.shape.kv_heads
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, s: ModelShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(s.hidden, s.intermediate, bias=False)
        self.up_proj = nn.Linear(s.hidden, s.intermediate, bias=False)
        self.down_proj = nn.Linear(s.intermediate, s.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, s: ModelShape) -> None:
        super().__init__()
        self.self_attn = Attention(s)
        self.mlp = MLP(s)
        self.input_layernorm = RMSNorm(s.hidden, s.eps)
        self.post_attention_layernorm = RMSNorm(s.hidden, s.eps)

    def feed_forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.post_attention_layernorm(x))


class Inner(nn.Module):
    def __init__(self, s: ModelShape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(s.vocab, s.hidden)
        self.layers = nn.ModuleList(Layer(s) for _ in range(s.layers))
        self.norm = RMSNorm(s.hidden, s.eps)


class Target(nn.Module):
    """Qwen3 with tied embeddings."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Inner(shape)
        self.set_tables()
        initialise(self, shape.layers)

    def set_tables(self, device: torch.device | None = None) -> None:
        """(Re)builds the float32 RoPE tables; needed after a cast to bfloat16, which would round them."""
        cos, sin = rope_tables(self.shape.max_positions, self.shape, device)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, ids: Tensor, feature_layers: Sequence[int] = ()) -> tuple[Tensor, Tensor | None]:
        """ids [B, T] -> normed hidden states [B, T, E] and features [B, T, len(feature_layers) * E]."""
        length = ids.shape[1]
        cos, sin = self.cos[None, :length, None], self.sin[None, :length, None]
        x = self.model.embed_tokens(ids)
        features = []
        for index, layer in enumerate(self.model.layers):
            h = layer.input_layernorm(x)
            k, v = layer.self_attn.keys_values(h, cos, sin)
            x = x + layer.self_attn.attend(layer.self_attn.queries(h, cos, sin), k, v, None)
            x = layer.feed_forward(x)
            if index in feature_layers:
                features.append(x)
        return self.model.norm(x), torch.cat(features, -1) if features else None

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.model.embed_tokens.weight)

    def mask_embedding(self) -> Tensor:
        return self.model.embed_tokens.weight[MASK]


class Drafter(nn.Module):
    """DFlash: a few Qwen3 layers over [context features ; block], the block seen in both directions.

    It owns no embedding and no head; slots after the first hold the target's embedding of <|mask|>.
    """

    def __init__(self, shape: ModelShape, recipe: DrafterRecipe) -> None:
        super().__init__()
        self.shape, self.recipe = shape, recipe
        self.layers = nn.ModuleList(Layer(shape) for _ in range(recipe.layers))
        self.fc = nn.Linear(len(recipe.target_layers) * shape.hidden, shape.hidden, bias=False)
        self.hidden_norm = RMSNorm(shape.hidden, shape.eps)
        self.norm = RMSNorm(shape.hidden, shape.eps)
        cos, sin = rope_tables(shape.max_positions + 64, shape)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        initialise(self, recipe.layers)

    def forward(
        self, features: Tensor, positions: Tensor, roots: Tensor, root_positions: Tensor, mask_embedding: Tensor, mask: Tensor
    ) -> Tensor:
        """Hidden states of slots 1.. of every block: [B, N, block - 1, E].

        features [B, T, F * E] at positions [B, T]; roots [B, N, E] are the anchors' embeddings at root_positions
        [B, N]; mask [B, 1, N * block, T + N * block] is True where a slot may look.
        """
        block = self.recipe.block
        B, N = root_positions.shape
        masks = mask_embedding.to(roots.dtype).expand(B, N, block - 1, -1)
        x = torch.cat([roots[:, :, None], masks], 2).flatten(1, 2)
        slots = (root_positions[:, :, None] + torch.arange(block, device=x.device)).flatten(1)
        cos, sin = self.cos[slots][:, :, None], self.sin[slots][:, :, None]
        all_positions = torch.cat([positions, slots], 1)
        all_cos, all_sin = self.cos[all_positions][:, :, None], self.sin[all_positions][:, :, None]
        context = self.hidden_norm(self.fc(features))
        for layer in self.layers:
            h = layer.input_layernorm(x)
            k, v = layer.self_attn.keys_values(torch.cat([context, h], 1), all_cos, all_sin)
            x = x + layer.self_attn.attend(layer.self_attn.queries(h, cos, sin), k, v, mask)
            x = layer.feed_forward(x)
        return self.norm(x).unflatten(1, (N, block))[:, :, 1:]


def initialise(module: nn.Module, layers: int) -> None:
    """Normal 0.02, with the projections that write to the residual stream scaled down by its depth."""
    for name, p in module.named_parameters():
        if p.ndim == 2:
            writes = name.endswith(("o_proj.weight", "down_proj.weight"))
            nn.init.normal_(p, std=0.02 / (math.sqrt(2 * layers) if writes else 1.0))
