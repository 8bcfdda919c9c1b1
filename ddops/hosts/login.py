"""Open one SSH connection: dns, tcp, banner, key exchange, host key, login, each with its own limit.

Fabric's own connect accepts any host key and has no limits, so `open` is replaced here. It runs no
command (remote.py does) and asks no question: no password, no prompt, no unknown key.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import paramiko
from fabric import Config, Connection

from ddops.errors import HostKeyRejected, Refused, Unreachable
from ddops.hosts import known_hosts
from ddops.hosts.known_hosts import Trust, fingerprint
from ddops.hosts.pulse import HeardSocket
from ddops.hosts.target import Target

T = TypeVar("T")

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
        marks = [time.monotonic()]
        addresses = _look_up(self.target, self._left())
        marks.append(time.monotonic())
        self.sock = self._dial(addresses)
        marks.append(time.monotonic())
        lines = _read_known_hosts(self.target)
        marks.append(self._negotiate(lines))
        marks.append(time.monotonic())
        _check_host_key(self.target, lines, self.transport.get_remote_server_key())
        self._authenticate()
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

    def _authenticate(self) -> None:
        tried: list[str] = []
        for label, key in _keys(self.target, self._left()):
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


def _within(timeout: float, work: Callable[[], T]) -> T:
    """Run a call that knows no limit (name look-up, key agent) and stop waiting for it in time."""
    results: list[T] = []
    problems: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as exc:
            problems.append(exc)

    thread = threading.Thread(target=run, name="ddops-bounded-call", daemon=True)
    thread.start()
    thread.join(timeout)
    if problems:
        raise problems[0]
    if not results:
        raise TimeoutError
    return results[0]


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
        return _within(timeout, look)
    except TimeoutError as exc:
        raise _unreachable(target, f"looking up {target.host} took longer than {timeout:.0f} s") from exc
    except (OSError, UnicodeError) as exc:
        reason = getattr(exc, "strerror", None) or exc
        raise _unreachable(target, f"the name {target.host} cannot be looked up: {reason}") from exc


def _read_known_hosts(target: Target) -> list[known_hosts.Line]:
    lines: list[known_hosts.Line] = []
    for path in target.known_hosts:
        try:
            lines += known_hosts.parse(path.read_text("utf-8", "replace"), str(path))
        except FileNotFoundError:
            continue  # named in the message when the key turns out to be unknown
        except OSError as exc:
            raise Refused(
                f"{target.name}: known_hosts file {path} cannot be read: {exc.strerror or exc}",
                means="the host's key could not be checked, so no login was tried",
                hint="fix the file, or name another in ssh.known_hosts",
            ) from exc
    return lines


def _preferred(known: list[str], supported: tuple[str, ...]) -> tuple[str, ...]:
    """Known key types first: a host with several keys then presents one that can be checked."""
    wanted = [name for kind in known for name in (_RSA if kind == "ssh-rsa" else (kind,)) if name in supported]
    return tuple(dict.fromkeys([*wanted, *supported]))


def _check_host_key(target: Target, lines: list[known_hosts.Line], key: Any) -> None:
    kind, blob = key.get_name(), key.asbytes()
    finding = known_hosts.judge(lines, target.key_names, kind, blob)
    if finding.trust is Trust.KNOWN:
        return
    raise host_key_rejected(target, finding, kind, blob)


def host_key_rejected(target: Target, finding: known_hosts.Finding, kind: str, blob: bytes) -> HostKeyRejected:
    """The refusal in words: what was presented, what is on file, and the exact commands."""
    name, file = (
        target.key_names[0],
        str(target.known_hosts[0] if target.known_hosts else "~/.ssh/known_hosts"),
    )
    shown = f"{kind} {fingerprint(blob)}"
    line = finding.line
    where = f"{line.file}:{line.number}" if line else ""
    scan = f"ssh-keyscan -p {target.port} -t {_keyscan_type(kind)} {target.host}"
    if target.alias:
        scan += f" | sed 's/^[^ ]*/{target.alias}/'"
    add = f"compare the fingerprint with the host's own (ssh-keygen -lf /etc/ssh/ssh_host_*_key.pub), then: {scan} >> "
    means = "no login was tried and nothing was changed on it"
    if finding.trust is Trust.REVOKED:
        return HostKeyRejected(
            f"{target.name} presents a revoked host key: {shown} ({where})",
            means=means,
            hint="this may be another machine; give the host a new key before using it again",
        )
    if finding.trust is Trust.CHANGED and line:
        return HostKeyRejected(
            f"the host key of {target.name} changed: it presents {shown}, {where} has {fingerprint(line.blob)}",
            means=f"either the host was set up anew or another machine answers; {means}",
            hint=f"if it was set up anew: ssh-keygen -R '{name}' -f {line.file}; then {add}{line.file}",
        )
    read = ", ".join(str(path) for path in target.known_hosts) or "no known_hosts file"
    what = {
        Trust.OTHER_TYPE: f"is known by another key type only ({line and line.key_type}, {where})",
        Trust.AUTHORITY_ONLY: f"is known only by a @cert-authority line ({where}), and those are not supported",
    }.get(finding.trust, f"is not known ({read})")
    return HostKeyRejected(
        f"the host key of {target.name} {what}: it presents {shown} as {name}",
        means=means,
        hint=f"{add}{file}",
    )


def _keyscan_type(kind: str) -> str:
    return {"ssh-rsa": "rsa", "ssh-ed25519": "ed25519"}.get(kind, "ecdsa")


def _keys(target: Target, timeout: float) -> Iterator[tuple[str, Any]]:
    """Keys in the order they are offered. Named files only when files are named (IdentitiesOnly), else
    the agent's keys and then the default files."""
    if not target.identity_required:
        for key in _agent_keys(timeout):
            yield f"agent key {key.fingerprint}", key
    for path in target.identity_files:
        try:
            yield str(path), _load(target, path, timeout)
        except Refused:
            if target.identity_required:
                raise


