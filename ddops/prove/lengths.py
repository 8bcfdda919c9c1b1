"""How long the long questions and answers of a level are, given what the engine's context holds. Pure.

Lengths are in tokens of the engine; questions are made of ids, so a tokenizer's rate turns one into the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ddops.prove.evidence import Level

ANSWER = 620  # tokens of a long answer: most ids that a small model copies without losing its place
CONTEXT = 1200  # tokens before a question: beyond what is prefilled at once, and beyond usual windows
_UNKNOWN = 4096  # context of an engine that does not say
_FRAME = 200  # tokens of templates, wording and a short answer
_FARTHER = {Level.STANDARD: 4_000, Level.DEEP: 16_000}  # at most; and never more than a good part of the context


@dataclass(frozen=True, slots=True)
class Lengths:
    """What is asked, in tokens. `short` says what the context has no room for, or is ''."""

    answers: tuple[int, ...]
    contexts: tuple[int, ...]
    short: str = ""


def lengths(level: Level, context: int | None) -> Lengths:
    """The level's lengths, cut to what fits into the engine's context."""
    room = (context or _UNKNOWN) - _FRAME
    answer = min(ANSWER, room // 2)  # it stands in the prompt as well
    before = min(CONTEXT, room - _FRAME)  # a few ids are copied after it
    farther = min(_FARTHER.get(level, 0), int(0.45 * room))
    missed = [f"answers of {answer}, not {ANSWER} tokens"] if answer < ANSWER else []
    missed += [f"contexts of {before}, not {CONTEXT} tokens"] if before < CONTEXT else []
    short = f"the engine's context of {context} tokens allows only {' and '.join(missed)}" if missed else ""
    answers = (answer,) if level is Level.QUICK else (answer, answer)
    contexts = tuple(dict.fromkeys(n for n in (before, farther) if n >= before))
    return Lengths(_possible(answers), _possible(contexts), short)


def _possible(tokens: Sequence[int]) -> tuple[int, ...]:
    return tuple(n for n in tokens if n > 0)
