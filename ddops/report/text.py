"""Make text from a host safe to show, and lay words out in columns. Pure."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

# C0 and C1 controls but tab and newline; bidirectional overrides, which make a line read otherwise than it is.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ufeff]")
_ESCAPE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-_])")


def clean(text: object) -> str:
    """Without terminal escapes and control characters; newlines and tabs stay."""
    return _CONTROL.sub("", _ESCAPE.sub("", str(text).replace("\r\n", "\n")))


def one_line(text: object, limit: int = 300) -> str:
    """Cleaned, on one line, at most `limit` characters."""
    flat = " ".join(clean(text).split())
    return flat if len(flat) <= limit else flat[: limit - 3] + "..."


def for_ci(text: str) -> str:
    """The text with nothing a CI runner takes for a command: no line starts with `::`, none holds `##[`."""
    return re.sub(r"(?m)^(\s*)::", r"\1: :", text).replace("##[", "## [")


def width(text: str) -> int:
    """Columns on a terminal: wide characters take two, combining ones none."""
    wide = sum(unicodedata.east_asian_width(char) in "WF" for char in text)
    return len(text) + wide - sum(unicodedata.combining(char) > 0 for char in text)


def columns(rows: Sequence[Sequence[str]], *, gap: int = 2) -> list[str]:
    """Rows of cells as aligned lines; the last column is not padded."""
    if not rows:
        return []
    count = max(len(row) for row in rows)
    full = [[one_line(cell) for cell in row] + [""] * (count - len(row)) for row in rows]
    widths = [max(width(row[index]) for row in full) for index in range(count)]
    lines = []
    for row in full:
        cells = [cell + " " * (widths[index] - width(cell) + gap) for index, cell in enumerate(row)]
        lines.append("".join(cells).rstrip())
    return lines


def settings_text(settings: object) -> str:
    """`{"budget": 32, "topk_cap": 8}` -> `budget 32, topk-cap 8`; what is unset is left out."""
    if not isinstance(settings, Mapping):
        return one_line(settings) if settings else ""
    return ", ".join(f"{str(key).replace('_', '-')} {value}" for key, value in settings.items() if value is not None)


def seconds_text(seconds: object) -> str:
    """`0.3 s`, `75 s`, `12 min 5 s`, `20 min`."""
    if not isinstance(seconds, (int, float)):
        return ""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 180:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if rest else f"{minutes} min"


def count_text(number: int, noun: str) -> str:
    """`1 host`, `2 hosts`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def mapping(value: Any) -> dict[str, Any]:
    """The value when it is a mapping, else an empty one: events may come from a file of another version."""
    return dict(value) if isinstance(value, Mapping) else {}


def sequence(value: Any) -> list[Any]:
    """The value when it is a list or tuple, else an empty list."""
    return list(value) if isinstance(value, (list, tuple)) else []
