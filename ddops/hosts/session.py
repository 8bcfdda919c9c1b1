"""One command on one channel: start it, move bytes both ways, read how it ended, close it.

It has the one loop that feeds stdin and drains stdout and stderr, so that neither side can block the
other; and the rule that a command without an exit status has no result.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import paramiko

from ddops.errors import RemoteFailed, RemoteTimeout, Unreachable
from ddops.hosts.link import Link
from ddops.hosts.words import Script, argv_of, command_line, sudo_refusal

CHUNK_BYTES = 32_768
LINE_BYTES = 65_536
OPEN_SECONDS = 30.0

Command = Sequence[str] | Script


class OutputTooLarge(RemoteFailed):
    """A remote command wrote more than it may; it was cut off and its output is not used."""


@dataclass(frozen=True, slots=True)
class Result:
    """How a remote command ended. status: its exit status, or 128 + n when signal n killed it."""

    status: int
    stdout: bytes
    stderr: bytes
    seconds: float

    @property
    def ok(self) -> bool:
        return self.status == 0

    @property
    def text(self) -> str:
        return self.stdout.decode("utf-8", "replace")

    @property
    def error_text(self) -> str:
        return self.stderr.decode("utf-8", "replace")

    def require(self, doing: str) -> Result:
        """Itself when the command succeeded. Raises RemoteFailed, naming what was being done."""
        if self.ok:
            return self
        said = (self.error_text.strip() or self.text.strip() or "it printed nothing").splitlines()[-1]
        raise RemoteFailed(f"{doing} failed with status {self.status}: {said}", status=self.status, stderr=self.error_text)


class Session:
    """A running command. Use as a context manager; leaving it closes the channel, the command may go on."""

    def __init__(self, link: Link, command: Command, deadline: float, *, sudo: bool, user: str) -> None:
        self._link = link
        self._argv = argv_of(command)
        self.mark = f"ddops:{secrets.token_hex(8)}"
        self._skim = Skim(self.mark)
        self._text = command_line(command, sudo=sudo, mark=self.mark)
        self._sudo_user = user if sudo else ""
        self._started = time.monotonic()
        self._deadline = deadline
        self._until = self._started + deadline
        self._wake = threading.Event()
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Session:
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._link.pulse.watched())
            self._channel = self.start()
            stack.callback(self._channel.close)
            bell = _Bell(self._wake)
            self._channel.in_buffer.set_event(bell)
            self._channel.in_stderr_buffer.set_event(bell)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def start(self) -> Any:
        """The channel, with the command started on it (the caller closes it)."""
        channel = self._open()
        try:
            channel.exec_command(self._text)
        except (paramiko.SSHException, EOFError, OSError) as exc:
            channel.close()
            raise self._broken(str(exc)) from exc
        except BaseException:
            channel.close()
            raise
        return channel

    def _open(self) -> Any:
        """A session channel. A refused one ran nothing, so it is asked for again (sshd allows MaxSessions
        at once, 10 by default)."""
        pause = 0.02
        while True:
            try:
                return self._link.open_channel("session", self._until)
            except paramiko.ChannelException as exc:
                if time.monotonic() + pause > min(self._until, self._started + OPEN_SECONDS):
                    raise RemoteTimeout(
                        f"{self._link.name} opens no further session ({exc.text or 'refused'})",
                        means=f"`{self._argv[0]}` was not started",
                        hint="raise MaxSessions in the host's sshd_config, or run fewer things at once",
                    ) from exc
            time.sleep(pause)
            pause = min(pause * 2, 0.5)

    def _broken(self, why: str) -> Unreachable | RemoteFailed:
        if self._link.is_lost():
            return self._link.lost()
        return RemoteFailed(f"{self._link.name} did not run `{self._argv[0]}` to its end: {why}", status=-1)

    def collect(self, source: Iterator[bytes], limit: int) -> Result:
        """Run to the end, keeping stdout and stderr. Raises OutputTooLarge over `limit` bytes of either."""
        out, err = bytearray(), bytearray()
        for chunk, is_error in self.pump(source):
            kept = err if is_error else out
            kept += chunk
            if len(kept) > limit:
                raise OutputTooLarge(
                    f"`{self._argv[0]}` on {self._link.name} wrote more than {limit} bytes and was cut off",
                    status=-1,
                    means="its output was not used; it may still be running there",
                )
        return self.result(bytes(out), bytes(err))

    def pump(self, source: Iterator[bytes]) -> Iterator[tuple[bytes, bool]]:
        """Move bytes until the command has ended; yields (chunk, is it stderr). Raises RemoteTimeout."""
        channel, pending, feeding = self._channel, b"", True
        while True:
            self._wake.clear()
            ended = self._ended()
            yield from self._drain()
            if ended:
                return
            if feeding:
                pending, feeding = self._feed(pending, source)
            self._check_deadline()
            if not (feeding and channel.send_ready()):
                self._wait(feeding)

    def _drain(self) -> Iterator[tuple[bytes, bool]]:
        channel = self._channel
        while (is_out := channel.recv_ready()) or channel.recv_stderr_ready():
            if is_out:
                yield self._skim.after(channel.recv(CHUNK_BYTES)), False
            else:
                yield channel.recv_stderr(CHUNK_BYTES), True
            self._check_deadline()  # a command that never stops writing ends here too

    def _check_deadline(self) -> None:
        if time.monotonic() >= self._until:
            raise self._link.timed_out(f"`{self._argv[0]}` (limit {self._deadline:g} s)")

    def _wait(self, feeding: bool) -> None:
        left = max(0.0, self._until - time.monotonic())
        if self._channel.eof_received and not self._channel.exit_status_ready():
            self._channel.status_event.wait(min(left, 0.25))
        else:
            # The bell does not ring when the host takes more input: then look again soon.
            self._wake.wait(min(left, 0.005 if feeding else 0.25))

    def _ended(self) -> bool:
        channel = self._channel
        return bool(channel.closed or (channel.eof_received and channel.exit_status_ready()))

    def _feed(self, pending: bytes, source: Iterator[bytes]) -> tuple[bytes, bool]:
        """Hand over at most one chunk; returns what is left of it and whether there is more to come."""
        channel = self._channel
        try:
            pending = pending or next(source, b"")
            if not pending:
                channel.shutdown_write()
                return b"", False
            if not channel.send_ready():
                return pending, True
            channel.settimeout(0.0)
            return pending[channel.send(pending) :], True
        except TimeoutError:
            return pending, True
        except (OSError, EOFError, paramiko.SSHException):
            if not channel.closed:
                raise  # the source could not be read; a closed channel says by its status what happened
            return b"", False

    def result(self, stdout: bytes, stderr: bytes) -> Result:
        """Raises ConnectionLost when there is no exit status, Refused when sudo said no, RemoteFailed when
        the login shell did not start the command."""
        status = int(self._channel.exit_status)
        if status < 0:
            raise self._broken("no exit status came")
        if not self._skim.found:
            said = _flat(self._skim.before + b" " + stderr)
            raise RemoteFailed(
                f"the login shell on {self._link.name} does not run commands: {said or 'it printed nothing'}",
                status=status,
                means=f"`{self._argv[0]}` was not started",
                hint="give ssh.user a POSIX shell, and its key no forced command",
            )
        if self._sudo_user:
            said = stderr.decode("utf-8", "replace")
            refusal = sudo_refusal(self._link.name, self._sudo_user, self._argv, status, said)
            if refusal is not None:
                raise refusal
        return Result(status, stdout, stderr, time.monotonic() - self._started)


class Skim:
    """Leaves out what a login shell's start-up files print before the command's own output."""

    def __init__(self, mark: str) -> None:
        self._mark = mark.encode() + b"\n"
        self.found = False
        self.before = b""

    def after(self, chunk: bytes) -> bytes:
        """The part of the chunk that is the command's own."""
        if self.found:
            return chunk
        self.before += chunk
        noise, mark, own = self.before.partition(self._mark)
        if not mark:
            self.before = self.before[-LINE_BYTES:]
            return b""
        self.found, self.before = True, noise
        return own


def _flat(said: bytes) -> str:
    return " ".join(said.decode("utf-8", "replace").split())[:300]


class _Bell:
    """What paramiko rings when a channel's buffer has bytes or ends (needs no pipe, as fileno would)."""

    def __init__(self, wake: threading.Event) -> None:
        self._wake = wake

    def set(self) -> None:
        self._wake.set()

    def clear(self) -> None:
        """Nothing: the reader clears the shared event itself, before it looks."""
