"""Function families: what a family is, the parser of families/*.txt, and rendering with other names.

A family file holds blocks separated by empty lines:

    names ... | parameter names; other parameter names | types -> return type
    : description, with {parameter} and {f} filled in
    > arguments -> expected ;; arguments -> expected
    ---
    body (plain Python; `f` is the function itself)

Bodies are split into names and other text once, so a rendering only joins strings. Wording is in coding.py.
"""

from __future__ import annotations

import io
import keyword
import re
import tokenize
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random

from training.tasks import skewed

SYNONYMS: dict[str, tuple[str, ...]] = {
    "result": ("result", "out", "res", "output"),
    "total": ("total", "acc", "running"),
    "count": ("count", "hits", "found"),
    "counts": ("counts", "freq", "table"),
    "i": ("i", "idx", "pos"),
    "j": ("j", "k", "jj"),
    "x": ("x", "item", "value", "element"),
    "c": ("c", "ch", "char", "letter"),
    "word": ("word", "w", "token"),
    "left": ("left", "lo", "start"),
    "right": ("right", "hi", "end"),
    "middle": ("middle", "mid", "center"),
    "best": ("best", "top", "winner"),
    "seen": ("seen", "known", "visited"),
    "first": ("first", "prev", "a"),
    "second": ("second", "curr", "b"),
    "row": ("row", "line", "r"),
    "inner": ("inner", "sub", "part"),
    "stack": ("stack", "opened", "pending"),
    "current": ("current", "cur", "here"),
}
PLAIN_STYLE = 0.6  # share of renderings that use the family file's own local names


@dataclass(frozen=True, slots=True)
class Body:
    pieces: tuple[tuple[str, bool], ...]  # (text, may be renamed)
    names: frozenset[str]

    def render(self, mapping: Mapping[str, str]) -> str:
        return "".join(mapping.get(text, text) if name else text for text, name in self.pieces)


@dataclass(frozen=True, slots=True)
class Example:
    arguments: str
    expected: str

    def expression(self, function: str) -> str:
        return f"{function}({self.arguments}) == {self.expected}"


@dataclass(frozen=True, slots=True)
class Family:
    names: tuple[str, ...]
    params: tuple[tuple[str, ...], ...]  # alternatives; the first is the one used in descriptions and bodies
    types: tuple[str, ...]
    returns: str
    descriptions: tuple[str, ...]
    examples: tuple[Example, ...]
    bodies: tuple[Body, ...]

    @property
    def key(self) -> str:
        return self.names[0]


@dataclass(frozen=True, slots=True)
class Function:
    """A family with all its names chosen."""

    family: Family
    name: str
    params: tuple[str, ...]

    @property
    def arguments(self) -> str:
        return ", ".join(self.params)

    @property
    def typed_arguments(self) -> str:
        return ", ".join(f"{p}: {t}" for p, t in zip(self.params, self.family.types, strict=True))

    @property
    def tests(self) -> tuple[str, ...]:
        return tuple(e.expression(self.name) for e in self.family.examples)

    def fill(self, description: str) -> str:
        """The description with the chosen names in place of {parameter} and {f}."""
        for canonical, chosen in zip(self.family.params[0], self.params, strict=True):
            description = description.replace("{" + canonical + "}", f"\0{chosen}")
        return description.replace("{f}", self.name).replace("\0", "")

    def body(self, rng: Random) -> str:
        """One of the family's bodies with the chosen parameters and, now and then, other local names."""
        body = skewed(rng, self.family.bodies, 0.65)
        mapping = dict(zip(self.family.params[0], self.params, strict=True)) | {"f": self.name}
        taken = set(body.names) | set(self.params) | {self.name}
        plain = rng.random() < PLAIN_STYLE
        for local in sorted(body.names & SYNONYMS.keys() - mapping.keys()):
            options = [s for s in SYNONYMS[local] if s not in taken]
            # A parameter called like the local would change the meaning, so then the local must move.
            if options and (local in self.params or not plain):
                mapping[local] = rng.choice(options)
                taken.add(mapping[local])
        return body.render(mapping)

    def code(self, rng: Random, *, hints: bool = False, docstring: str = "") -> str:
        head = f"def {self.name}({self.typed_arguments}) -> {self.family.returns}:" if hints else ""
        head = head or f"def {self.name}({self.arguments}):"
        lines = [head, *([f'    """{docstring}"""'] if docstring else [])]
        return "\n".join(lines + ["    " + line for line in self.body(rng).split("\n")])


def parse_body(text: str) -> Body:
    """Splits Python text into names and the rest; attributes and keyword arguments are no names of its own."""
    pieces: list[tuple[str, bool]] = []
    names, lines, row, col = set(), text.split("\n"), 1, 0
    tokens = list(tokenize.generate_tokens(io.StringIO(text + "\n").readline))
    for before, tok, after in zip([tokens[0], *tokens], tokens, [*tokens[1:], tokens[-1]], strict=False):
        if tok.type != tokenize.NAME or keyword.iskeyword(tok.string):
            continue
        keyword_argument = tok.string == "key" and after.string == "="
        if before.string == "." or keyword_argument:
            continue
        pieces.append((_between(lines, row, col, *tok.start), False))
        pieces.append((tok.string, True))
        names.add(tok.string)
        row, col = tok.end
    pieces.append((_between(lines, row, col, len(lines), len(lines[-1])), False))
    return Body(tuple(p for p in pieces if p[0]), frozenset(names))


def _between(lines: list[str], row: int, col: int, end_row: int, end_col: int) -> str:
    if row == end_row:
        return lines[row - 1][col:end_col]
    return "\n".join([lines[row - 1][col:], *lines[row : end_row - 1], lines[end_row - 1][:end_col]])


def parse_family(block: str) -> Family:
    """Parses one block of a family file. Raises ValueError when the block is malformed."""
    head, *bodies = re.split(r"^---\n", block.strip() + "\n", flags=re.M)
    first, *rest = head.strip().split("\n")
    names, params, signature = (part.strip() for part in first.split("|"))
    types, returns = signature.split(" -> ")
    tests = next(line[2:] for line in rest if line.startswith("> "))
    examples = (Example(*t.strip().rsplit(" -> ", 1)) for t in tests.split(" ;; "))
    family = Family(
        tuple(names.split()),
        tuple(tuple(p.split()) for p in params.split(";")),
        tuple(types.split()),
        returns,
        tuple(line[2:] for line in rest if line.startswith(": ")),
        tuple(examples),
        tuple(parse_body(b.rstrip("\n")) for b in bodies),
    )
    if {len(p) for p in family.params} != {len(family.types)}:
        raise ValueError(f"family {family.key}: every parameter list needs {len(family.types)} names")
    return family


@cache
def all_families() -> tuple[Family, ...]:
    files = sorted((Path(__file__).parent / "families").glob("*.txt"))
    blocks = [b for f in files for b in f.read_text(encoding="utf8").strip().split("\n\n")]
    return tuple(parse_family(b) for b in blocks)


def standard_families() -> tuple[Family, ...]:
    """The five families every probe asks for."""
    wanted = ("is_palindrome", "fib", "merge_sorted", "word_count", "gcd")
    by_key = {f.key: f for f in all_families()}
    return tuple(by_key[k] for k in wanted)
