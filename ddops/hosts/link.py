"""One live connection: opened whole, watched, dropped whole, never repaired.

It opens channels and tells a lost connection from everything else. What runs on a channel is not its
business (session.py, http.py).
"""

from __future__ import annotations

import signal
import time
from typing import Any

import paramiko
from paramiko.common import MSG_CHANNEL_REQUEST

from ddops.errors import ConnectionLost, RemoteTimeout
from ddops.hosts.login import Login
from ddops.hosts.pulse import Pulse
from ddops.hosts.target import Target


class Link:
    """A logged-in connection to one host."""

    def __init__(self, target: Target, until: float, silence_seconds: float) -> None:
        """Raises as Login.open does."""
        self.name = target.name
        self.login = Login(target, until)
        self.login.open()
        assert self.login.sock is not None
        self._why = ""
        _understand_signals(self.login.transport)
        self.pulse = Pulse(self.login.transport, self.login.sock, self._on_silence, silence_seconds)

    def _on_silence(self, seconds: float) -> None:
        self._why = f"it answered nothing for {seconds:g} s"
        self.login.close()

    @property
    def up(self) -> bool:
        return bool(self.login.is_connected)

    def is_lost(self) -> bool:
        """Is the connection down? Paramiko closes the channels a moment before it says so: wait for that."""
        until = time.monotonic() + 1.0
        while time.monotonic() < until:
            if not self.up:
                return True
            if self.pulse.answers(0.2):
                return not self.up
        return not self.up or not self.pulse.answers(2.0)

    def drop(self, why: str) -> None:
        """Close it at once; whoever waits on it is woken and told why."""
        self._why = self._why or why
        self.pulse.stop()
        self.login.close()

    def lost(self) -> ConnectionLost:
        return ConnectionLost(
            f"the connection to {self.name} is lost: {self._why or 'the other end closed it'}",
            means="what was under way may have finished there, or not",
            hint=f"ddops status --host {self.name}",
        )

    def timed_out(self, doing: str) -> RemoteTimeout:
        return RemoteTimeout(
            f"{doing} on {self.name} did not end in time",
            means="it may still be running there",
            hint=f"ddops status --host {self.name}",
        )

    def open_channel(self, kind: str, until: float, address: tuple[str, int] | None = None) -> Any:
        """A new paramiko channel.

        Raises paramiko.ChannelException when the host refuses it, ConnectionLost, RemoteTimeout.
        """
        if not self.up:
            raise self.lost()
        left = until - time.monotonic()
        if left <= 0:
            raise self.timed_out("opening a channel")
        try:
            source = ("127.0.0.1", 0) if address else None
            return self.login.transport.open_channel(kind, address, source, timeout=left)
        except paramiko.ChannelException:
            raise
        except (paramiko.SSHException, EOFError, OSError) as exc:
            if not self.up:
                raise self.lost() from exc
            if time.monotonic() >= until:
                raise self.timed_out("opening a channel") from exc
            # Another thread took the reason for this refusal (paramiko keeps one for all).
            raise paramiko.ChannelException(0, str(exc)) from exc


def _understand_signals(transport: Any) -> None:
    """Make "killed by a signal" an exit status (128 + n). Paramiko drops that message, so such a command
    could not be told from a lost connection."""
    plain = transport._channel_handler_table[MSG_CHANNEL_REQUEST]

    def handle(channel: Any, message: Any) -> None:
        start = message.packet.tell()
        if message.get_text() == "exit-signal":
            message.get_boolean()
            number = getattr(signal, f"SIG{message.get_text()}", signal.SIGKILL)
            channel.exit_status = 128 + int(number)
            channel.status_event.set()
            return
        message.packet.seek(start)
        plain(channel, message)

    transport._channel_handler_table = {**transport._channel_handler_table, MSG_CHANNEL_REQUEST: handle}
