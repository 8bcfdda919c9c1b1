"""The schema's complaints in our words: what is wrong, what was found, what was probably meant. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ddops.inventory.model import Section
from ddops.inventory.yaml_lines import Path


def kind_of(value: Any) -> str:
    names = {
        dict: "keys and values",
        list: "a list",
        str: "text",
        bool: "true or false",
        int: "a number",
        float: "a number",
    }
    return "nothing" if value is None else names.get(type(value), type(value).__name__)


def near(name: str, known: Iterable[str]) -> str:
    options = list(known)
    close = difflib.get_close_matches(name, options, n=2, cutoff=0.6)
    if close:
        return f"did you mean {' or '.join(close)}?"
    return f"known here: {', '.join(options[:24])}" if options else "none are defined"


@dataclass(frozen=True, slots=True)
class Problem:
    """One pydantic complaint in our words."""

    path: Path
    what: str
    hint: str = ""

    @classmethod
    def of(cls, item: Mapping[str, Any], model: type[Section], raw: Any) -> Problem:
        path, owner = _real_path(item["loc"], model, raw)
        kind, value, context = item["type"], item["input"], item.get("ctx", {})
        if kind == "missing":
            return cls((*path, item["loc"][-1]), "is missing")
        if kind == "extra_forbidden":
            return cls(path, "unknown key", near(str(path[-1]), _keys(owner)))
        if kind == "value_error":
            return cls(path, f"{_shown(value)} {context['error']}" if "error" in context else item["msg"])
        if kind in _LIMITS:
            return cls(path, f"{_shown(value)} must be {_LIMITS[kind]} {next(iter(context.values()))}")
        if kind == "literal_error" and value is not None and not _numeric(item):
            return cls(path, f"{_shown(value)} is not one of {context['expected']}")
        if kind == "finite_number":
            return cls(path, f"{_shown(value)} is not a finite number")
        wanted = _WANTED.get(kind, item["msg"].lower())
        if path and path[-1] in _OR_AUTO:
            wanted = "a whole number or auto"
        hint = "put it in quotes" if kind == "string_type" and _scalar(value) else ""
        return cls(path, f"expected {wanted}, found {kind_of(value)}{f' ({value})' if _scalar(value) else ''}", hint)


_LIMITS = {
    "greater_than": "above", "greater_than_equal": "at least", "less_than": "below", "less_than_equal": "at most",
}  # fmt: skip
_WANTED = {
    "int_type": "a whole number", "float_type": "a number", "string_type": "text", "bool_type": "true or false",
    "tuple_type": "a list", "dict_type": "keys and values", "model_type": "keys and values",
    "model_attributes_type": "keys and values", "int_from_float": "a whole number", "literal_error": "auto",
}  # fmt: skip


_OR_AUTO = ("budget", "max_running_requests")


def _numeric(item: Mapping[str, Any]) -> bool:
    """A union `int | "auto"` complains twice; the number's complaint reads better unless text was given."""
    return item.get("ctx", {}).get("expected") == "'auto'" and not isinstance(item["input"], str)


def _keys(owner: type[Section] | None) -> list[str]:
    return [info.alias or name for name, info in owner.model_fields.items()] if owner else []


def _scalar(value: Any) -> bool:
    return isinstance(value, (str, int, float)) and len(str(value)) <= 60


def _shown(value: Any) -> str:
    text = repr(value) if isinstance(value, str) else str(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _real_path(loc: Sequence[str | int], model: type[Section], raw: Any) -> tuple[Path, type[Section] | None]:
    """pydantic puts names of union branches and "[key]" into a location; keep what the file really has."""
    path: list[str | int] = []
    owner: type[Section] | None = model
    for part in loc:
        in_mapping = isinstance(raw, dict) and part in raw
        in_list = isinstance(raw, (list, tuple)) and isinstance(part, int) and part < len(raw)
        if not in_mapping and not in_list:
            break
        raw = raw[part]
        path.append(part)
        if owner is not None and part in owner.model_fields and part != loc[-1]:
            inner = owner.model_fields[str(part)].annotation
            owner = inner if isinstance(inner, type) and issubclass(inner, Section) else None
    return tuple(path), owner
