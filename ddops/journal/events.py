"""The journal itself: number, stamp, mask and hand out events. It writes nowhere (sinks do)."""

from __future__ import annotations

import dataclasses
import math
import secrets as randomness
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import Any, Protocol

from ddops.journal.secrets import SECRETS, Secrets

VERSION = 1
_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"  # no i, l, o, u: ids are read aloud

Event = dict[str, Any]


class Sink(Protocol):
    """Where events go. `write` may raise OSError or ValueError; the sink is then used no more."""

    name: str

    def write(self, event: Event) -> None: ...

    def close(self) -> None: ...


def new_run_id(now: datetime | None = None) -> str:
    """Such as 20260131-120000-k3f9: sorts by time, [a-z0-9-] only, safe in unit and file names."""
    stamp = (now or datetime.now(UTC)).strftime("%Y%m%d-%H%M%S")
    return f"{stamp}-{''.join(randomness.choice(_ALPHABET) for _ in range(4))}"


class Journal:
    """One run's events, in order, to every sink. Safe for several threads; never raises for a sink."""

    def __init__(self, run: str, sinks: Sequence[Sink] = (), *, secrets: Secrets = SECRETS) -> None:
        self.run = run
        self.secrets = secrets
        self._sinks = list(sinks)
        # Re-entrant: a signal handler may emit while the main thread is inside emit.
        self._lock = threading.RLock()
        self._seq = 0

    def emit(self, event: str, host: str | None = None, **fields: Any) -> Event:
        """Record one event; returns it as the sinks saw it."""
        with self._lock:
            self._seq += 1
            made: Event = {
                "v": VERSION,
                "seq": self._seq,
                "time": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z",
                "run": self.run,
                "host": host,
                "event": event,
            }
            made |= {key: plain(value, self.secrets) for key, value in fields.items() if key not in made}
            for sink in list(self._sinks):
                self._hand(sink, made)
        return made

    def _hand(self, sink: Sink, event: Event) -> None:
        try:
            sink.write(event)
        except (OSError, ValueError) as exc:
            # A full disk or a closed pipe must not stop a change half-way: go on without this output.
            if sink in self._sinks:
                self._sinks.remove(sink)
                with suppress(OSError, ValueError):
                    sink.close()
                self.emit("warning", text=f"{sink.name} cannot be written any more: {getattr(exc, 'strerror', None) or exc}")

    @contextmanager
    def step(self, host: str | None, name: str) -> Iterator[None]:
        """`step.started` before, `step.finished` after, whatever happens in between."""
        begun = time.monotonic()
        self.emit("step.started", host=host, step=name)
        ok = False
        try:
            yield
            ok = True
        finally:
            self.emit("step.finished", host=host, step=name, ok=ok, seconds=round(time.monotonic() - begun, 3))

    def mask(self, value: str | bytes | None) -> None:
        """From now on no sink shows this value."""
        self.secrets.add(value)

    def close(self) -> None:
        """Close the sinks. Events after it are numbered and go nowhere."""
        with self._lock:
            sinks, self._sinks = self._sinks, []
        for sink in sinks:
            with suppress(OSError, ValueError):
                sink.close()


def plain(value: Any, secrets: Secrets) -> Any:
    """The value as JSON can hold it, without secrets: no NaN, no lone surrogates, no objects."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return secrets.redact(str(value)).encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, (bytes, bytearray)):
        return plain(bytes(value).decode("utf-8", "replace"), secrets)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return plain({field.name: getattr(value, field.name) for field in dataclasses.fields(value)}, secrets)
    if isinstance(value, Mapping):
        return {plain(str(key), secrets): plain(item, secrets) for key, item in value.items()}
    if isinstance(value, (Sequence, set, frozenset)):
        items = sorted(value, key=str) if isinstance(value, (set, frozenset)) else value
        return [plain(item, secrets) for item in items]
    return plain(str(value), secrets)
