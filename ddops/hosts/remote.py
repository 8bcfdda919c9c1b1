"""One host over one connection: run a command, watch its lines, feed it bytes, speak HTTP to it.

Every wait has a limit, a lost connection is told from a failed command, and nothing is ever repeated
by itself. It does not know what the commands mean (commands.py) nor when to give up (transaction.py).
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, BinaryIO

from tenacity import (
    Retrying,
    retry_if_exception_type,
    retry_if_not_exception_type,
    stop_before_delay,
    wait_random_exponential,
)

from ddops.errors import ConnectionLost, Unreachable
from ddops.hosts.link import Link
from ddops.hosts.login import Busy, LoginRejected, Timings
from ddops.hosts.pulse import DEFAULT_SILENCE_SECONDS
from ddops.hosts.session import CHUNK_BYTES, Command, Result, Session
from ddops.hosts.target import HostLike, Target, resolve
from ddops.hosts.words import argv_of

if TYPE_CHECKING:
    import httpx

    from ddops.hosts.http import HostBackend

OUTPUT_LIMIT_BYTES = 16 * 2**20
LINE_LIMIT_BYTES = 65_536

Note = Callable[[str], None]


def connect(
    config: HostLike,
    *,
    deadline_seconds: float = 30.0,
    silence_seconds: float = DEFAULT_SILENCE_SECONDS,
    on_note: Note | None = None,
) -> Remote:
    """Log in to a host of the inventory.

    Args:
        deadline_seconds: for all of it; each phase is limited by ssh.connect_timeout_seconds as well.
        silence_seconds: a host that answers nothing for this long counts as lost.
        on_note: told about decisions the operator should see (an option not obeyed, a fallback taken).

    Raises:
        Refused: the login as configured is not possible (key file, ProxyJump, unreadable file).
        HostKeyRejected, LoginRejected, Unreachable.
    """
    remote = Remote(config, silence_seconds=silence_seconds, on_note=on_note)
    remote.log_in(time.monotonic() + deadline_seconds, retry_on=Busy)
    return remote


class Remote:
    """A logged-in host (made by `connect`). Safe for several threads: each command has its own channel."""

    def __init__(self, config: HostLike, *, silence_seconds: float, on_note: Note | None) -> None:
        self.target: Target = resolve(config)
        self.name = self.target.name
        self.engine_python = str(getattr(getattr(config, "engine", None), "python", None) or "python3")
        self._sudo = str(config.ssh.sudo).lower() not in ("never", "false", "no")
        self._silence = silence_seconds
        self._on_note = on_note
        self._notes: list[str] = []
        self._lock = threading.Lock()
        self._closed = False
        self._link: Link | None = None
        self._http_lock = threading.Lock()
        self._backend: HostBackend | None = None
        self._clients: weakref.WeakSet[Any] = weakref.WeakSet()
        for text in self.target.notes:
            self.note(text)

    def __enter__(self) -> Remote:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def link(self) -> Link:
        """The present connection. Raises ConnectionLost after close, or when a reconnect failed."""
        link = self._link
        if link is None or self._closed:
            raise ConnectionLost(f"there is no connection to {self.name} any more")
        return link

    @property
    def timings(self) -> Timings:
        """How long each phase of the present connection took to set up."""
        timings = self.link.login.timings
        assert timings is not None
        return timings

    @property
    def notes(self) -> tuple[str, ...]:
        return tuple(self._notes)

    def note(self, text: str) -> None:
        """Say once, to whoever listens, that something was decided here."""
        if text in self._notes:
            return
        self._notes.append(text)
        if self._on_note is not None:
            self._on_note(text)

    # -- commands -----------------------------------------------------------------------------------

    def session(self, command: Command, deadline: float, *, sudo: bool = False) -> Session:
        user = self.target.user
        return Session(self.link, command, deadline, sudo=sudo and self._sudo and user != "root", user=user)

    def run(
        self,
        command: Command,
        *,
        stdin: bytes = b"",
        deadline: float,
        sudo: bool = False,
        output_limit: int = OUTPUT_LIMIT_BYTES,
    ) -> Result:
        """Run one command to its end, at most `deadline` seconds.

        Args:
            command: words, or a Script. Quoted once, here.
            stdin: bytes fed to it; then its stdin is closed.
            sudo: put `sudo -n` in front unless the login is root already.

        Raises:
            ConnectionLost: the connection broke; whether the command ran or ended is not known.
            RemoteTimeout: still running after `deadline`; it is *not* killed.
            OutputTooLarge: more than `output_limit` bytes on stdout or stderr.
            Refused: sudo wants a password.
        """
        with self.session(command, deadline, sudo=sudo) as session:
            return session.collect(_chunks(stdin), output_limit)

    def put_stream(
        self,
        command: Command,
        source: BinaryIO,
        *,
        deadline: float,
        sudo: bool = False,
        progress: Callable[[int], None] | None = None,
    ) -> Result:
        """Feed a file to a command's stdin (for example `tar -x`, or `cat > file` in a Script).

        progress: called with the number of bytes handed over so far.
        Raises as `run` does.
        """
        with self.session(command, deadline, sudo=sudo) as session:
            return session.collect(_read(source, progress), OUTPUT_LIMIT_BYTES)

    def stream_lines(self, command: Command, *, deadline: float, sudo: bool = False) -> Iterator[str]:
        """Yield a command's lines as they come (a journal, a watch); ends when the command ends well.

        Stop early by closing the iterator. A line longer than 64 KiB comes in pieces of about that size.
        Raises as `run` does, and RemoteFailed when the command ends with an error.
        """
        pending, err = b"", b""
        with self.session(command, deadline, sudo=sudo) as session:
            for chunk, is_error in session.pump(iter(())):
                if is_error:
                    err = (err + chunk)[-LINE_LIMIT_BYTES:]
                    continue
                *lines, pending = (pending + chunk).split(b"\n")
                if len(pending) > LINE_LIMIT_BYTES:
                    lines, pending = [*lines, pending], b""
                for line in lines:
                    yield line.decode("utf-8", "replace")
            if pending:
                yield pending.decode("utf-8", "replace")
            session.result(b"", err).require(f"`{argv_of(command)[0]}` on {self.name}")

    def http(self, port: int, *, address: str = "127.0.0.1", timeout: float = 10.0) -> httpx.Client:
        """An httpx.Client that talks to `address:port` as seen from the host, over this connection.

        No local port is opened. Connection refused on the host is httpx.ConnectError; a lost SSH
        connection is ConnectionLost, so that it is never taken for a crashed engine.
        """
        from ddops.hosts.http import HostBackend, client

        with self._http_lock:
            self._backend = self._backend or HostBackend(self)
            made = client(self._backend, address, port, timeout)
            self._clients.add(made)
        return made

    # -- the connection -----------------------------------------------------------------------------

    def alive(self, timeout: float = 5.0) -> bool:
        """Ask the host for a reply now. False: no answer in time; only a new connection helps then."""
        link = self._link
        return not self._closed and link is not None and link.up and link.pulse.answers(timeout)

    def log_in(self, until: float, *, retry_on: type[Unreachable]) -> None:
        """Make the connection, trying until `until` while it fails with `retry_on`."""
        attempts = Retrying(
            # Before, not after: the error shown is then the host's, not that time ran out.
            stop=stop_before_delay(max(0.0, until - time.monotonic())),
            # Jittered: a fleet's logins through one gate must not come back all at once.
            wait=wait_random_exponential(multiplier=0.3, max=5),
            retry=retry_if_exception_type(retry_on) & retry_if_not_exception_type(LoginRejected),
            reraise=True,
        )
        self._link = attempts(Link, self.target, until, self._silence)

    def reconnect(self, deadline: float) -> None:
        """Drop this connection and make a new one, trying for `deadline` seconds.

        Nothing that was under way is run again: ask the host what became of it.
        Raises as `connect` does; only an unreachable host is tried again.
        """
        with self._lock:
            if self._closed:
                raise ConnectionLost(f"there is no connection to {self.name} any more")
            link, self._link = self._link, None
            if link is not None:
                link.drop("it was replaced by a new one")
            self.log_in(time.monotonic() + deadline, retry_on=Unreachable)

    def close(self) -> None:
        """Release everything: HTTP clients, channels, threads, the socket. Safe to call twice."""
        self._closed = True
        for client in list(self._clients):
            with contextlib.suppress(Exception):
                client.close()
        if self._backend is not None:
            self._backend.close()
        link = self._link
        if link is not None:
            link.drop("it was closed here")


def _chunks(data: bytes) -> Iterator[bytes]:
    for start in range(0, len(data), CHUNK_BYTES):
        yield data[start : start + CHUNK_BYTES]


def _read(source: BinaryIO, progress: Callable[[int], None] | None) -> Iterator[bytes]:
    total = 0
    while chunk := source.read(CHUNK_BYTES):
        yield chunk
        total += len(chunk)
        if progress is not None:
            progress(total)
