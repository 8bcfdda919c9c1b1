"""Muon for the matrices, AdamW for the rest, and one warm-up / linear decay schedule for both.

Muon: momentum, then the update's singular values are set to about one by five Newton-Schulz steps (Jordan, 2024).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn


def orthogonalise(update: Tensor) -> Tensor:
    """[n, rows, columns] -> the same with singular values near one."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = update.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if tall else x).float()


class Muon:
    """Groups the matrices by shape, so that a step is a few batched products."""

    def __init__(self, parameters: Iterable[nn.Parameter], rate: float, decay: float, momentum: float = 0.95) -> None:
        self.rate, self.decay, self.momentum = rate, decay, momentum
        groups: dict[tuple[int, ...], list[nn.Parameter]] = {}
        for p in parameters:
            groups.setdefault(tuple(p.shape), []).append(p)
        self.groups = [(ps, torch.zeros(len(ps), *s, device=ps[0].device)) for s, ps in groups.items()]

    @torch.no_grad()
    def step(self, multiplier: float) -> None:
        for ps, momentum in self.groups:
            gradient = torch.stack([p.grad for p in ps]).float()
            momentum.lerp_(gradient, 1 - self.momentum)
            update = orthogonalise(gradient.lerp(momentum, self.momentum))
            rows, columns = ps[0].shape
            rate = self.rate * multiplier * max(1.0, rows / columns) ** 0.5
            torch._foreach_mul_(ps, 1 - rate * self.decay)
            torch._foreach_add_(ps, list(update.unbind(0)), alpha=-rate)


@dataclass(frozen=True, slots=True)
class Schedule:
    steps: int
    warmup: int
    decay_share: float

    def multiplier(self, step: int) -> float:
        left = (self.steps - step) / self.steps
        return min(1.0, (step + 1) / self.warmup, left / self.decay_share)


class Optimizer:
    """One step of both optimizers on a module."""

    def __init__(self, module: nn.Module, schedule: Schedule, matrix_rate: float, other_rate: float, decay: float) -> None:
        self.module, self.schedule, self.other_rate = module, schedule, other_rate
        matrices = [p for n, p in module.named_parameters() if p.ndim == 2 and "embed" not in n]
        others = [p for n, p in module.named_parameters() if p.ndim != 2 or "embed" in n]
        self.muon = Muon(matrices, matrix_rate, decay)
        self.adam = torch.optim.AdamW(others, lr=other_rate, betas=(0.9, 0.95), weight_decay=0.0)

    def step(self, index: int) -> None:
        multiplier = self.schedule.multiplier(index)
        self.muon.step(multiplier)
        for group in self.adam.param_groups:
            group["lr"] = self.other_rate * multiplier
        self.adam.step()
        self.module.zero_grad(set_to_none=True)
