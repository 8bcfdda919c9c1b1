"""Speaks to one engine: SGLang's /generate, OpenAI's completions and chat, and what lies around them.

It asks and reads; it judges nothing. Temperature, top_p and max_tokens are always sent. Every request ends: by its
reply, by the stall limit or by its deadline. What an engine cannot answer is `Unsupported`, by name.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ddops.prove import dialects
from ddops.prove.dialects import DIALECTS, Dialect, ServerFacts
from ddops.prove.wire import (
    Ask,
    Assembler,
    Broken,
    Busy,
    EngineError,
    Gone,
    Hung,
    Malformed,
    Reply,
    Scores,
    Unsupported,
    choice_of,
    event_of,
    raise_error_body,
    raise_status,
    reply_of,
    scored_native,
    scored_openai,
)

if TYPE_CHECKING:
    import httpx


@dataclass(frozen=True, slots=True)
class Limits:
    request_seconds: float = 120.0
    stall_seconds: float = 30.0


class EngineClient:
    """One engine over one HTTP client (`base_url` set). Safe to use from several threads."""

    def __init__(
        self,
        http: httpx.Client,
        profile: Any,
        *,
        api_key: str | None = None,
        model: str | None = None,
        limits: Limits = Limits(),
    ) -> None:
        kind = str(getattr(profile, "kind", profile))
        if kind not in DIALECTS:
            raise ValueError(f"engine kind {kind!r} is not one of {', '.join(DIALECTS)}")
        self.http = http
        self.dialect: Dialect = DIALECTS[kind]
        self.limits = limits
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._model = model
        self._facts: ServerFacts | None = None
        self._render: Callable[[Ask], str] | None = None

    # ---- asking

    def ask(self, ask: Ask) -> Reply:
        """Send one request and wait for its whole reply. Raises EngineError's kinds; a full queue is waited out."""
        deadline = time.monotonic() + self.limits.request_seconds
        pause = 0.05
        while True:
            try:
                return self._once(ask, deadline)
            except Busy:
                if time.monotonic() + pause > deadline:
                    raise
                time.sleep(pause * random.uniform(0.7, 1.3))
                pause = min(2.0, pause * 2)

    def _once(self, ask: Ask, deadline: float) -> Reply:
        path, body = self._body(ask)
        started = time.monotonic()
        if ask.stream or ask.cancel_after_chunks:
            return _assemble(ask, self._events(path, body, deadline), started)
        raw = self._json("POST", path, body, deadline=deadline)
        return reply_of(ask, raw, started, time.monotonic() - started)

    def _body(self, ask: Ask) -> tuple[str, dict[str, Any]]:
        if ask.mode is not None and not self.dialect.spec_switch:
            raise Unsupported(f"{self.dialect.kind} cannot switch speculation per request")
        if ask.messages:
            return "/v1/chat/completions", self._openai(ask) | {
                "messages": [{"role": r, "content": c} for r, c in ask.messages]
            }
        if self.dialect.native:
            return "/generate", self._native(ask)
        return "/v1/completions", self._openai(ask) | {"prompt": list(ask.ids) if ask.ids else ask.text}

    def _openai(self, ask: Ask) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.model,
            "temperature": ask.temperature,
            "top_p": ask.top_p,
            "max_tokens": ask.max_tokens,
        }
        body |= self.dialect.chat_meta | _stream_options(ask)
        if ask.seed is not None:
            body["seed"] = ask.seed
        if ask.mode is not None:
            body["speculative"] = ask.mode
        if ask.ignore_eos:
            body["ignore_eos"] = True
        if ask.top_logprobs:
            chat = {"logprobs": True, "top_logprobs": ask.top_logprobs}
            body |= chat if ask.messages else {"logprobs": ask.top_logprobs}
        return body | ask.extra

    def _native(self, ask: Ask) -> dict[str, Any]:
        params: dict[str, Any] = {
            "temperature": ask.temperature,
            "top_p": ask.top_p,
            "max_new_tokens": ask.max_tokens,
            "ignore_eos": ask.ignore_eos,
        }
        if ask.seed is not None:
            params["sampling_seed"] = ask.seed
        body: dict[str, Any] = {"input_ids": list(ask.ids)} if ask.ids else {"text": ask.text}
        body |= {"sampling_params": params, "stream": bool(ask.stream or ask.cancel_after_chunks)}
        if ask.mode is not None:
            body["speculative"] = ask.mode
        if ask.top_logprobs:
            body |= {"return_logprob": True, "logprob_start_len": -1, "top_logprobs_num": ask.top_logprobs}
        return body | ask.extra

    # ---- scoring

    def score(self, ids: Sequence[int], start: int, *, top: int = 2, fresh: bool = True) -> Scores:
        """Score ids[start:] by prefill, generating nothing. `fresh` scores the whole prompt, so no cache is used.

        Raises Unsupported where the engine gives no prompt log-probabilities.
        """
        if not 0 < start <= len(ids):
            raise ValueError(f"start {start} is outside 1..{len(ids)}")
        if self.dialect.native:
            return self._score_native(tuple(ids), start, top, 0 if fresh else start)
        return self._score_openai(tuple(ids), start, top)

    def _score_native(self, ids: tuple[int, ...], start: int, top: int, first: int) -> Scores:
        body = {
            "input_ids": list(ids),
            "return_logprob": True,
            "logprob_start_len": first,
            "top_logprobs_num": top,
            "sampling_params": {"temperature": 0.0, "top_p": 1.0, "max_new_tokens": 0},
            "stream": False,
        }
        raw = self._json("POST", "/generate", body)
        info = raw.get("meta_info")
        if not isinstance(info, Mapping) or not isinstance(info.get("input_token_logprobs"), list):
            raise Unsupported("the engine returned no input_token_logprobs")
        pairs = info["input_token_logprobs"]
        tops = info.get("input_top_logprobs") or [None] * len(pairs)
        scored = [scored_native(p, t) for p, t in zip(pairs, tops, strict=False)]
        wanted = len(ids) - start
        tail = scored[-wanted:] if wanted else []
        if tuple(s.token for s in tail) != ids[start:]:
            raise Malformed("the scored ids are not the ids that were sent")
        return Scores(start, tuple(tail), dialects.meta(info).cached_tokens)

    def _score_openai(self, ids: tuple[int, ...], start: int, top: int) -> Scores:
        body = {
            "model": self.model,
            "prompt": list(ids),
            "max_tokens": 1,
            "temperature": 0.0,
            "top_p": 1.0,
            "prompt_logprobs": top,
        }
        raw = self._json("POST", "/v1/completions", body)
        choice = choice_of(raw)
        listed = choice.get("prompt_logprobs") or raw.get("prompt_logprobs")
        if not isinstance(listed, list) or len(listed) != len(ids):
            raise Unsupported("the engine returned no prompt_logprobs")
        tail = [scored_openai(ids[i], listed[i]) for i in range(start, len(ids))]
        return Scores(start, tuple(tail), dialects.meta(raw.get("usage")).cached_tokens)

    # ---- text and ids

    def tokenize(self, text: str) -> tuple[int, ...]:
        """Ids of raw text (no special tokens added). Raises Unsupported where the engine does not say."""
        body: dict[str, Any] = {"prompt": text}
        if self.dialect.kind != "ddtree":
            body |= {"add_special_tokens": False, "model": self.model}
        try:
            return self._tokens(body)
        except Unsupported:
            if not self.dialect.native:
                raise
        return self._ids_by_scoring(text)

    def _ids_by_scoring(self, text: str) -> tuple[int, ...]:
        """Ids of a text as the engine lists them beside their scores, for versions without /tokenize."""
        params = {"temperature": 0.0, "top_p": 1.0, "max_new_tokens": 0}
        body = {"text": text, "return_logprob": True, "logprob_start_len": 0, "sampling_params": params}
        info = self._json("POST", "/generate", body).get("meta_info")
        pairs = info.get("input_token_logprobs") if isinstance(info, Mapping) else None
        if not isinstance(pairs, list) or not pairs:
            raise Unsupported("the engine has no /tokenize and lists no ids")
        return tuple(scored_native(p, None).token for p in pairs)

    def _tokens(self, body: dict[str, Any]) -> tuple[int, ...]:
        raw = self._json("POST", "/tokenize", body)
        found = dialects.ids(raw, ("tokens", "token_ids", "ids", "input_ids"))
        if found is None:
            raise Unsupported("/tokenize returned no ids")
        return found

    def detokenize(self, ids: Sequence[int]) -> str:
        body: dict[str, Any] = {"tokens": list(ids)}
        if self.dialect.kind != "ddtree":
            body["model"] = self.model
        raw = self._json("POST", "/detokenize", body)
        text = dialects.first(raw, ("text", "prompt"))
        if not isinstance(text, str):
            raise Unsupported("/detokenize returned no text")
        return text

    def prompt_ids(self, reply: Reply) -> tuple[int, ...]:
        """The ids a reply's prompt became. Raises Unsupported when they cannot be known for certain."""
        ask = reply.ask
        if ask.ids:
            return ask.ids
        if reply.meta.prompt_ids is not None:
            return reply.meta.prompt_ids
        if not ask.messages:
            return self._counted(self.tokenize(ask.text), reply)
        return self._chat_ids(ask, reply)

    def _chat_ids(self, ask: Ask, reply: Reply) -> tuple[int, ...]:
        messages = [{"role": r, "content": c} for r, c in ask.messages]
        ways: tuple[Callable[[], tuple[int, ...]], ...] = (
            lambda: self._tokens(
                {"messages": messages, "add_generation_prompt": True}
                | ({"model": self.model} if self.dialect.kind == "vllm" else {})
            ),
            lambda: self.tokenize(chatml(ask.messages)),
        )
        for way in ways:
            try:
                return self._counted(way(), reply)
            except (Unsupported, Broken):
                continue
        raise Unsupported("the engine does not say which ids a chat prompt became")

    @staticmethod
    def _counted(ids: tuple[int, ...], reply: Reply) -> tuple[int, ...]:
        told = reply.meta.prompt_tokens
        if told is not None and told != len(ids):
            raise Unsupported(f"the prompt has {told} tokens, not the {len(ids)} that were worked out")
        return ids

    # ---- the engine as a whole

    @property
    def model(self) -> str:
        if self._model is None:
            listed = self._json("GET", "/v1/models").get("data")
            named = (
                [m["id"] for m in listed if isinstance(m, Mapping) and isinstance(m.get("id"), str)]
                if isinstance(listed, list)
                else []
            )
            if not named:
                raise Malformed("/v1/models names no model")
            self._model = named[0]
        return self._model

    def facts(self, *, again: bool = False) -> ServerFacts:
        """What the engine says it runs with; empty facts where it has no such endpoint."""
        if self._facts is None or again:
            self._facts = self._read_facts()
        return self._facts

    def _read_facts(self) -> ServerFacts:
        for path in self.dialect.info:
            try:
                return dialects.server_facts(self._json("GET", path))
            except Unsupported:
                continue
        try:
            listed = self._json("GET", "/v1/models").get("data")
        except Unsupported:
            return ServerFacts()
        entry = listed[0] if isinstance(listed, list) and listed and isinstance(listed[0], Mapping) else None
        return dialects.server_facts(entry)

    def metrics(self) -> dict[str, float]:
        """Sums by metric name. Raises Unsupported where there is no /metrics."""
        return dialects.metrics(self._bytes("GET", "/metrics", None, self._deadline()).decode("utf-8", "replace"))

    def flush(self) -> None:
        """Empty the prefix cache. Raises Unsupported where the engine has no such call."""
        for path in self.dialect.flush:
            try:
                self._bytes("POST", path, {}, self._deadline())
                return
            except Unsupported:
                continue
        raise Unsupported(f"{self.dialect.kind} cannot flush its cache here")

    def server_info(self) -> dict[str, Any] | None:
        """The engine's own report of its launch arguments, as it stands; None where there is no such endpoint."""
        return self.facts(again=True).raw or None

    def healthy(self, *, timeout: float = 5.0) -> bool:
        """Whether `/health` answers 200, asked once."""
        try:
            self._bytes("GET", "/health", None, time.monotonic() + timeout)
        except EngineError:
            return False
        return True

    def answers(self, *, timeout: float = 10.0) -> bool:
        """Whether one real token can be generated. It says nothing about whether the token is right."""
        deadline = time.monotonic() + timeout
        try:
            return self._once(Ask.user("What is 1 + 1?", max_tokens=1), deadline).finish != "abort"
        except EngineError:
            return False

    # ---- transport

    def _deadline(self) -> float:
        return time.monotonic() + self.limits.request_seconds

    def _json(self, method: str, path: str, body: Any = None, *, deadline: float | None = None) -> dict[str, Any]:
        data = self._bytes(method, path, body, self._deadline() if deadline is None else deadline)
        try:
            raw = json.loads(data)
        except (ValueError, RecursionError):
            raise Malformed(f"{path} did not answer JSON: {data[:80]!r}") from None
        if not isinstance(raw, dict):
            raise Malformed(f"{path} did not answer an object")
        raise_error_body(raw)
        return raw

    def _bytes(self, method: str, path: str, body: Any, deadline: float) -> bytes:
        return b"".join(self._stream(method, path, body, deadline))

    def _stream(self, method: str, path: str, body: Any, deadline: float) -> Iterator[bytes]:
        import httpx

        left = deadline - time.monotonic()
        if left <= 0:
            raise Hung(f"{path}: no time left")
        # An unstreamed reply comes when it is complete: silence is allowed up to the deadline.
        streamed = isinstance(body, Mapping) and body.get("stream")
        read = min(left, self.limits.stall_seconds) if streamed else left
        timeout = httpx.Timeout(left, connect=min(left, 10.0), read=read, pool=left)
        try:
            with self.http.stream(method, path, json=body, headers=self._headers, timeout=timeout) as response:
                if response.status_code >= 400:
                    raise_status(path, response.status_code, response.read())
                for data in response.iter_bytes():
                    yield data
                    if time.monotonic() > deadline:
                        raise Hung(f"{path}: not finished after {self.limits.request_seconds:g} s")
        except httpx.TimeoutException as exc:
            raise Hung(f"{path}: silent for {read:.0f} s ({type(exc).__name__})") from exc
        except httpx.TransportError as exc:
            raise Gone(f"{path}: {str(exc) or type(exc).__name__}") from exc

    def _events(self, path: str, body: dict[str, Any], deadline: float) -> Generator[dict[str, Any], None, None]:
        """The JSON events of a server-sent stream. A stream that ends without [DONE] was cut."""
        buffer = b""
        for data in self._stream("POST", path, body | {"stream": True}, deadline):
            buffer += data
            *lines, buffer = buffer.split(b"\n")
            for line in lines:
                if not line.startswith(b"data:"):
                    continue
                event = line[5:].strip()
                if event == b"[DONE]":
                    return
                yield event_of(event)
        raise Gone(f"{path}: the stream ended without its end mark")


def chatml(messages: Sequence[tuple[str, str]]) -> str:
    """The ChatML prompt text of a conversation, ready for the assistant's turn."""
    turns = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in messages)
    return f"{turns}<|im_start|>assistant\n"


def _stream_options(ask: Ask) -> dict[str, Any]:
    if not (ask.stream or ask.cancel_after_chunks):
        return {"stream": False}
    return {"stream": True, "stream_options": {"include_usage": True}}


def _assemble(ask: Ask, events: Generator[dict[str, Any], None, None], started: float) -> Reply:
    parts = Assembler(started)
    for event in events:
        parts.take(event, time.monotonic() - started)
        if ask.cancel_after_chunks and len(parts.chunks) >= ask.cancel_after_chunks:
            events.close()
            return parts.reply(ask, time.monotonic() - started, cancelled=True)
    return parts.reply(ask, time.monotonic() - started, cancelled=False)
