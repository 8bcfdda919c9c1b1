"""HTTP to one engine: JSON, bytes and server-sent streams, each with a deadline and a limit of silence.

What goes wrong becomes one of wire.py's errors; an exception of the connection to the host itself passes through. It
knows no dialect.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from ddops.prove.replies import object_of, raise_error_body, raise_status
from ddops.prove.wire import Broken, Gone, Hung, Malformed, Unsupported

if TYPE_CHECKING:
    import httpx

_CONNECT_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Limits:
    request_seconds: float = 120.0
    stall_seconds: float = 30.0


DEFAULT_LIMITS = Limits()


def base_of(url: str) -> str:
    """The address that paths are put after: `http://host:8000/v1/` and `http://host:8000` are the same server.

    Raises ValueError when it is no http:// or https:// address.
    """
    try:
        parsed = urlsplit(url.strip())
        usable = parsed.scheme in ("http", "https") and bool(parsed.hostname) and parsed.port != 0
    except ValueError as exc:
        raise ValueError(f"{url!r} is no address: {exc}") from None
    if not usable:
        raise ValueError(f"{url!r} is no http:// or https:// address")
    if parsed.query or parsed.fragment or "@" in parsed.netloc:
        raise ValueError(f"{url!r} holds more than an address: no user, query or fragment is taken")
    return f"{parsed.scheme}://{parsed.netloc}{parsed.path.rstrip('/').removesuffix('/v1')}"


class Transport:
    """One engine over one HTTP client (`base_url` set). Safe to use from several threads."""

    def __init__(self, http: httpx.Client, api_key: str | None, limits: Limits) -> None:
        self.http = http
        self.limits = limits
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    def deadline(self) -> float:
        return time.monotonic() + self.limits.request_seconds

    def json(self, method: str, path: str, body: Any = None, *, deadline: float | None = None) -> dict[str, Any]:
        return object_of(self.raw(method, path, body, deadline=deadline), path)

    def maybe(self, path: str) -> dict[str, Any] | None:
        """The JSON object at `path`; None where the engine has no such thing."""
        try:
            return self.json("GET", path)
        except (Unsupported, Malformed):
            return None

    def raw(self, method: str, path: str, body: Any = None, *, deadline: float | None = None) -> bytes:
        return b"".join(self._stream(method, path, body, self.deadline() if deadline is None else deadline))

    def _stream(self, method: str, path: str, body: Any, deadline: float) -> Iterator[bytes]:
        import httpx

        left = deadline - time.monotonic()
        if left <= 0:
            raise Hung(f"{path}: no time left")
        # An unstreamed reply comes when it is complete: silence is allowed up to the deadline.
        streamed = isinstance(body, Mapping) and body.get("stream")
        read = min(left, self.limits.stall_seconds) if streamed else left
        timeout = httpx.Timeout(left, connect=min(left, _CONNECT_SECONDS), read=read, pool=left)
        try:
            with self.http.stream(method, path, json=body, headers=self._headers, timeout=timeout) as response:
                if response.status_code >= 300:
                    raise_status(path, response.status_code, response.read(), response.headers.get("location", ""))
                if streamed and response.headers.get("content-type", "").startswith("application/json"):
                    raise_error_body(object_of(response.read(), path))
                    raise Unsupported(f"{path}: the server answers in one piece where a stream is asked for")
                for data in response.iter_bytes():
                    yield data
                    if time.monotonic() > deadline:
                        raise Hung(f"{path}: not finished after {self.limits.request_seconds:g} s")
        except httpx.TimeoutException as exc:
            raise Hung(f"{path}: silent for {read:.0f} s ({type(exc).__name__})") from exc
        except (httpx.TransportError, httpx.DecodingError) as exc:
            raise Gone(f"{path}: {str(exc) or type(exc).__name__}") from exc

    def events(self, path: str, body: dict[str, Any], deadline: float) -> Generator[dict[str, Any], None, None]:
        """The JSON events of a server-sent stream.

        A stream is whole with its [DONE], or when it ended in good order after a finish reason. Comments that only
        keep the connection open are silence all the same.
        """
        finished, last = False, time.monotonic()
        for line in self._lines(path, body | {"stream": True}, deadline):
            name, _, value = line.partition(b":")
            if name == b"error":  # llama.cpp before it sent errors as data
                raise Broken(f"{path}: {value.decode('utf-8', 'replace').strip()[:200]}")
            if name != b"data":
                if time.monotonic() - last > self.limits.stall_seconds:
                    raise Hung(f"{path}: nothing but keep-alive for {self.limits.stall_seconds:g} s")
                continue
            last = time.monotonic()
            if value.strip() == b"[DONE]":
                return
            event = object_of(value.strip(), "a stream event")
            finished = finished or _finishes(event)
            yield event
        if not finished:
            raise Gone(f"{path}: the stream ended without its end mark")

    def _lines(self, path: str, body: dict[str, Any], deadline: float) -> Iterator[bytes]:
        buffer = b""
        for data in self._stream("POST", path, body, deadline):
            buffer += data
            *lines, buffer = buffer.split(b"\n")
            yield from lines
        yield buffer  # a last line without its end


def _finishes(event: Mapping[str, Any]) -> bool:
    choices = event.get("choices")
    listed = choices if isinstance(choices, list) else [event.get("meta_info")]
    return any(isinstance(c, Mapping) and c.get("finish_reason") for c in listed)
