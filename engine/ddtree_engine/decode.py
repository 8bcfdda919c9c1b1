"""One round of decoding: compile the trees, verify, accept, commit, draft and grow the next.

The trees that a round verifies were grown at the end of the round before, so a round has one target pass and one drafter
pass. Prefill chunks ride along in the target pass. Which requests run is `scheduler.py`'s decision, how large trees are
`budget.py`'s; tensors live in `cache.py`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Many
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from ddtree_engine import sampling
from ddtree_engine.budget import Policy, Round
from ddtree_engine.config import SpecMode
from ddtree_engine.corruption import CorruptionPoints, FaultContext
from ddtree_engine.forest import Forest, Growth, Proposal, Sizes, gather
from ddtree_engine.requests import Finish, TopLogprobs, Update
from ddtree_engine.rows import RowBatch, Segment, Sight
from ddtree_engine.runner import Decoding, Replay, Runner, Settle, tree_segment
from ddtree_engine.sampling import RowSampling
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
class Accepted:
    """What the target agreed with in one tree."""

    path: list[int]  # rows from the root down
    tokens: list[int]  # gained: those of path[1:], then the choice after path[-1]


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
            forest = gather([s.proposal for s in decoding], [s.root for s in decoding])
            forest = self.policy.fit(forest, decoding)
        if decoding and not chunks and not self.faults and self.runner.replays(forest):
            return self._replay(forest, decoding, started)
        with self._stage("tree_compile"):
            drafts = [Draft(s, forest.tree(i)) for i, s in enumerate(decoding)]
            rows = self._compile(drafts, chunks)
        with self._stage("verify"):
            verified = self._verify(rows, forest, decoding, chunks)
        with self._stage("commit"):
            accepted = self._walk(drafts, verified.choices)
            self.policy.learn(forest, decoding, [a.path for a in accepted])
            sizes = [d.tree.rows for d in drafts]
            steps = self._accept(decoding, sizes, accepted) + self._first_tokens(chunks, verified.choices, sum(sizes))
            self._commit(steps, chunks)
            updates = [self._update(step, verified.logits) for step in steps]
        drafted = self._draft([step.sequence for step in steps if step.ending is None])
        if not chunks:
            self.policy.observe(Round(len(decoding), rows.rows, drafted, time.perf_counter() - started))
        return updates

    def _replay(self, forest: Forest, decoding: Many[Sequence], started: float) -> list[Update]:
        """The same round on the device alone: it walks, commits, drafts and grows before the host hears of it.

        What to draft is therefore decided before the pass; requests that turn out to have ended were drafted in vain.
        """
        chosen = {s.request.id for s in self.policy.to_draft(decoding)}
        sizes = forest.rows.tolist()
        index = [i for i, s in enumerate(decoding) if sizes[i] > 1 or s.request.id in chosen]
        settled = [decoding[i] for i in index]
        with self._stage("draft"):
            self._catch_up(settled)
        with self._stage("verify"):
            places = (np.array([s.base for s in decoding]), np.array([s.computed for s in decoding]))
            settle = self._settle(index, settled, chosen) if index else None
            replay = self.runner.replay(Decoding(forest, *places), self._row_samplings(forest, decoding, ()), settle)
        with self._stage("commit"):
            accepted = _read(replay, sizes, index)
            self.policy.learn(forest, decoding, [a.path for a in accepted])
            steps = self._accept(decoding, sizes, accepted)
            for step in steps:
                self._advance(step.sequence, len(step.path or ()))
            updates = [self._update(step, replay.logits) for step in steps]
        for s in decoding:
            s.proposal = None
        for i, s in enumerate(settled):
            s.drafted = s.computed
            if s.request.id in chosen and replay.forest is not None:
                s.proposal = Proposal(replay.forest, i)
        self.policy.observe(Round(len(decoding), sum(sizes), len(settled), time.perf_counter() - started))
        return updates

    def _settle(self, index: list[int], sequences: Many[Sequence], chosen: set[str]) -> Settle:
        growth = self._growth(sequences)
        nodes = [n if s.request.id in chosen else 0 for s, n in zip(sequences, growth.nodes, strict=True)]
        return Settle(
            np.array(index),
            np.array([s.left_to_say for s in sequences]),
            np.array(growth.ranks),
            np.array(nodes),
            growth.off_spine,
            growth.floor,
        )

    def _growth(self, sequences: Many[Sequence]) -> Growth:
        """How the next trees of these requests grow. A path of d nodes commits d + 1 tokens: deeper than is left is wasted."""
        block, budget = self.settings.block_size, min(self.settings.budget, self.policy.nodes)
        chains = [self.policy.chains or s.request.mode is SpecMode.CHAIN for s in sequences]
        return Growth(
            roots=[s.root for s in sequences],
            depths=[max(0, min(block - 1, s.left_to_say - 1)) for s in sequences],
            ranks=[1 if chain else self.settings.topk_cap for chain in chains],
            nodes=[block - 1 if chain else budget for chain in chains],
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
        segment = tree_segment(t, s.base, s.computed)
        if not self.faults:
            return segment
        positions = self.faults.row_positions(list(segment.positions), list(t.depths), self._context(s))
        visible = segment.visible
        if visible is not None and s.drafts:
            visible = self.faults.tree_mask(visible, self._context(s))
        return replace(segment, positions=positions, visible=visible)

    # verify -------------------------------------------------------------------------------------------------------

    def _verify(self, rows: RowBatch, forest: Forest, decoding: Many[Sequence], chunks: Many[Chunk]) -> Verified:
        featured = any(s.drafts for s in decoding) or bool(chunks)
        hidden = self.runner.verify(rows, features=featured)
        wanted = list(range(rows.offsets[len(decoding)]))
        for i, chunk in enumerate(chunks, start=len(decoding)):
            self._score_prompt(chunk, hidden, rows.offsets[i])
            if chunk.completes and chunk.sequence.left_to_say > 0:
                wanted.append(rows.offsets[i + 1] - 1)
        if not wanted:
            return Verified(torch.empty(0, 0), [])
        logits = self.runner.logits(hidden, wanted)
        return Verified(logits, sampling.choose(logits, self._row_samplings(forest, decoding, chunks)).tolist())

    def _row_samplings(self, forest: Forest, decoding: Many[Sequence], chunks: Many[Chunk]) -> list[RowSampling]:
        ready = [c.sequence for c in chunks if c.completes and c.sequence.left_to_say > 0]
        if all(s.request.sampling.greedy for s in (*decoding, *ready)):
            return []
        rows = [
            RowSampling(s.request.sampling, s.seed, s.computed + depth + 1)
            for i, s in enumerate(decoding)
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
        own, top = sampling.logprobs_of(self.runner.logits(hidden, rows), targets, s.request.top_logprobs)
        s.scores.extend(own)
        s.top_scores.extend(top)

    # accept -------------------------------------------------------------------------------------------------------

    def _walk(self, drafts: Many[Draft], choices: list[int]) -> list[Accepted]:
        walked, row = [], 0
        for draft in drafts:
            walked.append(self._walk_tree(draft, choices[row : row + draft.tree.rows]))
            row += draft.tree.rows
        return walked

    def _walk_tree(self, draft: Draft, choices: list[int]) -> Accepted:
        s, t = draft.sequence, draft.tree
        if self.faults:
            choices = self.faults.choices(choices, self._context(s))
        path = t.walk(choices)
        if self.faults and s.drafts:
            path = self.faults.accepted(path, t, self._context(s))
        return Accepted(path, [t.token_ids[row] for row in path[1:]] + [choices[path[-1]]])

    def _accept(self, decoding: Many[Sequence], sizes: list[int], accepted: Many[Accepted]) -> list[Step]:
        """What was walked joins the answers, up to their ends."""
        steps, first = [], 0
        for s, rows, walked in zip(decoding, sizes, accepted, strict=True):
            tokens, ending = s.say(walked.tokens)
            kept = walked.path[: len(tokens)]
            self._count(s, rows - 1, len(kept) - 1, tokens)
            steps.append(Step(s, tokens, [first + row for row in kept], kept, ending))
            first += rows
        return steps

    def _first_tokens(self, chunks: Many[Chunk], choices: list[int], row: int) -> list[Step]:
        """The first token after each prompt that is complete, chosen after logits row `row` and those that follow."""
        steps = []
        for chunk in chunks:
            if not chunk.completes:
                continue
            s = chunk.sequence
            if s.left_to_say > 0:
                tokens, ending = s.say([choices[row]])
                steps.append(Step(s, tokens, [row], None, ending))
                row += 1
            else:
                steps.append(Step(s, [], [], None, Ending(Finish.LENGTH)))
        return steps

    def _count(self, s: Sequence, proposed: int, accepted: int, tokens: list[int]) -> None:
        s.verify_passes += 1
        s.accepted_drafts += accepted
        s.proposed_drafts += proposed
        if s.drafts:
            self.counters.verify_passes += 1
            self.counters.committed_tokens += len(tokens)
            self.counters.accepted_drafts += accepted
            self.counters.proposed_drafts += proposed

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

    def _update(self, step: Step, logits: torch.Tensor) -> Update:
        s, ending = step.sequence, step.ending
        own: tuple[float, ...] = ()
        top: tuple[TopLogprobs, ...] = ()
        if s.request.want_logprobs and step.tokens:
            mine = logits[torch.tensor(step.rows, device=logits.device)]
            own, top = sampling.logprobs_of(mine, step.tokens, s.request.top_logprobs)
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
        with self._stage("draft"):
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
        with self._stage("tree_build"):
            if self.faults:
                self._batch = tuple(live)
                logprobs, token_ids = self._corrupted(drafting, logprobs, token_ids)
            forest = self.runner.grow(logprobs, token_ids, self._growth(drafting), self.settings.trees)
            for i, s in enumerate(drafting):
                s.proposal = Proposal(forest, i)
        return len(drafting)

    def _corrupted(
        self, drafting: Many[Sequence], logprobs: torch.Tensor, token_ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.faults is not None
        for i, s in enumerate(drafting):
            deep = min(self.settings.block_size - 1, s.left_to_say - 1)
            lp, ids = logprobs[i, :deep].numpy(force=True), token_ids[i, :deep].numpy(force=True)
            new_ids = self.faults.draft_tokens(ids, lp, self._context(s))
            new_lp = self.faults.draft_logprobs(lp, self._context(s))
            token_ids[i, :deep] = torch.from_numpy(np.array(new_ids))
            logprobs[i, :deep] = torch.from_numpy(np.array(new_lp))
        return logprobs, token_ids

    def _catch_up(self, sequences: Many[Sequence]) -> None:
        """Bring the drafter's context up to the last computed token, however far it is behind."""
        positions: list[int] = []
        slots: list[int] = []
        for s in sequences:
            positions.extend(range(s.drafted, s.computed))
            slots.extend(range(s.base + s.drafted, s.base + s.computed))
            s.drafted = s.computed
        if slots:
            self.runner.extend(positions, slots)

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


def _read(replay: Replay, sizes: list[int], index: list[int]) -> list[Accepted]:
    """Every decoding request's path and tokens: walked on the device, or a plain step's only choice."""
    firsts = np.cumsum(sizes) - sizes
    accepted = [Accepted([0], [token]) for token in replay.choices[firsts].tolist()]
    lengths, paths, said = replay.lengths.tolist(), replay.paths.tolist(), replay.said.tolist()
    for i, length, path, tokens in zip(index, lengths, paths, said, strict=True):
        accepted[i] = Accepted(path[:length], tokens[:length])
    return accepted
