"""Turns tasks into training rows: tokens and loss weights, packed without cutting an example.

Workers make shards from seeds, so the rows of a run depend on the recipe alone, not on the number of processes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.pool import Pool
from random import Random

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from training.mixture import sample
from training.recipe import END_OF_TEXT
from training.tasks import Split, Task, system_text, user_text

PROMPT_WEIGHT, ANSWER_WEIGHT = 1, 10  # in tenths: prompts hold random ids that nobody can predict
CHATS_AT_ONCE = 64
_worker_tokenizer: Tokenizer | None = None


@dataclass(frozen=True, slots=True)
class Rows:
    """ids and weights: [rows, row_tokens + 1]; the weight at i is that of predicting id i (0 on padding)."""

    ids: NDArray[np.int16]
    weights: NDArray[np.uint8]


def start_worker(tokenizer_json: str) -> None:
    global _worker_tokenizer
    _worker_tokenizer = Tokenizer.from_str(tokenizer_json)


def worker_tokenizer() -> Tokenizer:
    """The tokenizer given to start_worker in this process."""
    if _worker_tokenizer is None:
        raise RuntimeError("this process has no tokenizer yet: call start_worker first")
    return _worker_tokenizer


def pieces(task: Task) -> list[tuple[str, int]]:
    """The chat's text in pieces with the loss weight of each."""
    out = [(system_text(task.system), PROMPT_WEIGHT)] if task.system else []
    for turn in task.turns:
        out += [(user_text(turn.prompt), PROMPT_WEIGHT), (turn.answer + "<|im_end|>", ANSWER_WEIGHT * task.weight)]
        out += [("\n", PROMPT_WEIGHT)]
    return out


def encode(tok: Tokenizer, tasks: Sequence[Task]) -> Iterator[tuple[list[int], list[int]]]:
    """(ids, weights) of every task, ended with <|endoftext|>."""
    parts = [pieces(t) for t in tasks]
    encoded = iter(tok.encode_batch([text for p in parts for text, _ in p], add_special_tokens=False))
    for p in parts:
        ids: list[int] = []
        weights: list[int] = []
        for _, weight in p:
            new = next(encoded).ids
            ids += new
            weights += [weight] * len(new)
        ids[-1], weights[-1] = END_OF_TEXT, PROMPT_WEIGHT  # in place of the last newline
        yield ids, weights


def make_shard(job: tuple[int, int, int]) -> Rows:
    """(seed, rows, row_tokens) -> that many full rows. Runs in a worker (or after start_worker)."""
    seed, count, length = job
    tok = worker_tokenizer()
    rng = Random(seed)
    ids = np.zeros((count, length + 1), np.int16)
    weights = np.zeros((count, length + 1), np.uint8)
    used = [0] * count
    misses = 0
    while misses < 12:  # the last few places are left as padding
        tasks = [sample(rng, Split.TRAIN) for _ in range(CHATS_AT_ONCE)]
        for doc, doc_weights in encode(tok, tasks):
            row = next((r for r in range(count) if used[r] + len(doc) <= length + 1), None)
            if row is None:
                misses += len(doc) < length // 4
                continue
            ids[row, used[row] : used[row] + len(doc)] = doc
            weights[row, used[row] : used[row] + len(doc)] = doc_weights
            used[row] += len(doc)
    return Rows(ids, weights)


def stream_rows(pool: Pool, seed: int, shard_rows: int, row_tokens: int, total: int) -> Iterator[Rows]:
    """Shards in the order of their seeds, together at least `total` rows."""
    jobs = [(seed * 1_000_003 + k, shard_rows, row_tokens) for k in range(-(-total // shard_rows))]
    return pool.imap(make_shard, jobs)


def batches(shards: Iterator[Rows], rows: int) -> Iterator[Rows]:
    """Cuts the stream into batches of `rows` rows."""
    kept: list[Rows] = []
    for shard in shards:
        kept.append(shard)
        while sum(len(k.ids) for k in kept) >= rows:
            ids = np.concatenate([k.ids for k in kept])
            weights = np.concatenate([k.weights for k in kept])
            yield Rows(ids[:rows], weights[:rows])
            kept = [Rows(ids[rows:], weights[rows:])] if len(ids) > rows else []
