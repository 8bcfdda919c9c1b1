"""Sizes of the shapes that `shape8b.py` measures, and what their passes must read and compute at least. Nothing runs here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from ddtree_engine.checkpoint import DrafterConfig, StackConfig, TargetConfig, drafter_tensors, target_tensors


@dataclass(frozen=True, slots=True)
class Scale:
    """Everything that a run is made of."""

    target: TargetConfig
    drafter: DrafterConfig
    context: int  # slots filled before the measured rows
    batches: tuple[int, ...]
    budgets: tuple[int, ...]  # of one request's tree; the first is also measured at every batch size
    chunks: tuple[int, ...]  # rows of a prefill pass
    products: tuple[int, ...]  # rows at which the layers' matrix products are timed apart
    square: int  # side of the measured matrix product
    read_bytes: int  # of the measured read


def scale_of(stack: StackConfig, taps: tuple[int, ...], drafter_layers: int, **rest: object) -> Scale:
    drafter = DrafterConfig(replace(stack, layers=drafter_layers), 16, stack.vocab - 1, taps)
    return Scale(TargetConfig(stack, tied=False, eos_ids=()), drafter, **rest)  # type: ignore[arg-type]


QWEN3_8B = scale_of(
    StackConfig(4096, 36, 32, 8, 128, 12288, 151936, 1e-6, 1e6, 40960),
    (1, 9, 17, 25, 33),
    5,
    context=2048,
    batches=(1, 4, 16, 32),
    budgets=(16, 32, 64),
    chunks=(512, 2048),
    products=(1, 65),
    square=8192,
    read_bytes=8 << 30,
)
MICRO = scale_of(
    StackConfig(32, 2, 4, 2, 8, 48, 64, 1e-6, 1e6, 256),
    (0, 1),
    1,
    context=24,
    batches=(1, 2),
    budgets=(4, 8),
    chunks=(8, 24),
    products=(1,),
    square=64,
    read_bytes=1 << 16,
)


def numbers(shapes: Mapping[str, tuple[int, ...]]) -> int:
    return sum(int(np.prod(shape)) for shape in shapes.values())


def step_numbers(target: TargetConfig) -> int:
    """Weights that one pass reads: all but the embedding table, of which it reads a row a token (unless it is the head)."""
    shapes = target_tensors(target)
    if not target.tied:
        del shapes["model.embed_tokens.weight"]
    return numbers(shapes)


def draft_numbers(target: TargetConfig, drafter: DrafterConfig) -> int:
    """Weights that commit and draft read: the drafter's layers, their k and v once more for the context, the target's head."""
    shapes = drafter_tensors(drafter)
    context = {n: s for n, s in shapes.items() if "k_proj" in n or "v_proj" in n}
    layers = {n: s for n, s in shapes.items() if n.startswith("layers.")}
    return numbers(layers) + numbers(context) + target.stack.vocab * target.stack.hidden


def slot_numbers(stack: StackConfig) -> int:
    """Keys and values of one slot."""
    return 2 * stack.layers * stack.kv_heads * stack.head_dim


def prefill_flops(target: TargetConfig, tokens: int) -> int:
    """Of a prompt from its start: the layers' matrices, causal attention (no more than it needs), the head once."""
    s = target.stack
    matrices = sum(int(np.prod(shape)) for n, shape in target_tensors(target).items() if "layers." in n and len(shape) == 2)
    pairs = tokens * (tokens + 1) // 2
    return 2 * tokens * matrices + 4 * pairs * s.heads * s.head_dim * s.layers + 2 * s.vocab * s.hidden
