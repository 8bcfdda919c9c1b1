"""The drafters' training data: what the trained target itself writes, packed into rows with its features."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.pool import Pool
from random import Random

import torch
from torch import Tensor

from training.generate import Prompt, generate_all
from training.mixture import sample
from training.model import Target
from training.recipe import GenerationRecipe
from training.rows import worker_tokenizer
from training.tasks import Split, prompt_text

FEATURE_TOKENS = 1 << 17  # tokens of one forward pass when features are computed


@dataclass(frozen=True, slots=True)
class Written:
    """A prompt and its continuation; tokens from `prompt` on are the target's own."""

    ids: tuple[int, ...]
    prompt: int


@dataclass(frozen=True, slots=True)
class DraftRows:
    """Packed sequences, all [rows, T]: ids, place of the token in its sequence, sequence number (-1: padding),
    whether a block may start here; features [rows, T, F * E]."""

    ids: Tensor
    positions: Tensor
    sequence: Tensor
    anchor: Tensor
    features: Tensor


def chat_prompts(recipe: GenerationRecipe, seed: int, pool: Pool) -> list[Prompt]:
    """Prompts of the training mixture, with room for an answer a little longer than the reference."""
    parts = 20
    jobs = [(seed * 1009 + k, -(-recipe.chats // parts), recipe) for k in range(parts)]
    return [p for part in pool.map(_chat_prompts, jobs, chunksize=1) for p in part]


def _chat_prompts(job: tuple[int, int, GenerationRecipe]) -> list[Prompt]:
    seed, count, recipe = job
    rng, tok = Random(seed), worker_tokenizer()
    prompts: list[Prompt] = []
    longest = recipe.batches[-1][0]
    while len(prompts) < count:
        task = sample(rng, Split.TRAIN)
        answer = len(tok.encode(task.last.answer, add_special_tokens=False).ids)
        if answer < 10 and rng.random() > recipe.short_kept:
            continue
        ids = tuple(tok.encode(prompt_text(task), add_special_tokens=False).ids)
        total = len(ids) + answer * 5 // 4 + 12
        if total <= longest:
            prompts.append(Prompt(ids, total, 0.0 if rng.random() < recipe.greedy_share else recipe.temperature))
    return prompts


def library_prompts(library: Sequence[int], recipe: GenerationRecipe, seed: int) -> list[Prompt]:
    """Pieces of library text to be continued."""
    rng = Random(seed)
    prompts = []
    for _ in range(recipe.library_prompts):
        start, length = rng.randrange(len(library) - 200), rng.randrange(24, 96)
        temperature = 0.0 if rng.random() < recipe.greedy_share else recipe.temperature
        prompts.append(Prompt(tuple(library[start : start + length]), recipe.batches[0][0], temperature))
    return prompts


def write_sequences(model: Target, prompts: Sequence[Prompt], recipe: GenerationRecipe) -> list[Written]:
    outputs = generate_all(model, prompts, recipe.batches)
    made = [Written(tuple(o), len(p.ids)) for o, p in zip(outputs, prompts, strict=True)]
    return [s for s in made if len(s.ids) >= s.prompt + 2]  # a block needs an anchor and a token after it


def pack(sequences: Sequence[Written], length: int) -> list[list[int]]:
    """Sequence numbers of every row: longest first, each into the first open row with room."""
    rows: list[list[int]] = []
    room: list[int] = []
    first_open = 0
    for i in sorted(range(len(sequences)), key=lambda i: -len(sequences[i].ids)):
        need = len(sequences[i].ids)
        row = next((r for r in range(first_open, len(rows)) if room[r] >= need), None)
        if row is None:
            rows.append([])
            room.append(length)
            row = len(rows) - 1
        rows[row].append(i)
        room[row] -= need
        while first_open < len(rows) and room[first_open] < 32:
            first_open += 1
    return rows


@torch.no_grad()
def draft_rows(model: Target, sequences: Sequence[Written], layers: Sequence[int], length: int) -> DraftRows:
    """Packs the sequences and computes the target's features, every sequence on its own."""
    device = model.cos.device
    rows = pack(sequences, length)
    shape = (len(rows), length)
    ids = torch.zeros(shape, dtype=torch.long)
    positions, anchor = torch.zeros_like(ids), torch.zeros(shape, dtype=torch.bool)
    numbers = torch.full(shape, -1)
    places = [0] * len(sequences)  # where each sequence starts in the flattened rows
    for r, row in enumerate(rows):
        at = 0
        for i in row:
            s = sequences[i]
            span = slice(at, at + len(s.ids))
            ids[r, span], positions[r, span], numbers[r, span] = torch.tensor(s.ids), torch.arange(len(s.ids)), i
            anchor[r, at + s.prompt : at + len(s.ids) - 1] = True
            places[i] = r * length + at
            at += len(s.ids)
    width = len(layers) * model.shape.hidden
    features = torch.zeros(len(rows) * length, width, dtype=torch.bfloat16, device=device)
    for part in _parts(sequences):
        _write_features(model, sequences, part, places, layers, features)
    moved = (t.to(device) for t in (ids, positions, numbers, anchor))
    return DraftRows(*moved, features.view(*shape, width))


def _parts(sequences: Sequence[Written]) -> list[list[int]]:
    """Sequences of about the same length, together at most FEATURE_TOKENS tokens."""
    parts: list[list[int]] = []
    for i in sorted(range(len(sequences)), key=lambda i: -len(sequences[i].ids)):
        if not parts or (len(parts[-1]) + 1) * len(sequences[parts[-1][0]].ids) > FEATURE_TOKENS:
            parts.append([])
        parts[-1].append(i)
    return parts


def _write_features(
    model: Target, sequences: Sequence[Written], part: list[int], places: list[int], layers: Sequence[int], out: Tensor
) -> None:
    device = out.device
    widest = len(sequences[part[0]].ids)
    padded = [list(sequences[i].ids) + [0] * (widest - len(sequences[i].ids)) for i in part]
    _, features = model(torch.tensor(padded, device=device), layers)
    assert features is not None
    lengths = torch.tensor([len(sequences[i].ids) for i in part], device=device)
    step = torch.arange(widest, device=device)
    valid = step[None] < lengths[:, None]
    targets = torch.tensor([places[i] for i in part], device=device)[:, None] + step[None]
    out[targets[valid]] = features[valid].to(out.dtype)
