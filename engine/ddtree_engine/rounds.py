"""What a round of decoding is made of: its settings, its parts' results, the totals, and what its parts share.

The round itself is in `decode.py`; its parts in `verifying.py`, `committing.py` and `drafting.py`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from ddtree_engine.budget import Policy
from ddtree_engine.corruption import CorruptionPoints, FaultContext
from ddtree_engine.forest import Sizes
from ddtree_engine.runner import Runner
from ddtree_engine.sequence import Ending, Sequence
from ddtree_engine.tree import Tree


@dataclass(frozen=True, slots=True)
class DecodeSettings:
    budget: int  # nodes of a tree; for `auto` the most it may choose
    topk_cap: int
    block_size: int  # 1 without a drafter
    max_running: int

    @property
    def trees(self) -> Sizes:
        return Sizes(max(self.budget + 1, self.block_size), self.block_size - 1)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Prompt tokens of one sequence to prefill."""

    sequence: Sequence
    tokens: int

    @property
    def completes(self) -> bool:
        return self.tokens == self.sequence.left_to_prefill

    @property
    def replayable(self) -> bool:
        """Whether the host wants nothing of its rows but the token after the last."""
        return self.sequence.score_start is None and self.sequence.left_to_say > 0


@dataclass(frozen=True, slots=True)
class Draft:
    """A decoding sequence and the tree that this round verifies for it."""

    sequence: Sequence
    tree: Tree


@dataclass(frozen=True, slots=True)
class Verified:
    """The target's word on the rows whose next token matters: decoding rows first, then one row a finished prompt."""

    logits: torch.Tensor  # float32 [rows, vocab]
    choices: list[int]


class Accepted(NamedTuple):
    """What the target agreed with in one tree."""

    path: list[int]  # rows from the root down
    tokens: list[int]  # gained: those of path[1:], then the choice after path[-1]


class Step(NamedTuple):
    """What was accepted for one sequence: tokens[i] was chosen after logits row rows[i]."""

    sequence: Sequence
    tokens: list[int]
    rows: list[int]
    path: list[int] | None  # accepted tree rows; None for the first token after a prompt
    ending: Ending | None


@dataclass(slots=True)
class Counters:
    """Totals over speculative requests (chain and tree) since start."""

    rounds: int = 0
    verify_passes: int = 0
    committed_tokens: int = 0
    accepted_drafts: int = 0
    proposed_drafts: int = 0
    stage_seconds: dict[str, float] = field(default_factory=dict)


_UNTIMED = nullcontext()


class RoundState:
    """What the parts of a round share. `timed` adds up stage times (on CUDA that synchronises, so it is off by default)."""

    def __init__(
        self,
        runner: Runner,
        policy: Policy,
        settings: DecodeSettings,
        faults: CorruptionPoints | None,
    ) -> None:
        self.runner = runner
        self.policy = policy
        self.settings = settings
        self.counters = Counters()
        self.timed = False
        self.faults = faults
        self.batch: tuple[Sequence, ...] = ()  # what decodes in this round, for the corruption points

    def context(self, s: Sequence) -> FaultContext:
        c = self.settings
        batch = tuple(other.view for other in self.batch)
        return FaultContext(s.view, batch, c.budget, c.topk_cap, c.block_size, c.max_running)

    def stage(self, name: str) -> AbstractContextManager[None]:
        return self._timer(name) if self.timed else _UNTIMED

    @contextmanager
    def _timer(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.runner.synchronise()
        seconds = self.counters.stage_seconds
        seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - started
