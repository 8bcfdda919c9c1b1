"""What passes of Qwen3-8B's shape cost on one CUDA device, beside what the device can do at best: random weights, no files.

    python engine/benchmarks/shape8b.py [--repeats 30] [--no-profile] [--json PATH]
    python engine/benchmarks/shape8b.py --micro        # a tiny shape on CPU: tries the benchmark, measures nothing

Target: 36 layers, hidden 4096, 32 heads on 8 key heads of 128, feed-forward 12288, vocabulary 151936, untied, bfloat16.
Drafter: DFlash, 5 layers, blocks of 16, features of layers 1, 9, 17, 25 and 33. Every request has 2048 tokens of context.

Method: the ceilings (reading, matrix products) are measured in the same process; a step's floor is the bytes of weights
that it must read over the read bandwidth. Graph replays are timed with CUDA events, arms interleaved; whole rounds, host
work included, with the wall clock. Medians with the range beside them. Weights are random, so nothing here says how many
drafts a target accepts: a pass and a round cost the same whatever is accepted. Kernel times come from a profiler run of
their own.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from ddtree_engine.cache import Cache, CacheShape
from ddtree_engine.captured import Shape
from ddtree_engine.checkpoint import drafter_tensors, target_tensors
from ddtree_engine.drafter import Drafter
from ddtree_engine.forest import Forest, Sizes
from ddtree_engine.graphs import CudaRunner
from ddtree_engine.loading import device_facts
from ddtree_engine.model import Target
from ddtree_engine.rows import Segment, Sight
from ddtree_engine.runner import Decoding, Settle
from ddtree_engine.tiles import ReferenceAttention
from ddtree_engine.tree import Tree, best_first, root_only
from device_timing import Call, Ceilings, Times, captured, device_times, kernel_ms, wall_times
from shape8b_sizes import MICRO, QWEN3_8B, Scale, draft_numbers, prefill_flops, slot_numbers, step_numbers

MAX_NODES, K = 64, 8


# Models -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OnlyThese(Shape):
    """Captures no more sizes than are measured. An engine whose budget is fixed captures these and others."""

    rows: tuple[int, ...] = ()
    requests: tuple[int, ...] = ()

    @property
    def row_buckets(self) -> tuple[int, ...]:
        return self.rows

    @property
    def request_buckets(self) -> tuple[int, ...]:
        return self.requests


def random_tensors(shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, device: torch.device) -> dict[str, torch.Tensor]:
    generator = torch.Generator(device).manual_seed(1)
    return {
        name: torch.ones(shape, dtype=dtype, device=device)
        if len(shape) == 1
        else torch.empty(shape, dtype=dtype, device=device).normal_(0.0, 0.02, generator=generator)
        for name, shape in shapes.items()
    }


@dataclass(frozen=True, slots=True)
class Runners:
    """Two over the same target and cache: one without a drafter for plain steps, one with for trees."""

    plain: CudaRunner
    drafting: CudaRunner


def build(scale: Scale, device: torch.device, dtype: torch.dtype, rows: tuple[int, ...] = ()) -> Runners:
    """Models and a cache of random numbers, graphs captured: for `rows`, or for the trees of the scale's budgets."""
    target_config, block, most = scale.target, scale.drafter.block_size, max(scale.batches)
    slab = scale.context + max(MAX_NODES + 1, block)
    target = Target(random_tensors(target_tensors(target_config), dtype, device), target_config, slab, device)
    drafter = Drafter(
        random_tensors(drafter_tensors(scale.drafter), dtype, device),
        scale.drafter,
        target,
        block_size=block,
        positions=slab,
        device=device,
    )
    cache = Cache(CacheShape(most, slab), target_config.stack, scale.drafter, dtype, device)
    assert cache.drafter is not None
    assert cache.features is not None
    for pool in (cache.target.keys, cache.target.values, cache.drafter.keys, cache.drafter.values, cache.features):
        pool.normal_()
    if device.type == "cuda":
        from ddtree_engine.attention_kernel import TileAttention as Attention
        from ddtree_engine.tree_kernel import grow_into
    else:
        Attention, grow_into = ReferenceAttention, no_trees  # type: ignore[assignment,misc]
    trees = {budget + 1 for budget in scale.budgets} | {n * (scale.budgets[0] + 1) for n in scale.batches}
    plain, drafting = (CudaRunner(target, d, cache, device, Attention, grow_into) for d in (None, drafter))
    runners = Runners(plain, drafting)
    sizes = {"max_requests": most, "max_nodes": MAX_NODES, "block": block, "k": K}
    runners.plain.capture(OnlyThese(**sizes, rows=scale.batches, requests=scale.batches), lambda share: None)
    runners.drafting.capture(OnlyThese(**sizes, rows=rows or tuple(sorted(trees)), requests=scale.batches), lambda share: None)
    return runners


