"""Trains a DFlash drafter on the target's own text: random anchors, one block each, cross-entropy on every slot.

A block sees the target's features strictly before its anchor and its own slots in both directions, as in decoding.
"""

from __future__ import annotations

import time

import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone knows it by
from torch import Tensor

from training.model import Drafter, Target
from training.onpolicy import DraftRows
from training.optim import Optimizer, Schedule
from training.recipe import DrafterRecipe, ModelShape
from training.train_target import Log


def block_mask(sequence: Tensor, anchors: Tensor, block: int) -> Tensor:
    """sequence [B, T], anchors [B, N] (places in the row) -> [B, 1, N * block, T + N * block]."""
    N = anchors.shape[1]
    own = sequence.gather(1, anchors)
    places = torch.arange(sequence.shape[1], device=sequence.device)
    context = (sequence[:, None] == own[:, :, None]) & (places[None, None] < anchors[:, :, None])
    number = torch.arange(N * block, device=sequence.device) // block
    inside = (number[:, None] == number[None]).expand(len(sequence), -1, -1)
    return torch.cat([context.repeat_interleave(block, 1), inside], -1)[:, None]


def labels_of(ids: Tensor, sequence: Tensor, anchors: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """The tokens after each anchor and whether they belong to its sequence, both [B, N, block - 1]."""
    places = anchors[:, :, None] + 1 + torch.arange(block - 1, device=ids.device)
    inside = places < ids.shape[1]
    places = places.clamp(max=ids.shape[1] - 1).flatten(1)
    shape = (*anchors.shape, block - 1)
    same = sequence.gather(1, places).view(shape) == sequence.gather(1, anchors)[:, :, None]
    return ids.gather(1, places).view(shape), same & inside


def draft_loss(
    drafter: Drafter,
    target: Target,
    ids: Tensor,
    positions: Tensor,
    sequence: Tensor,
    features: Tensor,
    anchors: Tensor,
    usable: Tensor,
) -> tuple[Tensor, Tensor]:
    """(the loss, the mean number of tokens a chain would accept); the first four as in DraftRows, the rest [B, N]."""
    block = drafter.recipe.block
    labels, valid = labels_of(ids, sequence, anchors, block)
    valid = valid & usable[:, :, None]
    roots = target.model.embed_tokens(ids.gather(1, anchors))
    mask = block_mask(sequence, anchors, block)
    with torch.autocast(ids.device.type, torch.bfloat16):
        root_positions = positions.gather(1, anchors)
        hidden = drafter(features, positions, roots, root_positions, target.mask_embedding(), mask)
        logits = target.logits(hidden)
    losses = F.cross_entropy(logits.float().flatten(0, 2), labels.flatten(), reduction="none").view(labels.shape)
    weights = torch.exp(-torch.arange(block - 1, device=losses.device) / drafter.recipe.gamma) * valid
    right = ((logits.argmax(-1) == labels) & valid).float().cumprod(-1).sum(-1)
    return (losses * weights).sum() / weights.sum(), (right * usable).sum() / usable.sum()


def choose_anchors(anchor: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """`count` random places of each row where a block may start, and whether there were that many."""
    scores = torch.rand(anchor.shape, device=anchor.device) * anchor
    best = scores.topk(count, 1)
    return best.indices, best.values > 0


def train_drafter(recipe: DrafterRecipe, shape: ModelShape, target: Target, data: DraftRows, seed: int, log: Log) -> Drafter:
    """The target is frozen; `data.features` must hold the recipe's target layers."""
    torch.manual_seed(seed)
    device = data.ids.device
    drafter = Drafter(shape, recipe).to(device)
    optimizer = Optimizer(
        drafter,
        Schedule(recipe.steps, recipe.warmup, recipe.decay_share),
        recipe.matrix_rate,
        recipe.other_rate,
        recipe.weight_decay,
    )
    loss_of = torch.compile(draft_loss, dynamic=False) if device.type == "cuda" else draft_loss
    started = time.time()
    for step in range(recipe.steps):
        chosen = torch.randint(len(data.ids), (recipe.rows,), device=device)
        anchors, usable = choose_anchors(data.anchor[chosen], recipe.anchors)
        rows = (t[chosen] for t in (data.ids, data.positions, data.sequence, data.features))
        loss, accepted = loss_of(drafter, target, *rows, anchors, usable)
        loss.backward()
        optimizer.step(step)
        if step % max(1, recipe.steps // 12) == 0 or step == recipe.steps - 1:
            rate = (step + 1) / (time.time() - started)
            log(f"{recipe.name} step {step} loss {loss.item():.4f} chain {accepted.item():.3f} steps/s {rate:.1f}")
    return drafter
