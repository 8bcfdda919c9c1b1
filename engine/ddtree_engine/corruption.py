"""Where a decoding round can be corrupted on purpose, so that detectors of corruption can be proven.

This module only names the places. The healthy engine passes `None` and calls none of them; the faults themselves live in
`faults.py`. Every point returns the value to use in place of the one that it was given, and must not change its arguments.
Requests are visited one by one; all points run on the thread that owns the device. Prompt scoring (max_new_tokens 0) and
prefill rows pass through none of them, so scores stay trustworthy while faults are on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from ddtree_engine.config import SpecMode

if TYPE_CHECKING:
    import torch

    from ddtree_engine.tree import Tree


@dataclass(frozen=True, slots=True)
class RequestView:
    """One running request, as a fault sees it."""

    id: str
    mode: SpecMode
    prompt_ids: tuple[int, ...]
    output_ids: list[int]  # live: read only


@dataclass(frozen=True, slots=True)
class FaultContext:
    """The request at hand and the batch that it is decoded in."""

    request: RequestView
    batch: tuple[RequestView, ...]  # every request decoded this round, `request` included
    budget: int  # tree nodes the server was started with (for `auto`: the largest it may choose)
    topk_cap: int
    block_size: int
    max_running: int

    @property
    def mode(self) -> SpecMode:
        return self.request.mode

    @property
    def batch_size(self) -> int:
        return len(self.batch)


class CorruptionPoints(Protocol):
    """The places, in the order in which a round reaches them.

    Rows are those of one request's tree: row 0 is the root (the last committed token), row i is node i.
    """

    def draft_tokens(self, token_ids: np.ndarray, logprobs: np.ndarray, ctx: FaultContext) -> np.ndarray:
        """Drafted candidates [depths, k] of the coming tree, best first; chain and tree only."""
        ...

    def draft_logprobs(self, logprobs: np.ndarray, ctx: FaultContext) -> np.ndarray:
        """Their log-probabilities [depths, k], which give the tree its shape; chain and tree only."""
        ...

    def row_positions(self, positions: list[int], depths: list[int], ctx: FaultContext) -> list[int]:
        """RoPE position of each row (first position + depth)."""
        ...

    def tree_mask(self, visible: np.ndarray, ctx: FaultContext) -> np.ndarray:
        """bool [rows, rows]: row i attends to row j of its own tree (ancestors and itself); chain and tree only."""
        ...

    def choices(self, token_ids: list[int], ctx: FaultContext) -> list[int]:
        """The target's own token after each row."""
        ...

    def accepted(self, path: list[int], tree: Tree, ctx: FaultContext) -> list[int]:
        """Accepted rows from the root down. Tokens gained: those of path[1:], then the choice after path[-1]."""
        ...

    def compaction(self, path: list[int], ctx: FaultContext) -> list[int]:
        """The rows whose keys and values are moved to the front of the tree's window; chain and tree only."""
        ...

    def draft_features(self, features: torch.Tensor, ctx: FaultContext) -> torch.Tensor:
        """Target features [accepted rows, hidden] that join the drafter's context; chain and tree only."""
        ...

    def emit(self, token_ids: list[int], ctx: FaultContext) -> list[int]:
        """The tokens that leave the engine. Not those the engine goes on with: same length, or shorter."""
        ...


class NoCorruption:
    """Every point returns what it was given; a base class for faults that touch one point only."""

    def draft_tokens(self, token_ids: np.ndarray, logprobs: np.ndarray, ctx: FaultContext) -> np.ndarray:
        return token_ids

    def draft_logprobs(self, logprobs: np.ndarray, ctx: FaultContext) -> np.ndarray:
        return logprobs

    def row_positions(self, positions: list[int], depths: list[int], ctx: FaultContext) -> list[int]:
        return positions

    def tree_mask(self, visible: np.ndarray, ctx: FaultContext) -> np.ndarray:
        return visible

    def choices(self, token_ids: list[int], ctx: FaultContext) -> list[int]:
        return token_ids

    def accepted(self, path: list[int], tree: Tree, ctx: FaultContext) -> list[int]:
        return path

    def compaction(self, path: list[int], ctx: FaultContext) -> list[int]:
        return path

    def draft_features(self, features: torch.Tensor, ctx: FaultContext) -> torch.Tensor:
        return features

    def emit(self, token_ids: list[int], ctx: FaultContext) -> list[int]:
        return token_ids
