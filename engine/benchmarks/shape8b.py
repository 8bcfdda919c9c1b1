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
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from ddtree_engine.cache import Cache, CacheShape
from ddtree_engine.checkpoint import DrafterConfig, StackConfig, TargetConfig, drafter_tensors, target_tensors
from ddtree_engine.drafter import Drafter
from ddtree_engine.graphs import CudaRunner, Shape
from ddtree_engine.loading import device_facts
from ddtree_engine.model import Target
from ddtree_engine.rows import Segment, Sight
from ddtree_engine.runner import Settle
from ddtree_engine.tiles import ReferenceAttention
from ddtree_engine.tree import Tree, best_first, root_only

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU
    triton = None

MAX_NODES, K = 64, 8
Call = Callable[[], object]


# Sizes --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Scale:
    """Everything that a run is made of."""

    target: TargetConfig
    drafter: DrafterConfig
    context: int  # slots filled before the measured rows
    batches: tuple[int, ...]
    budgets: tuple[int, ...]  # of one request's tree; the first is also measured at every batch size
    chunks: tuple[int, ...]  # rows of a prefill pass
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


# Timing -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Times:
    """Milliseconds."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Times:
        return cls(statistics.median(values), min(values), max(values))

    def __str__(self) -> str:
        return f"{self.median:.3f} ms ({self.low:.3f}-{self.high:.3f})"


def device_times(calls: Mapping[str, Call], device: torch.device, repeats: int) -> dict[str, Times]:
    """Interleaved, by CUDA events; on CPU by the wall clock."""
    if device.type != "cuda":
        return wall_times(calls, device, repeats)
    marks: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in calls}
    for n in range(repeats + 3):
        for name, call in calls.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            call()
            end.record()
            if n >= 3:
                marks[name].append((start, end))
    torch.cuda.synchronize()
    return {name: Times.of([a.elapsed_time(b) for a, b in pairs]) for name, pairs in marks.items()}


def wall_times(calls: Mapping[str, Call], device: torch.device, repeats: int) -> dict[str, Times]:
    """Interleaved; a call is over when the device is idle."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for n in range(repeats + 3):
        for name, call in calls.items():
            started = time.perf_counter()
            call()
            if device.type == "cuda":
                torch.cuda.synchronize()
            if n >= 3:
                seconds[name].append((time.perf_counter() - started) * 1e3)
    return {name: Times.of(values) for name, values in seconds.items()}


KINDS = (
    ("attention", ("_attend_part", "_join_parts")),
    ("norm, rope, swiglu", ("_norm_rope_store", "_swiglu", "rms_norm", "RMSNorm", "layer_norm", "LayerNorm")),
    ("matrix", ("gemm", "gemv", "cutlass", "nvjet", "splitK", "cublas")),
    ("top-k", ("topk", "TopK", "radix", "Radix", "sort", "Sort", "gatherTopK")),
    ("reductions", ("reduce_kernel", "softmax", "Reduce")),
)


def kernel_ms(call: Call, device: torch.device, repeats: int = 4) -> dict[str, float]:
    """Milliseconds a call by kind of kernel, then the five longest of the rest by name. Empty on CPU."""
    if device.type != "cuda":
        return {}
    call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(repeats):
            call()
        torch.cuda.synchronize()
    kinds = {kind: 0.0 for kind, _ in KINDS}
    rest: dict[str, float] = {}
    for event in profile.key_averages():
        ms = event.self_device_time_total / 1e3 / repeats
        kind = next((kind for kind, words in KINDS if any(w in event.key for w in words)), None)
        if kind:
            kinds[kind] += ms
        elif ms > 0:
            rest[event.key[:120]] = ms
    longest = sorted(rest, key=lambda name: -rest[name])[:5]
    kinds["other"] = sum(rest.values())
    return kinds | {f"other: {name}": rest[name] for name in longest}


# Models -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OnlyThese(Shape):
    """Captures no more sizes than are measured. An engine whose budget is fixed captures these and others."""

    rows: tuple[int, ...]
    requests: tuple[int, ...]

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


def build(scale: Scale, device: torch.device, dtype: torch.dtype) -> Runners:
    """Models and a cache of random numbers, graphs captured."""
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
        from ddtree_engine.kernels import TileAttention as Attention
    else:
        Attention = ReferenceAttention  # type: ignore[assignment,misc]
    trees = {budget + 1 for budget in scale.budgets} | {n * (scale.budgets[0] + 1) for n in scale.batches}
    runners = Runners(CudaRunner(target, None, cache, device, Attention), CudaRunner(target, drafter, cache, device, Attention))
    sizes = {"max_requests": most, "max_nodes": MAX_NODES, "block": block, "k": K}
    runners.plain.capture(OnlyThese(**sizes, rows=scale.batches, requests=scale.batches), lambda share: None)
    runners.drafting.capture(OnlyThese(**sizes, rows=tuple(sorted(trees)), requests=scale.batches), lambda share: None)
    return runners