def no_trees(out: torch.Tensor, *rest: object) -> None:
    """On CPU only the benchmark is tried: every next tree is its root."""
    out[:, 0] = 1


@dataclass(frozen=True, slots=True)
class Batch:
    """Trees of random candidates, one a request, all of them at the same context."""

    decoding: Decoding
    settle: Settle

    @classmethod
    def of(cls, runner: CudaRunner, trees: Sequence[Tree], past: int) -> Batch:
        n, every = len(trees), np.ones(len(trees), dtype=np.int64)
        bases = np.array([runner.cache.shape.base(i) for i in range(n)])
        forest = Forest.planted(trees, Sizes(MAX_NODES + 1, 0))
        return cls(
            Decoding(forest, bases, every * past),
            Settle(np.arange(n), every * past, every * K, every * MAX_NODES),
        )


def random_tree(scale: Scale, budget: int) -> Tree:
    random = np.random.default_rng(budget)
    logprobs = -np.sort(random.uniform(0.1, 3.0, (scale.drafter.block_size - 1, K)), axis=1)
    return best_first(0, logprobs.tolist(), [list(range(K))] * len(logprobs), budget)


# Arms ---------------------------------------------------------------------------------------------------------------


def replayed(runner: CudaRunner, batch: Batch, part: str) -> Call:
    """Launches the graph that `replay` would take for this batch, its inputs filled once."""
    graphs = runner._graphs  # the graph without the host's part has no public name
    assert graphs is not None
    rows = int(batch.decoding.forest.rows.sum())
    graphs._verify[rows].run(batch.decoding)
    if part == "verify":
        return graphs._verify[rows].launch
    settle = graphs._settle[len(batch.settle.index)]
    settle.run(batch.decoding, batch.settle)
    return settle.launch


def passes(scale: Scale, runners: Runners) -> tuple[dict[str, Call], dict[str, Call]]:
    """(graphs to time on the device, whole rounds to time on the host)."""
    graphs: dict[str, Call] = {}
    rounds: dict[str, Call] = {}
    for n in scale.batches:
        one = Batch.of(runners.plain, [root_only(0)] * n, scale.context)
        graphs[f"step {n}"] = replayed(runners.plain, one, "verify")
        rounds[f"step {n}"] = _round(runners.plain, one, settle=False)
    for budget in scale.budgets:
        for n in scale.batches if budget == scale.budgets[0] else (1,):
            batch = Batch.of(runners.drafting, [random_tree(scale, budget)] * n, scale.context)
            graphs[f"verify {n}x{budget + 1}"] = replayed(runners.drafting, batch, "verify")
            rounds[f"round {n}x{budget + 1}"] = _round(runners.drafting, batch, settle=True)
            if budget == scale.budgets[0]:
                graphs[f"draft {n}"] = replayed(runners.drafting, batch, "settle")
    return graphs, rounds


def _round(runner: CudaRunner, batch: Batch, *, settle: bool) -> Call:
    return lambda: runner.replay(batch.decoding, [], batch.settle if settle else None)


def products(target: Target, rows: int, device: torch.device) -> dict[str, tuple[Call, int]]:
    """Every layer's products with one of its matrices (and the head's): how, and how many weights that reads."""
    s, layers = target.config.stack, target.stack.layers
    dtype = target.embedding.dtype
    x, wide, ff = (torch.randn(rows, n, device=device).to(dtype) for n in (s.hidden, s.heads * s.head_dim, s.ff))
    qkv = (s.heads + 2 * s.kv_heads) * s.head_dim * s.hidden
    calls: dict[str, tuple[Call, int]] = {
        "qkv": (lambda: [layer.qkv(x) for layer in layers], qkv * s.layers),
        "out": (lambda: [layer.out.add(wide, x) for layer in layers], wide.shape[1] * s.hidden * s.layers),
        "gate_up": (lambda: [layer.gate_up(x) for layer in layers], 2 * s.ff * s.hidden * s.layers),
        "down": (lambda: [layer.down.add(ff, x) for layer in layers], s.ff * s.hidden * s.layers),
        "head": (lambda: target.head(x), s.vocab * s.hidden),
    }
    return {name: (captured(call, device), size) for name, (call, size) in calls.items()}


