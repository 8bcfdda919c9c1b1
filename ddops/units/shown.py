"""Variables as `systemctl show` prints them, and as /proc keeps them of a process. Pure.

This is the loaded unit's own word, drop-ins and specifiers included; parse.py reads files.
"""

from __future__ import annotations

import re

_WORD = re.compile(r'"((?:[^"\\]|\\.)*)"|(\S+)', re.DOTALL)
_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{2}|[0-7]{3}|.)", re.DOTALL)
_CONTROL = {"a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v"}


def assignments(text: str) -> dict[str, str]:
    """`A=1 "B=two words"` -> {"A": "1", "B": "two words"}; the last one of a name counts."""
    words = [_unescaped(quoted) if quoted or not bare else bare for quoted, bare in _WORD.findall(text)]
    return dict(word.split("=", 1) for word in words if "=" in word)


def of_process(environ: bytes) -> dict[str, str]:
    """/proc/PID/environ, or some of its entries; the first one of a name is the one that programs see."""
    entries = [entry.decode(errors="surrogateescape") for entry in environ.split(b"\0")]
    return dict(entry.split("=", 1) for entry in reversed(entries) if "=" in entry)


def _unescaped(text: str) -> str:
    def one(match: re.Match[str]) -> str:
        code = match[1]
        if code[0] == "x":
            return chr(int(code[1:], 16))
        if len(code) == 3:
            return chr(int(code, 8))
        return _CONTROL.get(code, code)

    return _ESCAPE.sub(one, text)
