"""Programmatic dependent launch: a kernel's programs start while those of the kernel before it end (Hopper and later).

A kernel launched `with` this must `wait` before it reads what an earlier kernel wrote, and before it writes. That is enough
for any order of kernels: one ends after its own wait, hence after all that came before it. Launching a kernel of a small
model takes as long as running it, so this hides a good part of a pass.

Needs triton, and CUDA to run: imported only where the device is CUDA.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl


@triton.jit
def announce(PDL: tl.constexpr):
    """From here on the next kernel may start: once every program of this one has come so far."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait(PDL: tl.constexpr):
    """Until all kernels before this one have ended."""
    if PDL:
        tl.extra.cuda.gdc_wait()


@cache
def _can(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def overlapping(device: torch.device) -> dict[str, bool]:
    """Arguments of a launch."""
    return {"PDL": True, "launch_pdl": True} if _can(device) else {"PDL": False}
