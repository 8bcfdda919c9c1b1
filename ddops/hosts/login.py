"""Open one SSH connection: dns, tcp, banner, key exchange, host key, login, each with its own limit.

Fabric's own connect accepts any host key and has no limits, so `open` is replaced here. It runs no
command (remote.py does) and asks no question: no password, no prompt, no unknown key.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import paramiko
from fabric import Config, Connection

from ddops.errors import Unreachable
from ddops.hosts import known_hosts
from ddops.hosts.bounded import within
from ddops.hosts.hostkeys import check_host_key, read_known_hosts
from ddops.hosts.identities import keys
from ddops.hosts.pulse import HeardSocket
from ddops.hosts.target import Target

LOG = "ddops.ssh"
# Without a handler, Python prints paramiko's own error lines (with tracebacks) to stderr.
logging.getLogger(LOG).addHandler(logging.NullHandler())

_RSA = ("rsa-sha2-512", "rsa-sha2-256")


class LoginRejected(Unreachable):
    """The host answered and its key is right, but it does not let this user in; never retried."""


class Busy(Unreachable):
    """The host closed the connection before it said anything: too many logins at once, mostly."""


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds spent in each phase of connecting."""

    dns: float
    tcp: float
    banner: float
    key_exchange: float
    auth: float

    @property
    def total(self) -> float:
        return self.dns + self.tcp + self.banner + self.key_exchange + self.auth


class Login(Connection):  # type: ignore[misc]  # fabric ships no types
    """A Fabric connection that checks the host key, never prompts and never waits without a limit."""

    def __init__(self, target: Target, deadline: float) -> None:
        # An empty SSHConfig keeps Fabric from reading files of its own: the target is resolved already.
        config = Config(ssh_config=paramiko.SSHConfig(), lazy=True)
        super().__init__(target.host, user=target.user, port=target.port, config=config)
        self.target = target
        self.deadline = deadline
        self.sock: HeardSocket | None = None
        self.timings: Timings | None = None

    def open(self) -> None:
        """Raises Unreachable, LoginRejected, HostKeyRejected or Refused; leaves nothing open then."""
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        # Named key files are read first: a mistake in the inventory needs no host to be found.
        offers = keys(self.target, self._left())
        if self.target.identity_required:
            offers = iter(list(offers))
        marks = [time.monotonic()]
        addresses = _look_up(self.target, self._left())
        marks.append(time.monotonic())
        self.sock = self._dial(addresses)
        marks.append(time.monotonic())
        lines = read_known_hosts(self.target)
        marks.append(self._negotiate(lines))
        marks.append(time.monotonic())
        check_host_key(self.target, lines, self.transport.get_remote_server_key())
        self._authenticate(offers)
        marks.append(time.monotonic())
        self.timings = Timings(*(after - before for before, after in pairwise(marks)))

    def close(self) -> None:
        """Close at once: a peer that no longer answers is not waited for."""
        if self.sock is not None:
            with contextlib.suppress(OSError):
                self.sock.shutdown(socket.SHUT_RDWR)
        if self.transport is not None:
            self.transport.close()
            if self.transport.is_alive() and self.transport is not threading.current_thread():
                self.transport.join(2)
        if self.sock is not None:
            self.sock.close()

    def _left(self) -> float:
        """Seconds for the next phase: the phase limit or what is left of the whole."""
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise _unreachable(self.target, "the time for connecting ran out")
        return min(left, self.target.timeout_seconds)

    def _dial(self, addresses: list[tuple[int, Any]]) -> HeardSocket:
        problem: OSError | None = None
        for family, address in addresses:
            sock = HeardSocket(family, socket.SOCK_STREAM)
            try:
                sock.settimeout(self._left())
                sock.connect(address)
                # Paramiko never sets it: each small packet would wait for a delayed ACK (about 40 ms).
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                return sock
            except OSError as exc:
                sock.close()
                problem = exc
            except BaseException:
                sock.close()
                raise
        reason = "no answer" if isinstance(problem, TimeoutError) else (problem and problem.strerror) or problem
        raise _unreachable(self.target, f"cannot connect to {self.target.host} port {self.target.port}: {reason}")

    def _negotiate(self, lines: list[known_hosts.Line]) -> float:
        """Banner and key exchange; returns when the banner had come."""
        limit = self._left()
        self.transport = paramiko.Transport(self.sock)
        self.transport.set_log_channel(LOG)
        self.transport.banner_timeout = limit
        self.transport.handshake_timeout = limit
        options = self.transport.get_security_options()
        options.key_types = _preferred(known_hosts.key_types(lines, self.target.key_names), options.key_types)
        done = threading.Event()
        self.transport.start_client(event=done)
        banner: float | None = None
        until = time.monotonic() + limit
        while not done.wait(0.005) and time.monotonic() < until:
            if banner is None and self.transport.remote_version:
                banner = time.monotonic()
        if not done.is_set() or not self.transport.is_active():
            raise _negotiation_failed(self.target, self.transport)
        return banner or time.monotonic()

    def _authenticate(self, offers: Iterator[tuple[str, Any]]) -> None:
        tried: list[str] = []
        for label, key in offers:
            tried.append(label)
            self.transport.auth_timeout = self._left()
            try:
                more = self.transport.auth_publickey(self.target.user, key)
            except paramiko.BadAuthenticationType as exc:
                raise _login_rejected(self.target, tried, f"it allows only {', '.join(exc.allowed_types)}") from exc
            except paramiko.AuthenticationException as exc:
                if not self.transport.is_active():
                    raise _login_rejected(self.target, tried, "it closed the connection") from exc
                if "timeout" in str(exc).lower():
                    raise _unreachable(self.target, "it did not answer the login in time") from exc
                continue
            except (paramiko.SSHException, OSError, EOFError) as exc:
                raise _login_rejected(self.target, tried, f"{exc or 'it closed the connection'}") from exc
            if not more:
                return
            raise _login_rejected(self.target, tried, f"it also asks for {', '.join(more)}")
        raise _login_rejected(self.target, tried, "it accepted none of the keys")


