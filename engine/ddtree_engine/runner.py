"""Runs row batches on the device: the target pass, its logits, the cache moves and the drafter pass.

The eager runner, for CPU and as the reference on CUDA; `graphs.py` replays the same steps as CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ddtree_engine.attention import Attend, plan_sdpa
from ddtree_engine.cache import Cache
from ddtree_engine.checkpoint import StackConfig
from ddtree_engine.drafter import Drafter
from ddtree_engine.model import Target
from ddtree_engine.rows import RowBatch, Segment, Sight, batch_rows, bucket
from ddtree_engine.sampling import RowSampling, best
from ddtree_engine.threads import Threads, numbers_per_product
from ddtree_engine.tree import Tree, root_only


@dataclass(frozen=True, slots=True)
class Settle:
    """A request whose tree is to be walked and committed on the device, and which is drafted again."""

    tree: Tree
    first_row: int  # of the tree, in the batch
    base: int  # first slot of the slab
    past: int  # slots filled before the tree


@dataclass(frozen=True, slots=True)
class Replay:
    """What a replayed round brings: choices of every row, and the candidates of every settled request."""

    logits: torch.Tensor  # float32 [rows, vocab], on the device, until the next replay
    choices: list[int]
    logprobs: list[list[list[float]]]  # [settled][depths][k]
    token_ids: list[list[list[int]]]


class Runner:
    """Owns the models and the cache. Everything runs on the calling thread."""

    def __init__(self, target: Target, drafter: Drafter | None, cache: Cache, device: torch.device) -> None:
        self.target = target
        self.drafter = drafter
        self.cache = cache
        self.device = device
        self.featured = False  # whether the last pass wrote drafter features
        self.used_graph = False
        self.staircase = False  # whether a pass costs as much as the next captured size
        self.row_sizes: tuple[int, ...] = ()  # captured, ascending; () where any size runs as it is
        self.request_sizes: tuple[int, ...] = ()
        self._verify_threads = self._threads(target.config.stack)
        self._draft_threads = self._threads(drafter.config.stack) if drafter is not None else None

    def _threads(self, stack: StackConfig) -> Threads | None:
        """None off the CPU, where threads are not what a pass waits for."""
        if self.device.type != "cpu":
            return None
        return Threads(torch.get_num_threads(), numbers_per_product(stack), self.target.embedding.itemsize)

    def batch(self, segments: Sequence[Segment]) -> RowBatch:
        """The rows of a pass; on CPU padded to sizes that come back."""
        trash = self.cache.shape.slots - 1 if self.device.type == "cpu" else None
        return batch_rows(segments, self.device, trash)

    def verify(self, rows: RowBatch, *, features: bool) -> torch.Tensor:
        """Run the target over the rows; keys, values and (asked for) features go to their slots.

        Returns hidden states [padded rows, hidden] before the final norm.
        """
        if self._verify_threads is not None:
            self._verify_threads.use(rows.padded)
        self.featured = features and self.drafter is not None
        taps = self.drafter.taps if self.drafter is not None and self.featured else ()
        attend = self._attend(rows, self.target.config.stack.heads, self.target.config.stack.kv_heads)
        hidden = self.target.forward(rows.token_ids, rows.positions, rows.slots, self.cache.target, attend, taps)
        if self.drafter is not None and self.featured:
            assert self.cache.features is not None
            self.cache.features.index_copy_(0, rows.slots, self.drafter.features(hidden.tapped))
        return hidden.last

    def logits(self, hidden: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        """float32 [len(rows), vocab]"""
        n = len(rows)
        if n and rows[-1] - rows[0] == n - 1 and bucket(n) <= hidden.shape[0] - rows[0]:
            return self.target.logits(hidden[rows[0] : rows[0] + bucket(n)])[:n]
        index = torch.tensor([*rows, *[0] * (bucket(n) - n)], device=self.device)
        return self.target.logits(hidden.index_select(0, index))[:n]

    def compact(self, source: Sequence[int], target: Sequence[int]) -> None:
        moved = torch.tensor([source, target], device=self.device)
        self.cache.compact(moved[0], moved[1])

    def replace_features(self, first: int, count: int, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Corruption only: rewrite the features of some slots."""
        if self.cache.features is not None:
            kept = self.cache.features[first : first + count]
            kept.copy_(change(kept.clone()))

    def block(self, root: int) -> list[int]:
        assert self.drafter is not None
        return self.drafter.block(root)

    def extend(self, positions: Sequence[int], slots: Sequence[int]) -> None:
        """Append committed tokens (by slot) to the drafter's context."""
        assert self.drafter is not None
        assert self.cache.drafter is not None
        assert self.cache.features is not None
        pad = bucket(len(slots)) - len(slots)
        places = [[*positions, *[0] * pad], [*slots, *[self.cache.shape.slots - 1] * pad]]
        index = torch.tensor(places, device=self.device)
        features = self.cache.features.index_select(0, index[1])
        self.drafter.extend(features, index[0], index[1], self.cache.drafter)

    def draft(self, rows: RowBatch, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Blocks -> (log-probabilities, token ids) [requests, block_size - 1, k] on the device."""
        assert self.drafter is not None
        assert self.cache.drafter is not None
        if self._draft_threads is not None:
            self._draft_threads.use(rows.padded)
        stack = self.drafter.config.stack
        attend = self._attend(rows, stack.heads, stack.kv_heads)
        logprobs, ids = self.drafter.draft(rows.token_ids, rows.positions, rows.slots, self.cache.drafter, attend, k)
        return logprobs[: len(rows.segments)], ids[: len(rows.segments)]

    def replays(self, rows: RowBatch) -> bool:
        """Whether this pure decoding round can be replayed as graphs."""
        return False

    def replay(self, rows: RowBatch, samplings: Sequence[RowSampling], settle: Sequence[Settle]) -> Replay:
        """Verify, walk, commit and draft in one go (see `graphs.py`); without `settle` only verify."""
        raise AssertionError("only a runner whose `replays` said yes is asked to")

    def probe_verify(self, segments: Sequence[Segment]) -> None:
        """One pass as a decoding round has it, for measuring."""
        rows = self.batch(segments)
        if self.replays(rows):
            self.replay(rows, [], [])
        else:
            best(self.logits(self.verify(rows, features=True), range(rows.rows))).tolist()

    def probe_draft(self, requests: int, past: int, k: int) -> None:
        """One draft as a decoding round has it, for measuring (a replay includes a pass over the roots)."""
        bases = [self.cache.shape.base(i) for i in range(requests)]
        roots = self.batch([Segment(base, past, [0], [past], Sight.CAUSAL) for base in bases])
        if self.replays(roots):
            self.replay(roots, [], [Settle(root_only(0), i, base, past) for i, base in enumerate(bases)])
            return
        block = self.block(0)
        positions = range(past, past + len(block))
        self.extend([0] * requests, list(bases))
        blocks = [Segment(base, past, block, positions, Sight.FULL) for base in bases]
        self.draft(self.batch(blocks), k)[0].tolist()

    def synchronise(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def _attend(self, rows: RowBatch, heads: int, kv_heads: int) -> Attend:
        return plan_sdpa(rows, self.cache.shape.slab_slots, heads // kv_heads, self.target.embedding.dtype)
