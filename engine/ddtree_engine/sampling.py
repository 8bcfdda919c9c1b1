"""Choosing tokens: greedy, or Gumbel noise keyed by (seed, position), which makes sampling a pure function of the logits.

argmax(logits / T + Gumbel) is an exact sample of softmax(logits / T). Since the noise of a position does not depend on how
many rows a pass has, plain decoding, the chain and the tree give the same tokens at any temperature: a tree's rows of one
depth share their noise, and the walk keeps the one whose prefix is right. Works on CPU and CUDA alike; no global generator.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ddtree_engine.requests import Sampling, TopLogprobs

_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_MASK = (1 << 64) - 1
_COLUMNS = 128  # that `best_few` folds a row into: eight vectors of AVX-512
_FOLDED = 1 << 17  # numbers; below, its operations take longer than one topk


@dataclass(frozen=True, slots=True)
class RowSampling:
    """How the token after one row is chosen."""

    sampling: Sampling
    seed: int
    position: int  # of the token that is chosen, counted from the prompt's first


def _mix(z: int) -> int:
    """splitmix64's finaliser."""
    z = ((z ^ (z >> 30)) * _MIX_1) & _MASK
    z = ((z ^ (z >> 27)) * _MIX_2) & _MASK
    return z ^ (z >> 31)


def _signed(z: int) -> int:
    return z - (1 << 64) if z >> 63 else z


def row_key(seed: int, position: int) -> int:
    """A 64-bit (signed) key that differs for every (seed, position)."""
    return _signed(_mix((_mix(seed & _MASK) + (position + 1) * _GOLDEN) & _MASK))


def gumbel(keys: torch.Tensor, vocab: int) -> torch.Tensor:
    """float32 [rows, vocab] of standard Gumbel noise from int64 keys [rows]; token i's is a hash of (key, i)."""
    index = torch.arange(1, vocab + 1, dtype=torch.int64, device=keys.device)
    z = keys[:, None] + index[None] * _signed(_GOLDEN)
    z = (z ^ _shift(z, 30)) * _signed(_MIX_1)
    z = (z ^ _shift(z, 27)) * _signed(_MIX_2)
    z = z ^ _shift(z, 31)
    # 40 bits in (0, 1): float32 keeps them fine near 0, where the winners of the argmax lie (v small = noise large).
    v = (_shift(z, 24).to(torch.float32) + 0.5) * 2.0**-40
    return -torch.log(-torch.log1p(-v))


def _shift(z: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical right shift of int64 (torch's is arithmetic)."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def best(logits: torch.Tensor) -> torch.Tensor:
    """int64 [rows]: the first of the largest of each row. On CPU by numpy, which is ten times as fast at it."""
    if logits.device.type != "cpu":
        return logits.argmax(dim=-1)
    return torch.from_numpy(logits.numpy().argmax(axis=-1))


def best_few(scores: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(values, int64 token ids) [rows, k]: the largest of float32 [rows, vocab], largest first.

    On CPU half of topk's time and less: what is among the k best lies in one of the k columns of a folded row whose bests are
    the best.
    """
    rows, vocab = scores.shape
    if k == 1 and scores.device.type == "cpu":
        ids = best(scores)[:, None]
        return scores.gather(1, ids), ids
    if scores.device.type != "cpu" or scores.numel() < _FOLDED or vocab % _COLUMNS or k > _COLUMNS // 8:
        return scores.topk(k, dim=-1)
    folded = scores.view(rows, vocab // _COLUMNS, _COLUMNS)
    columns = folded.amax(dim=1).topk(k, dim=-1)[1]  # [rows, k]
    candidates = folded.gather(2, columns[:, None].expand(-1, folded.shape[1], -1)).flatten(1)  # depth by depth
    values, at = candidates.topk(k, dim=-1)
    return values, at.div(k, rounding_mode="floor").mul_(_COLUMNS).add_(columns.gather(1, at.remainder(k)))


def choose(logits: torch.Tensor, rows: Sequence[RowSampling]) -> torch.Tensor:
    """int64 [rows]: the token after each row. logits: float32 [rows, vocab], left as they are."""
    greedy = best(logits)
    drawn = [i for i, row in enumerate(rows) if not row.sampling.greedy]
    if not drawn:
        return greedy
    picked = [rows[i] for i in drawn]
    index = torch.tensor(drawn, device=logits.device)
    scaled = _truncate(_tempered(logits[index], picked), picked)
    keys = [row_key(row.seed, row.position) for row in picked]
    unique = sorted(set(keys))  # rows of one depth share their noise
    where = torch.tensor([unique.index(key) for key in keys], device=logits.device)
    noise = gumbel(torch.tensor(unique, dtype=torch.int64, device=logits.device), logits.shape[-1])
    greedy[index] = best(scaled + noise[where])
    return greedy


def _tempered(logits: torch.Tensor, rows: Sequence[RowSampling]) -> torch.Tensor:
    heat = torch.tensor([row.sampling.temperature for row in rows], dtype=torch.float32, device=logits.device)
    return logits / heat[:, None]


def _truncate(logits: torch.Tensor, rows: Sequence[RowSampling]) -> torch.Tensor:
    """Set logits outside top-k, then outside top-p, to -inf. The best token always stays."""
    vocab = logits.shape[-1]
    limits = [row.sampling.top_k if 0 < row.sampling.top_k < vocab else vocab for row in rows]
    shares = [row.sampling.top_p for row in rows]
    if min(limits) == vocab and min(shares) >= 1.0:
        return logits
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(vocab, device=logits.device)
    ordered = ordered.masked_fill(rank >= torch.tensor(limits, device=logits.device)[:, None], -torch.inf)
    mass = ordered.softmax(dim=-1)
    before = mass.cumsum(dim=-1) - mass  # probability of everything more likely
    top_p = torch.tensor(shares, dtype=torch.float32, device=logits.device)[:, None]
    ordered = ordered.masked_fill((before >= top_p) & (rank > 0) & (top_p < 1.0), -torch.inf)
    return torch.full_like(logits, -torch.inf).scatter(-1, order, ordered)


def logprobs_of(logits: torch.Tensor, token_ids: Sequence[int], top: int) -> tuple[tuple[float, ...], tuple[TopLogprobs, ...]]:
    """log_softmax(logits) [rows, vocab] at one token per row, and the `top` best of each row when top > 0."""
    if not token_ids:
        return (), ()
    logp = torch.log_softmax(logits.float(), dim=-1)
    ids = torch.tensor(list(token_ids), device=logits.device)
    own = tuple(logp.gather(-1, ids[:, None])[:, 0].tolist())
    if top <= 0:
        return own, ()
    values, tokens = logp.topk(min(top, logp.shape[-1]), dim=-1)
    pairs = zip(values.tolist(), tokens.tolist(), strict=True)
    return own, tuple(tuple(zip(v, t, strict=True)) for v, t in pairs)


def request_seed(engine_seed: int, serial: int) -> int:
    """The seed of a request that gave none: differs per request, repeats with the engine's seed and order."""
    return _mix((engine_seed + (serial + 1) * _GOLDEN) & _MASK)


def reference_gumbel(key: int, vocab: int) -> np.ndarray:
    """`gumbel` for one key in plain integers: the definition that the fast version is tested against."""
    bits = [(_mix(((key & _MASK) + (i + 1) * _GOLDEN) & _MASK)) >> 24 for i in range(vocab)]
    v = (np.array(bits, dtype=np.float32) + np.float32(0.5)) * np.float32(2.0**-40)
    return (-np.log(-np.log1p(-v))).astype(np.float32)
