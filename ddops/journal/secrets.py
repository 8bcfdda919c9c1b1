"""Values that no output may show. Registered where they are read, masked wherever text leaves.

One registry for the process: a secret read for one host must not appear in another host's lines either.
"""

from __future__ import annotations

import json
import threading
from urllib.parse import quote

MASK = "***"
SHORTEST = 4  # shorter values would mask half of every line; they are masked only where they stand alone


class Secrets:
    """A set of values and how to take them out of text."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._forms: tuple[str, ...] = ()
        self._short: frozenset[str] = frozenset()

    def add(self, value: str | bytes | None) -> None:
        """Register a value, with the forms it takes in JSON and in URLs. Empty values are ignored."""
        text = value.decode("utf-8", "replace") if isinstance(value, bytes) else value
        if not text or not text.strip():
            return
        forms = {text, text.strip(), quote(text.strip(), safe=""), json.dumps(text.strip())[1:-1]}
        # A value of several lines (a key file) also leaks line by line.
        forms |= {line.strip() for line in text.splitlines() if len(line.strip()) >= 2 * SHORTEST}
        with self._lock:
            long = {form for form in forms if len(form) >= SHORTEST}
            # Longest first, so that a secret inside another one cannot leave half of it standing.
            self._forms = tuple(sorted({*self._forms, *long}, key=lambda form: (-len(form), form)))
            self._short |= forms - long

    def redact(self, text: str) -> str:
        if text in self._short:
            return MASK
        for form in self._forms:
            if form in text:
                text = text.replace(form, MASK)
        return text


SECRETS = Secrets()


def mask(value: str | bytes | None) -> None:
    """From now on no output shows this value."""
    SECRETS.add(value)


def redact(text: str) -> str:
    """The text without registered secrets; for whatever is printed outside the journal."""
    return SECRETS.redact(text)