def prefill(scale: Scale, runner: CudaRunner, chunk: int) -> Call:
    """A whole prompt of `context` tokens in passes of `chunk` rows, and the last row's logits; runs without graphs."""
    tokens = list(range(min(scale.context, scale.target.stack.vocab))) * -(-scale.context // scale.target.stack.vocab)

    def run() -> None:
        for start in range(0, scale.context, chunk):
            end = min(scale.context, start + chunk)
            rows = runner.batch([Segment(0, start, tokens[start:end], range(start, end), Sight.CAUSAL)])
            hidden = runner.verify(rows, features=False)
        runner.logits(hidden, [rows.rows - 1])

    return run


# Report -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Figures:
    """What was measured, and what it is held against."""

    device: dict[str, str | None]
    ceilings: Ceilings
    graphs: dict[str, Times]
    rounds: dict[str, Times]
    prefill: dict[str, Times]
    products: dict[str, tuple[Times, int]]  # with the weights read
    kernels: dict[str, dict[str, float]]


def measure(scale: Scale, device: torch.device, repeats: int, *, profile: bool) -> Figures:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    facts = asdict(device_facts(device)) | {"torch": torch.__version__, "dtype": str(dtype)}
    best = Ceilings.measure(scale.read_bytes, scale.square, device, repeats)
    runners = build(scale, device, dtype)
    graphs, rounds = passes(scale, runners)
    prompts = {f"prefill {chunk}": prefill(scale, runners.plain, chunk) for chunk in scale.chunks}
    matrices = {f"{name} {n}": p for n in scale.products for name, p in products(runners.plain.target, n, device).items()}
    times = device_times({name: call for name, (call, _) in matrices.items()}, device, repeats)
    figures = Figures(
        facts,
        best,
        device_times(graphs, device, repeats),
        wall_times(rounds, device, repeats),
        device_times(prompts, device, repeats),
        {name: (times[name], size) for name, (_, size) in matrices.items()},
        {},
    )
    if profile:
        figures.kernels.update({name: kernel_ms(call, device) for name, call in (graphs | prompts).items()})
    return figures


def report(scale: Scale, f: Figures, itemsize: int = 2) -> str:
    band, rate = f.ceilings.bandwidth, f.ceilings.rate
    weights, kv = step_numbers(scale.target) * itemsize, slot_numbers(scale.target.stack) * itemsize * scale.context
    drafter = draft_numbers(scale.target, scale.drafter) * itemsize
    floor, step = weights / band, f.graphs["step 1"].median
    lines = [
        ", ".join(f"{k} {v}" for k, v in f.device.items()),
        f"read {band / 1e9:.2f} TB/s, product {rate / 1e9:.0f} TFLOP/s",
        f"weights read by a step {weights / 1e9:.2f} GB: floor {floor:.3f} ms; keys and values of a request {kv / 1e9:.3f} GB",
        "graphs (device time)",
    ]
    for name, t in f.graphs.items():
        kind, _, size = name.partition(" ")
        requests = int(size.split("x")[0])
        least = drafter / band if kind == "draft" else (weights + kv * requests) / band
        base = f.graphs[f"step {requests}"].median
        note = f"{least / t.median:.0%} of the floor with the cache's bytes; {t.median / base:.2f}x of step {requests}"
        if name == "step 1":
            note = f"{floor / step:.0%} of the weights' floor; {least / step:.0%} with the cache's bytes"
        lines.append(f"  {name:<14}{t!s:<32}{note}")
    lines.append("rounds (wall time, host included)")
    lines += [f"  {name:<14}{t!s:<32}" for name, t in f.rounds.items()]
    lines.append(f"prefill of {scale.context} tokens, {prefill_flops(scale.target, scale.context) / 1e12:.1f} TFLOP")
    for name, t in f.prefill.items():
        share = prefill_flops(scale.target, scale.context) / t.median / rate
        lines.append(f"  {name:<14}{t!s:<32}{share:.0%} of the product's rate")
    lines.append("matrix products, all layers (device time, share of the read bandwidth)")
    for name, (t, size) in f.products.items():
        lines.append(f"  {name:<14}{t!s:<32}{size * itemsize / band / t.median:.0%}")
    lines += [
        f"kernels of {name}: " + ", ".join(f"{k} {ms:.3f}" for k, ms in kinds.items() if not k.startswith("other: "))
        for name, kinds in f.kernels.items()
        if kinds
    ]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--micro", action="store_true", help="a tiny shape on CPU, to try the benchmark itself")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--no-profile", action="store_true", help="leave out the kernel times")
    parser.add_argument("--json", type=Path, help="write every figure there too")
    args = parser.parse_args(argv)
    if not args.micro and not torch.cuda.is_available():
        parser.error("no CUDA device is visible to this process; --micro tries the benchmark on CPU")
    scale, device = (MICRO, torch.device("cpu")) if args.micro else (QWEN3_8B, torch.device("cuda"))
    if args.micro:
        torch.set_num_threads(1)
    with torch.inference_mode():
        figures = measure(scale, device, args.repeats, profile=not args.no_profile)
    print(report(scale, figures, 4 if args.micro else 2))
    if args.json:
        args.json.write_text(json.dumps(asdict(figures), indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
