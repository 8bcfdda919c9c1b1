"""Two greedy replies to one prompt: are they the same, and if not, is the difference rounding or a fault?

At T=0 two lossless decodes part only where the target's two best tokens lie within rounding of each other; after that
the texts may go anywhere. So the first differing position is looked at, and nothing behind it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from ddops.prove.rescore import Scorer
from ddops.prove.scores import Threshold
from ddops.prove.wire import Reply, Scored


class Parting(StrEnum):
    SAME = "same"
    TIE = "tie"
    FAULT = "fault"


@dataclass(frozen=True, slots=True)
class Divergence:
    kind: Parting
    at: int = -1  # first differing token
    gap: float = 0.0  # nats by which the worse of the two tokens lies below the top


def first_difference(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    """Index of the first differing token; -1 when the lists are equal."""
    at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return -1 if at == len(a) == len(b) else at


def compare(scorer: Scorer, one: Reply, other: Reply, limit: Threshold) -> Divergence:
    """Both replies answer the same prompt at T=0. Raises EngineError when the position cannot be scored."""
    prompt, a = scorer.ids_of(one)
    _, b = scorer.ids_of(other)
    at = first_difference(a, b)
    if at < 0:
        return Divergence(Parting.SAME)
    if at >= min(len(a), len(b)):
        # One goes on where the other stopped: a shorter list that was cut by its length limit is no difference.
        shorter = one if len(a) < len(b) else other
        return Divergence(Parting.SAME if shorter.finish == "length" else Parting.FAULT, at, float("inf"))
    gap = max(_gap(scorer, (*prompt, *a[: at + 1])), _gap(scorer, (*prompt, *b[: at + 1])))
    return Divergence(Parting.TIE if gap <= limit.nats else Parting.FAULT, at, gap)


def _gap(scorer: Scorer, ids: tuple[int, ...]) -> float:
    scored: Scored = scorer.client.score(ids, len(ids) - 1, top=2).tokens[0]
    return scored.gap if scored.gap is not None else float("inf")
