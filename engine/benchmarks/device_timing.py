"""Timing on a device: CUDA events, wall clock, kernel times by kind, and what the device can do at best.

On CPU everything is timed by the wall clock and there are no kernel times. Not here: what is timed.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU
    triton = None

WARM_UPS = 3

Call = Callable[[], object]


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
    for n in range(repeats + WARM_UPS):
        for name, call in calls.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            call()
            end.record()
            if n >= WARM_UPS:
                marks[name].append((start, end))
    torch.cuda.synchronize()
    return {name: Times.of([a.elapsed_time(b) for a, b in pairs]) for name, pairs in marks.items()}


def wall_times(calls: Mapping[str, Call], device: torch.device, repeats: int) -> dict[str, Times]:
    """Interleaved; a call is over when the device is idle."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for n in range(repeats + WARM_UPS):
        for name, call in calls.items():
            started = time.perf_counter()
            call()
            if device.type == "cuda":
                torch.cuda.synchronize()
            if n >= WARM_UPS:
                seconds[name].append((time.perf_counter() - started) * 1e3)
    return {name: Times.of(values) for name, values in seconds.items()}


KINDS = (
    ("attention", ("_attend_part", "_join_parts")),
    ("norm, rope, swiglu", ("_norm_rope_store", "_swiglu", "rms_norm", "RMSNorm", "layer_norm", "LayerNorm")),
    ("matrix", ("_one_row", "_few_rows", "gemm", "gemv", "cutlass", "nvjet", "splitK", "cublas")),
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


def captured(call: Call, device: torch.device) -> Call:
    """The call as a CUDA graph, so that launching it costs nothing; on CPU the call itself."""
    if device.type != "cuda":
        return call
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return lambda keep=call: graph.replay()  # what the call holds must outlive the graph


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What the device can do at best, measured."""

    read: Times  # of `read_bytes`, by the faster of two kernels
    product: Times  # bfloat16, `square` x `square` x `square`
    read_bytes: int
    square: int

    @property
    def bandwidth(self) -> float:
        """Bytes read a millisecond."""
        return self.read_bytes / self.read.median

    @property
    def rate(self) -> float:
        """Operations a millisecond."""
        return 2 * self.square**3 / self.product.median

    @classmethod
    def measure(cls, read_bytes: int, square: int, device: torch.device, repeats: int) -> Ceilings:
        """On random numbers: zeros can run faster."""
        words = torch.randint(-(2**31), 2**31, (read_bytes // 4,), dtype=torch.int32, device=device)
        a, b = (torch.randn(square, square, device=device).bfloat16() for _ in range(2))
        calls: dict[str, Call] = {"sum": words.view(torch.float32).sum, "product": lambda: a @ b}
        if device.type == "cuda":
            out = torch.empty(triton.cdiv(words.numel(), 8192), dtype=torch.int32, device=device)
            calls["read"] = lambda: _read[(out.numel(),)](words, out, words.numel(), BLOCK=8192, num_warps=8)
        times = device_times(calls, device, repeats)
        product = times.pop("product")
        return cls(min(times.values(), key=lambda t: t.median), product, read_bytes, square)


if triton is not None:

    @triton.jit
    def _read(source, out, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        tl.store(out + tl.program_id(0), tl.sum(tl.load(source + at, mask=at < count, other=0), 0))
