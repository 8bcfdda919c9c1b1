"""Programmatic dependent launch: a kernel's programs start while those of the kernel before it end (Hopper and later).

A kernel launched `with` this must `wait` before it reads what an earlier kernel wrote, and before it writes. That is enough
for any order of kernels: one ends after its own wait, hence after all that came before it. Launching a kernel of a small
model takes as long as running it, so this hides a good part of a pass of few rows; with more, programs that came early are
in the way of those that still run.

Needs triton, and CUDA to run: imported only where the device is CUDA.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

MOST_ROWS = 16  # one H200, bundled model, a pass: 1 row 117 us -> 89, 9 rows 169 -> 146, 17 the same, 33 181 -> 190


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


def overlapping(device: torch.device, rows: int) -> dict[str, bool]:
    """Arguments of a launch in a pass of so many rows."""
    return {"PDL": True, "launch_pdl": True} if rows <= MOST_ROWS and _can(device) else {"PDL": False}
