"""The memory floor: how long one pass takes if it does nothing but read the weights once. Measured, not looked up."""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from ddtree_engine.checkpoint import drafter_tensors, read_drafter, read_target, target_tensors

BEYOND_CACHES = 512 * 2**20


@dataclass(frozen=True, slots=True)
class Floor:
    target_bytes: int  # read by every target pass; the tied embedding is the head, and is read whole
    draft_bytes: int  # read by every draft: the drafter's weights and the target's head
    cached_bytes_per_second: float  # reading as much as the target has, again and again: what a small model gets
    memory_bytes_per_second: float  # reading far more than any cache holds

    @property
    def plain_tokens_per_second(self) -> float:
        """No decoding of one request without speculation can be faster than this here."""
        return self.cached_bytes_per_second / self.target_bytes

    def drafted_tokens_per_second(self, tokens_per_pass: float) -> float:
        """The same for draft and verify, when a pass commits so many tokens."""
        return tokens_per_pass * self.cached_bytes_per_second / (self.target_bytes + self.draft_bytes)


def measure(target: Path, drafter: Path, dtype: str, threads: int) -> Floor:
    torch.set_num_threads(threads)
    size = getattr(torch, dtype).itemsize
    config = read_target(target)
    weights = sum(map(math.prod, target_tensors(config).values())) * size
    draft = sum(map(math.prod, drafter_tensors(read_drafter(drafter, config)).values())) * size
    head = config.stack.vocab * config.stack.hidden * size
    return Floor(weights, draft + head, read_bandwidth(weights), read_bandwidth(BEYOND_CACHES))


def read_bandwidth(size: int, seconds: float = 1.0) -> float:
    """Bytes a second of summing a buffer of `size` bytes over and over; the median of the passes."""
    numbers = torch.ones(size // 4)
    times, end = [], time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < 3:
        begun = time.perf_counter()
        numbers.sum()
        times.append(time.perf_counter() - begun)
    return size / statistics.median(times)
