"""Read a unit file the way systemd does, and refuse what can't be told from the file alone. Pure.

Follows systemd 252's own parser: continuation lines, comments inside them, quotes and C escapes anywhere in a
word, `;` as a separator, specifiers, `$VAR` and `${VAR}`. Every word keeps its place in the file.
"""

from __future__ import annotations

import os.path
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from ddops.units import words
from ddops.units.quoting import UnitError
from ddops.units.words import Char, Word

__all__ = ["Assignment", "ParsedUnit", "UnitError", "parse"]

_SHELLS = ("sh", "bash", "dash", "zsh", "ksh", "ash", "busybox", "fish")
_CONTAINERS = (
    "docker",
    "podman",
    "nerdctl",
    "docker-compose",
    "podman-compose",
    "crictl",
    "ctr",
    "kubectl",
    "lxc-start",
)
_TYPES = ("simple", "exec", "notify", "notify-reload", "idle", "dbus")


@dataclass(frozen=True, slots=True)
class Assignment:
    """One `Key=value` line; `chars` are the value's characters with their places in the file."""

    section: str
    key: str
    value: str
    line: int
    chars: tuple[Char, ...] = field(repr=False, default=())


@dataclass(frozen=True, slots=True)
class ParsedUnit:
    """A unit file understood: what runs (`argv`), with what environment, and every assignment in order."""

    name: str
    text: str
    assignments: tuple[Assignment, ...]
    argv: tuple[str, ...]
    environment: Mapping[str, str]
    words: tuple[Word, ...] = field(repr=False, default=())

    def values(self, section: str, key: str) -> list[str]:
        """Values of a list setting; an empty assignment forgets what came before."""
        return [a.value for a in _effective(self.assignments, section, key)]

    def value(self, section: str, key: str, default: str = "") -> str:
        """The value of a setting that can be given once: the last one counts."""
        found = self.values(section, key)
        return found[-1] if found else default


def parse(text: bytes, name: str = "engine.service") -> ParsedUnit:
    """Understand a service unit.

    Args:
        text: the file's bytes.
        name: the unit's name, for the specifiers %n, %N, %p and %i.

    Raises:
        UnitError: not UTF-8; a line that is neither; several commands; a shell, a container client, a
            forking service; a word whose value stands outside this file.
    """
    source = _decode(text)
    assignments = tuple(_assignments(source))
    environment, certain = _environment(assignments, name)
    command = _command(assignments)
    found = words.split(command.chars, command.line)
    resolved = words.resolve(found, name, environment if certain else None)
    argv = tuple(value for word in resolved for value in word.values)
    if not argv:
        raise _refused(command.line, "ExecStart names no command")
    _refuse_indirect(argv, command.line)
    return ParsedUnit(name, source, assignments, argv, environment, tuple(resolved))


def _refused(line: int, what: str, hint: str = "") -> UnitError:
    return UnitError(f"unit line {line}: {what}", means="the unit was left as it is", hint=hint)


def _decode(text: bytes) -> str:
    try:
        source = text.decode("utf-8")
    except UnicodeDecodeError as problem:
        raise _refused(text.count(b"\n", 0, problem.start) + 1, "not UTF-8") from None
    for char, what in (("\0", "a NUL"), ("\r", "a carriage return")):
        if char in source:
            line = source.count("\n", 0, source.index(char)) + 1
            raise _refused(line, f"{what} in the file", "save it with plain line ends")
    return source


def _logical_lines(source: str) -> list[tuple[int, list[Char]]]:
    """Lines with continuations joined: (number of the first line, characters with places)."""
    lines: list[tuple[int, list[Char]]] = []
    open_line: tuple[int, list[Char]] | None = None
    at = 0
    for number, raw in enumerate(source.split("\n"), 1):
        start, at = at, at + len(raw) + 1
        stripped = raw.lstrip(" \t")
        if stripped[:1] in ("#", ";"):
            continue  # also between the lines of a continuation
        chars = [Char(c, start + len(raw) - len(stripped) + i) for i, c in enumerate(stripped)]
        first, joined = open_line or (number, [])
        joined = joined + chars
        if _continues(stripped):
            joined[-1] = Char(" ", joined[-1].at, joint=True)  # systemd puts a blank for the backslash
            open_line = (first, joined)
        else:
            lines.append((first, joined))
            open_line = None
    if open_line is not None:
        lines.append(open_line)
    return lines


