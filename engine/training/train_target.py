"""Trains the target on chat rows and standard library rows: cross-entropy, weighted token by token."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone knows it by
from torch import Tensor

from training.model import Target
from training.optim import Optimizer, Schedule
from training.recipe import Recipe
from training.rows import Rows

Log = Callable[[str], None]


def weighted_loss(model: Target, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """ids, weights [B, T + 1] -> (the loss, the mean loss of every row [B])."""
    with torch.autocast(ids.device.type, torch.bfloat16):
        hidden, _ = model(ids[:, :-1])
        logits = model.logits(hidden)
    losses = F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    losses = losses.view(len(ids), -1) * weights[:, 1:]
    return losses.sum() / weights[:, 1:].sum(), losses.sum(1) / weights[:, 1:].sum(1).clamp(min=1)


def library_windows(library: Tensor, rows: int, length: int, generator: torch.Generator) -> Tensor:
    """Random windows [rows, length + 1] of the flat token stream."""
    starts = torch.randint(len(library) - length - 1, (rows,), generator=generator).to(library.device)
    return library[starts[:, None] + torch.arange(length + 1, device=library.device)].long()


def train_target(recipe: Recipe, chats: Iterator[Rows], library: Tensor, device: torch.device, log: Log) -> Target:
    """Returns the trained target in float32 on `device`."""
    t = recipe.target
    torch.manual_seed(recipe.seed)
    generator = torch.Generator().manual_seed(recipe.seed)
    model = Target(recipe.shape).to(device)
    optimizer = Optimizer(model, Schedule(t.steps, t.warmup, t.decay_share), t.matrix_rate, t.other_rate, t.weight_decay)
    loss_of = torch.compile(weighted_loss, dynamic=False) if device.type == "cuda" else weighted_loss
    started, chat_rows = time.time(), t.rows - t.library_rows
    for step in range(t.steps):
        batch = next(chats)
        ids = torch.from_numpy(batch.ids).to(device).long()
        text = library_windows(library, t.library_rows, t.row_tokens, generator)
        weights = torch.from_numpy(batch.weights).to(device).float()
        weights = torch.cat([weights, torch.full(text.shape, 4.0, device=device)])
        loss, rows = loss_of(model, torch.cat([ids, text]), weights)
        loss.backward()
        optimizer.step(step)
        if step % max(1, t.steps // 24) == 0 or step == t.steps - 1:
            chat, lib = rows[:chat_rows].mean().item(), rows[chat_rows:].mean().item()
            speed = (step + 1) * t.rows * t.row_tokens / 1e6 / (time.time() - started)
            log(f"target step {step} chat {chat:.4f} library {lib:.4f} Mtok/s {speed:.2f}")
    return model


@torch.no_grad()
def library_loss(model: Target, library: Tensor, length: int, rows: int = 64) -> float:
    """Mean loss per token on evenly spaced windows of a (held-out) token stream."""
    rows = min(rows, max(1, (len(library) - 1) // (length + 1)))
    starts = torch.arange(rows, device=library.device) * (len(library) - length - 1) // rows
    ids = library[starts[:, None] + torch.arange(length + 1, device=library.device)].long()
    total = sum(weighted_loss(model, part, torch.ones_like(part).float())[0].item() for part in ids.split(1))
    return total / rows