@dataclass(frozen=True, slots=True)
class Batch:
    """The same tree for every request, all of them at the same context."""

    segments: tuple[Segment, ...]
    settle: tuple[Settle, ...]

    @classmethod
    def of(cls, runner: CudaRunner, tree: Tree, requests: int, past: int) -> Batch:
        visible = tree.visible() if tree.nodes else None
        sight = Sight.TREE if tree.nodes else Sight.CAUSAL
        positions = [past + depth for depth in tree.depths]
        bases = [runner.cache.shape.base(i) for i in range(requests)]
        return cls(
            tuple(Segment(base, past, tree.token_ids, positions, sight, visible) for base in bases),
            tuple(Settle(tree, i * tree.rows, base, past) for i, base in enumerate(bases)),
        )


def random_tree(scale: Scale, budget: int) -> Tree:
    random = np.random.default_rng(budget)
    logprobs = -np.sort(random.uniform(0.1, 3.0, (scale.drafter.block_size - 1, K)), axis=1)
    return best_first(0, logprobs.tolist(), [list(range(K))] * len(logprobs), budget)


# Arms ---------------------------------------------------------------------------------------------------------------


def ceilings(scale: Scale, device: torch.device, repeats: int) -> dict[str, Times]:
    """A read of every byte (two kernels, the faster counts) and a square bfloat16 product."""
    words = torch.randint(-(2**31), 2**31, (scale.read_bytes // 4,), dtype=torch.int32, device=device)
    floats = words.view(torch.float32)
    calls: dict[str, Call] = {"read, torch sum": floats.sum}
    if device.type == "cuda":
        out = torch.empty(triton.cdiv(words.numel(), 8192), dtype=torch.int32, device=device)
        calls["read, triton"] = lambda: _read[(out.numel(),)](words, out, words.numel(), BLOCK=8192, num_warps=8)
    a, b = (torch.randn(scale.square, scale.square, device=device).bfloat16() for _ in range(2))
    calls["product"] = lambda: a @ b
    return device_times(calls, device, repeats)


if triton is not None:

    @triton.jit
    def _read(source, out, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        tl.store(out + tl.program_id(0), tl.sum(tl.load(source + at, mask=at < count, other=0), 0))


def replayed(runner: CudaRunner, batch: Batch, part: str) -> Call:
    """Launches the graph that `replay` would take for this batch, its inputs filled once."""
    graphs = runner._graphs  # the graph without the host's part has no public name
    assert graphs is not None
    rows = sum(s.rows for s in batch.segments)
    graphs._verify[rows].run(batch.segments)
    if part == "verify":
        return graphs._verify[rows].launch
    settle = graphs._settle[len(batch.settle)]
    settle.run(batch.settle)
    return settle.launch


def passes(scale: Scale, runners: Runners) -> tuple[dict[str, Call], dict[str, Call]]:
    """(graphs to time on the device, whole rounds to time on the host)."""
    graphs: dict[str, Call] = {}
    rounds: dict[str, Call] = {}
    for n in scale.batches:
        one = Batch.of(runners.plain, root_only(0), n, scale.context)
        graphs[f"step {n}"] = replayed(runners.plain, one, "verify")
        rounds[f"step {n}"] = _round(runners.plain, one, settle=False)
    for budget in scale.budgets:
        for n in scale.batches if budget == scale.budgets[0] else (1,):
            batch = Batch.of(runners.drafting, random_tree(scale, budget), n, scale.context)
            graphs[f"verify {n}x{budget + 1}"] = replayed(runners.drafting, batch, "verify")
            rounds[f"round {n}x{budget + 1}"] = _round(runners.drafting, batch, settle=True)
            if budget == scale.budgets[0]:
                graphs[f"draft {n}"] = replayed(runners.drafting, batch, "settle")
    return graphs, rounds


def _round(runner: CudaRunner, batch: Batch, *, settle: bool) -> Call:
    rows = runner.batch(batch.segments)
    return lambda: runner.replay(rows, [], batch.settle if settle else [])


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
    ceilings: dict[str, Times]
    graphs: dict[str, Times]
    rounds: dict[str, Times]
    prefill: dict[str, Times]
    kernels: dict[str, dict[str, float]]

    def bandwidth(self, scale: Scale) -> float:
        """Bytes a millisecond."""
        return scale.read_bytes / min(t.median for name, t in self.ceilings.items() if name.startswith("read"))

    def rate(self, scale: Scale) -> float:
        """Operations a millisecond."""
        return 2 * scale.square**3 / self.ceilings["product"].median


def measure(scale: Scale, device: torch.device, repeats: int, *, profile: bool) -> Figures:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    facts = asdict(device_facts(device)) | {"torch": torch.__version__, "dtype": str(dtype)}
    best = ceilings(scale, device, repeats)
    runners = build(scale, device, dtype)
    graphs, rounds = passes(scale, runners)
    prompts = {f"prefill {chunk}": prefill(scale, runners.plain, chunk) for chunk in scale.chunks}
    figures = Figures(
        facts,
        best,
        device_times(graphs, device, repeats),
        wall_times(rounds, device, repeats),
        device_times(prompts, device, repeats),
        {},
    )
    if profile:
        figures.kernels.update({name: kernel_ms(call, device) for name, call in (graphs | prompts).items()})
    return figures


def report(scale: Scale, f: Figures, itemsize: int = 2) -> str:
    band, rate = f.bandwidth(scale), f.rate(scale)
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
    with torch.inference_mode():
        figures = measure(scale, device, args.repeats, profile=not args.no_profile)
    print(report(scale, figures, 4 if args.micro else 2))
    if args.json:
        args.json.write_text(json.dumps(asdict(figures), indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
