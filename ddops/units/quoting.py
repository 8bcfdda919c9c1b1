"""Words into a unit file so that systemd reads back exactly these words. Pure.

Rules from systemd.service(5) and systemd.syntax(7): in Exec lines `%` starts a specifier and `$` a variable,
inside quotes too, so both are doubled; in Environment= only `%` is. Escapes are C's.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from ddops.errors import Refused

_PLAIN = re.compile(r"[A-Za-z0-9_@+=:,./-]+")
_PREFIXES = "@-:+!|"  # before a command they change how it is run


class UnitError(Refused):
    """A unit file, or a word meant for one, that can't be represented faithfully."""

    def __init__(self, what: str, *, means: str = "no unit was written", hint: str = "") -> None:
        super().__init__(what, means=means, hint=hint)


def checked(word: str) -> str:
    """The word itself.

    Raises:
        UnitError: a line break or NUL (it would start a new directive), a backslash at the end (it would join
            the next line), or text that is no Unicode.
    """
    for char, name in (("\n", "a line break"), ("\r", "a carriage return"), ("\0", "a NUL")):
        if char in word:
            raise UnitError(f"{name} in {word[:60]!r}", hint="a unit file's values are one line each")
    if word.endswith("\\"):
        raise UnitError(f"a backslash at the end of {word[:60]!r}", hint="it would join the next line of the unit")
    try:
        word.encode()
    except UnicodeEncodeError:
        raise UnitError(f"{word[:60]!r} is not Unicode text") from None
    return word


def _escaped(word: str) -> str:
    out = []
    for char in checked(word):
        if char in '"\\':
            out.append("\\" + char)
        elif char == "%":
            out.append("%%")
        elif char < " " or char == "\x7f":
            out.append(f"\\x{ord(char):02x}")
        else:
            out.append(char)
    return "".join(out)


def exec_quote(word: str) -> str:
    """One argument of an Exec line. Raises UnitError, see `checked`."""
    if _PLAIN.fullmatch(checked(word)):
        return word
    return '"' + _escaped(word).replace("$", "$$") + '"'


def env_quote(name: str, value: str) -> str:
    """One assignment for Environment=, always in quotes (blanks would cut it). Raises UnitError."""
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise UnitError(f"{name[:60]!r} is no name of an environment variable")
    return f'"{name}={_escaped(value)}"'


def value_quote(value: str) -> str:
    """A whole directive value that systemd takes as it stands, such as a path. Raises UnitError."""
    text = checked(value)
    if text != text.strip() or any(char < " " or char in "\"'\\" for char in text):
        raise UnitError(f"{text[:60]!r} holds quotes, backslashes or blanks at an end")
    return text.replace("%", "%%")


def command(word: str) -> str:
    """The first word of an Exec line: an absolute path without anything systemd could read as more.

    Raises:
        UnitError: not absolute (a leading `-`, `@`, `:`, `+`, `!` or `|` changes how it is run), or a `$` in it.
    """
    if word[:1] in tuple(_PREFIXES):
        raise UnitError(f"the command {word[:60]!r} begins with {word[0]!r}", hint="systemd reads that as a prefix")
    if not word.startswith("/") or word.endswith("/"):
        raise UnitError(f"the command {word[:60]!r} is no absolute path of a program")
    if any(char in "$;\"'\\ \t" for char in word):
        raise UnitError(f"the command {word[:60]!r} holds a blank, quote, backslash, $ or ;")
    return exec_quote(word)


def exec_line(argv: Sequence[str]) -> str:
    """An ExecStart value, one flag a line, so that a diff shows the flags that changed.

    Raises:
        UnitError: see `command` and `checked`; or nothing to run.
    """
    if not argv:
        raise UnitError("a command without words")
    lines = [[command(argv[0])]]
    for word in argv[1:]:
        quoted = exec_quote(word)
        if word.startswith("--"):
            lines.append([quoted])
        else:
            lines[-1].append(quoted)
    return " \\\n    ".join(" ".join(words) for words in lines)
