"""Exact copying: N opaque ids, one a line, every character right. Pure.

One wrong character in an otherwise fluent reply is how several speculative-decoding faults show.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

from ddops.prove.answers import Check, visible

_LOWER = "abcdefghijkmnpqrstuvwxyz23456789"
_MIXED = "ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnpqrstuvwxyz23456789"
_HEX = "0123456789abcdef"
_GREEK = "abcdefgh234567αβγδεζηθ"  # two bytes a letter: text read in another encoding shows
_SHAPES = ((_LOWER, (4, 4)), (_HEX, (4, 4)), (_LOWER, (3, 5)), (_MIXED, (4, 4)), (_GREEK, (4, 4)))
_ID = re.compile(r"[^\W_]+(?:-[^\W_]+)+")


@dataclass(frozen=True, slots=True)
class Copied:
    """How a list of ids came back."""

    right: int
    wanted: int
    wrong: tuple[str, ...]  # "kx7f-29ab -> kx7f-29db"

    def check(self) -> Check:
        return Check(self.right == self.wanted and not self.wrong, self.got)

    @property
    def got(self) -> str:
        head = f"{self.right}/{self.wanted} ids"
        return f"{head}; {self.wrong[0]}" if self.wrong else head


def make_ids(rng: random.Random, count: int) -> tuple[str, ...]:
    """Opaque ids, all different, of mixed alphabets; characters that fonts confuse are left out."""
    found: dict[str, None] = {}
    while len(found) < count:
        alphabet, parts = rng.choice(_SHAPES)
        found["-".join("".join(rng.choices(alphabet, k=n)) for n in parts)] = None
    return tuple(found)


def prompt(ids: tuple[str, ...]) -> str:
    return "Repeat these ids exactly, one per line:\n" + "\n".join(ids)


def compare(wanted: tuple[str, ...], text: str) -> Copied:
    """Position by position; list marks, quotes and fences around an id are ignored, anything else is not."""
    found = _ID.findall(visible(text))
    right = sum(a == b for a, b in zip(wanted, found, strict=False))
    wrong = [f"{a} -> {b}" for a, b in zip(wanted, found, strict=False) if a != b]
    if len(found) < len(wanted):
        wrong.append(f"{len(wanted) - len(found)} missing")
    elif len(found) > len(wanted):
        wrong.append(f"{len(found) - len(wanted)} too many")
    return Copied(right, len(wanted), tuple(wrong))
