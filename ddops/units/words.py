"""Split an Exec or Environment value into words, and say what each becomes when the unit is started. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ddops.units.quoting import UnitError

_BLANK = " \t"
_ESCAPES = {"a": 7, "b": 8, "f": 12, "n": 10, "r": 13, "t": 9, "v": 11, "\\": 92, '"': 34, "'": 39, "s": 32}
_NUMERIC = re.compile(r"x(?P<x>[0-9a-fA-F]{2})|u(?P<u>[0-9a-fA-F]{4})|U(?P<U>[0-9a-fA-F]{8})|(?P<o>[0-7]{3})")
_SPECIFIERS = frozenset("aAbBCdDEfgGhHiIjJlLmMnNoOpPqsStTuUvVwW")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class Char(NamedTuple):
    char: str
    at: int  # its place in the file, in characters
    joint: bool = False  # stands for the end of a continued line


@dataclass(frozen=True, slots=True)
class Word:
    """A word as written: [start, end) in the file, its text without quotes, and what it becomes."""

    start: int
    end: int
    text: str
    line: int
    literal: bool = False  # variables are not expanded in it
    values: tuple[str, ...] = ()


def _refused(line: int, what: str, hint: str = "") -> UnitError:
    return UnitError(f"unit line {line}: {what}", means="the unit was left as it is", hint=hint)


def split(chars: Sequence[Char], line: int, *, command: bool = True) -> list[Word]:
    """Words without their quotes, specifiers and variables still in them.

    Raises:
        UnitError: an open quote, an unknown escape, a quote that runs over a line's end, a `;` between commands.
    """
    found: list[Word] = []
    index, literal = 0, False
    while True:
        while index < len(chars) and chars[index].char in _BLANK:
            index += 1
        if index == len(chars):
            return found
        if command and not found:
            index, literal = _prefixes(chars, index, line)
        if command and _alone(chars, index, ";"):
            raise _refused(line, "a ; starts a second command", "an engine's unit starts one command")
        if command and _alone(chars, index, "\\;"):
            found.append(Word(chars[index].at, chars[index + 1].at + 1, ";", line, True))
            index += 2
            continue
        end, text = _word(chars, index, line)
        found.append(Word(chars[index].at, chars[end - 1].at + 1, text, line, literal))
        index = end


def _prefixes(chars: Sequence[Char], index: int, line: int) -> tuple[int, bool]:
    """Skip `-`, `+`, `!` and `:` before the command; `:` switches variables off."""
    literal = False
    while index < len(chars) and chars[index].char in "-+!:@|":
        if chars[index].char in "@|":
            raise _refused(line, f"ExecStart begins with {chars[index].char}", "start the engine's program itself")
        literal |= chars[index].char == ":"
        index += 1
    return index, literal


def _alone(chars: Sequence[Char], index: int, text: str) -> bool:
    here = "".join(char.char for char in chars[index : index + len(text)])
    after = chars[index + len(text)].char if index + len(text) < len(chars) else " "
    return here == text and after in _BLANK


def _word(chars: Sequence[Char], index: int, line: int) -> tuple[int, str]:
    """One word from `index`: (index behind it, its text)."""
    out = bytearray()
    quote = ""
    while index < len(chars):
        char, _, joint = chars[index]
        if joint and quote:
            raise _refused(line, "a quoted text runs over the end of a line", "write it on one line")
        if char == "\\":
            taken, data = _escape(chars, index + 1, line)
            out += data
            index += 1 + taken
            continue
        if quote:
            if char == quote:
                quote = ""
            else:
                out += char.encode()
        elif char in "\"'":
            quote = char
        elif char in _BLANK:
            break
        else:
            out += char.encode()
        index += 1
    if quote:
        raise _refused(line, f"a quote {quote} that is never closed")
    return index, out.decode(errors="surrogateescape")


def _escape(chars: Sequence[Char], index: int, line: int) -> tuple[int, bytes]:
    text = "".join(char.char for char in chars[index : index + 9])
    if text[:1] in _ESCAPES:
        return 1, bytes([_ESCAPES[text[0]]])
    match = _NUMERIC.match(text)
    if match is None:
        raise _refused(line, f"an unknown escape \\{text[:1]}", "write \\\\ for a backslash")
    kind, digits = next((k, v) for k, v in match.groupdict().items() if v)
    code = int(digits, 8 if kind == "o" else 16)
    if code == 0 or code > (255 if kind in "xo" else 0x10FFFF) or 0xD800 <= code <= 0xDFFF:
        raise _refused(line, f"the escape \\{match.group()} is no character")
    return match.end(), bytes([code]) if kind in "xo" else chr(code).encode()


def resolve(found: Sequence[Word], name: str, environment: Mapping[str, str] | None, *, variables: bool = True) -> list[Word]:
    """The words with their values at start; `environment` None: it is not known from the unit.

    Raises:
        UnitError: a specifier or a variable whose value stands outside the unit.
    """
    done: list[Word] = []
    for index, word in enumerate(found):
        text = _specified(word, name)
        if not variables or word.literal or (index == 0 and "$" not in text):
            values: tuple[str, ...] = (text,)
        elif index == 0:
            raise _refused(word.line, "the command is a variable, which systemd does not expand")
        else:
            values = _expanded(text, word.line, environment)
        done.append(replace(word, values=values))
    return done


def _specified(word: Word, name: str) -> str:
    stem = name.rsplit(".", 1)[0]
    prefix, at, instance = stem.partition("@")
    known = {"%": "%", "n": name, "N": stem, "p": prefix, "i": instance if at else ""}

    def one(match: re.Match[str]) -> str:
        letter = match.group(1)
        if letter in known and (letter != "i" or "\\" not in name):
            return known[letter]
        if letter in _SPECIFIERS:
            raise _refused(word.line, f"%{letter} is known to systemd only", "write its value out, or %% for a %")
        return match.group(0)

    return re.sub(r"%(.)", one, word.text, flags=re.DOTALL)


def _expanded(text: str, line: int, environment: Mapping[str, str] | None) -> tuple[str, ...]:
    if text.startswith("$") and text[1:2] not in ("{", "$", ""):
        return tuple(_lookup(text[1:], line, environment).split())

    def one(match: re.Match[str]) -> str:
        return "$" if match.group() == "$$" else _lookup(match.group()[2:-1], line, environment)

    return (re.sub(r"\$\$|\$\{[^}]*\}", one, text),)


def _lookup(variable: str, line: int, environment: Mapping[str, str] | None) -> str:
    if not _VARIABLE.fullmatch(variable):
        raise _refused(line, f"${variable[:40]} is no variable", "write $$ for a $")
    value = (environment or {}).get(variable)
    if value is None:
        raise _refused(
            line,
            f"ExecStart uses ${variable}, and its value is not certain from this unit",
            "write the value out in ExecStart, or set it with Environment= and without EnvironmentFile=",
        )
    if any(char in value for char in "\"'\\"):
        raise _refused(line, f"the value of ${variable} holds quotes", "write the words out in ExecStart")
    return value
