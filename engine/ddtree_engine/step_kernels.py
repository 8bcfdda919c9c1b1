"""The steps of a decoder layer on CUDA: element-wise ones as Triton kernels, and which of them products do in their pass.

Not here: attention (`attention_kernel.py`), products of few rows (`products.py`).

Needs triton, and CUDA to run: imported only where the device is CUDA.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ddtree_engine import products
from ddtree_engine.checkpoint import StackConfig
from ddtree_engine.model import Linear, Norm, Rope
from ddtree_engine.overlap import announce, overlapping, wait


@triton.jit
def _norm_rope_store(
    qkv_ptr,
    weight_ptr,  # float32 [heads + kv heads, dim]
    turns_ptr,  # float32 [positions, dim / 2, 2]: cosine and sine
    position_ptr,
    slot_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    qkv_row,
    kv_slot,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HALF_PAD: tl.constexpr,
    PDL: tl.constexpr,
):
    announce(PDL)
    wait(PDL)
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = tl.arange(0, HALF_PAD)
    inside = i < DIM // 2
    source = qkv_ptr + row * qkv_row + head * DIM + 2 * i
    even = tl.load(source, mask=inside, other=0.0)
    odd = tl.load(source + 1, mask=inside, other=0.0)
    slot = tl.load(slot_ptr + row)
    if head >= HEADS + KV_HEADS:
        place = v_ptr + slot * kv_slot + (head - HEADS - KV_HEADS) * DIM + 2 * i
        tl.store(place, even, mask=inside)
        tl.store(place + 1, odd, mask=inside)
    else:
        e, o = even.to(tl.float32), odd.to(tl.float32)
        scale = 1.0 / tl.sqrt((tl.sum(e * e, 0) + tl.sum(o * o, 0)) / DIM + eps)
        e = e * scale * tl.load(weight_ptr + head * DIM + 2 * i, mask=inside, other=0.0)
        o = o * scale * tl.load(weight_ptr + head * DIM + 2 * i + 1, mask=inside, other=0.0)
        turn = turns_ptr + tl.load(position_ptr + row) * DIM + 2 * i
        cos = tl.load(turn, mask=inside, other=0.0)
        sin = tl.load(turn + 1, mask=inside, other=0.0)
        if head < HEADS:
            place = q_ptr + row * (HEADS * DIM) + head * DIM + 2 * i
        else:
            place = k_ptr + slot * kv_slot + (head - HEADS) * DIM + 2 * i
        tl.store(place, (e * cos - o * sin).to(q_ptr.dtype.element_ty), mask=inside)
        tl.store(place + 1, (e * sin + o * cos).to(q_ptr.dtype.element_ty), mask=inside)


def norm_rope_store(
    qkv: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    turns: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    heads: int,
) -> torch.Tensor:
    """Normalise and turn q and k, write k and v to their slots; returns q [rows, heads, dim].

    qkv [rows, (heads + 2 * kv heads) * dim]; turns complex64 [positions, dim / 2]; pairs of a head lie side by side.
    """
    rows, (_, kv_heads, dim) = qkv.shape[0], keys.shape
    q = torch.empty(rows, heads, dim, dtype=qkv.dtype, device=qkv.device)
    _norm_rope_store[(rows, heads + 2 * kv_heads)](
        qkv,
        weight,
        torch.view_as_real(turns),
        positions,
        slots,
        q,
        keys,
        values,
        qkv.stride(0),
        keys.stride(0),
        eps,
        HEADS=heads,
        KV_HEADS=kv_heads,
        DIM=dim,
        HALF_PAD=triton.next_power_of_2(dim // 2),
        num_warps=1,  # a head is one or two elements a thread
        **overlapping(qkv.device, rows),
    )
    return q


@triton.jit
def _swiglu(gate_up_ptr, out_ptr, ff, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < ff
    gate = tl.load(gate_up_ptr + row * 2 * ff + i, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * 2 * ff + ff + i, mask=inside, other=0.0).to(tl.float32)
    out = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out_ptr + row * ff + i, out.to(out_ptr.dtype.element_ty), mask=inside)


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up for [rows, 2 * ff] with the gate first."""
    rows, ff = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, ff, dtype=gate_up.dtype, device=gate_up.device)
    _swiglu[(rows, triton.cdiv(ff, 1024))](gate_up, out, ff, BLOCK=1024)
    return out


@triton.jit
def _rms_norm(x_ptr, weight_ptr, out_ptr, dim, eps, PAD: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, PAD)
    x = tl.load(x_ptr + row * dim + i, mask=i < dim, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + i, mask=i < dim, other=0.0)
    out = x * (1.0 / tl.sqrt(tl.sum(x * x, 0) / dim + eps)) * weight
    tl.store(out_ptr + row * dim + i, out.to(out_ptr.dtype.element_ty), mask=i < dim)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [rows, dim], contiguous; weight float32 [dim]."""
    rows, dim = x.shape
    out = torch.empty_like(x)
    pad = triton.next_power_of_2(dim)
    _rms_norm[(rows,)](x, weight, out, dim, eps, PAD=pad, num_warps=max(1, min(16, pad // 256)))
    return out


class TritonSteps:
    """One kernel a step where `products` takes the product; else cuBLAS between element-wise kernels (see `model.Steps`)."""

    def __init__(self, config: StackConfig, rope: Rope) -> None:
        self._config, self._rope = config, rope

    def begin(self, positions: torch.Tensor, slots: torch.Tensor) -> None:
        self._positions, self._slots = positions, slots

    def normed(self, x: torch.Tensor, norm: Norm, linear: Linear) -> torch.Tensor:
        if products.takes(x, linear.weight):
            return products.product(x, linear.weight, norm=norm)
        return linear(rms_norm(x, norm.weight_float, norm.eps))

    def project(self, qkv: torch.Tensor, qk_norm: Norm, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return norm_rope_store(
            qkv,
            qk_norm.weight_float,
            qk_norm.eps,
            self._rope.turns,
            self._positions,
            self._slots,
            keys,
            values,
            self._config.heads,
        )

    def gated(self, x: torch.Tensor, norm: Norm, gate_up: Linear) -> torch.Tensor:
        if products.takes(x, gate_up.weight, gated=True):
            return products.product(x, gate_up.weight, norm=norm, gated=True)
        return swiglu(gate_up(rms_norm(x, norm.weight_float, norm.eps)))

    def add(self, linear: Linear, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        if products.takes(x, linear.weight):
            return products.product(x, linear.weight, residual=residual)
        return linear.add(x, residual)

    head = normed
