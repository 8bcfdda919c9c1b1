"""What a training example is, how its answer is checked, and how wordings are held out.

Not for generating examples: that is done by coding.py, copying.py, arithmetic.py, records.py, steps.py, prose.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from random import Random
from typing import TypeVar
from zlib import crc32

T = TypeVar("T")


class Split(StrEnum):
    """Which half of the wordings and grammar combinations an example may use."""

    TRAIN = "train"
    HELD = "held"


class CheckKind(StrEnum):
    EXACT = "exact"  # the stripped answer equals one of the expected strings
    JSON = "json"  # the answer parses to the same value as the expected string
    PYTHON = "python"  # the fenced code makes every expected expression true
    SENTENCES = "sentences"  # the answer is a run of sentences that each match one of the expected patterns


@dataclass(frozen=True, slots=True)
class Check:
    kind: CheckKind
    expected: tuple[str, ...]
    first_line: str = ""  # PYTHON only: must stand in the first line of the code

    def passes(self, answer: str) -> bool:
        """Whether `answer` is right. PYTHON checks execute the answer: call them in a throw-away process."""
        match self.kind:
            case CheckKind.EXACT:
                return answer.strip() in self.expected
            case CheckKind.JSON:
                return _parses_to(answer, self.expected[0])
            case CheckKind.SENTENCES:
                return _all_match(answer, self.expected)
            case CheckKind.PYTHON:
                return _runs(answer, self.expected, self.first_line)


@dataclass(frozen=True, slots=True)
class Turn:
    prompt: str
    answer: str
    check: Check


@dataclass(frozen=True, slots=True)
class Task:
    """A chat: one or more turns, the category of its last turn, and how much its answers weigh in the loss."""

    category: str
    turns: tuple[Turn, ...]
    system: str = ""
    weight: int = 1
    tags: tuple[str, ...] = field(default=())  # for reports: family names, grammar keys

    @property
    def last(self) -> Turn:
        return self.turns[-1]


def single(category: str, prompt: str, answer: str, check: Check | None = None, **kw: object) -> Task:
    """A task of one turn; without a check the answer must be matched exactly."""
    turn = Turn(prompt, answer, check or Check(CheckKind.EXACT, (answer,)))
    return Task(category, (turn,), **kw)  # type: ignore[arg-type]


def system_text(text: str) -> str:
    return f"<|im_start|>system\n{text}<|im_end|>\n" if text else ""


def user_text(prompt: str) -> str:
    return f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"


def prompt_text(task: Task) -> str:
    """The ChatML text up to where the last answer starts, as the chat template renders it."""
    earlier = "".join(f"{user_text(t.prompt)}{t.answer}<|im_end|>\n" for t in task.turns[:-1])
    return system_text(task.system) + earlier + user_text(task.last.prompt)


def is_held(key: str, one_in: int = 17) -> bool:
    """Whether a grammar combination belongs to the held-out split (by a hash, so the same on every machine)."""
    return crc32(key.encode()) % one_in == 0


def words(text: str) -> list[str]:
    """The words of a text, for the long word lists of the generators."""
    return text.split()


def pick(rng: Random, options: Sequence[T], split: Split) -> T:
    """One of `options`; the last eighth (at least one, when there are five or more) is for the held-out split."""
    if len(options) < 5:
        return rng.choice(options)
    kept = len(options) - max(1, len(options) // 8)
    return rng.choice(options[kept:] if split is Split.HELD else options[:kept])


def skewed(rng: Random, options: Sequence[T], first: float) -> T:
    """The first option with probability `first`, else any of the others."""
    if len(options) == 1 or rng.random() < first:
        return options[0]
    return rng.choice(options[1:])


def fenced(text: str) -> str:
    """The code inside the first ```python fence, or the whole text when there is none."""
    match = re.search(r"```(?:python)?\n(.*?)```", text, re.S)
    return match.group(1) if match else text


def _all_match(answer: str, patterns: Sequence[str]) -> bool:
    """Whether the whole answer can be cut into pieces that each match a pattern."""
    either = "|".join(f"(?:{p})" for p in patterns)
    return re.fullmatch(rf"(?:(?:{either})(?:\s+|$))+", answer.strip()) is not None


def _parses_to(answer: str, expected: str) -> bool:
    try:
        return bool(json.loads(answer) == json.loads(expected))
    except ValueError:
        return False


def _runs(answer: str, expressions: Sequence[str], first_line: str) -> bool:
    code = fenced(answer)
    if first_line not in code.split("\n", 1)[0]:
        return False
    scope: dict[str, object] = {}
    try:
        exec(compile(code, "<answer>", "exec"), scope)  # our own model's answer, in a worker process
        return all(eval(e, scope) for e in expressions)
    except Exception:
        return False
