"""Who runs in the next round: a pure decision over counts. No tensors, no clocks.

First come, first served. Requests that decode always run; the rest of a round is filled with prefill chunks, so that a
long prompt never holds up the others for longer than one chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Waiting:
    id: str


@dataclass(frozen=True, slots=True)
class Running:
    id: str
    left_to_prefill: int  # prompt tokens not yet computed; 0: it decodes


@dataclass(frozen=True, slots=True)
class Limits:
    max_running: int
    chunk: int  # prompt tokens prefilled in one round, all requests together


@dataclass(frozen=True, slots=True)
class Chunk:
    id: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Plan:
    chunks: tuple[Chunk, ...]
    decode: tuple[str, ...]

    @property
    def empty(self) -> bool:
        return not self.chunks and not self.decode


def admit(waiting: Sequence[Waiting], running: int, limits: Limits) -> tuple[str, ...]:
    """The waiting requests that may start now, oldest first."""
    free = max(0, limits.max_running - running)
    return tuple(w.id for w in waiting[:free])


def plan(running: Sequence[Running], limits: Limits) -> Plan:
    """The rows of the next round. `running` is in order of admission."""
    decode = tuple(r.id for r in running if r.left_to_prefill == 0)
    chunks, left = [], limits.chunk
    for r in running:
        if r.left_to_prefill and left:
            take = min(r.left_to_prefill, left)
            chunks.append(Chunk(r.id, take))
            left -= take
    return Plan(tuple(chunks), decode)
