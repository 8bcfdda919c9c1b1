"""Everything is rows: a prefill chunk, a plain step, a chain and a tree are the same forward over (token, position, slot).

A `Segment` is the consecutive rows of one request in one pass; a `RowBatch` is all of them, with the index tensors that every
layer shares. Built on the host, once per pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

import numpy as np
import torch


class Sight(Enum):
    """What a row sees of its own segment; all rows see the `past` slots before it."""

    CAUSAL = auto()  # rows before it and itself
    FULL = auto()  # the whole segment (the drafter's block)
    TREE = auto()  # as its `visible` matrix says


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows of one request: row i goes to slot base + past + i and sees slots base .. base + past - 1."""

    base: int  # first slot of the request's slab
    past: int  # slots already filled
    token_ids: Sequence[int]
    positions: Sequence[int]
    sight: Sight
    visible: np.ndarray | None = None  # bool [rows, rows], TREE only

    @property
    def rows(self) -> int:
        return len(self.token_ids)

    @property
    def seen(self) -> int:
        """Slots of the slab that any row may see."""
        return self.past + self.rows

    @property
    def masked(self) -> bool:
        return self.rows > 1 and self.sight is not Sight.FULL

    def sees(self) -> np.ndarray:
        """bool [rows, rows] inside the segment."""
        if self.visible is not None:
            return self.visible
        if self.sight is Sight.FULL:
            return np.ones((self.rows, self.rows), dtype=bool)
        return np.tri(self.rows, dtype=bool)


@dataclass(frozen=True, slots=True)
class RowBatch:
    """The rows of one pass, segment after segment, then padding rows that write to the trash slot and are not read."""

    segments: tuple[Segment, ...]
    offsets: tuple[int, ...]  # first row of each segment, then the number of rows
    token_ids: torch.Tensor  # int64 [padded]
    positions: torch.Tensor  # int64 [padded]
    slots: torch.Tensor  # int64 [padded]

    @property
    def rows(self) -> int:
        return self.offsets[-1]

    @property
    def padded(self) -> int:
        return self.token_ids.shape[0]


def bucket(rows: int) -> int:
    """Rows to compute for so many: exact up to 16, then eight sizes an octave.

    oneDNN compiles a kernel for every shape it meets (milliseconds and half a megabyte each), so the CPU path must not
    meet every number of rows there is.
    """
    step = 1 << max(0, rows.bit_length() - 4)
    return -(-rows // step) * step


def batch_rows(segments: Sequence[Segment], device: torch.device, trash: int | None = None) -> RowBatch:
    """Pads to `bucket` sizes when the trash slot is given."""
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    offsets = [0]
    for segment in segments:
        first = segment.base + segment.past
        tokens.extend(segment.token_ids)
        positions.extend(segment.positions)
        slots.extend(range(first, first + segment.rows))
        offsets.append(len(tokens))
    if trash is not None:
        extra = bucket(len(tokens)) - len(tokens)
        tokens, positions, slots = tokens + [0] * extra, positions + [0] * extra, slots + [trash] * extra
    packed = torch.tensor([tokens, positions, slots], dtype=torch.int64).to(device)  # one copy to the device
    return RowBatch(tuple(segments), tuple(offsets), *packed.unbind())
