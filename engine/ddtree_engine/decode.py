"""One round of decoding: compile the trees, verify, accept, commit, draft and grow the next.

The trees that a round verifies were grown at the end of the round before, so a round has one target pass and one drafter
pass. Prefill chunks ride along in the target pass. Which requests run is `scheduler.py`'s decision, how large trees are
`budget.py`'s; tensors live in `cache.py`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Many

import numpy as np

from ddtree_engine.budget import Policy, Round
from ddtree_engine.committing import Committer
from ddtree_engine.corruption import CorruptionPoints
from ddtree_engine.drafting import Drafting
from ddtree_engine.forest import Forest, Proposal, gather
from ddtree_engine.requests import Update
from ddtree_engine.rounds import Accepted, Chunk, DecodeSettings, Draft, RoundState
from ddtree_engine.rows import Segment
from ddtree_engine.runner import Decoding, Replay, Runner
from ddtree_engine.sequence import Sequence
from ddtree_engine.tree import root_only
from ddtree_engine.verifying import Verifier, prompt_segment

__all__ = ["Chunk", "DecodeSettings", "Decoder"]


class Decoder(RoundState):
    """Runs rounds over sequences."""

    def __init__(self, runner: Runner, policy: Policy, settings: DecodeSettings, faults: CorruptionPoints | None) -> None:
        super().__init__(runner, policy, settings, faults)
        self._verifier, self._committer, self._drafting = Verifier(self), Committer(self), Drafting(self)

    def round(self, chunks: Many[Chunk], decoding: Many[Sequence]) -> list[Update]:
        """One pass of the target over everything that runs. Sequences that end are reported, not released."""
        self.batch = tuple(decoding)
        self.counters.rounds += 1
        started = time.perf_counter()
        if self.runner.captured and not self.faults and all(c.replayable for c in chunks):
            live = [*decoding, *(c.sequence for c in chunks if c.completes)]
            with self.stage("tree_build"):
                forest = _forest(live)
            prompts = _prompts(chunks)
            if self.runner.replays(forest, prompts):
                return self._replay(forest, live, chunks, prompts, started)
        with self.stage("tree_build"):
            forest = self.policy.fit(_forest(decoding), decoding)
        with self.stage("tree_compile"):
            plain = forest.sizes.width == 1
            drafts = [Draft(s, root_only(s.root) if plain else forest.tree(i)) for i, s in enumerate(decoding)]
            rows = self._verifier.compile(drafts, chunks)
        with self.stage("verify"):
            verified = self._verifier.verify(rows, forest, decoding, chunks)
        with self.stage("commit"):
            accepted = self._walk(drafts, verified.choices)
            self.policy.learn(forest, decoding, [a.path for a in accepted])
            self.policy.meanwhile()
            sizes = [d.tree.rows for d in drafts]
            steps = self._committer.accept(decoding, sizes, accepted)
            steps += self._committer.first_tokens(chunks, verified.choices[sum(sizes) :], sum(sizes))
            self._committer.commit(steps, chunks)
            updates = [self._committer.update(step, verified.logits) for step in steps]
        drafted = self._drafting.draft([step.sequence for step in steps if step.ending is None])
        if not chunks:
            self.policy.observe(Round(len(decoding), rows.rows, drafted, time.perf_counter() - started))
        return updates

    def _replay(
        self, forest: Forest, live: Many[Sequence], chunks: Many[Chunk], prompts: tuple[Segment, ...], started: float
    ) -> list[Update]:
        """The same round on the device alone: it walks, commits, drafts and grows before the host hears of it.

        What to draft is therefore decided before the pass; requests that turn out to have ended were drafted in vain. The
        last token of a prompt that is complete is a root like the others: `live` ends with these prompts' requests.
        """
        completing = [c.sequence for c in chunks if c.completes]
        decoding = live[: len(live) - len(completing)]
        with self.stage("tree_build"):
            forest = self.policy.fit(forest, live)
        chosen = {s.request.id for s in self.policy.to_draft(live)}
        sizes = forest.rows.tolist()
        index = [i for i, s in enumerate(live) if sizes[i] > 1 or s.request.id in chosen]
        settled = [live[i] for i in index]
        past = [s.computed for s in decoding] + [s.prompt_length - 1 for s in completing]
        with self.stage("verify"):
            base = np.array([s.base for s in live], dtype=np.int64)
            batch = Decoding(forest, base, np.array(past, dtype=np.int64), prompts)
            settle = self._drafting.settle(index, settled, batch.past, chosen) if index else None
            samplings = self._verifier.row_samplings(forest, live, past)
            replay = self.runner.replay(batch, samplings, settle, self.policy.meanwhile)
        with self.stage("commit"):
            accepted = _read(replay, sizes, index)
            self.policy.learn(forest, live, [a.path for a in accepted])
            n = len(decoding)
            steps = self._committer.accept(decoding, sizes[:n], accepted[:n])
            steps += self._committer.first_tokens(chunks, [a.tokens[0] for a in accepted[n:]], sum(sizes[:n]))
            self._committer.advance_all(steps, chunks)
            updates = [self._committer.update(step, replay.logits) for step in steps]
        for s in live:
            s.proposal = None
        for i, s in enumerate(settled):
            s.drafted = s.computed
            if s.request.id in chosen and replay.forest is not None:
                s.proposal = Proposal(replay.forest, i)
        if not chunks:
            self.policy.observe(Round(len(decoding), sum(sizes), len(settled), time.perf_counter() - started))
        return updates

    def _walk(self, drafts: Many[Draft], choices: list[int]) -> list[Accepted]:
        walked, row = [], 0
        for draft in drafts:
            walked.append(self._walk_tree(draft, choices[row : row + draft.tree.rows]))
            row += draft.tree.rows
        return walked

    def _walk_tree(self, draft: Draft, choices: list[int]) -> Accepted:
        s, t = draft.sequence, draft.tree
        if self.faults:
            choices = self.faults.choices(choices, self.context(s))
        path = t.walk(choices)
        if self.faults and s.drafts:
            path = self.faults.accepted(path, t, self.context(s))
        return Accepted(path, [t.token_ids[row] for row in path[1:]] + [choices[path[-1]]])


def _forest(sequences: Many[Sequence]) -> Forest:
    """The trees that were drafted for these requests."""
    return gather([s.proposal for s in sequences], [s.root for s in sequences])


def _prompts(chunks: Many[Chunk]) -> tuple[Segment, ...]:
    """The rows that replayed chunks add to a pass; the last token of a prompt is a root, and none of them."""
    segments = [prompt_segment(c.sequence, c.tokens - c.completes) for c in chunks]
    return tuple(s for s in segments if s.rows)


def _read(replay: Replay, sizes: list[int], index: list[int]) -> list[Accepted]:
    """Every decoding request's path and tokens: walked on the device, or a plain step's only choice."""
    firsts = np.cumsum(sizes, dtype=np.int64) - np.array(sizes, dtype=np.int64)
    accepted = [Accepted([0], [token]) for token in replay.choices[firsts].tolist()]
    lengths, paths, said = replay.lengths.tolist(), replay.paths.tolist(), replay.said.tolist()
    for i, length, path, tokens in zip(index, lengths, paths, said, strict=True):
        accepted[i] = Accepted(path[:length], tokens[:length])
    return accepted