def _agent_keys(timeout: float) -> list[Any]:
    if not os.environ.get("SSH_AUTH_SOCK"):
        return []
    try:
        return list(_within(timeout, lambda: paramiko.Agent().get_keys()))
    except (TimeoutError, OSError, paramiko.SSHException):
        return []


def _load(target: Target, path: Path, timeout: float) -> Any:
    try:
        return paramiko.PKey.from_path(path)
    except FileNotFoundError as exc:
        raise _bad_key(target, f"key file {path} does not exist", "fix ssh.identity_file") from exc
    except OSError as exc:
        raise _bad_key(target, f"key file {path} cannot be read: {exc.strerror or exc}", "fix its mode") from exc
    except (TypeError, paramiko.PasswordRequiredException) as exc:
        key = _held_by_agent(path, timeout)
        if key is not None:
            return key
        raise _bad_key(
            target,
            f"key file {path} is protected by a passphrase, and ddops never asks for one",
            f"load it into an agent (ssh-add {path}), or use a key without a passphrase",
        ) from exc
    except (ValueError, paramiko.SSHException, paramiko.pkey.UnknownKeyType) as exc:
        raise _bad_key(target, f"{path} is not a private key that can be used: {exc}", "fix ssh.identity_file") from exc


def _held_by_agent(path: Path, timeout: float) -> Any:
    """The agent's copy of a protected key file, found by the public half beside it."""
    try:
        blob = paramiko.PublicBlob.from_file(f"{path}.pub").key_blob
    except (OSError, ValueError, IndexError, TypeError):
        return None
    return next((key for key in _agent_keys(timeout) if key.asbytes() == blob), None)


def _bad_key(target: Target, what: str, hint: str) -> Refused:
    return Refused(f"{target.name}: {what}", means="no login was tried", hint=hint)


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
    if (
        isinstance(exc, (EOFError, paramiko.SSHException))
        and "Indecipherable" not in str(exc)
        and transport.sock._closed
    ):
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
