"""HTTP to a port of the host, through the SSH connection that is open already.

An httpcore network backend whose "TCP connections" are `direct-tcpip` channels; where sshd refuses to
forward, they go through a relay (relay.py), and the operator is told. It knows nothing of engines.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import httpcore
import httpx
import paramiko

from ddops.errors import RemoteFailed, RemoteTimeout
from ddops.hosts.link import Link
from ddops.hosts.relay import START_SECONDS, Relay, RelayStream

if TYPE_CHECKING:
    from ddops.hosts.remote import Remote

ADMINISTRATIVELY_PROHIBITED = 1  # RFC 4254, 5.1; 2 is "connect failed"
CONNECT_FAILED = 2
CONNECT_SECONDS = 30.0
MAX_CONNECTIONS = 256


def client(backend: HostBackend, address: str, port: int, timeout: float) -> httpx.Client:
    """A client for http://address:port as seen from the host; proxies of this machine do not apply."""
    host = f"[{address}]" if ":" in address else address
    return httpx.Client(base_url=f"http://{host}:{port}", transport=HostTransport(backend), timeout=timeout, trust_env=False)


class HostTransport(httpx.BaseTransport):
    """httpx on top of httpcore, with the host's connections underneath."""

    def __init__(self, backend: HostBackend) -> None:
        self._pool = httpcore.ConnectionPool(
            max_connections=MAX_CONNECTIONS,
            max_keepalive_connections=64,
            keepalive_expiry=5.0,
            network_backend=backend,
        )

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        url = request.url
        with _as_httpx(request):
            response = self._pool.handle_request(
                httpcore.Request(
                    method=request.method,
                    url=httpcore.URL(scheme=url.raw_scheme, host=url.raw_host, port=url.port, target=url.raw_path),
                    headers=request.headers.raw,
                    content=request.stream,
                    extensions=request.extensions,
                )
            )
        return httpx.Response(
            response.status,
            headers=response.headers,
            stream=_Body(response, request),
            extensions=response.extensions,
        )

    def close(self) -> None:
        self._pool.close()


class _Body(httpx.SyncByteStream):
    def __init__(self, response: httpcore.Response, request: httpx.Request) -> None:
        self._response = response
        self._request = request

    def __iter__(self) -> Iterator[bytes]:
        with _as_httpx(self._request):
            yield from self._response.iter_stream()

    def close(self) -> None:
        self._response.close()


@contextlib.contextmanager
def _as_httpx(request: httpx.Request) -> Iterator[None]:
    """httpcore's errors under httpx's names (they are called the same); others pass as they are."""
    try:
        yield
    except (
        httpcore.TimeoutException,
        httpcore.NetworkError,
        httpcore.ProtocolError,
        httpcore.UnsupportedProtocol,
    ) as exc:
        kind = getattr(httpx, type(exc).__name__, httpx.TransportError)
        raise kind(str(exc), request=request) from exc


