"""The curated requests: what is asked, and how the reply is checked. Pure, and drawn from one seeded generator.

Healthy runs pass all of them; wording is ordinary English, and every fact that an answer needs stands in the prompt.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from ddops.prove import answers, copying
from ddops.prove.answers import Check
from ddops.prove.isolation import draw_marks
from ddops.prove.problems import KIN, STANDARD, Problem


class Kind(StrEnum):
    CODE = "code"  # checked by running it (coding.py)
    COPY = "copy"
    LONG_COPY = "long_copy"  # a prompt of several hundred tokens and an answer as long, or a long conversation before it
    RECALL = "recall"  # what was said at the beginning of a long conversation
    NONCE = "nonce"
    NONCE_CODE = "nonce_code"
    ARITH = "arith"
    JSON = "json"
    TOOL = "tool"
    FACT = "fact"
    LONG = "long"  # several functions in one answer, checked by running them
    OPEN = "open"  # ordinary prose, which only the scores can judge: a drafter guesses it badly, so trees branch

    @property
    def is_code(self) -> bool:
        return self in (Kind.CODE, Kind.NONCE_CODE, Kind.LONG)

    @property
    def probe(self) -> str:
        """The probe that an item of this kind is evidence for."""
        return _PROBES.get(self, "answers")


_PROBES = {
    Kind.CODE: "coding",
    Kind.COPY: "copy",
    Kind.NONCE: "isolation",
    Kind.NONCE_CODE: "shapes",
    Kind.LONG: "long",
    Kind.LONG_COPY: "long",
    Kind.RECALL: "long",
    Kind.OPEN: "sweep",
}


@dataclass(frozen=True, slots=True)
class Item:
    """One curated request. `expect` is what `check` compares with; `marks` exist in no other request of the run."""

    kind: Kind
    prompt: str
    expect: dict[str, Any] = field(default_factory=dict)
    max_tokens: int = 256
    marks: tuple[str, ...] = ()
    problems: tuple[Problem, ...] = ()
    history: tuple[tuple[str, str], ...] = ()  # (role, content) of the turns before

    @property
    def probe(self) -> str:
        return self.kind.probe

    @property
    def messages(self) -> tuple[tuple[str, str], ...]:
        return (*self.history, ("user", self.prompt))

    @property
    def said(self) -> str:
        """Everything that the model was given."""
        return "\n".join(content for _, content in self.messages)


def check(item: Item, text: str) -> Check | None:
    """Whether the text is right; None for code, which has to be run."""
    expect = item.expect
    match item.kind:
        case Kind.COPY | Kind.LONG_COPY:
            return copying.compare(tuple(expect["ids"]), text).check()
        case Kind.NONCE | Kind.RECALL:
            return answers.word(text, expect["mark"])
        case Kind.ARITH:
            return answers.number(text, expect["number"])
        case Kind.JSON:
            return answers.json_object(text, expect["object"])
        case Kind.TOOL:
            return answers.tool_call(text, expect["tool"], expect["arguments"])
        case Kind.FACT:
            return answers.word(text, expect["word"], tuple(expect["others"]))
        case _:
            return None


_NAMES = ("Alice", "Bob", "Carol", "David", "Emma", "Frank", "Grace", "Henry", "Julia", "Kevin", "Laura", "Peter")
_LANDS = ("Norland", "Surland", "Estania", "Westmark", "Belmora", "Corvia", "Dorland", "Felland")
_CITIES = ("Veska", "Tomar", "Lunda", "Breva", "Solin", "Karda", "Mirna", "Orsa")
_WEATHER_CITIES = ("Oslo", "Paris", "Berlin", "Madrid", "Rome", "Vienna", "Lisbon", "Dublin")


_SUBJECTS = (
    "a lighthouse", "an old clock", "the winter market", "two brothers", "a lost letter", "the river", "a garden",
    "the night train", "a small village", "the first snow", "a wooden boat", "the harvest", "a library", "the mountain pass",
)  # fmt: skip
_SCRIPTS = ("Zürich", "Łódź", "naïve", "東京", "Ελλάδα", "Москва", "한국어", "नमस्ते", "שלום", "😀", "日本語", "Straße")
_OPENINGS = (
    "Write a short story about {0} and {1}.",
    "Describe {0} to someone who has only ever seen {1}.",
    "Explain in a few sentences what {0} and {1} have in common.",
    "Write the first lines of a poem about {0} near {1}.",
)


class Maker:
    """Draws items; all marks it hands out are different from each other."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self._marks = draw_marks(rng)
        self._mixed = 0  # items of mixed batches so far

    def code(self, problem: Problem) -> Item:
        return Item(Kind.CODE, problem.prompt, {"function": problem.name}, 640, problems=(problem,))

    def standard(self) -> list[Item]:
        return [self.code(p) for p in STANDARD]

    def kin(self, count: int) -> list[Item]:
        pool = list(KIN)
        self.rng.shuffle(pool)
        return [self.code(pool[i % len(pool)]) for i in range(count)]

    def copy(self, count: int) -> Item:
        ids = copying.make_ids(self.rng, count)
        # A character is at most a token; line ends and chatty frames on top.
        return Item(Kind.COPY, copying.prompt(ids), {"ids": list(ids)}, 96 + 12 * count, marks=ids)

    def long_copy(self, count: int) -> Item:
        return replace(self.copy(count), kind=Kind.LONG_COPY)

    def conversation(self, before: int) -> tuple[Item, Item]:
        """Two questions at the end of one conversation in which `before` ids were copied.

        What its first turn said, and a few ids more to copy.
        """
        mark = next(self._marks)
        history = (("user", f"Remember the code word {mark}."), ("assistant", "OK"), *self._copied(before))
        recall = Item(Kind.RECALL, "What is the code word?", {"mark": mark}, 64, marks=(mark,), history=history)
        return recall, replace(self.long_copy(6), history=history)

    def _copied(self, count: int) -> tuple[tuple[str, str], ...]:
        """Earlier turns in which ids were copied, some two dozen at a time."""
        sizes = [24] * (count // 24) + ([count % 24] if count % 24 else [])
        lists = [copying.make_ids(self.rng, size) for size in sizes]
        return tuple(turn for ids in lists for turn in (("user", copying.prompt(ids)), ("assistant", "\n".join(ids))))

    def nonce(self) -> Item:
        """A code word to say again, given with the question, in a turn before it, or by the system."""
        mark = next(self._marks)
        given, asked = f"Your code word is {mark}.", "Reply with the code word only."
        before = (("user", f"{given} {asked}"), ("assistant", mark))
        prompt, history = self.rng.choice(((f"{given} {asked}", ()), (asked, before), (asked, (("system", given),))))
        return Item(Kind.NONCE, prompt, {"mark": mark}, 64, marks=(mark,), history=history)

    def nonce_code(self) -> Item:
        mark, problem = next(self._marks), self.rng.choice((*STANDARD, *KIN))
        given, asked = f"Remember the code word {mark}.", f"{problem.prompt} Put the code word in a comment on the first line."
        before = (("user", given), ("assistant", "Understood."))
        prompt, history = self.rng.choice(((f"{given} {asked}", ()), (asked, before)))
        expect = {"mark": mark, "function": problem.name}
        return Item(Kind.NONCE_CODE, prompt, expect, 640, marks=(mark,), problems=(problem,), history=history)

    def arith(self) -> Item:
        a, b, sign = self.rng.randint(2, 60), self.rng.randint(2, 40), self.rng.choice("+-")
        a, b = max(a, b), min(a, b)
        value = a + b if sign == "+" else a - b
        return Item(Kind.ARITH, f"What is {a} {sign} {b}? Answer with the number only.", {"number": value}, 64)

    def json(self) -> Item:
        name, age = self.rng.choice(_NAMES), self.rng.randint(18, 80)
        prompt = f'Return a JSON object with the keys "name" and "age" for: {name}, {age}.'
        return Item(Kind.JSON, prompt, {"object": {"name": name, "age": age}}, 128)

    def tool(self) -> Item:
        city, unit = self.rng.choice(_WEATHER_CITIES), self.rng.choice("cf")
        prompt = f'Call the tool get_weather with city "{city}" and unit "{unit}". Answer with JSON only.'
        return Item(Kind.TOOL, prompt, {"tool": "get_weather", "arguments": {"city": city, "unit": unit}}, 128)

    def fact(self) -> Item:
        lands, cities = self.rng.sample(_LANDS, 3), self.rng.sample(_CITIES, 3)
        asked = self.rng.randrange(3)
        facts = " ".join(f"The capital of {land} is {city}." for land, city in zip(lands, cities, strict=True))
        prompt = f"{facts} What is the capital of {lands[asked]}? Answer with one word."
        others = [c for i, c in enumerate(cities) if i != asked]
        return Item(Kind.FACT, prompt, {"word": cities[asked], "others": others}, 64)

    def open(self) -> Item:
        one, two = self.rng.sample(_SUBJECTS, 2)
        return Item(Kind.OPEN, self.rng.choice(_OPENINGS).format(one, two), {}, 48)

    def scripts(self) -> Item:
        """A line in several scripts. Small models fail at it; but text and ids must agree, whatever comes."""
        words = " ".join(self.rng.sample(_SCRIPTS, 5))
        return Item(Kind.OPEN, f"Repeat this line exactly:\n{words}", {}, 64)

    def short(self, count: int) -> list[Item]:
        """Short replies in which most faults show: above all ids to copy (any token can go wrong) and prose (trees branch)."""
        makers = (
            lambda: self.copy(self.rng.randint(8, 11)),
            self.open,
            lambda: self.copy(self.rng.randint(4, 9)),
            self.nonce_code,
            self.open,
            lambda: self.copy(self.rng.randint(7, 10)),
            self._any_short,
            lambda: self.copy(self.rng.randint(8, 11)),
            self.open,
            lambda: self.copy(self.rng.randint(6, 9)),
        )
        return [makers[i % len(makers)]() for i in range(count)]

    def _any_short(self) -> Item:
        return self.rng.choice(
            (self.json, self.tool, self.fact, self.arith, self.nonce, self.scripts, lambda: self.kin(1)[0])
        )()

    def long(self, count: int) -> Item:
        """Several functions in one answer; the prompt describes each."""
        chosen = [*STANDARD, *self.rng.sample(KIN, max(0, count - len(STANDARD)))][:count]
        lines = "\n".join(f"- {p.signature}: it {p.does}" for p in chosen)
        prompt = f"Write a Python module with these functions:\n{lines}"
        expect = {"functions": [p.name for p in chosen]}
        return Item(Kind.LONG, prompt, expect, 320 + 100 * count, problems=tuple(chosen))

    def mixed(self, count: int) -> list[Item]:
        """A varied batch of unequal lengths: short answers, copies, code, code with a nonce. The next goes on where it ends."""
        makers = (
            self.nonce_code,
            lambda: self.copy(self.rng.randint(4, 9)),
            self.arith,
            lambda: self.kin(1)[0],
            self.nonce,
            self.json,
            lambda: self.copy(self.rng.randint(10, 16)),
            self.fact,
            self.nonce_code,
            self.tool,
        )
        items = [makers[(self._mixed + i) % len(makers)]() for i in range(count)]
        self._mixed += count
        self.rng.shuffle(items)
        return items


def marks_of(items: Iterable[Item]) -> dict[int, tuple[str, ...]]:
    return {i: item.marks for i, item in enumerate(items)}
