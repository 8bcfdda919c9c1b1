"""Does anything of one request turn up in another's reply? Pure.

Each request carries marks of its own (code words, opaque ids) that exist nowhere else in the run. Fluent text about the
wrong conversation is found no other way.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

_ANIMALS = ("ZEBRA", "OTTER", "HERON", "BISON", "LYNX", "RAVEN", "TAPIR", "GECKO", "MOOSE", "VIPER", "KOALA", "CRANE")
_CODE = "ABCDEFGHJKLMNPQRSTUVWXYZ23456789"


@dataclass(frozen=True, slots=True)
class Leak:
    """A mark of `owner` in the reply of `reader`."""

    owner: int
    reader: int
    mark: str


def draw_marks(rng: random.Random) -> Iterator[str]:
    """Code words without end, all different: ZEBRA-4417, K7Q2-XN."""
    seen: set[str] = set()
    while True:
        if rng.random() < 0.5:
            mark = f"{rng.choice(_ANIMALS)}-{rng.randrange(1000, 9999)}"
        else:
            mark = f"{''.join(rng.choices(_CODE, k=4))}-{''.join(rng.choices(_CODE, k=2))}"
        if mark not in seen:
            seen.add(mark)
            yield mark


def leaks(marks: Mapping[int, Iterable[str]], texts: Mapping[int, str]) -> list[Leak]:
    """Foreign marks in replies. A mark that several requests share is nobody's."""
    owners: dict[str, set[int]] = {}
    for owner, own in marks.items():
        for mark in own:
            owners.setdefault(mark, set()).add(owner)
    return [
        Leak(next(iter(owner)), reader, mark)
        for mark, owner in owners.items()
        if len(owner) == 1
        for reader, text in texts.items()
        if reader not in owner and mark in text
    ]
