"""How the next trees come about: what to ask of the drafter, how far its context is, one pass, and growing.

What trees are is in `tree.py`, which requests draft and how large trees are in `budget.py`.
"""

from __future__ import annotations

from collections.abc import Sequence as Many

import numpy as np
import torch

from ddtree_engine.config import SpecMode
from ddtree_engine.forest import Growth, Proposal
from ddtree_engine.rounds import RoundState
from ddtree_engine.rows import Segment, Sight
from ddtree_engine.runner import NOTHING, Settle
from ddtree_engine.sequence import Sequence


class Drafting:
    """The stages draft and tree_build."""

    def __init__(self, state: RoundState) -> None:
        self._state = state

    def draft(self, live: Many[Sequence]) -> int:
        """Propose the next block of the sequences that the policy picks; returns how many were drafted."""
        state = self._state
        with state.stage("draft"):
            for s in live:
                s.proposal = None
            drafting = [s for s in state.policy.to_draft(live) if s.left_to_say > 1]
            if not drafting:
                return 0
            self.catch_up(drafting)
            blocks = [
                Segment(
                    s.base,
                    s.computed,
                    state.runner.block(s.root),
                    range(s.computed, s.computed + state.settings.block_size),
                    Sight.FULL,
                )
                for s in drafting
            ]
            growth = self._growth(drafting)
            logprobs, token_ids = state.runner.draft(state.runner.batch(blocks), self._ranks(growth))
        with state.stage("tree_build"):
            if state.faults:
                state.batch = tuple(live)
                logprobs, token_ids = self._corrupted(drafting, logprobs, token_ids)
            forest = state.runner.grow(logprobs, token_ids, growth, state.settings.trees)
            for i, s in enumerate(drafting):
                s.proposal = Proposal(forest, i)
        return len(drafting)

    def _ranks(self, growth: Growth) -> int:
        """Candidates to ask for: on CPU as many as are used; elsewhere one number, for which kernels are made."""
        state = self._state
        return max(growth.ranks) if state.runner.device.type == "cpu" and not state.faults else state.settings.topk_cap

    def _corrupted(
        self, drafting: Many[Sequence], logprobs: torch.Tensor, token_ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        state = self._state
        assert state.faults is not None
        for i, s in enumerate(drafting):
            deep = min(state.settings.block_size - 1, s.left_to_say - 1)
            lp, ids = logprobs[i, :deep].numpy(force=True), token_ids[i, :deep].numpy(force=True)
            new_ids = state.faults.draft_tokens(ids, lp, state.context(s))
            new_lp = state.faults.draft_logprobs(lp, state.context(s))
            token_ids[i, :deep] = torch.from_numpy(np.array(new_ids))
            logprobs[i, :deep] = torch.from_numpy(np.array(new_lp))
        return logprobs, token_ids

    def catch_up(self, sequences: Many[Sequence]) -> None:
        """Bring the drafter's context up to the last computed token, however far it is behind."""
        positions, slots = _behind(sequences, [s.computed for s in sequences])
        for s in sequences:
            s.drafted = s.computed
        if len(slots):
            self._state.runner.extend(positions.tolist(), slots.tolist())

    def settle(self, index: list[int], sequences: Many[Sequence], past: np.ndarray, chosen: set[str]) -> Settle:
        """What becomes of these requests; index: among those that decode, whose trees `past` tokens precede."""
        growth = self._growth(sequences)
        nodes = [n if s.request.id in chosen else 0 for s, n in zip(sequences, growth.nodes, strict=True)]
        return Settle(
            np.array(index),
            np.array([s.left_to_say for s in sequences]),
            np.array(growth.ranks),
            np.array(nodes),
            growth.off_spine,
            growth.floor,
            _behind(sequences, past[index].tolist()),
        )

    def _growth(self, sequences: Many[Sequence]) -> Growth:
        """How the next trees of these requests grow. A path of d nodes commits d + 1 tokens: deeper than is left is wasted."""
        state = self._state
        block, budget = state.settings.block_size, min(state.settings.budget, state.policy.nodes)
        chains = [state.policy.chains or s.request.mode is SpecMode.CHAIN for s in sequences]
        return Growth(
            roots=[s.root for s in sequences],
            depths=[max(0, min(block - 1, s.left_to_say - 1)) for s in sequences],
            ranks=[1 if chain else state.settings.topk_cap for chain in chains],
            nodes=[block - 1 if chain else budget for chain in chains],
            off_spine=state.policy.off_spine,
            floor=state.policy.floor,
        )


def _behind(sequences: Many[Sequence], past: Many[int]) -> tuple[np.ndarray, np.ndarray]:
    """Positions and slots that the drafter's context lacks up to `past` tokens."""
    if all(s.drafted == end for s, end in zip(sequences, past, strict=True)):
        return NOTHING, NOTHING
    positions = [np.arange(s.drafted, end) for s, end in zip(sequences, past, strict=True)]
    slots = [s.base + p for s, p in zip(sequences, positions, strict=True)]
    return np.concatenate(positions), np.concatenate(slots)
