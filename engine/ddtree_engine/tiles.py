"""From row batches to the tables of the attention kernel: what each row sees, and which rows form a tile. Pure numpy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ddtree_engine.rows import Segment, Sight
from ddtree_engine.tree import ancestor_bits

MAX_NODES = 64  # bits of a row's mask


def sight_table(segments: Sequence[Segment]) -> np.ndarray:
    """int64 [3, rows]: first slot of the slab, slots seen from it on, ancestor bits beyond them."""
    parts = []
    for s in segments:
        base, bits = np.full(s.rows, s.base), np.zeros(s.rows, dtype=np.int64)
        if s.sight is Sight.TREE and s.visible is not None:
            visible, bits = np.full(s.rows, s.past + 1), ancestor_bits(s.visible)  # the root is seen by all
        elif s.sight is Sight.FULL:
            visible = np.full(s.rows, s.seen)
        else:
            visible = s.past + 1 + np.arange(s.rows)
        parts.append(np.stack([base, visible, bits]).astype(np.int64))
    return np.concatenate(parts, axis=1)


def tile_table(segments: Sequence[Segment], rows_per_tile: int) -> np.ndarray:
    """int64 [3, tiles]: first row, number of rows, slots that any row of it may see."""
    table, first = [], 0
    for s in segments:
        for start in range(0, s.rows, rows_per_tile):
            table.append((first + start, min(rows_per_tile, s.rows - start), s.seen))
        first += s.rows
    return np.array(table, dtype=np.int64).T


def tiles_at_most(rows: int, requests: int, rows_per_tile: int) -> int:
    """The most tiles that so many rows of so many requests can need."""
    return rows // rows_per_tile + min(rows, requests)


def fits(segments: Sequence[Segment]) -> bool:
    """Whether every tree fits a row's mask."""
    return all(s.sight is not Sight.TREE or s.rows <= MAX_NODES + 1 for s in segments)
