"""How many threads a pass on CPU runs with: a pure rule, and the one call that applies it.

Each of a pass's products wakes the other threads and waits for them, which on a virtual machine takes some 0.1 ms in all, and
far more when other work holds a core. Small models in small passes are done sooner by one thread.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ddtree_engine.checkpoint import StackConfig

WORK = 25e6  # multiply-adds of one product that other threads are woken for: 0.2 ms (bfloat16) to 0.5 ms (float32) of one core
BYTES = 4e6  # bytes of one weight: as long, read from memory


def numbers_per_product(stack: StackConfig) -> float:
    """Numbers in a weight matrix of a layer, on average over its four products."""
    queries, keys = stack.heads * stack.head_dim, stack.kv_heads * stack.head_dim
    return stack.hidden * (2 * queries + 2 * keys + 3 * stack.ff) / 4


@dataclass(frozen=True, slots=True)
class Threads:
    """All threads or one, for passes through one stack."""

    most: int
    numbers: float
    itemsize: int

    def count(self, rows: int) -> int:
        return self.most if rows * self.numbers >= WORK or self.numbers * self.itemsize >= BYTES else 1

    def use(self, rows: int) -> None:
        torch.set_num_threads(self.count(rows))
