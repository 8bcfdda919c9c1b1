"""Short texts from the grammar in prose.txt: stories, descriptions, instructions, dialogues, reports, letters.

Every slot has several equally likely sentences, so the next word is often one of a few: text that a drafter can
follow only in part. Answers are checked sentence by sentence against the grammar.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random

from training.records import CITIES, FIRST, invented
from training.tasks import Check, CheckKind, Split, Task, single, words
from training.wording import lead

JOBS = words(
    "baker sailor gardener painter teacher smith tailor miner driver nurse potter clerk weaver farmer fisher "
        "carpenter shepherd printer"
)  # fmt: skip
THINGS = words(
    "lamp clock radio bicycle kettle camera printer pump ladder boat violin stove fan drone engine scale "
          "compass lantern heater mirror"
)  # fmt: skip
FREE = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True, slots=True)
class Kind:
    name: str
    prompts: tuple[str, ...]
    slots: tuple[tuple[str, ...], ...]


@cache
def grammar() -> tuple[tuple[Kind, ...], dict[str, tuple[str, ...]]]:
    """The kinds of text and the word lists of prose.txt."""
    kinds, words = [], {}
    text = (Path(__file__).parent / "prose.txt").read_text(encoding="utf8")
    for section in re.split(r"^\[", text, flags=re.M)[1:]:
        name, _, body = section.partition("]\n")
        lines = body.strip().split("\n")
        if name == "words":
            words = {key: tuple(rest.split()) for key, _, rest in (line.partition(": ") for line in lines)}
            continue
        prompts = tuple(line[2:] for line in lines if line.startswith("> "))
        slots = tuple(tuple(line[2:].split(" / ")) for line in lines if line.startswith("- "))
        kinds.append(Kind(name, prompts, slots))
    return tuple(kinds), words


def _given(rng: Random) -> dict[str, str]:
    name = rng.choice(FIRST) if rng.random() < 0.6 else invented(rng)
    place = rng.choice(CITIES) if rng.random() < 0.4 else invented(rng)
    return {"name": name, "place": place, "job": rng.choice(JOBS), "thing": rng.choice(THINGS)}


def _fill(rng: Random, template: str, given: dict[str, str], words: dict[str, tuple[str, ...]]) -> str:
    def one(match: re.Match[str]) -> str:
        key = match.group(1)
        # {thing} is the prompt's in the kinds that ask for one and free in stories and descriptions.
        return given[key] if key in given else rng.choice(words[key])

    return FREE.sub(one, template)


def _pattern(template: str, given: dict[str, str], words: dict[str, tuple[str, ...]]) -> str:
    parts = FREE.split(template)
    for k in range(1, len(parts), 2):
        options = (given[parts[k]],) if parts[k] in given else words[parts[k]]
        parts[k] = "(?:" + "|".join(map(re.escape, options)) + ")"
    return "".join(p if k % 2 else re.escape(p) for k, p in enumerate(parts))


def prose_task(rng: Random, split: Split) -> Task:
    """One text: one sentence for every slot of its kind (one or two slots may be left out)."""
    kinds, words = grammar()
    kind = rng.choice(kinds)
    given = _given(rng)
    prompt = _fill(rng, lead(rng, kind.prompts, split), given, words)
    if not any("{thing}" in p for p in kind.prompts):
        words = words | {"thing": tuple(THINGS)}
        given = {k: v for k, v in given.items() if k != "thing"}
    glue = "\n" if kind.name in ("dialogue", "letter") else " "
    answer = glue.join(_fill(rng, rng.choice(slot), given, words) for slot in kind.slots)
    patterns: tuple[str, ...] = ()
    if split is Split.HELD:  # only evaluation checks answers, and the patterns are long
        patterns = tuple(_pattern(s, given, words) for slot in kind.slots for s in slot)
    return single("prose", prompt, answer, Check(CheckKind.SENTENCES, patterns), tags=(kind.name,))
