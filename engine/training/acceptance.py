"""What a drafter gains on greedy text, without running an engine.

At temperature 0 verification is deterministic: a draft tree accepts the longest path that spells the target's own
continuation. So the tree of every anchor is built from one teacher-forced pass of the drafter, and a decoding is
replayed on the known text. Best-first order makes the tree of budget B a prefix of the tree of any larger budget.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.pool import Pool

import numpy as np
import torch
from numpy.typing import NDArray

from training.model import Drafter, Target
from training.onpolicy import Written
from training.train_drafter import block_mask

BUDGETS = (8, 16, 32, 64)
TOP = 8
ANCHORS_AT_ONCE = 64
Tokens, Scores = NDArray[np.int64], NDArray[np.float32]  # [anchors, block - 1, TOP]


@dataclass(slots=True)
class Acceptance:
    """Sums over the sequences of one category; `mean` divides."""

    tokens: int = 0
    passes: dict[str, int] = field(default_factory=lambda: defaultdict[str, int](int))
    ranks: dict[int, list[int]] = field(default_factory=dict)  # depth -> counts of rank 0..TOP-1 and missed

    def mean(self, policy: str) -> float:
        return self.tokens / max(1, self.passes[policy])

    def add(self, other: Acceptance) -> None:
        self.tokens += other.tokens
        for policy, passes in other.passes.items():
            self.passes[policy] += passes
        for depth, counts in other.ranks.items():
            mine = self.ranks.setdefault(depth, [0] * (TOP + 1))
            self.ranks[depth] = [a + b for a, b in zip(mine, counts, strict=True)]


@torch.no_grad()
def top_tokens(drafter: Drafter, target: Target, ids: Sequence[int], prompt: int) -> tuple[Tokens, Scores]:
    """Token ids and log-probabilities [anchors, block - 1, TOP] for every anchor from `prompt` to the last but one."""
    device = target.cos.device
    block = drafter.recipe.block
    row = torch.tensor([ids], device=device)
    _, features = target(row, drafter.recipe.target_layers)
    positions = torch.arange(len(ids), device=device)[None]
    tokens, scores = [], []
    for anchors in torch.arange(prompt, len(ids) - 1, device=device).split(ANCHORS_AT_ONCE):
        mask = block_mask(torch.zeros_like(row), anchors[None], block)
        roots = target.model.embed_tokens(row[:, anchors])
        hidden = drafter(features, positions, roots, anchors[None], target.mask_embedding(), mask)
        best = target.logits(hidden)[0].float().log_softmax(-1).topk(TOP, -1)
        tokens.append(best.indices.cpu())
        scores.append(best.values.cpu())
    return torch.cat(tokens).numpy(), torch.cat(scores).numpy()


def node_order(scores: Sequence[Sequence[float]], budget: int, path: Sequence[int]) -> list[int]:
    """When best-first search pops each node of `path` (ranks from depth 1 on); shorter where it is not reached.

    scores[d][r] is the log-probability of rank r at depth d + 1. A popped node offers its next sibling and its
    first child, so nodes come in order of their path's total log-probability.
    """
    heap: list[tuple[float, tuple[int, ...]]] = [(-scores[0][0], (0,))]
    order: list[int] = []
    for popped in range(budget):
        if not heap or len(order) == len(path):
            break
        cost, ranks = heapq.heappop(heap)
        depth, rank = len(ranks), ranks[-1]
        if depth == len(order) + 1 and ranks == tuple(path[:depth]):
            order.append(popped)
        if rank + 1 < TOP:
            sibling = cost + scores[depth - 1][rank] - scores[depth - 1][rank + 1]
            heapq.heappush(heap, (sibling, (*ranks[:-1], rank + 1)))
        if depth < len(scores):
            heapq.heappush(heap, (cost - scores[depth][0], (*ranks, 0)))
    return order


def true_ranks(tokens: Tokens, continuation: Sequence[int]) -> list[int]:
    """The rank of each true token among the drafted ones, up to the first that is missing."""
    ranks = []
    for depth, token in enumerate(continuation[: len(tokens)]):
        found = np.flatnonzero(tokens[depth] == token)
        if not found.size:
            break
        ranks.append(int(found[0]))
    return ranks


def replay(job: tuple[Written, Tokens, Scores]) -> Acceptance:
    """The passes that chain and trees need for one sequence, with its top_tokens. Pure; for a worker process."""
    written, tokens, scores = job
    out = Acceptance()
    ids, first, depths = written.ids, written.prompt, tokens.shape[1]
    chain: list[int] = []
    trees: list[list[int]] = []
    for k, anchor in enumerate(range(first, len(ids) - 1)):
        ranks = true_ranks(tokens[k], ids[anchor + 1 :])
        chain.append(next((d for d, r in enumerate(ranks) if r), len(ranks)))
        trees.append(node_order(scores[k].tolist(), max(BUDGETS), ranks))
        for depth in range(min(len(ranks) + 1, depths, len(ids) - 1 - anchor)):
            counts = out.ranks.setdefault(depth + 1, [0] * (TOP + 1))
            counts[ranks[depth] if depth < len(ranks) else TOP] += 1
    out.tokens = len(ids) - 1 - first
    out.passes["chain"] = _passes(len(chain), chain)
    for budget in BUDGETS:
        out.passes[f"b{budget}"] = _passes(len(chain), [sum(o < budget for o in order) for order in trees])
    return out


def _passes(anchors: int, accepted: Sequence[int]) -> int:
    """Verify passes of a decoding that starts at anchor 0; each commits the accepted tokens and one more."""
    at = passes = 0
    while at < anchors:
        at += accepted[at] + 1
        passes += 1
    return passes


def measure(drafter: Drafter, target: Target, texts: dict[str, list[Written]], pool: Pool) -> dict[str, Acceptance]:
    """Acceptance of every category of greedy texts; the models run here, the replays in `pool`."""
    results = {}
    for category, sequences in texts.items():
        jobs = ((w, *top_tokens(drafter, target, w.ids, w.prompt)) for w in sequences)
        results[category] = Acceptance()
        for one in pool.imap(replay, jobs):
            results[category].add(one)
    return results
