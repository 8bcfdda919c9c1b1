"""How many threads a pass on CPU runs with: a pure rule, and the one call that applies it.

Every product of a pass, and the larger of its other operations, wakes the other threads and waits for them. On a virtual
machine that takes some 0.1 ms each, and far more when other work holds a core. Small models in small passes are done sooner
by one thread.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ddtree_engine.checkpoint import StackConfig

# What other threads are woken for, of one product: about half a millisecond of one core with AVX-512.
WORK = 120e6  # multiply-adds x bytes of a number
BYTES = 4e6  # of the weight: as long, read from memory


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
        size = self.numbers * self.itemsize
        return self.most if rows * size >= WORK or size >= BYTES else 1

    def use(self, rows: int) -> None:
        torch.set_num_threads(self.count(rows))
