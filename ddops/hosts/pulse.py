"""Is the host still there? A socket that remembers when bytes last came, and a thread that asks.

Paramiko's own keepalive wants no reply, so a frozen or cut host is never noticed. Here a request that
must be answered goes out after a short silence, and a connection that stays silent is torn down, which
wakes every waiter on it at once. It never judges a command: only whether the other end answers.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from paramiko import Message
from paramiko.common import cMSG_GLOBAL_REQUEST

DEFAULT_SILENCE_SECONDS = 5.0
IDLE_INTERVAL_SECONDS = 15.0  # nobody waits for the host: ask rarely (it also keeps NAT entries alive)


class HeardSocket(socket.socket):
    """A TCP socket that stamps every arrival and gives up on a write nobody takes."""

    heard = 0.0
    stuck_limit_seconds = 10.0
    _stuck_since: float | None = None

    def recv(self, size: int, flags: int = 0, /) -> bytes:
        data = super().recv(size, flags)
        if data:
            self.heard = time.monotonic()
        return data

    def send(self, data: Any, flags: int = 0, /) -> int:
        # Paramiko retries a write that times out without end, holding the lock that every other
        # thread needs; here the retries have a limit.
        try:
            sent = super().send(data, flags)
        except TimeoutError:
            now = time.monotonic()
            self._stuck_since = self._stuck_since or now
            if now - self._stuck_since > self.stuck_limit_seconds:
                raise ConnectionResetError("the host takes no more data") from None
            raise
        self._stuck_since = None
        return sent


class Pulse:
    """Watches one connection. `on_silence(seconds)` is called once, from the watching thread."""

    def __init__(
        self,
        transport: Any,
        sock: HeardSocket,
        on_silence: Callable[[float], None],
        silence_seconds: float = DEFAULT_SILENCE_SECONDS,
    ) -> None:
        self._transport = transport
        self._sock = sock
        self._on_silence = on_silence
        self._silence = silence_seconds
        self._interval = silence_seconds / 5
        self._asked: float | None = None  # when the unanswered question was put
        self._waiting = 0
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._stopped = threading.Event()
        sock.heard = time.monotonic()
        sock.stuck_limit_seconds = silence_seconds
        self._thread = threading.Thread(target=self._watch, name="ddops-pulse", daemon=True)
        self._thread.start()

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """While inside, silence is noticed within `silence_seconds`."""
        with self._lock:
            self._waiting += 1
        self._wake.set()
        try:
            yield
        finally:
            with self._lock:
                self._waiting -= 1

    def answers(self, timeout: float) -> bool:
        """Put the question now; True when anything comes back in time."""
        with self.watched():
            asked = time.monotonic()
            until = asked + timeout
            self._ask()
            while time.monotonic() < until and self._transport.is_active():
                if self._sock.heard > asked:
                    return True
                time.sleep(0.005)
        return False

    def stop(self) -> None:
        self._stopped.set()
        self._wake.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(2)

    def _watch(self) -> None:
        tick = time.monotonic()
        while not self._stopped.is_set() and self._transport.is_active():
            now = time.monotonic()
            if now - tick > 2:
                self._asked = None  # this process was paused itself: old questions prove nothing
            tick = now
            if self._silent_for(now) > self._silence - self._interval:
                self._on_silence(self._silence)
                return
            self._ask_when_due(now)
            self._wake.wait(self._interval / 4 if self._waiting else 1.0)
            self._wake.clear()

    def _silent_for(self, now: float) -> float:
        if self._asked is None or self._sock.heard >= self._asked:
            self._asked = None
            return 0.0
        return now - self._asked

    def _ask_when_due(self, now: float) -> None:
        interval = self._interval if self._waiting else IDLE_INTERVAL_SECONDS
        if self._asked is None and now - self._sock.heard >= interval:
            self._asked = now
            self._ask()

    def _ask(self) -> None:
        # Transport.global_request either asks for no reply or blocks without a limit; so the same
        # message is built here, with "want reply" set, and nobody waits for it.
        message = Message()
        message.add_byte(cMSG_GLOBAL_REQUEST)
        message.add_string("keepalive@openssh.com")
        message.add_boolean(True)
        with contextlib.suppress(Exception):  # a broken connection shows as silence or as inactive
            self._transport._send_user_message(message)
