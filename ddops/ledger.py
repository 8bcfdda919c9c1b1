"""Lines of the host's ledger: written here, appended by the host script, read back here. Pure.

One JSON object a line, compact and with no blanks after separators: the host script finds a run's own
line by its `"run":"..."` and `"kind":"..."` when it completes half-finished work forward.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ddops.state import Entry, Kind

VERSION = 1
_TEXT_FIELDS = ("run", "time", "digest", "invocation", "boot", "by", "why")
_OBJECT_FIELDS = ("settings", "key", "verdict", "extra")


def to_line(entry: Entry) -> bytes:
    """The entry as one line without its newline; empty fields are left out."""
    document: dict[str, Any] = {"v": VERSION, "kind": entry.kind.value}
    for name in (*_TEXT_FIELDS, *_OBJECT_FIELDS):
        value = getattr(entry, name)
        if value:
            document[name] = value
    return json.dumps(document, separators=(",", ":"), sort_keys=False).encode()


def parse(text: bytes) -> tuple[tuple[Entry, ...], tuple[str, ...]]:
    """All entries that can be read, and a note for each line that cannot (a power cut tears the last one)."""
    entries: list[Entry] = []
    notes: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            entries.append(_entry(json.loads(line)))
        except (ValueError, TypeError, KeyError) as problem:
            notes.append(f"ledger line {number} cannot be read ({problem}); it was left out")
    return tuple(entries), tuple(notes)


def _entry(document: Any) -> Entry:
    if not isinstance(document, Mapping):
        raise TypeError("not an object")
    if document.get("v") != VERSION:
        raise ValueError(f"version {document.get('v')!r}, this ddops reads {VERSION}")
    texts: dict[str, Any] = {name: str(document.get(name, "")) for name in _TEXT_FIELDS}
    objects: dict[str, Any] = {name: dict(document.get(name) or {}) for name in _OBJECT_FIELDS}
    return Entry(kind=Kind(document["kind"]), **texts, **objects)
