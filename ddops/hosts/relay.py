"""The controller's half of the HTTP relay: streams multiplexed over one exec channel.

Used only where the host's sshd forwards no ports. One session carries every connection, because sshd
allows few sessions (MaxSessions) and a proof needs many requests at once.
"""

from __future__ import annotations

import struct
import threading
import time
from importlib.resources import files
from typing import Any

from ddops.errors import Unreachable
from ddops.hosts.session import Session, Skim
from ddops.hosts.words import Script

_HEADER = struct.Struct(">IBI")
_OPEN, _OPENED, _REFUSED, _DATA, _END, _CLOSE, _READY = range(7)
_BLOCK = 32_768
_BUFFER_LIMIT = 64 * 2**20  # of one stream nobody reads
START_SECONDS = 20.0

_START = """src=$1; shift
for python in "$@"; do
  if command -v "$python" >/dev/null 2>&1; then exec "$python" -c "$src"; fi
done
echo "none of these is on the host: $*" >&2; exit 127"""


class RelayRefused(OSError):
    """The host could not connect to the address (the engine does not listen), or has no Python."""


class RelayBroken(OSError):
    """The relay ended while a stream was open."""


class RelayStream:
    """One TCP connection made by the host."""

    def __init__(self, relay: Relay, number: int) -> None:
        self._relay = relay
        self.number = number
        self.buffer = bytearray()
        self.opened = False
        self.ended = False
        self.problem: OSError | None = None

    def read(self, size: int, timeout: float | None) -> bytes:
        """b"" at the end. Raises TimeoutError, RelayBroken."""
        self._relay.wait(lambda: bool(self.buffer or self.ended or self.problem), timeout)
        with self._relay.changed:
            if self.buffer:
                data = bytes(self.buffer[:size])
                del self.buffer[:size]
                return data
        if self.problem is not None:
            raise self.problem
        return b""

    def write(self, data: bytes) -> None:
        for start in range(0, len(data), _BLOCK):
            self._relay.send(self.number, _DATA, data[start : start + _BLOCK])

    @property
    def readable(self) -> bool:
        return bool(self.buffer or self.ended or self.problem)

    def close(self) -> None:
        self._relay.forget(self)


class Relay:
    """Streams over the channel of a session that runs `command()`."""

    def __init__(self, session: Session) -> None:
        self._skim = Skim(session.mark)
        self._channel = session.start()
        self._streams: dict[int, RelayStream] = {}
        self._next = 1
        self._sending = threading.Lock()
        self.changed = threading.Condition()
        self._ready = False
        self.problem: OSError | None = None
        self._thread = threading.Thread(target=self._receive, name="ddops-relay", daemon=True)
        self._thread.start()
        try:
            self.wait(lambda: self._ready or self.problem is not None, START_SECONDS)
        except TimeoutError:
            self.problem = RelayRefused("the relay on the host did not start")
        if self.problem is not None:
            self.close()
            raise self.problem

    @staticmethod
    def command(pythons: tuple[str, ...]) -> Script:
        source = files("ddops.hosts").joinpath("relay_host.py").read_text("utf-8")
        return Script(_START, (source, *pythons))

    @property
    def usable(self) -> bool:
        return self.problem is None

    def connect(self, address: str, port: int, timeout: float | None) -> RelayStream:
        """Raises RelayRefused, TimeoutError."""
        with self.changed:
            stream = RelayStream(self, self._next)
            self._streams[self._next] = stream
            self._next += 1
        try:
            self.send(stream.number, _OPEN, f"{address} {port}".encode())
            self.wait(lambda: stream.opened or stream.problem is not None, timeout)
        except BaseException:
            self.forget(stream)
            raise
        if stream.problem is not None:
            self.forget(stream)
            raise stream.problem
        return stream

    def forget(self, stream: RelayStream) -> None:
        with self.changed:
            known = self._streams.pop(stream.number, None)
            stream.problem = stream.problem or RelayBroken("the connection was closed here")
            self.changed.notify_all()
        if known is not None and self.usable:
            try:
                self.send(stream.number, _CLOSE)
            except OSError:
                return

    def send(self, number: int, kind: int, payload: bytes = b"") -> None:
        data = _HEADER.pack(number, kind, len(payload)) + payload
        with self._sending:
            try:
                self._channel.sendall(data)
            except (OSError, EOFError) as exc:
                raise RelayBroken(f"the relay on the host ended: {exc}") from exc

    def wait(self, ready: Any, timeout: float | None) -> None:
        with self.changed:
            if not self.changed.wait_for(ready, timeout):
                raise TimeoutError

    def close(self) -> None:
        self._channel.close()
        if threading.current_thread() is not self._thread:
            self._thread.join(2)

    def _receive(self) -> None:
        buffer = bytearray()
        try:
            while data := self._channel.recv(1 << 20):
                buffer += self._skim.after(data)
                self._dispatch(buffer)
        except (OSError, EOFError, Unreachable):
            pass
        said = self._last_words()
        with self.changed:
            self.problem = self.problem or (
                RelayBroken(f"the relay on the host ended{said}")
                if self._ready
                else RelayRefused(f"the relay on the host did not start{said}")
            )
            for stream in self._streams.values():
                stream.problem = stream.problem or self.problem
            self.changed.notify_all()

    def _last_words(self) -> str:
        until = time.monotonic() + 0.5
        while not self._channel.closed and not self._channel.eof_received and time.monotonic() < until:
            time.sleep(0.01)
        if not self._channel.recv_stderr_ready():
            return ""
        lines = self._channel.recv_stderr(4096).decode("utf-8", "replace").strip().splitlines()
        return f": {lines[-1]}" if lines else ""

    def _dispatch(self, buffer: bytearray) -> None:
        with self.changed:
            while len(buffer) >= _HEADER.size:
                number, kind, length = _HEADER.unpack_from(buffer)
                if len(buffer) < _HEADER.size + length:
                    break
                payload = bytes(buffer[_HEADER.size : _HEADER.size + length])
                del buffer[: _HEADER.size + length]
                self._handle(number, kind, payload)
            self.changed.notify_all()

    def _handle(self, number: int, kind: int, payload: bytes) -> None:
        if kind == _READY:
            self._ready = True
        stream = self._streams.get(number)
        if stream is None:
            return
        if kind == _OPENED:
            stream.opened = True
        elif kind == _REFUSED:
            stream.problem = RelayRefused(payload.decode("utf-8", "replace"))
        elif kind == _DATA:
            stream.buffer += payload
            if len(stream.buffer) > _BUFFER_LIMIT:
                stream.problem = RelayBroken("more than 64 MiB arrived that nobody read")
        elif kind == _END:
            stream.ended = True
        elif kind == _CLOSE:
            stream.problem = RelayBroken(payload.decode("utf-8", "replace") or "the connection was reset")
