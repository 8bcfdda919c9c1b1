"""HTTP plumbing that no endpoint should repeat: errors as JSON, bodies with a limit, streams, the API key.

Not here: routes (api.py) and what replies contain (api_native.py, api_openai.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
from collections.abc import AsyncGenerator, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from ddtree_engine.chat import ChatTemplateError
from ddtree_engine.generation import GenerationFailed, InjectedFailure
from ddtree_engine.requests import RequestError
from ddtree_engine.schemas import FieldError
from ddtree_engine.tickets import Busy, EngineDead, NotReady, Stalled

log = logging.getLogger("ddtree_engine")

MAX_BODY_BYTES = 8 << 20
BODY_TIMEOUT_S = 30.0
OPEN_PATHS = frozenset({"/health", "/metrics"})  # what load balancers and Prometheus poll without credentials

_T = TypeVar("_T")


class TooLarge(Exception):
    """The body is larger than any prompt this engine could take."""


class SlowBody(Exception):
    """The client did not send its body in time."""


class ClientGone(Exception):
    """The client closed the connection before its answer was ready."""


def error_body(message: str, *, kind: str, code: str | int, param: str | None = None) -> dict[str, Any]:
    """The error object of the OpenAI API."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def describe(exc: Exception) -> tuple[int, dict[str, Any]]:
    """Status and body for everything a request may run into."""
    if isinstance(exc, FieldError | RequestError):
        status = 404 if exc.field == "model" else 400
        code = "model_not_found" if status == 404 else 400
        return status, error_body(exc.message, kind="invalid_request_error", code=code, param=exc.field)
    if isinstance(exc, ChatTemplateError):
        return 400, error_body(str(exc), kind="invalid_request_error", code=400, param="messages")
    if isinstance(exc, TooLarge):
        return 413, error_body(str(exc), kind="invalid_request_error", code=413)
    if isinstance(exc, SlowBody):
        return 408, error_body(str(exc), kind="invalid_request_error", code=408)
    if isinstance(exc, NotReady):
        return 503, error_body(f"the engine is {exc}", kind="service_unavailable", code=str(exc))
    if isinstance(exc, Busy):
        return 503, error_body(f"the queue is full: {exc}; try again later", kind="service_unavailable", code="queue_full")
    if isinstance(exc, EngineDead):
        return 503, error_body(f"the engine died: {exc}", kind="service_unavailable", code="engine_dead")
    if isinstance(exc, Stalled):
        return 504, error_body(str(exc), kind="server_error", code="stalled")
    if isinstance(exc, InjectedFailure | GenerationFailed):
        return 500, error_body(str(exc), kind="server_error", code=500)
    log.error("unexpected error while answering", exc_info=exc)
    return 500, error_body("internal error; the engine's log has the details", kind="server_error", code=500)


def error_response(exc: Exception) -> Response:
    status, body = describe(exc)
    headers = {"Retry-After": "1"} if isinstance(exc, Busy | NotReady) else None
    return JSONResponse(body, status_code=status, headers=headers)


async def read_body(request: HttpRequest) -> bytes:
    """The whole body. Raises TooLarge, or SlowBody when it does not arrive in time."""
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for chunk in request.stream():
                body += chunk
                if len(body) > MAX_BODY_BYTES:
                    raise TooLarge(f"the body is larger than {MAX_BODY_BYTES} bytes")
    except TimeoutError as exc:
        raise SlowBody(f"the body did not arrive within {BODY_TIMEOUT_S:.0f} s") from exc
    return bytes(body)


async def unless_gone(request: HttpRequest, work: Coroutine[Any, Any, _T]) -> _T:
    """Run `work`; when the client hangs up first, cancel it (and with it the request) and raise ClientGone."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        for pending in (task, gone):
            pending.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(request: HttpRequest) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def sse(value: dict[str, Any] | str) -> bytes:
    """One server-sent event."""
    data = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return f"data: {data}\n\n".encode()


class SseResponse(Response):
    """A stream of events whose source is always closed: at its end, on an error, and when the client leaves."""

    def __init__(self, events: AsyncGenerator[bytes]) -> None:
        self._inner = StreamingResponse(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.ensure_future(self._inner.stream_response(send))
        gone = asyncio.ensure_future(_disconnected(HttpRequest(scope, receive)))
        try:
            await asyncio.wait({sending, gone}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        finally:
            for pending in (sending, gone):
                pending.cancel()
            await asyncio.gather(sending, gone, return_exceptions=True)
            with contextlib.suppress(RuntimeError):
                await self._events.aclose()


async def stream_events(events: AsyncGenerator[bytes]) -> Response:
    """Answer with `events`. The first one is awaited here, so that a refusal still has its own HTTP status."""
    first = await anext(events)

    async def whole() -> AsyncGenerator[bytes]:
        try:
            yield first
            async for event in events:
                yield event
            yield sse("[DONE]")
        except Exception as exc:
            yield sse(describe(exc)[1])
        finally:
            await events.aclose()

    return SseResponse(whole())


class ApiKeyGuard:
    """Asks for `Authorization: Bearer KEY` on every path but OPEN_PATHS. Several keys may be valid at once."""

    def __init__(self, app: ASGIApp, keys: Sequence[bytes]) -> None:
        self._app = app
        self._keys = tuple(keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS and not self._allowed(scope):
            body = error_body("missing or wrong API key", kind="authentication_error", code="invalid_api_key")
            response = JSONResponse(body, status_code=401, headers={"WWW-Authenticate": "Bearer"})
            await response(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _allowed(self, scope: Scope) -> bool:
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        scheme, _, token = given.partition(b" ")
        # Every key is compared, and in constant time: the time taken tells nothing.
        matches = [hmac.compare_digest(token.strip(), key) for key in self._keys]
        return scheme.lower() == b"bearer" and any(matches)


class KeyFileError(Exception):
    """The file of --api-key-file cannot be used."""


def read_keys(path: str) -> tuple[bytes, ...]:
    """The keys in a file, one a line; blank lines and lines that begin with # are skipped."""
    try:
        lines = Path(path).read_bytes().splitlines()
    except OSError as exc:
        raise KeyFileError(f"cannot read {path}: {exc.strerror}") from exc
    keys = tuple(line.strip() for line in lines if line.strip() and not line.strip().startswith(b"#"))
    if not keys:
        raise KeyFileError(f"{path} holds no key; put one on a line of its own")
    return keys
