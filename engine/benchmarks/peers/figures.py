"""Statistics of an interleaved run: order of arms, medians with spread, ratios of pairs, the sign test. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Spread:
    """A median and the values around it; never a minimum or a best of."""

    median: float
    low: float  # first quartile
    high: float  # third quartile
    count: int


@dataclass(frozen=True, slots=True)
class Compared:
    """One arm against another, round by round: ratios above 1 favour the first."""

    ratio: Spread
    wins: int
    losses: int
    p: float  # two-sided sign test, ties dropped

    @property
    def tied(self) -> bool:
        return self.p >= 0.05


def order(arms: Sequence[str], round_number: int) -> list[str]:
    """The arms of one round: each round starts with another arm, and every other round runs backwards.

    So no arm always follows the same neighbour, and a drift of the machine hits all of them.
    """
    if not arms:
        return []
    shift = (round_number // 2) % len(arms)
    rotated = [*arms[shift:], *arms[:shift]]
    return rotated if round_number % 2 == 0 else rotated[::-1]


def spread(values: Sequence[float]) -> Spread:
    """Raises ValueError without values."""
    if not values:
        raise ValueError("a median needs at least one value")
    if len(values) == 1:
        return Spread(values[0], values[0], values[0], 1)
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(median, low, high, len(values))


def sign_test(wins: int, losses: int) -> float:
    """Two-sided p of at least so uneven a split when both sides are equally likely; 1.0 without any decided pair."""
    n = wins + losses
    tail = sum(math.comb(n, i) for i in range(min(wins, losses) + 1)) / 2**n
    return min(1.0, 2 * tail)


def compare(ours: Sequence[float], peer: Sequence[float]) -> Compared:
    """Speeds of two arms in the same rounds. Raises ValueError when they are not pairs."""
    if len(ours) != len(peer):
        raise ValueError(f"{len(ours)} and {len(peer)} values are not pairs")
    wins = sum(a > b for a, b in zip(ours, peer, strict=True))
    losses = sum(a < b for a, b in zip(ours, peer, strict=True))
    return Compared(spread([a / b for a, b in zip(ours, peer, strict=True)]), wins, losses, sign_test(wins, losses))


@dataclass(frozen=True, slots=True)
class Difference:
    """Where two greedy answers part: the tokens before are the same. A missing token (one answer ended) is None."""

    prompt: int
    at: int
    expected: int | None
    got: int | None


def differences(expected: Sequence[Sequence[int]], got: Sequence[Sequence[int]]) -> list[Difference]:
    """The first difference of every prompt that has one. Raises ValueError when the prompts are not the same number."""
    if len(expected) != len(got):
        raise ValueError(f"{len(expected)} answers were expected, {len(got)} came")
    return [d for i, (a, b) in enumerate(zip(expected, got, strict=True)) if (d := _first(i, a, b)) is not None]


def _first(prompt: int, a: Sequence[int], b: Sequence[int]) -> Difference | None:
    for at in range(max(len(a), len(b))):
        one, other = (a[at] if at < len(a) else None), (b[at] if at < len(b) else None)
        if one != other:
            return Difference(prompt, at, one, other)
    return None


def goal_lines(measured: Mapping[str, float], goals: Mapping[str, tuple[str, float]]) -> list[str]:
    """One line per goal: `name: measured, goal op limit: met or MISSED`; a goal without a figure is "not measured"."""
    lines = []
    for name, (op, limit) in goals.items():
        if name not in measured:
            lines.append(f"{name}: not measured (goal {op} {limit:g})")
            continue
        value = measured[name]
        met = value >= limit if op == ">=" else value <= limit
        lines.append(f"{name}: {value:.3g} (goal {op} {limit:g}): {'met' if met else 'MISSED'}")
    return lines
