"""The Qwen3 target, and the decoder stack that it shares with the drafter.

Forward passes over rows; no sampling, no scheduling. Numbers: matrices in the served dtype, norms, RoPE, softmax and
logits in float32. Head dimensions of q and k are reordered when loading, so that the two halves which RoPE rotates lie
side by side and the rotation is one complex product; q . k does not change.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F  # noqa: N812

from ddtree_engine.attention import Attend
from ddtree_engine.cache import LayerCache
from ddtree_engine.checkpoint import StackConfig, TargetConfig

Tensors = dict[str, torch.Tensor]


class Linear:
    """x @ weight.T, with the weight in oneDNN's blocked layout on CPU (2-3 times faster at these sizes)."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._packed = _pack(weight)
        self.weight = None if self._packed is not None else weight  # the packed copy takes its place
        if self._packed is not None:  # looked up once: finding an overload costs as much as a small operation
            self._product = torch.ops.mkldnn._linear_pointwise.default
            self._product_add = torch.ops.mkldnn._linear_pointwise.binary

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._packed is not None:
            return self._product(x, self._packed, None, "none", [], "")
        assert self.weight is not None
        return F.linear(x, self.weight)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """residual + x @ weight.T; the residual may be overwritten with it."""
        if self._packed is not None:
            return self._product_add(x, residual, self._packed, None, "add")
        assert self.weight is not None
        return residual.addmm_(x, self.weight.t())  # one kernel and one rounding less


def _pack(weight: torch.Tensor) -> torch.Tensor | None:
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return None
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, 16)
        probe = torch.zeros(1, weight.shape[1], dtype=weight.dtype)
        torch.ops.mkldnn._linear_pointwise(probe, packed, None, "none", [], "")
    except (AttributeError, NotImplementedError, RuntimeError):  # a build or a processor without it
        return None
    return packed