def _look_up(target: Target, timeout: float) -> list[tuple[int, Any]]:
    family = {"inet": socket.AF_INET, "inet6": socket.AF_INET6}.get(target.address_family, socket.AF_UNSPEC)

    def look() -> list[tuple[int, Any]]:
        found = socket.getaddrinfo(target.host, target.port, family, socket.SOCK_STREAM)
        return [(int(entry[0]), entry[4]) for entry in found]

    try:
        ipaddress.ip_address(target.host.partition("%")[0])
        return look()  # a literal address asks no name server
    except ValueError:
        pass
    except OSError as exc:
        raise _unreachable(target, f"{target.host} is not a usable address: {exc.strerror or exc}") from exc
    try:
        return within(timeout, look)
    except TimeoutError as exc:
        raise _unreachable(target, f"looking up {target.host} took longer than {timeout:.0f} s") from exc
    except (OSError, UnicodeError) as exc:
        reason = getattr(exc, "strerror", None) or exc
        raise _unreachable(target, f"the name {target.host} cannot be looked up: {reason}") from exc


def _preferred(known: list[str], supported: tuple[str, ...]) -> tuple[str, ...]:
    """Known key types first: a host with several keys then presents one that can be checked."""
    wanted = [name for kind in known for name in (_RSA if kind == "ssh-rsa" else (kind,)) if name in supported]
    return tuple(dict.fromkeys([*wanted, *supported]))


def _login_rejected(target: Target, tried: list[str], why: str) -> LoginRejected:
    offered = ", ".join(tried) or "no key (none is named, the agent has none, no default key file exists)"
    return LoginRejected(
        f"{target.name} does not let {target.user} in: {why}",
        means=f"offered: {offered}",
        hint=f"set ssh.identity_file, and try: ssh -o IdentitiesOnly=yes -p {target.port} {target.user}@{target.host}",
    )


def _negotiation_failed(target: Target, transport: Any) -> Unreachable:
    exc = transport.get_exception()
    place = f"{target.host} port {target.port}"
    if isinstance(exc, paramiko.ssh_exception.IncompatiblePeer):
        return _unreachable(target, f"no common SSH algorithm with {place}: {exc}")
    if transport.remote_version:
        return _unreachable(target, f"the key exchange with {place} did not finish: {exc or 'no answer'}")
    if isinstance(exc, (EOFError, paramiko.SSHException)) and "Indecipherable" not in str(exc) and transport.sock._closed:
        return Busy(
            f"{target.name} is not reachable: {place} closed the connection before an SSH banner ({exc})",
            means="nothing was changed on it",
            hint="sshd refuses logins over MaxStartups; is something else listening on that port?",
        )
    return _unreachable(target, f"{place} sent no SSH banner: {exc or 'no answer'}")


def _unreachable(target: Target, what: str) -> Unreachable:
    return Unreachable(
        f"{target.name} is not reachable: {what}",
        means="its state is not known from here",
        hint=f"ssh -v -p {target.port} {target.user}@{target.host} true",
    )
