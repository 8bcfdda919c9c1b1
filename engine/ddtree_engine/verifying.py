"""From a round's trees and prefill chunks to the target's word on them: compile the rows, one pass, choose tokens.

Which of the chosen tokens are kept is `decode.py`'s walk and `committing.py`.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import replace

import torch

from ddtree_engine import sampling
from ddtree_engine.forest import Forest
from ddtree_engine.rounds import Chunk, Draft, RoundState, Verified
from ddtree_engine.rows import RowBatch, Segment, Sight
from ddtree_engine.runner import tree_segment
from ddtree_engine.sampling import RowSampling
from ddtree_engine.sequence import Sequence


class Verifier:
    """The stages tree_compile and verify."""

    def __init__(self, state: RoundState) -> None:
        self._state = state

    def compile(self, drafts: Many[Draft], chunks: Many[Chunk]) -> RowBatch:
        segments = [self._tree_segment(d) for d in drafts]
        segments += [prompt_segment(chunk.sequence, chunk.tokens) for chunk in chunks]
        return self._state.runner.batch(segments)

    def _tree_segment(self, draft: Draft) -> Segment:
        s, t = draft.sequence, draft.tree
        segment = tree_segment(t, s.base, s.computed)
        if not self._state.faults:
            return segment
        positions = self._state.faults.row_positions(list(segment.positions), list(t.depths), self._state.context(s))
        visible = segment.visible
        if visible is not None and s.drafts:
            visible = self._state.faults.tree_mask(visible, self._state.context(s))
        return replace(segment, positions=positions, visible=visible)

    def verify(self, rows: RowBatch, forest: Forest, decoding: Many[Sequence], chunks: Many[Chunk]) -> Verified:
        featured = any(s.drafts for s in decoding) or bool(chunks)
        hidden = self._state.runner.verify(rows, features=featured)
        wanted = list(range(rows.offsets[len(decoding)]))
        for i, chunk in enumerate(chunks, start=len(decoding)):
            self._score_prompt(chunk, hidden, rows.offsets[i])
            if chunk.completes and chunk.sequence.left_to_say > 0:
                wanted.append(rows.offsets[i + 1] - 1)
        if not wanted:
            return Verified(torch.empty(0, 0), [])
        logits = self._state.runner.logits(hidden, wanted)
        past = [s.computed for s in decoding]
        samplings = self.row_samplings(forest, decoding, past, [c.sequence for c in chunks if c.completes])
        return Verified(logits, sampling.choose(logits, samplings).tolist())

    def row_samplings(
        self, forest: Forest, decoding: Many[Sequence], past: Many[int], completed: Many[Sequence] = ()
    ) -> list[RowSampling]:
        """How to choose after every row of these trees, `past` tokens before them, then after each completed prompt."""
        ready = [s for s in completed if s.left_to_say > 0]
        if all(s.request.sampling.greedy for s in (*decoding, *ready)):
            return []
        rows = [
            RowSampling(s.request.sampling, s.seed, before + depth + 1)
            for i, (s, before) in enumerate(zip(decoding, past, strict=True))
            for depth in forest.depths[i, : forest.rows[i]].tolist()
        ]
        return rows + [RowSampling(s.request.sampling, s.seed, s.prompt_length) for s in ready]

    def _score_prompt(self, chunk: Chunk, hidden: torch.Tensor, first_row: int) -> None:
        """Log-probabilities of the prompt tokens that follow this chunk's rows."""
        s, start = chunk.sequence, chunk.sequence.score_start
        if start is None:
            return
        low = max(s.computed, start - 1)
        high = min(s.computed + chunk.tokens, s.prompt_length - 1)  # the last row scores an output token
        if low >= high:
            return
        rows = range(first_row + low - s.computed, first_row + high - s.computed)
        targets = s.request.prompt_ids[low + 1 : high + 1]
        own, top = sampling.logprobs_of(self._state.runner.logits(hidden, rows), targets, s.request.top_logprobs)
        s.scores.extend(own)
        s.top_scores.extend(top)


def prompt_segment(s: Sequence, tokens: int) -> Segment:
    """The next rows of a prompt."""
    start, end = s.computed, s.computed + tokens
    return Segment(s.base, start, s.request.prompt_ids[start:end], range(start, end), Sight.CAUSAL)
