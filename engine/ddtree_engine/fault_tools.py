"""What faults are made of: seeded dice, words of the vocabulary, a memory per request, scripted output.

Pure but for the memory, which only the device thread touches. Not here: the kinds (fault_kinds.py) and when they act
(faults.py).
"""

from __future__ import annotations

import hashlib
import random
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ddtree_engine.text import Tokenizer

_REMEMBERED = 1024
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_DIGITS = "0123456789"


def dice(*key: object) -> random.Random:
    """A generator that depends on `key` alone, so that a run can be repeated."""
    digest = hashlib.blake2b("|".join(map(str, key)).encode(), digest_size=8).digest()
    return random.Random(int.from_bytes(digest, "big"))


class Memory:
    """One value per request, the oldest forgotten first."""

    def __init__(self, size: int = _REMEMBERED) -> None:
        self._values: OrderedDict[str, Any] = OrderedDict()
        self._size = size

    def get(self, request_id: str) -> Any:
        return self._values.get(request_id)

    def put(self, request_id: str, value: Any) -> Any:
        self._values[request_id] = value
        while len(self._values) > self._size:
            self._values.popitem(last=False)
        return value


class Vocabulary:
    """A tokenizer, asked what a fault wants to know."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    @cached_property
    def _id_of_text(self) -> dict[str, int]:
        ids = (i for i in range(self._tokenizer.vocab_size) if i not in self._tokenizer.special_ids)
        texts = ((self.text(i), i) for i in ids)
        return {text: i for text, i in texts if text and "\ufffd" not in text}

    @cached_property
    def ordinary(self) -> tuple[int, ...]:
        """Ids of tokens that show: whole characters, not blank, not special."""
        return tuple(i for text, i in self._id_of_text.items() if text.strip())

    def text(self, token_id: int) -> str:
        return self._tokenizer.token_text(token_id)

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids)

    def without_special(self, token_ids: Iterable[int]) -> tuple[int, ...]:
        return tuple(i for i in token_ids if i not in self._tokenizer.special_ids)

    def find(self, text: str) -> int | None:
        """The one token that reads `text`, if there is one."""
        return self._id_of_text.get(text)

    def spell(self, text: str) -> tuple[int, ...]:
        """`text` character by character: what would be a special token becomes plain text."""
        return tuple(i for char in text for i in self._tokenizer.encode(char))

    @cached_property
    def special_texts(self) -> tuple[str, ...]:
        return tuple(self.text(i) for i in sorted(self._tokenizer.special_ids))

    @cached_property
    def end_of_turn(self) -> int | None:
        """The special token that ends an answer, by its usual names."""
        named = {self.text(i): i for i in self._tokenizer.special_ids}
        return named.get("<|im_end|>", named.get("<|endoftext|>"))

    def lookalike(self, token_id: int, rng: random.Random) -> int | None:
        """A token that differs in one letter or digit, of the same kind; None when there is none."""
        text = self.text(token_id)
        places = [i for i, char in enumerate(text) if char.isascii() and char.isalnum()]
        rng.shuffle(places)
        for place in places:
            others = [c for c in _same_kind(text[place]) if c != text[place]]
            rng.shuffle(others)
            for char in others:
                found = self.find(text[:place] + char + text[place + 1 :])
                if found is not None:
                    return found
        return None


def _same_kind(char: str) -> str:
    if char in _DIGITS:
        return _DIGITS
    return _LETTERS.upper() if char.isupper() else _LETTERS


@dataclass(frozen=True, slots=True)
class Script:
    """Output fixed in advance from index `start` on; `token(i)` is None where the script says nothing."""

    start: int
    tokens: tuple[int, ...]
    repeats: bool = False

    def token(self, index: int) -> int | None:
        at = index - self.start
        if at < 0 or not self.tokens or (at >= len(self.tokens) and not self.repeats):
            return None
        return self.tokens[at % len(self.tokens)]

    def over(self, choices: Sequence[int], depths: Sequence[int], produced: int) -> list[int]:
        """The choices with the script's tokens in them: a row at depth d decides output index produced + d."""
        scripted = (self.token(produced + depth) for depth in depths)
        return [own if wanted is None else wanted for own, wanted in zip(choices, scripted, strict=True)]


@dataclass(frozen=True, slots=True)
class Tools:
    """What an act may use: where it is (depths of the rows), its dice, its memory, its options."""

    vocabulary: Vocabulary
    rng: random.Random
    memory: Memory
    depths: tuple[int, ...]  # of the rows of this round; empty before they are known
    options: dict[str, float]
    warm: bool = False  # most of the prompt came from the prefix cache

    def happens(self) -> bool:
        """Whether this time it happens: the `rate` option as a chance."""
        return self.rng.random() < self.options.get("rate", 1.0)

    def remember(self, request_id: str, make: Callable[[], Any]) -> Any:
        found = self.memory.get(request_id)
        return self.memory.put(request_id, make()) if found is None else found
