"""Whether what answers at an address is an engine at all; and if not, what it is and what it said.

A web server, a proxy with nothing behind it, a port with or without TLS: each is told from an engine before
anything is probed. How good an engine is, is not asked here.
"""

from __future__ import annotations

import json
import re
import socket
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urljoin, urlsplit

from ddops.errors import DdopsError, Unreachable, UsageError
from ddops.journal import redact
from ddops.report import one_line

if TYPE_CHECKING:
    import httpx

SECONDS = 10.0
_LONGEST = 1 << 20  # bytes of one answer
_NOTHING = "nothing was probed"
_MODELS, _CHAT = "/v1/models", "/v1/chat/completions"
_DENIED = (401, 403)
_NO_TLS = re.compile(r"WRONG_VERSION_NUMBER|RECORD_LAYER_FAILURE|UNKNOWN_PROTOCOL|HTTP_REQUEST|PACKET_LENGTH_TOO_LONG")


@dataclass(frozen=True, slots=True)
class Greeted:
    """Who is greeted: its address, what it should speak ("" for any engine's API), and what named it."""

    url: str
    kind: str = ""
    option: str = "--url"
    api_key: str | None = None
    model: str | None = None

    @property
    def api(self) -> str:
        return {"": "the API of any engine", "openai": "OpenAI's API"}.get(self.kind, f"the API of {self.kind}")


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back to one request."""

    request: str
    status: int
    kind: str
    text: str
    location: str = ""

    @property
    def said(self) -> str:
        shown = f"to {self.location}" if self.location else re.sub(r"<[^>]*>", " ", self.text)
        return one_line(f"{self.request}: {self.status} {self.kind} {redact(shown)}", 160)

    @property
    def json(self) -> Mapping[str, Any]:
        """The JSON object it is; {} when it is none."""
        try:
            found = json.loads(self.text)
        except (ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}

    @property
    def of_an_engine(self) -> bool:
        """A list of models, a reply, or an error in an API's own words."""
        raw = self.json
        if self.request.startswith("GET"):
            return self.status == 200 and isinstance(raw.get("data", raw.get("models")), list)
        if self.status == 404:  # no such path, or no such model
            return "error" in raw and "model" in self.text.lower()
        return "choices" in raw or (bool(raw) and self.status in (400, 422, 429, 500, 503))


def check(http: httpx.Client, who: Greeted) -> None:
    """Return when an engine answers, wants a key, or takes its time; the battery has the word then.

    Raises:
        UsageError: it is something else. Unreachable: a gateway with no engine behind it.
        httpx.RequestError: nothing answers, or not with HTTP (see `unheard`).
    """
    import httpx

    answers = []
    body = {"model": who.model or "default", "messages": [{"role": "user", "content": "1"}], "max_tokens": 1, "temperature": 0}
    for method, path, content in (("GET", _MODELS, None), ("POST", _CHAT, body)):
        try:
            answer = _ask(http, who, method, path, content)
        except httpx.TimeoutException:
            return
        if answer.of_an_engine or answer.status in _DENIED:
            return
        answers.append(answer)
    raise _stranger(who, answers)


def _ask(http: httpx.Client, who: Greeted, method: str, path: str, body: Any) -> Answer:
    headers = {"Authorization": f"Bearer {who.api_key}"} if who.api_key else {}
    give_up, data = time.monotonic() + SECONDS, b""
    with http.stream(method, path, json=body, headers=headers, timeout=SECONDS, follow_redirects=False) as reply:
        for piece in reply.iter_bytes():
            data += piece
            if len(data) > _LONGEST or time.monotonic() > give_up:
                break  # a file, or a stream without an end
    kind = reply.headers.get("content-type", "").partition(";")[0]
    text = data.decode("utf-8", "replace")
    return Answer(f"{method} {path}", reply.status_code, kind, text, reply.headers.get("location", ""))


def _stranger(who: Greeted, answers: list[Answer]) -> DdopsError:
    said = "; ".join(answer.said for answer in answers)
    what, hint = (
        f"{who.url} does not speak {who.api}: {said}",
        f"name the engine's own address: {who.option} http://ADDRESS:PORT",
    )
    if moved := next((answer for answer in answers if answer.location), None):
        place = urljoin(who.url + "/", moved.location).removesuffix(moved.request.split()[1])
        return UsageError(
            what, means=f"{_NOTHING}: redirects are not followed", hint=f"{who.option} {place}, if that is the engine"
        )
    if all(answer.status in (502, 503, 504) for answer in answers):
        return Unreachable(what, means=f"{_NOTHING}: a gateway answers, and no engine behind it", hint="start the engine")
    if who.url.startswith("http://") and _shakes_hands(who.url):
        return UsageError(what, means=f"{_NOTHING}: TLS is spoken there", hint=_other_scheme(who))
    return UsageError(what, means=f"{_NOTHING}: an HTTP server answers there, and it is no engine", hint=hint)


def unheard(who: Greeted, problem: Exception) -> DdopsError:
    """The error for an address from which no HTTP answer came."""
    import httpx

    said = str(problem)
    if who.url.startswith("https://") and _NO_TLS.search(said):
        return UsageError(f"{who.url}: what answers there does not speak TLS ({said})", means=_NOTHING, hint=_other_scheme(who))
    if who.url.startswith("http://") and "refused" not in said and _shakes_hands(who.url):
        return UsageError(f"{who.url}: what answers there speaks TLS ({said})", means=_NOTHING, hint=_other_scheme(who))
    if isinstance(problem, httpx.RemoteProtocolError):
        hint = f"name the engine's own port: {who.option} http://ADDRESS:PORT"
        return UsageError(f"{who.url}: what answers there is no HTTP server ({one_line(said, 120)})", means=_NOTHING, hint=hint)
    hint = f"start the engine, or name its address: {who.option} http://ADDRESS:PORT"
    if "CERTIFICATE_VERIFY_FAILED" in said:
        hint = "name the file with its authority's certificate in SSL_CERT_FILE"
    return Unreachable(f"{who.url}: nothing answers there ({said})", means=_NOTHING, hint=hint)


def _other_scheme(who: Greeted) -> str:
    scheme, _, rest = who.url.partition("://")
    return f"{who.option} {'http' if scheme == 'https' else 'https'}://{rest}"


def _shakes_hands(url: str) -> bool:
    """Whether TLS is spoken at an http:// address; whose certificate it is does not matter here."""
    place = urlsplit(url)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with socket.create_connection((place.hostname or "", place.port or 80), timeout=5.0) as plain:
            context.wrap_socket(plain, server_hostname=place.hostname).close()
    except (OSError, ValueError):
        return False
    return True