class HostBackend(httpcore.NetworkBackend):
    """Connections made by the host; one for all clients of a Remote, so that they share the relay.

    A lost SSH connection is ConnectionLost, never an HTTP error.
    """

    def __init__(self, remote: Remote) -> None:
        self._remote = remote
        self._lock = threading.Lock()
        self._relay: Relay | None = None
        self._relay_link: object = None  # the connection the relay runs on
        self._refusing_link: object = None  # the connection that refused to forward

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.NetworkStream:
        limit = CONNECT_SECONDS if timeout is None else timeout
        if self._refusing_link is not self._remote.link:
            stream = self._direct(host, port, time.monotonic() + limit)
            if stream is not None:
                return stream
            self._refusing_link = self._remote.link
            self._remote.note(f"sshd on {self._remote.name} forwards no ports: HTTP goes through a relay instead")
        return self._relayed(host, port, limit)

    def close(self) -> None:
        relay, self._relay = self._relay, None
        if relay is not None:
            relay.close()

    def _direct(self, host: str, port: int, until: float) -> httpcore.NetworkStream | None:
        """A forwarded connection; None when sshd forwards none."""
        reason = "refused"
        for _ in range(5):
            try:
                link = self._remote.link
                return _ChannelStream(link, link.open_channel("direct-tcpip", until, (host, port)))
            except paramiko.ChannelException as exc:
                reason = exc.text or "refused"
                if exc.code == ADMINISTRATIVELY_PROHIBITED:
                    return None
                if exc.code == CONNECT_FAILED:
                    break
            except RemoteTimeout as exc:
                raise httpcore.ConnectTimeout(str(exc.what)) from exc
        raise httpcore.ConnectError(f"{host}:{port} on {self._remote.name}: {reason}")

    def _relayed(self, host: str, port: int, limit: float) -> httpcore.NetworkStream:
        place = f"{host}:{port} on {self._remote.name}"
        link = self._remote.link
        try:
            # Starting the relay happens once and has its own limit: it is not this engine being slow.
            relay = self._running_relay(link)
            return _RelayedStream(link, relay.connect(host, port, limit))
        except (TimeoutError, RemoteTimeout) as exc:
            raise httpcore.ConnectTimeout(f"{place}: no answer") from exc
        except (OSError, RemoteFailed) as exc:
            raise _lost_or(link, httpcore.ConnectError(f"{place}: {exc}")) from exc

    def _running_relay(self, link: Link) -> Relay:
        with self._lock:
            if self._relay is not None and (not self._relay.usable or self._relay_link is not link):
                self._relay.close()
                self._relay = None
            if self._relay is None:
                pythons = tuple(dict.fromkeys(("python3", self._remote.engine_python)))
                self._relay = Relay(self._remote.session(Relay.command(pythons), START_SECONDS))
                self._relay_link = link
            return self._relay


def _lost_or(link: Link, otherwise: Exception) -> Exception:
    """The lost SSH connection behind an error, if there is one: the engine is not to blame then."""
    return link.lost() if link.is_lost() else otherwise


class _ChannelStream(httpcore.NetworkStream):
    """One direct-tcpip channel."""

    def __init__(self, link: Link, channel: Any) -> None:
        self._link = link
        self._channel = channel

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        with self._link.pulse.watched():
            try:
                self._channel.settimeout(timeout)
                data: bytes = self._channel.recv(max_bytes)
            except TimeoutError as exc:
                raise httpcore.ReadTimeout("no answer in time") from exc
            except OSError as exc:
                raise _lost_or(self._link, httpcore.ReadError(str(exc))) from exc
        if not data and not self._channel.eof_received and self._link.is_lost():
            raise self._link.lost()
        return data

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        with self._link.pulse.watched():
            try:
                self._channel.settimeout(timeout)
                self._channel.sendall(buffer)
            except TimeoutError as exc:
                raise httpcore.WriteTimeout("the host took no data in time") from exc
            except (OSError, EOFError) as exc:
                raise _lost_or(self._link, httpcore.WriteError(str(exc) or "closed")) from exc

    def close(self) -> None:
        with contextlib.suppress(OSError, EOFError):
            self._channel.close()

    def get_extra_info(self, info: str) -> Any:
        if info == "is_readable":
            return self._channel.closed or self._channel.eof_received or self._channel.recv_ready()
        return None


class _RelayedStream(httpcore.NetworkStream):
    """One connection inside the relay."""

    def __init__(self, link: Link, stream: RelayStream) -> None:
        self._link = link
        self._stream = stream

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        with self._link.pulse.watched():
            try:
                return self._stream.read(max_bytes, timeout)
            except TimeoutError as exc:
                raise httpcore.ReadTimeout("no answer in time") from exc
            except OSError as exc:
                raise _lost_or(self._link, httpcore.ReadError(str(exc))) from exc

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        with self._link.pulse.watched():
            try:
                self._stream.write(buffer)
            except OSError as exc:
                raise _lost_or(self._link, httpcore.WriteError(str(exc))) from exc

    def close(self) -> None:
        self._stream.close()

    def get_extra_info(self, info: str) -> Any:
        return self._stream.readable if info == "is_readable" else None
