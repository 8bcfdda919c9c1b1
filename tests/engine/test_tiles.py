"""Tiles tell the attention kernel how far to read: as far as any of their rows sees, and no further."""

from __future__ import annotations

import numpy as np
import torch
from ddtree_engine.rows import Segment, Sight
from ddtree_engine.tiles import Tiles, sight_table, tile_table
from ddtree_engine.tree import best_first
from hypothesis import given
from hypothesis import strategies as st


@st.composite
def segments(draw: st.DrawFn) -> Segment:
    past, rows = draw(st.integers(0, 300)), draw(st.integers(1, 65))
    sight = draw(st.sampled_from(list(Sight)))
    visible = None
    if sight is Sight.TREE:
        logprobs = -np.sort(np.random.default_rng(rows).uniform(0.1, 3, (9, 8)), axis=1)
        visible = best_first(0, logprobs.tolist(), [list(range(8))] * 9, rows - 1).visible()
    return Segment(1000 * draw(st.integers(0, 3)), past, [0] * rows, range(past, past + rows), sight, visible)


@given(st.lists(segments(), min_size=1, max_size=5), st.integers(1, 32))
def test_tiles_cover_every_row_once_and_everything_it_sees(drawn: list[Segment], per_tile: int) -> None:
    _, visible, bits = sight_table(drawn)
    reach = visible + np.array([int(b).bit_length() if b >= 0 else 64 for b in bits])
    covered, owner = [], [s for s in drawn for _ in range(s.rows)]
    for first, rows, seen in tile_table(drawn, per_tile).T.tolist():
        assert 1 <= rows <= per_tile
        assert len({id(owner[row]) for row in range(first, first + rows)}) == 1
        covered += range(first, first + rows)
        furthest = int(reach[first : first + rows].max())
        assert seen >= furthest
        if owner[first].sight is not Sight.TREE:
            assert seen == furthest
    assert covered == list(range(len(owner)))


def test_live_tiles_are_those_with_rows() -> None:
    table = torch.tensor([[0, 16, 0, 0], [16, 4, 0, 0], [90, 90, 0, 0]])
    assert int(Tiles(*table).live) == 2
