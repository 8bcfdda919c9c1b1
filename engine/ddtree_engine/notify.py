"""Tell systemd how far we are (sd_notify), and nothing at all when nobody listens.

The protocol is one datagram of KEY=VALUE lines to the socket named in NOTIFY_SOCKET; a name that begins with @ is
an abstract one. Not here: deciding when the engine is ready (server.py).
"""

from __future__ import annotations

import os
import socket

_SEND_TIMEOUT_S = 1.0


class Notifier:
    """Sends states to the service manager. Every failure is swallowed: an unread status must not stop serving."""

    def __init__(self, address: str | None = None) -> None:
        self._address = os.environ.get("NOTIFY_SOCKET", "") if address is None else address

    @property
    def listening(self) -> bool:
        return self._address.startswith(("/", "@"))

    def status(self, text: str) -> None:
        """Progress; dropped rather than waited for when the manager is behind with reading."""
        self._send(f"STATUS={_one_line(text)}", timeout_s=0.0)

    def ready(self, text: str) -> None:
        self._send(f"READY=1\nSTATUS={_one_line(text)}\nMAINPID={os.getpid()}")

    def stopping(self, text: str) -> None:
        self._send(f"STOPPING=1\nSTATUS={_one_line(text)}")

    def failed(self, text: str, exit_code: int) -> None:
        """Say why the process is about to leave; `systemctl status` shows it after the death."""
        self._send(f"STATUS={_one_line(text)}\nEXIT_STATUS={exit_code}")

    def _send(self, message: str, timeout_s: float = _SEND_TIMEOUT_S) -> None:
        if not self.listening:
            return
        target = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
                sock.settimeout(timeout_s)
                sock.connect(target)
                sock.sendall(message.encode())
        except OSError:
            return


def _one_line(text: str) -> str:
    return " ".join(text.split())
