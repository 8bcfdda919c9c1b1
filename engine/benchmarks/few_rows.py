"""What products of few rows and overlapping launches save: whole passes, and single products of Qwen3-8B's shape at one row.

    python engine/benchmarks/few_rows.py [--rows 1 9 17 33 65 130] [--repeats 15]       # CUDA
    TRITON_INTERPRET=1 python engine/benchmarks/few_rows.py --micro    # tries the benchmark on CPU, measures nothing

Method: one pass (stack and logits) over the rows of one tree at 192 tokens of context, random weights, captured as a CUDA
graph once an arm and replayed in turns; CUDA events, medians with the range. The arms are the engine's own steps with
`products.py` and `overlap.py` switched off and on, and with their limits of rows as they are.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from unittest.mock import patch

import torch
from ddtree_engine import model, tiles
from ddtree_engine.cache import LayerCache
from ddtree_engine.checkpoint import StackConfig, TargetConfig, target_tensors
from ddtree_engine.model import Target
from device_timing import Times, captured, device_times
from shape8b import random_tensors
from shape8b_sizes import QWEN3_8B

CONTEXT = 192
BUNDLED = StackConfig(256, 8, 4, 2, 64, 768, 3072, 1e-6, 1e4, 4096)
MICRO = StackConfig(64, 2, 4, 2, 32, 96, 100, 1e-6, 1e4, 512)
ALL = 1 << 20  # rows
OFF, FUSED, BOTH, AS_IT_IS = "cuBLASLt", "fused", "fused, overlapping", "as the engine runs"


@contextmanager
def arm(name: str) -> Iterator[None]:
    """The engine's steps, as they are captured in this arm."""
    from ddtree_engine import overlap, products

    fused, over = {OFF: (0, 0), FUSED: (ALL, 0), BOTH: (ALL, ALL), AS_IT_IS: (products.MOST_ROWS, overlap.MOST_ROWS)}[name]
    takes = products.takes if fused else lambda *args, **more: False
    products.tile_for.cache_clear()
    with patch.multiple(products, takes=takes, MOST_ROWS=fused), patch.object(overlap, "MOST_ROWS", over):
        yield
    products.tile_for.cache_clear()


def random_target(config: TargetConfig, positions: int, device: torch.device, dtype: torch.dtype) -> Target:
    from ddtree_engine.step_kernels import TritonSteps

    with patch.object(model, "_pack", lambda weight: None):  # where the benchmark is only tried: weights as on CUDA
        target = Target(random_tensors(target_tensors(config), dtype, device), config, positions, device)
    target.stack.steps = TritonSteps(config.stack, target.stack.rope)
    return target


class Pass:
    """A target of random weights and everything that a pass over one tree needs."""

    def __init__(self, stack: StackConfig, device: torch.device, dtype: torch.dtype) -> None:
        from ddtree_engine.attention_kernel import TileAttention

        config, positions = TargetConfig(stack, tied=True, eos_ids=()), CONTEXT + 256
        self._target = random_target(config, positions, device, dtype)
        self._cache, self._attention = LayerCache(stack, positions, dtype, device), TileAttention
        self._stack, self._device = stack, device

    def of(self, rows: int) -> Callable[[], torch.Tensor]:
        s, at = self._stack, torch.arange(rows, device=self._device) + CONTEXT
        size = tiles.rows_per_tile(s.heads // s.kv_heads)
        first = torch.arange(0, rows, size, device=self._device)
        sight = tiles.RowSight(torch.zeros_like(at), torch.full_like(at, CONTEXT + 1), torch.full_like(at, 3))
        table = tiles.Tiles(first, (rows - first).clamp(max=size), torch.full_like(first, CONTEXT + min(rows, 64)))
        attention = self._attention(tiles.AttentionShape(rows, len(first), s.heads, s.kv_heads, s.head_dim), self._device)
        tokens, target = at % s.vocab, self._target

        def run() -> torch.Tensor:
            attend = lambda q, k, v: attention(q, k, v, sight, table)  # noqa: E731
            return target.logits(target.forward(tokens, at, at, self._cache, attend, ()).last)

        return run


def passes(stack: StackConfig, rows: Sequence[int], device: torch.device, dtype: torch.dtype, repeats: int) -> str:
    made, lines = Pass(stack, device, dtype), []
    for n in rows:
        calls = {}
        for name in (OFF, FUSED, BOTH, AS_IT_IS):
            with arm(name):
                calls[name] = captured(made.of(n), device)
        lines.append(f"  {n:>4} rows  " + _line(device_times(calls, device, repeats)))
    return "\n".join(lines)


def products_of_one_row(stack: StackConfig, device: torch.device, dtype: torch.dtype, repeats: int) -> str:
    """Every layer's product with what surrounds it, one row: a line a product."""
    target = random_target(TargetConfig(stack, tied=False, eos_ids=()), 8, device, dtype)
    steps, layers = target.stack.steps, target.stack.layers
    x, wide, ff = (torch.randn(1, n, device=device).to(dtype) for n in (stack.hidden, stack.heads * stack.head_dim, stack.ff))
    calls: dict[str, Callable[[], object]] = {
        "norm, qkv": lambda: [steps.normed(x, layer.input_norm, layer.qkv) for layer in layers],
        "out, residual": lambda: [steps.add(layer.out, wide, x) for layer in layers],
        "norm, gate, up, SwiGLU": lambda: [steps.gated(x, layer.post_norm, layer.gate_up) for layer in layers],
        "down, residual": lambda: [steps.add(layer.down, ff, x) for layer in layers],
    }
    lines = []
    for what, call in calls.items():
        both = {}
        for name in (OFF, FUSED):
            with arm(name):
                both[name] = captured(call, device)
        lines.append(f"  {what:<24}" + _line(device_times(both, device, repeats)))
    return "\n".join(lines)


def _line(times: dict[str, Times]) -> str:
    return "   ".join(f"{name} {t.median * 1e3:.1f} us ({t.low * 1e3:.1f}-{t.high * 1e3:.1f})" for name, t in times.items())


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 9, 17, 33, 65, 130])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument(
        "--micro", action="store_true", help="a tiny shape in Triton's interpreter, to try the benchmark itself"
    )
    args = parser.parse_args(argv)
    if not args.micro and not torch.cuda.is_available():
        parser.error("no CUDA device is visible to this process; TRITON_INTERPRET=1 and --micro try the benchmark on CPU")
    device, dtype = (torch.device("cpu"), torch.float16) if args.micro else (torch.device("cuda"), torch.bfloat16)
    small, large = (MICRO, MICRO) if args.micro else (BUNDLED, QWEN3_8B.target.stack)
    with torch.inference_mode():
        print("a pass of the small model\n" + passes(small, args.rows, device, dtype, args.repeats))
        print(f"{large.layers} layers' products, one row\n" + products_of_one_row(large, device, dtype, args.repeats))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
