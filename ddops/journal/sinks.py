"""Sinks without a screen: a list in memory and an NDJSON stream."""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TextIO

from ddops import __version__
from ddops.errors import UsageError
from ddops.journal.events import VERSION, Event


class Collector:
    """Keeps every event; the reports are made from it."""

    name = "the event list"

    def __init__(self) -> None:
        self.events: list[Event] = []

    def write(self, event: Event) -> None:
        self.events.append(event)

    def close(self) -> None:
        """Nothing is held open."""


class Ndjson:
    """One JSON object a line, flushed as it comes. The first line says which version follows.

    Readers take minor additions: they ignore events and keys they do not know.
    """

    def __init__(self, stream: TextIO, name: str, run: str, *, owned: bool) -> None:
        self.name = name
        self._stream = stream
        self._owned = owned
        self.write(
            {
                "v": VERSION,
                "seq": 0,
                "time": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z",
                "run": run,
                "host": None,
                "event": "version",
                "ddops": __version__,
            }
        )

    @classmethod
    def open(cls, target: str, run: str) -> Ndjson:
        """`-` is stdout. Raises UsageError when the file cannot be written: before anything is touched."""
        if target == "-":
            return cls(sys.stdout, "stdout", run, owned=False)
        try:
            return cls(Path(target).open("w", encoding="utf-8"), target, run, owned=True)
        except OSError as exc:
            raise UsageError(
                f"events cannot be written to {target}: {exc.strerror or exc}",
                means="nothing was done",
                hint="name another file with --events",
            ) from exc

    def write(self, event: Event) -> None:
        self._stream.write(json.dumps(event, ensure_ascii=False, allow_nan=False, separators=(",", ":")) + "\n")
        self._stream.flush()

    def close(self) -> None:
        if self._owned:
            self._stream.close()
