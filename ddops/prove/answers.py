"""Questions with one right answer: arithmetic, short facts from the prompt, JSON, the shape of a tool call. Pure.

A check says whether the answer is right and what it was; what that means for the engine is decided elsewhere.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

_NUMBER = re.compile(r"(?<![\w.])-?\d+(?:\.\d+)?(?![\w])")
_FENCE = re.compile(r"```[a-zA-Z]*\n(.*?)```", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Check:
    """Whether a reply is right, and what was found in it (short, for the evidence)."""

    ok: bool
    got: str


def visible(text: str) -> str:
    """What a reasoning model answers once it has thought: text after the closing tag."""
    return text.rpartition("</think>")[2].strip()


def number(text: str, expected: int) -> Check:
    """The last number of a short answer is the expected one."""
    found = _NUMBER.findall(visible(text).replace(",", "").replace("\u2212", "-"))
    return Check(bool(found) and float(found[-1]) == expected, short(found[-1] if found else text))


def word(text: str, expected: str, others: tuple[str, ...] = ()) -> Check:
    """The expected word stands in the answer (whole, exactly), and none of the wrong ones does."""
    shown = visible(text)
    ok = _has(shown, expected) and not any(_has(shown, other) for other in others)
    return Check(ok, short(shown))


def _has(text: str, token: str) -> bool:
    return re.search(rf"(?<![\w-]){re.escape(token)}(?![\w-])", text) is not None


def json_object(text: str, expected: dict[str, Any]) -> Check:
    """An object with exactly these keys and values; a number may be written as text."""
    found = parse_json(text)
    ok = isinstance(found, dict) and found.keys() == expected.keys() and all(_same(found[k], v) for k, v in expected.items())
    return Check(ok, short(text))


def tool_call(text: str, name: str, arguments: dict[str, str]) -> Check:
    """JSON (any layout: OpenAI's, flat, a list of one) that names the tool and gives each argument its exact value."""
    found = parse_json(text)
    if found is None:
        return Check(False, short(text))
    pairs = list(_pairs(found))
    named = any(v == name for _, v in pairs) or any(k == name for k, _ in pairs)
    given = all(any(k == key and _same(v, value) for k, v in pairs) for key, value in arguments.items())
    return Check(named and given, short(text))


def parse_json(text: str) -> Any:
    """The JSON value in a reply: all of it, a fenced block, or from the first bracket to the last; else None."""
    shown = visible(text)
    fenced = _FENCE.search(shown)
    start, end = (
        min((i for i in (shown.find("{"), shown.find("[")) if i >= 0), default=-1),
        max(shown.rfind("}"), shown.rfind("]")),
    )
    candidates = [fenced.group(1) if fenced else "", shown, shown[start : end + 1] if 0 <= start < end else ""]
    for candidate in candidates:
        try:
            return json.loads(candidate)
        except (ValueError, RecursionError):
            continue
    return None


def _pairs(value: Any, depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Every (key, scalar) of a JSON value; arguments that are JSON in a string are opened too."""
    if depth > 8:
        return
    if isinstance(value, list):
        for item in value:
            yield from _pairs(item, depth + 1)
    if not isinstance(value, dict):
        return
    for key, item in value.items():
        if isinstance(item, (dict, list)):
            yield (key, None)
            yield from _pairs(item, depth + 1)
            continue
        yield (key, item)
        if isinstance(item, str) and item[:1] == "{":
            yield from _pairs(parse_json(item), depth + 1)


def _same(found: Any, expected: Any) -> bool:
    if isinstance(expected, bool) or isinstance(found, bool):
        return found is expected
    as_text = isinstance(expected, int) and isinstance(found, str) and found.strip() == str(expected)
    return bool(found == expected) or as_text


def short(text: str, limit: int = 80) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= limit else flat[: limit - 3] + "..."
