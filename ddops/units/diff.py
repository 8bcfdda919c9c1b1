"""What changes, for people to read, with secrets masked on both sides. Pure."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence

MASK = "***"
_SECRET_FLAG = re.compile(r"--?[\w-]*(api[-_]?key|token|password|passwd|secret)s?", re.IGNORECASE)
_FILE_FLAG = re.compile(r"(file|path|dir)$", re.IGNORECASE)
_NOT_SECRET = re.compile(r"tokens?[-_]|[-_]tokens$|num[-_]|max[-_]", re.IGNORECASE)
_FLAG_IN_TEXT = re.compile(r"(?P<flag>--?[A-Za-z][\w-]*)(?P<gap>=|[ \t]+(?:\\\n[ \t]*)?)(?P<value>\"[^\"\n]*\"|'[^'\n]*'|\S+)")
_VARIABLE = re.compile(
    r"(?P<name>\b[A-Za-z0-9_]*(?:API_?KEY|TOKEN|PASSWORD|PASSWD|SECRET|CREDENTIALS?))=(?P<value>(?:\\.|[^\"'\n])*)",
    re.IGNORECASE,
)
_BEARER = re.compile(r"(?i)(bearer\s+)[A-Za-z0-9._~+/=-]+")


def _is_secret(flag: str) -> bool:
    name = flag.partition("=")[0]
    if not _SECRET_FLAG.fullmatch(name) or _FILE_FLAG.search(name):
        return False
    return not _NOT_SECRET.search(name.lstrip("-"))


def redact(text: str) -> str:
    """`text` with the values of secret flags and variables masked."""

    def flag(match: re.Match[str]) -> str:
        if not _is_secret(match["flag"]):
            return match.group()
        return match["flag"] + match["gap"] + MASK

    # A value may itself be a flag (`--enable-metrics --api-key X`), so look again from behind each flag name.
    out, at = [], 0
    while match := _FLAG_IN_TEXT.search(text, at):
        out += [text[at : match.start()], flag(match) if _is_secret(match["flag"]) else match["flag"]]
        at = match.end() if _is_secret(match["flag"]) else match.end("flag")
    masked = "".join([*out, text[at:]])
    masked = _VARIABLE.sub(lambda m: f"{m['name']}={MASK}" if m["value"] else m.group(), masked)
    return _BEARER.sub(rf"\1{MASK}", masked)


def redact_argv(argv: Sequence[str]) -> list[str]:
    """An argument list with the values of secret flags masked."""
    out: list[str] = []
    for index, word in enumerate(argv):
        if index and _is_secret(argv[index - 1]) and "=" not in argv[index - 1]:
            out.append(MASK)
        elif "=" in word and word.startswith("-") and _is_secret(word):
            out.append(word.partition("=")[0] + "=" + MASK)
        else:
            out.append(word)
    return out


def diff(old: bytes | None, new: bytes, name: str = "unit") -> str:
    """Unified diff of two units, "" when they are equal; None: there was none."""
    before = redact((old or b"").decode(errors="replace")).splitlines(keepends=True)
    after = redact(new.decode(errors="replace")).splitlines(keepends=True)
    lines = difflib.unified_diff(before, after, f"{name} (now)" if old is not None else "/dev/null", f"{name} (new)")
    return "".join(line if line.endswith("\n") else line + "\n" for line in lines)


def argv_diff(old: Sequence[str], new: Sequence[str]) -> str:
    """Unified diff of two argument lists, one flag with its values a line; "" when they are equal."""
    lines = difflib.unified_diff(_flags(old), _flags(new), "running", "new", lineterm="", n=1)
    return "".join(line + "\n" for line in lines)


def _flags(argv: Sequence[str]) -> list[str]:
    lines: list[str] = []
    for word in redact_argv(argv):
        if word.startswith("--") or not lines:
            lines.append(word)
        else:
            lines[-1] += " " + word
    return lines