class Norm:
    """RMSNorm over the last axis, in float32 inside. weight [..., dim] may differ per head."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        dim = weight.shape[-1]
        self.weight, self.eps = weight, eps
        self._fused = weight.device.type != "cpu" and weight.dim() == 1
        # x / rms(x) = x * sqrt(dim) / hypot(|x|, sqrt(dim * eps)): four small kernels instead of PyTorch's eight on CPU.
        self._floor = torch.tensor(math.sqrt(dim * eps), dtype=torch.float32, device=weight.device)
        self.weight_float = weight.float()
        self._scaled = self.weight_float * math.sqrt(dim)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._fused:
            return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)
        return self.exact(x, torch.empty_like(x))

    def exact(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """float32, whatever x is; `out` may be of another dtype."""
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32).hypot_(self._floor)
        if out is None or out.dtype == torch.float32:
            return torch.div(x, length, out=out).mul_(self._scaled)
        return torch.mul(x / length, self._scaled, out=out)


class Rope:
    """Rotations by position: complex64 [positions, head dim / 2], always in float32."""

    def __init__(self, positions: int, head_dim: int, theta: float, device: torch.device) -> None:
        inverse = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
        angles = torch.arange(positions, dtype=torch.float64)[:, None] * inverse
        self.turns = torch.polar(torch.ones_like(angles), angles).to(torch.complex64).to(device)

    def at(self, positions: torch.Tensor) -> torch.Tensor:
        """complex64 [rows, 1, head dim / 2]"""
        return self.turns.index_select(0, positions)[:, None]


def rotate(x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    """x float32 [..., heads, dim] in pairs, turned in place by complex [..., 1, dim / 2]."""
    torch.view_as_complex(x.view(*x.shape[:-1], -1, 2)).mul_(turns)
    return x


def pair_heads(weight: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Reorder the first axis of a q or k weight within each head: (0, half, 1, half + 1, ...)."""
    rest = weight.shape[1:]
    halves = weight.view(-1, 2, head_dim // 2, *rest)
    return halves.transpose(1, 2).reshape(weight.shape)


class Layer:
    """One decoder layer; q, k and v are one matrix, gate and up another."""

    def __init__(self, tensors: Tensors, prefix: str, stack: StackConfig) -> None:
        def take(name: str) -> torch.Tensor:
            return tensors[f"{prefix}{name}.weight"]

        dim = stack.head_dim
        q, k = pair_heads(take("self_attn.q_proj"), dim), pair_heads(take("self_attn.k_proj"), dim)
        v = take("self_attn.v_proj")
        self.input_norm = Norm(take("input_layernorm"), stack.eps)
        self.post_norm = Norm(take("post_attention_layernorm"), stack.eps)
        self.qkv = Linear(torch.cat([q, k, v]))
        self.kv_weight = torch.cat([k, v])  # [2 * kv heads * dim, hidden]; the drafter projects its context with it
        self.out = Linear(take("self_attn.o_proj"))
        self.gate_up = Linear(torch.cat([take("mlp.gate_proj"), take("mlp.up_proj")]))
        self.down = Linear(take("mlp.down_proj"))
        self.k_norm = pair_heads(take("self_attn.k_norm"), dim)  # [dim]
        q_norm = pair_heads(take("self_attn.q_norm"), dim)
        heads = torch.cat([q_norm.expand(stack.heads, dim), self.k_norm.expand(stack.kv_heads, dim)])
        self.qk_norm = Norm(heads, stack.eps)


class Steps(Protocol):
    """The steps of a layer but for attention, for the rows of one pass: as few kernels as the device allows."""

    def begin(self, positions: torch.Tensor, slots: torch.Tensor) -> None: ...

    def normed(self, x: torch.Tensor, norm: Norm, linear: Linear) -> torch.Tensor:
        """linear(norm(x)) for the pass's rows [rows, hidden]"""
        ...

    def project(self, qkv: torch.Tensor, qk_norm: Norm, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Normalise and turn q and k; write k and v to the rows' slots; q [rows, heads, dim]."""
        ...

    def gated(self, x: torch.Tensor, norm: Norm, gate_up: Linear) -> torch.Tensor:
        """silu(gate) * up [rows, ff] of gate_up(norm(x))"""
        ...

    def add(self, linear: Linear, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """residual + linear(x); the residual may be overwritten with it."""
        ...

    def head(self, x: torch.Tensor, norm: Norm, linear: Linear) -> torch.Tensor:
        """linear(norm(x)) after the last layer, for any number of rows"""
        ...


class TorchSteps:
    """In plain PyTorch: the CPU path, and the reference of the fused kernels.

    At a few rows a pass is as long as its list of operations, so what layers have in common is made once: a pass's turns,
    and buffers with their views. What `project` gives is therefore only good until it is called again.
    """

    def __init__(self, config: StackConfig, rope: Rope, dtype: torch.dtype) -> None:
        self._config, self._rope, self._dtype = config, rope, dtype
        self._heads = (config.heads + config.kv_heads, config.kv_heads)  # of qkv: with norm and turns, and without
        self._shape = (-1, sum(self._heads), config.head_dim)
        self._rows = -1  # that buffers are made for

    def begin(self, positions: torch.Tensor, slots: torch.Tensor) -> None:
        self._turns, self._slots = self._rope.at(positions), slots
        if positions.shape[0] != self._rows:
            self._make(positions.shape[0])

    def _make(self, rows: int) -> None:
        c = self._config
        self._rows = rows
        self._wide = torch.empty(rows, self._heads[0], c.head_dim, dtype=torch.float32)
        self._pairs = torch.view_as_complex(self._wide.view(rows, self._heads[0], -1, 2))
        self._qk = self._wide if self._dtype == torch.float32 else torch.empty_like(self._wide, dtype=self._dtype)
        self._q, self._k = self._qk.split_with_sizes((c.heads, c.kv_heads), 1)
        self._normed = torch.empty(rows, c.hidden, dtype=self._dtype)

    def normed(self, x: torch.Tensor, norm: Norm, linear: Linear) -> torch.Tensor:
        return linear(norm.exact(x, self._normed))

    def project(self, qkv: torch.Tensor, qk_norm: Norm, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        qk, v = qkv.view(self._shape).split_with_sizes(self._heads, 1)
        qk_norm.exact(qk, self._wide)
        self._pairs.mul_(self._turns)
        if self._qk is not self._wide:
            self._qk.copy_(self._wide)
        keys.index_copy_(0, self._slots, self._k)
        values.index_copy_(0, self._slots, v)
        return self._q

    def gated(self, x: torch.Tensor, norm: Norm, gate_up: Linear) -> torch.Tensor:
        both = gate_up(norm.exact(x, self._normed))
        gate, up = both.split_with_sizes((self._config.ff, self._config.ff), 1)  # half of chunk's time
        return F.silu(gate).mul_(up)

    add = staticmethod(Linear.add)  # no call more than the product itself

    def head(self, x: torch.Tensor, norm: Norm, linear: Linear) -> torch.Tensor:
        return linear(norm(x))


def _triton_steps() -> Callable[[StackConfig, Rope], Steps]:
    from ddtree_engine.step_kernels import TritonSteps

    return TritonSteps


class Stack:
    """Decoder layers over rows. Writes the rows' keys and values to their slots, then attends."""

    def __init__(self, tensors: Tensors, prefix: str, config: StackConfig, positions: int, device: torch.device):
        self.config = config
        self.layers = [Layer(tensors, f"{prefix}layers.{i}.", config) for i in range(config.layers)]
        self.rope = Rope(positions, config.head_dim, config.theta, device)
        self.steps: Steps
        if device.type == "cpu":
            self.steps = TorchSteps(config, self.rope, self.layers[0].kv_weight.dtype)
        else:
            self.steps = _triton_steps()(config, self.rope)

    def forward(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        cache: LayerCache,
        attend: Attend,
        taps: Sequence[int] = (),
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """x [rows, hidden] -> (x after the last layer, outputs of the layers in `taps`)."""
        tapped, steps = [], self.steps
        steps.begin(positions, slots)
        for i, (layer, (keys, values)) in enumerate(zip(self.layers, cache.layers, strict=True)):
            queries = steps.project(steps.normed(x, layer.input_norm, layer.qkv), layer.qk_norm, keys, values)
            x = steps.add(layer.out, attend(queries, keys, values), x)
            x = steps.add(layer.down, steps.gated(x, layer.post_norm, layer.gate_up), x)
            if i in taps:
                tapped.append(x.clone())  # the next layer adds to x in place
        return x, tapped


@dataclass(frozen=True, slots=True)
class Hidden:
    """What a target pass leaves on the device."""

    last: torch.Tensor  # [rows, hidden], before the final norm
    tapped: list[torch.Tensor]  # [rows, hidden] of each tapped layer


class Target:
    """Embedding, stack, final norm and head of a dense Qwen3."""

    def __init__(self, tensors: Tensors, config: TargetConfig, positions: int, device: torch.device) -> None:
        self.config = config
        self.embedding = tensors["model.embed_tokens.weight"]
        self.stack = Stack(tensors, "model.", config.stack, positions, device)
        self.final_norm = Norm(tensors["model.norm.weight"], config.stack.eps)
        self.head = Linear(self.embedding if config.tied else tensors["lm_head.weight"])

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(token_ids, self.embedding)

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        cache: LayerCache,
        attend: Attend,
        taps: Sequence[int],
    ) -> Hidden:
        return Hidden(*self.stack.forward(self.embed(token_ids), positions, slots, cache, attend, taps))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 [rows, vocab] from rows before the final norm."""
        return self.stack.steps.head(hidden, self.final_norm, self.head).float()