def _continues(line: str) -> bool:
    return (len(line) - len(line.rstrip("\\"))) % 2 == 1


def _assignments(source: str) -> list[Assignment]:
    section = ""
    found: list[Assignment] = []
    for number, chars in _logical_lines(source.removeprefix("\ufeff")):
        text = "".join(char.char for char in chars).strip(" \t")
        if not text:
            continue
        if text.startswith("["):
            if not re.fullmatch(r"\[[^\[\]]+\]", text):
                raise _refused(number, f"{text[:40]!r} is no section")
            section = text[1:-1]
            continue
        if "=" not in text:
            raise _refused(number, f"{text[:40]!r} is neither a section nor an assignment")
        if not section:
            raise _refused(number, "an assignment before the first section")
        equals = next(i for i, char in enumerate(chars) if char.char == "=")
        key = "".join(char.char for char in chars[:equals]).strip(" \t")
        value = _trim(chars[equals + 1 :])
        found.append(Assignment(section, key, "".join(c.char for c in value), number, tuple(value)))
    return found


def _trim(chars: list[Char]) -> list[Char]:
    start, end = 0, len(chars)
    while start < end and chars[start].char in " \t":
        start += 1
    while end > start and chars[end - 1].char in " \t":
        end -= 1
    return chars[start:end]


def _effective(assignments: tuple[Assignment, ...], section: str, key: str) -> list[Assignment]:
    found: list[Assignment] = []
    for item in assignments:
        if (item.section, item.key) == (section, key):
            found = [*found, item] if item.value else []
    return found


def _command(assignments: tuple[Assignment, ...]) -> Assignment:
    commands = _effective(assignments, "Service", "ExecStart")
    if not commands:
        raise UnitError("the unit has no ExecStart", means="the unit was left as it is", hint="is it a service unit?")
    if len(commands) > 1:
        raise _refused(commands[1].line, "a second ExecStart", "an engine's unit starts one command")
    kinds = _effective(assignments, "Service", "Type")
    if kinds and kinds[-1].value not in _TYPES:
        kind = kinds[-1]
        raise _refused(kind.line, f"Type={kind.value}: its main process can't be relied upon", "use Type=exec or Type=notify")
    return commands[0]


def _environment(assignments: tuple[Assignment, ...], name: str) -> tuple[dict[str, str], bool]:
    """Variables set in the unit, and whether they are all there is to know of them."""
    found: dict[str, str] = {}
    for item in _effective(assignments, "Service", "Environment"):
        for word in words.resolve(words.split(item.chars, item.line, command=False), name, {}, variables=False):
            variable, equals, value = word.values[0].partition("=")
            if not equals:
                raise _refused(item.line, f"Environment={word.values[0][:40]!r} has no =", 'quote it: "NAME=a b"')
            found[variable] = value
    outside = any(_effective(assignments, "Service", key) for key in ("EnvironmentFile", "PassEnvironment", "UnsetEnvironment"))
    return found, not outside


def _refuse_indirect(argv: tuple[str, ...], line: int) -> None:
    name = os.path.basename(argv[0])
    if name in _SHELLS:
        raise _refused(
            line,
            f"ExecStart runs {name}, so what systemd watches is the shell and not the engine",
            "write the engine's own command into ExecStart (variables go into Environment=)",
        )
    inner = {os.path.basename(word) for word in argv[1:4] if "/" in word or word in _CONTAINERS}
    if name in _CONTAINERS or (name in ("env", "sudo") and inner & set(_CONTAINERS)):
        raise _refused(
            line,
            f"ExecStart runs the container client {name}, so what systemd watches is not the engine",
            "turn it into a Quadlet unit (podman-systemd.unit(5)) or run the engine directly",
        )
    if name in ("sudo", "su", "runuser", "screen", "tmux", "nohup"):
        raise _refused(line, f"ExecStart runs {name}, so the engine is its child", "use User= and run the engine directly")
