"""One round of decoding: build and compile the trees, verify, accept, commit, draft the next.

The trees that a round verifies were drafted at the end of the round before, so a round has one target pass and one drafter
pass. Prefill chunks ride along in the target pass. Which requests run is `scheduler.py`'s decision, how large trees are
`budget.py`'s; tensors live in `cache.py`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Many
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch

from ddtree_engine import sampling, tree
from ddtree_engine.budget import Policy, Round
from ddtree_engine.config import SpecMode
from ddtree_engine.corruption import CorruptionPoints, FaultContext
from ddtree_engine.requests import Finish, TopLogprobs, Update
from ddtree_engine.rows import RowBatch, Segment, Sight
from ddtree_engine.runner import Runner, Settle
from ddtree_engine.sampling import RowSampling
from ddtree_engine.sequence import Ending, Proposal, Sequence
from ddtree_engine.tree import Tree

EXTEND_ROWS = 1024  # context tokens that the drafter catches up with in one call; bounds its activations


@dataclass(frozen=True, slots=True)
class DecodeSettings:
    budget: int  # nodes of a tree; for `auto` the most it may choose
    topk_cap: int
    block_size: int  # 1 without a drafter
    max_running: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """Prompt tokens of one sequence to prefill."""

    sequence: Sequence
    tokens: int

    @property
    def completes(self) -> bool:
        return self.tokens == self.sequence.left_to_prefill


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


@dataclass(frozen=True, slots=True)
class Step:
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


class Decoder:
    """Runs rounds over sequences. `timed` adds up stage times (on CUDA that synchronises, so it is off by default)."""

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
        self._batch: tuple[Sequence, ...] = ()

    def round(self, chunks: Many[Chunk], decoding: Many[Sequence]) -> list[Update]:
        """One pass of the target over everything that runs. Sequences that end are reported, not released."""
        self._batch = tuple(decoding)
        self.counters.rounds += 1
        started = time.perf_counter()
        with self._stage("tree_build"):
            drafts = self._build(decoding)
        with self._stage("tree_compile"):
            rows = self._compile(drafts, chunks)
        if not chunks and not self.faults and self.runner.replays(rows):
            return self._replay(rows, drafts, started)
        with self._stage("verify"):
            verified = self._verify(rows, drafts, chunks)
        with self._stage("commit"):
            steps = self._accept(verified, drafts, chunks)
            self._commit(steps, chunks)
            updates = [self._update(step, verified) for step in steps]
        drafting = time.perf_counter()
        with self._stage("draft"):
            drafted = self._draft([step.sequence for step in steps if step.ending is None])
        if not chunks:
            ended = time.perf_counter()
            self.policy.observe(Round(len(decoding), rows.rows, drafting - started, drafted, ended - drafting))
        return updates

    def _replay(self, rows: RowBatch, drafts: Many[Draft], started: float) -> list[Update]:
        """The same round on the device alone: it walks, commits and drafts before the host hears of it.

        What to draft is therefore decided before the pass; requests that turn out to have ended were drafted in vain.
        """
        chosen = {s.request.id for s in self.policy.to_draft([d.sequence for d in drafts])}
        settled = [(i, d) for i, d in enumerate(drafts) if chosen and (d.tree.nodes or d.sequence.request.id in chosen)]
        with self._stage("draft"):
            self._catch_up([d.sequence for _, d in settled])
        with self._stage("verify"):
            settle = [Settle(d.tree, rows.offsets[i], d.sequence.base, d.sequence.computed) for i, d in settled]
            replay = self.runner.replay(rows, self._row_samplings(drafts, ()), settle)
        with self._stage("commit"):
            verified = Verified(replay.logits, replay.choices)
            steps = self._accept(verified, drafts, ())
            if settled:
                for step in steps:
                    self._advance(step.sequence, len(step.path or ()))
            else:
                self._commit(steps, ())
            updates = [self._update(step, verified) for step in steps]
        for d in drafts:
            d.sequence.proposal = None
        for (_, d), logprobs, ids in zip(settled, replay.logprobs, replay.token_ids, strict=True):
            d.sequence.drafted = d.sequence.computed
            if d.sequence.request.id in chosen:
                d.sequence.proposal = Proposal(logprobs, ids)
        seconds = time.perf_counter() - started
        self.policy.observe(Round(len(drafts), rows.rows, seconds, len(settled), None if settled else 0.0))
        return updates

    # tree_build ---------------------------------------------------------------------------------------------------

    def _build(self, decoding: Many[Sequence]) -> list[Draft]:
        trees = self.policy.fit([self._tree(s) for s in decoding], decoding)
        return [Draft(s, t) for s, t in zip(decoding, trees, strict=True)]

    def _tree(self, s: Sequence) -> Tree:
        # A path of d nodes commits d + 1 tokens: deeper than what is left to say is wasted.
        depth = max(0, s.left_to_say - 1)
        if s.proposal is None or depth == 0:
            return tree.root_only(s.root)
        logprobs, token_ids = s.proposal.logprobs[:depth], s.proposal.token_ids[:depth]
        if self.faults:
            lp, ids = np.array(logprobs), np.array(token_ids)
            token_ids = self.faults.draft_tokens(ids, lp, self._context(s)).tolist()
            logprobs = self.faults.draft_logprobs(lp, self._context(s)).tolist()
        if s.request.mode is SpecMode.CHAIN:
            return tree.chain(s.root, [ids[0] for ids in token_ids])
        return tree.best_first(
            s.root,
            logprobs,
            token_ids,
            self.settings.budget,
            off_spine=self.policy.off_spine,
            floor=self.policy.floor,
        )

    # tree_compile -------------------------------------------------------------------------------------------------

    def _compile(self, drafts: Many[Draft], chunks: Many[Chunk]) -> RowBatch:
        segments = [self._tree_segment(d) for d in drafts]
        for chunk in chunks:
            s, start = chunk.sequence, chunk.sequence.computed
            end = start + chunk.tokens
            tokens = s.request.prompt_ids[start:end]
            segments.append(Segment(s.base, start, tokens, range(start, end), Sight.CAUSAL))
        return self.runner.batch(segments)

    def _tree_segment(self, draft: Draft) -> Segment:
        s, t = draft.sequence, draft.tree
        positions = [s.computed + depth for depth in t.depths]
        visible = t.visible() if t.nodes else None
        if self.faults:
            positions = self.faults.row_positions(positions, list(t.depths), self._context(s))
            if visible is not None and s.drafts:
                visible = self.faults.tree_mask(visible, self._context(s))
        sight = Sight.CAUSAL if visible is None else Sight.TREE
        return Segment(s.base, s.computed, t.token_ids, positions, sight, visible)

    # verify -------------------------------------------------------------------------------------------------------

    def _verify(self, rows: RowBatch, drafts: Many[Draft], chunks: Many[Chunk]) -> Verified:
        featured = [d.sequence for d in drafts if d.sequence.drafts] or chunks
        hidden = self.runner.verify(rows, features=bool(featured))
        wanted = list(range(sum(d.tree.rows for d in drafts)))
        for i, chunk in enumerate(chunks):
            self._score_prompt(chunk, hidden, rows.offsets[len(drafts) + i])
            if chunk.completes and chunk.sequence.left_to_say > 0:
                wanted.append(rows.offsets[len(drafts) + i + 1] - 1)
        if not wanted:
            return Verified(torch.empty(0, 0), [])
        logits = self.runner.logits(hidden, wanted)
        return Verified(logits, sampling.choose(logits, self._row_samplings(drafts, chunks)).tolist())

    def _row_samplings(self, drafts: Many[Draft], chunks: Many[Chunk]) -> list[RowSampling]:
        ready = [c.sequence for c in chunks if c.completes and c.sequence.left_to_say > 0]
        sequences = [d.sequence for d in drafts] + ready
        if all(s.request.sampling.greedy for s in sequences):
            return []
        rows = [
            RowSampling(d.sequence.request.sampling, d.sequence.seed, d.sequence.computed + depth + 1)
            for d in drafts
            for depth in d.tree.depths
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
        own, top = sampling.logprobs_of(self.runner.logits(hidden, rows), targets, s.request.top_logprobs)
        s.scores.extend(own)
        s.top_scores.extend(top)

    # accept -------------------------------------------------------------------------------------------------------

    def _accept(self, verified: Verified, drafts: Many[Draft], chunks: Many[Chunk]) -> list[Step]:
        steps, row = [], 0
        for draft in drafts:
            steps.append(self._accept_tree(draft, verified.choices[row : row + draft.tree.rows], row))
            row += draft.tree.rows
        for chunk in chunks:
            if not chunk.completes:
                continue
            s = chunk.sequence
            if s.left_to_say > 0:
                tokens, ending = s.say([verified.choices[row]])
                steps.append(Step(s, tokens, [row], None, ending))
                row += 1
            else:
                steps.append(Step(s, [], [], None, Ending(Finish.LENGTH)))
        return steps

    def _accept_tree(self, draft: Draft, choices: list[int], first_row: int) -> Step:
        s, t = draft.sequence, draft.tree
        if self.faults:
            choices = self.faults.choices(choices, self._context(s))
        path = t.walk(choices)
        if self.faults and s.drafts:
            path = self.faults.accepted(path, t, self._context(s))
        self.policy.learn(s, t, path)
        gained = [t.token_ids[row] for row in path[1:]] + [choices[path[-1]]]
        tokens, ending = s.say(gained)
        kept = path[: len(tokens)]
        self._count(s, t, kept, tokens)
        return Step(s, tokens, [first_row + row for row in kept], kept, ending)

    def _count(self, s: Sequence, t: Tree, kept: list[int], tokens: list[int]) -> None:
        accepted = min(len(kept) - 1, len(tokens))
        s.verify_passes += 1
        s.accepted_drafts += accepted
        s.proposed_drafts += t.nodes
        if s.drafts:
            self.counters.verify_passes += 1
            self.counters.committed_tokens += len(tokens)
            self.counters.accepted_drafts += accepted
            self.counters.proposed_drafts += t.nodes

    # commit -------------------------------------------------------------------------------------------------------

    def _commit(self, steps: Many[Step], chunks: Many[Chunk]) -> None:
        """Keep the accepted rows' keys, values and features; rejected slots are overwritten by the next pass."""
        source: list[int] = []
        target: list[int] = []
        for step in steps:
            if step.path is None:
                continue
            s, path = step.sequence, step.path
            if self.faults and s.drafts:
                path = self.faults.compaction(path, self._context(s))
            moved = [(row, i) for i, row in enumerate(path) if row != i]
            source.extend(s.base + s.computed + row for row, _ in moved)
            target.extend(s.base + s.computed + i for _, i in moved)
        if source:
            self.runner.compact(source, target)
        for step in steps:
            if step.path is not None:
                self._advance(step.sequence, len(step.path))
        for chunk in chunks:
            self._advance(chunk.sequence, chunk.tokens)

    def _advance(self, s: Sequence, tokens: int) -> None:
        if self.runner.featured and s.featured == s.computed:
            s.featured += tokens
        if self.faults and s.drafts and s.output_ids and s.left_to_prefill == 0:
            self.runner.replace_features(
                s.base + s.computed, tokens, lambda rows: self.faults.draft_features(rows, self._context(s))
            )
        s.computed += tokens

    def _update(self, step: Step, verified: Verified) -> Update:
        s, ending = step.sequence, step.ending
        own: tuple[float, ...] = ()
        top: tuple[TopLogprobs, ...] = ()
        if s.request.want_logprobs and step.tokens:
            logits = verified.logits[torch.tensor(step.rows, device=verified.logits.device)]
            own, top = sampling.logprobs_of(logits, step.tokens, s.request.top_logprobs)
        tokens = step.tokens
        if self.faults and step.path is not None:
            tokens = self.faults.emit(list(tokens), self._context(s))
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

    # draft --------------------------------------------------------------------------------------------------------

    def _draft(self, live: Many[Sequence]) -> int:
        """Propose the next block of the sequences that the policy picks; returns how many were drafted."""
        for s in live:
            s.proposal = None
        drafting = [s for s in self.policy.to_draft(live) if s.left_to_say > 1]
        if not drafting:
            return 0
        self._catch_up(drafting)
        blocks = [
            Segment(
                s.base,
                s.computed,
                self.runner.block(s.root),
                range(s.computed, s.computed + self.settings.block_size),
                Sight.FULL,
            )
            for s in drafting
        ]
        logprobs, token_ids = self.runner.draft(self.runner.batch(blocks), self.settings.topk_cap)
        for s, lp, ids in zip(drafting, logprobs.tolist(), token_ids.tolist(), strict=True):
            s.proposal = Proposal(lp, ids)
        return len(drafting)

    def _catch_up(self, sequences: Many[Sequence]) -> None:
        """Bring the drafter's context up to the last computed token, however far it is behind."""
        positions: list[int] = []
        slots: list[int] = []
        for s in sequences:
            positions.extend(range(s.drafted, s.computed))
            slots.extend(range(s.base + s.drafted, s.base + s.computed))
            s.drafted = s.computed
        for i in range(0, len(slots), EXTEND_ROWS):
            self.runner.extend(positions[i : i + EXTEND_ROWS], slots[i : i + EXTEND_ROWS])

    # Shared -------------------------------------------------------------------------------------------------------

    def _context(self, s: Sequence) -> FaultContext:
        c = self.settings
        batch = tuple(other.view for other in self._batch)
        return FaultContext(s.view, batch, c.budget, c.topk_cap, c.block_size, c.max_running)

    @contextmanager
    def _stage(self, name: str):  # type: ignore[no-untyped-def]
        if not self.timed:
            yield
            return
        started = time.perf_counter()
        yield
        self.runner.synchronise()
        seconds = self.counters.stage_seconds
        seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - started
