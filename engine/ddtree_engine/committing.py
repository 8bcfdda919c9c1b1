"""What a round leaves behind: accepted tokens join the answers, their keys and values move up, the news goes out."""

from __future__ import annotations

from collections.abc import Sequence as Many

import torch

from ddtree_engine import sampling
from ddtree_engine.requests import Finish, TopLogprobs, Update
from ddtree_engine.rounds import Accepted, Chunk, RoundState, Step
from ddtree_engine.sequence import Ending, Sequence


class Committer:
    """The stages accept and commit."""

    def __init__(self, state: RoundState) -> None:
        self._state = state

    def accept(self, decoding: Many[Sequence], sizes: list[int], accepted: Many[Accepted]) -> list[Step]:
        """What was walked joins the answers, up to their ends."""
        steps, first = [], 0
        for s, rows, walked in zip(decoding, sizes, accepted, strict=True):
            tokens, ending = s.say(walked.tokens)
            kept = walked.path[: len(tokens)]
            self._count(s, rows - 1, len(kept) - 1, tokens)
            steps.append(Step(s, tokens, [first + row for row in kept], kept, ending))
            first += rows
        return steps

    def first_tokens(self, chunks: Many[Chunk], choices: Many[int], first: int) -> list[Step]:
        """The first token after each prompt that is complete: `choices`, after logits row `first` and those that follow."""
        steps, chosen = [], enumerate(choices, start=first)
        for chunk in chunks:
            if not chunk.completes:
                continue
            s = chunk.sequence
            if s.left_to_say > 0:
                row, choice = next(chosen)
                tokens, ending = s.say([choice])
                steps.append(Step(s, tokens, [row], None, ending))
            else:
                steps.append(Step(s, [], [], None, Ending(Finish.LENGTH)))
        return steps

    def _count(self, s: Sequence, proposed: int, accepted: int, tokens: list[int]) -> None:
        state = self._state
        s.verify_passes += 1
        s.accepted_drafts += accepted
        s.proposed_drafts += proposed
        if s.drafts:
            state.counters.verify_passes += 1
            state.counters.committed_tokens += len(tokens)
            state.counters.accepted_drafts += accepted
            state.counters.proposed_drafts += proposed

    def commit(self, steps: Many[Step], chunks: Many[Chunk]) -> None:
        """Keep the accepted rows' keys, values and features; rejected slots are overwritten by the next pass."""
        state = self._state
        source: list[int] = []
        target: list[int] = []
        for step in steps:
            if step.path is None:
                continue
            s, path = step.sequence, step.path
            if state.faults and s.drafts:
                path = state.faults.compaction(path, state.context(s))
            moved = [(row, i) for i, row in enumerate(path) if row != i]
            source.extend(s.base + s.computed + row for row, _ in moved)
            target.extend(s.base + s.computed + i for _, i in moved)
        if source:
            state.runner.compact(source, target)
        self.advance_all(steps, chunks)

    def advance_all(self, steps: Many[Step], chunks: Many[Chunk]) -> None:
        """Accepted rows and prompt rows are where they belong."""
        for step in steps:
            if step.path is not None:
                self._advance(step.sequence, len(step.path))
        for chunk in chunks:
            self._advance(chunk.sequence, chunk.tokens)

    def _advance(self, s: Sequence, tokens: int) -> None:
        state = self._state
        if state.runner.featured and s.featured == s.computed:
            s.featured += tokens
        if state.faults and s.drafts and s.output_ids and s.left_to_prefill == 0:
            state.runner.replace_features(
                s.base + s.computed, tokens, lambda rows: state.faults.draft_features(rows, state.context(s))
            )
        s.computed += tokens

    def update(self, step: Step, logits: torch.Tensor) -> Update:
        state = self._state
        s, ending = step.sequence, step.ending
        own: tuple[float, ...] = ()
        top: tuple[TopLogprobs, ...] = ()
        if s.request.want_logprobs and step.tokens:
            mine = logits[torch.tensor(step.rows, device=logits.device)]
            own, top = sampling.logprobs_of(mine, step.tokens, s.request.top_logprobs)
        tokens = step.tokens
        if state.faults and step.path is not None:
            tokens = state.faults.emit(list(tokens), state.context(s))
        first, s.reported = not s.reported, True
        return Update(
            request_id=s.request.id,
            token_ids=tuple(tokens),
            finish=ending.finish if ending else None,
            matched_token=ending.matched_token if ending else None,
            verify_passes=s.verify_passes,
            cached_tokens=s.lease.reused,
            accepted_drafts=s.accepted_drafts,
            proposed_drafts=s.proposed_drafts,
            logprobs=own,
            top_logprobs=top,
            input_logprobs=s.input_logprobs() if first else None,
        )
