"""Runs row batches on the device: the target pass, its logits, the cache moves and the drafter pass.

The eager runner, for CPU and as the reference on CUDA; `graphs.py` replays the same steps as CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ddtree_engine.attention import Attend, plan_sdpa
from ddtree_engine.cache import Cache
from ddtree_engine.checkpoint import StackConfig
from ddtree_engine.drafter import Drafter
from ddtree_engine.forest import Forest, Growth, Sizes, grow
from ddtree_engine.model import Target
from ddtree_engine.rows import RowBatch, Segment, Sight, batch_rows, bucket
from ddtree_engine.sampling import RowSampling, best
from ddtree_engine.threads import Crowd, Threads, numbers_per_product, slowest_wake
from ddtree_engine.tree import Tree

NOTHING = np.empty(0, dtype=np.int64)
EXTEND_ROWS = 1024  # context tokens that the drafter catches up with at once; bounds its activations


@dataclass(frozen=True, slots=True)
class Decoding:
    """The trees to verify and where their requests are; of a prompt that this round completes, the last token is a root."""

    forest: Forest
    base: np.ndarray  # int64 [requests]: first slot of the slab
    past: np.ndarray  # int64 [requests]: slots filled before the tree
    prompts: tuple[Segment, ...] = ()  # rows that ride along; nothing is chosen after them


@dataclass(frozen=True, slots=True)
class Settle:
    """Requests whose trees are walked and committed on the device, and which are drafted again."""

    index: np.ndarray  # int64 [settled]: which of the decoding requests
    left: np.ndarray  # int64 [settled]: tokens that each may still say, before this round
    ranks: np.ndarray  # int64 [settled]: candidates a depth; 1 gives a chain
    nodes: np.ndarray  # int64 [settled]: of the next tree, at most
    off_spine: float = 0.0
    floor: float = -np.inf
    behind: tuple[np.ndarray, np.ndarray] = (NOTHING, NOTHING)  # positions and slots that the drafter's context lacks


@dataclass(frozen=True, slots=True)
class Replay:
    """What a replayed round brings."""

    logits: torch.Tensor  # float32 [rows, vocab], on the device, until the next replay
    choices: np.ndarray  # int64 [rows]
    lengths: np.ndarray  # int64 [settled]: accepted rows
    paths: np.ndarray  # int64 [settled, block]: accepted rows from the root down, the first `length` count
    said: np.ndarray  # int64 [settled, block]: the tokens gained, the first `length` count
    forest: Forest | None  # the settled requests' next trees


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
        most = torch.get_num_threads()
        crowd = Crowd(lambda: slowest_wake(most))
        self._verify_threads = self._threads(most, target.config.stack, crowd)
        self._draft_threads = self._threads(most, drafter.config.stack, crowd) if drafter is not None else None

    def _threads(self, most: int, stack: StackConfig, crowd: Crowd) -> Threads | None:
        """None off the CPU, where threads are not what a pass waits for."""
        if self.device.type != "cpu":
            return None
        return Threads(most, numbers_per_product(stack), self.target.embedding.itemsize, crowd)

    def batch(self, segments: Sequence[Segment]) -> RowBatch:
        """The rows of a pass; on CPU padded to sizes that come back."""
        trash = self.cache.shape.slots - 1 if self.device.type == "cpu" else None
        return batch_rows(segments, self.device, trash)

    def verify(self, rows: RowBatch, *, features: bool) -> torch.Tensor:
        """Run the target over the rows; keys, values and (asked for) features go to their slots.

        Returns hidden states [padded rows, hidden] before the final norm.
        """
        self.featured = features and self.drafter is not None
        taps = self.drafter.taps if self.drafter is not None and self.featured else ()
        attend = self._attend(rows, self.target.config.stack.heads, self.target.config.stack.kv_heads)
        if self._verify_threads is not None:
            self._verify_threads.start(rows.padded)
            attend = self._verify_threads.watched(attend)
        hidden = self.target.forward(rows.token_ids, rows.positions, rows.slots, self.cache.target, attend, taps)
        if self.drafter is not None and self.featured:
            assert self.cache.features is not None
            self.cache.features.index_copy_(0, rows.slots, self.drafter.features(hidden.tapped))
        if self._verify_threads is not None:
            self._verify_threads.stop()
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
        """Append committed tokens (by slot) to the drafter's context. At most once a round."""
        assert self.drafter is not None
        assert self.cache.drafter is not None
        assert self.cache.features is not None
        for first in range(0, len(slots), EXTEND_ROWS):
            part = slots[first : first + EXTEND_ROWS]
            pad = bucket(len(part)) - len(part)
            places = [[*positions[first : first + len(part)], *[0] * pad], [*part, *[self.cache.shape.slots - 1] * pad]]
            index = torch.tensor(places, device=self.device)
            features = self.cache.features.index_select(0, index[1])
            self.drafter.extend(features, index[0], index[1], self.cache.drafter)

    def draft(self, rows: RowBatch, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Blocks -> (log-probabilities, token ids) [requests, block_size - 1, k] on the device."""
        assert self.drafter is not None
        assert self.cache.drafter is not None
        stack = self.drafter.config.stack
        attend = self._attend(rows, stack.heads, stack.kv_heads)
        if self._draft_threads is not None:
            self._draft_threads.start(rows.padded)
            attend = self._draft_threads.watched(attend)
        logprobs, ids = self.drafter.draft(rows.token_ids, rows.positions, rows.slots, self.cache.drafter, attend, k)
        if self._draft_threads is not None:
            self._draft_threads.stop()
        return logprobs[: len(rows.segments)], ids[: len(rows.segments)]

    def grow(self, logprobs: torch.Tensor, token_ids: torch.Tensor, growth: Growth, sizes: Sizes) -> Forest:
        """The trees of candidates [requests, depths, k]."""
        return grow(logprobs.numpy(force=True), token_ids.numpy(force=True), growth, sizes)

    @property
    def captured(self) -> bool:
        """Whether rounds may be replayed at all."""
        return False

    def replays(self, forest: Forest, prompts: Sequence[Segment] = ()) -> bool:
        """Whether a round that verifies these trees and reads these prompts can be replayed as graphs."""
        return False

    def replay(
        self,
        decoding: Decoding,
        samplings: Sequence[RowSampling],
        settle: Settle | None,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> Replay:
        """Verify, walk, commit and draft in one go (see `graphs.py`); without `settle` only verify.

        `meanwhile` is called while the device works.
        """
        raise AssertionError("only a runner whose `replays` said yes is asked to")

    def probe_verify(self, decoding: Decoding) -> None:
        """One pass as a decoding round has it, for measuring."""
        if self.replays(decoding.forest):
            self.replay(decoding, [], None)
            return
        places = zip(decoding.base.tolist(), decoding.past.tolist(), strict=True)
        rows = self.batch([tree_segment(decoding.forest.tree(i), *place) for i, place in enumerate(places)])
        best(self.logits(self.verify(rows, features=True), range(rows.rows))).tolist()

    def probe_draft(self, requests: int, past: int, k: int, sizes: Sizes) -> None:
        """One draft as a decoding round has it, for measuring (a replay includes a pass over the roots)."""
        bases = [self.cache.shape.base(i) for i in range(requests)]
        forest, every = Forest.roots([0] * requests), np.ones(requests, dtype=np.int64)
        if self.replays(forest):
            settle = Settle(np.arange(requests), every * 1000, every * k, every * (sizes.width - 1))
            self.replay(Decoding(forest, np.array(bases), every * past), [], settle)
            return
        block = self.block(0)
        positions = range(past, past + len(block))
        self.extend([0] * requests, list(bases))
        blocks = [Segment(base, past, block, positions, Sight.FULL) for base in bases]
        deep, most = [sizes.depths] * requests, [sizes.width - 1] * requests
        self.grow(*self.draft(self.batch(blocks), k), Growth([0] * requests, deep, [k] * requests, most), sizes)

    def synchronise(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def _attend(self, rows: RowBatch, heads: int, kv_heads: int) -> Attend:
        return plan_sdpa(rows, self.cache.shape.slab_slots, heads // kv_heads, self.target.embedding.dtype)


def tree_segment(tree: Tree, base: int, past: int) -> Segment:
    """The rows of one tree."""
    positions = [past + depth for depth in tree.depths]
    if not tree.nodes:
        return Segment(base, past, tree.token_ids, positions, Sight.CAUSAL)
    return Segment(base, past, tree.token_ids, positions, Sight.TREE, tree.visible())
