"""Speaks to one engine: SGLang's /generate, OpenAI's completions and chat, and what lies around them.

It asks and reads; it judges nothing. Temperature, top_p and max_tokens are always sent. Every request ends: by its
reply, by the stall limit or by its deadline. What an engine cannot answer is `Unsupported`, by name.
"""

from __future__ import annotations

import random
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ddops.prove import bodies, dialects
from ddops.prove.assembly import Assembler
from ddops.prove.dialects import DIALECTS, Dialect
from ddops.prove.facts import ServerFacts, first_model, kind_of, model_names, server_facts, with_vllm_metrics
from ddops.prove.replies import choice_of, reply_of, scored_native, scored_openai
from ddops.prove.transport import DEFAULT_LIMITS, Limits, Transport
from ddops.prove.wire import (
    Ask,
    Broken,
    Busy,
    Denied,
    EngineError,
    Malformed,
    Rejected,
    Reply,
    Scored,
    Scores,
    Unsupported,
)

if TYPE_CHECKING:
    import httpx

_ONE_TOKEN = {"max_tokens": 1, "temperature": 0.0, "top_p": 1.0}

__all__ = ["EngineClient", "Limits", "chatml", "identify"]


class EngineClient:
    """One engine over one HTTP client (`base_url` set). Safe to use from several threads."""

    def __init__(
        self,
        http: httpx.Client,
        profile: Any,
        *,
        api_key: str | None = None,
        model: str | None = None,
        limits: Limits = DEFAULT_LIMITS,
    ) -> None:
        kind = str(getattr(profile, "kind", profile))
        if kind not in DIALECTS:
            raise ValueError(f"engine kind {kind!r} is not one of {', '.join(DIALECTS)}")
        self.transport = Transport(http, api_key, limits)
        self.dialect: Dialect = DIALECTS[kind]
        self._model = model
        self._facts: ServerFacts | None = None
        self._unknown: frozenset[str] = frozenset()  # fields of ours that this server does not take

    @property
    def http(self) -> httpx.Client:
        return self.transport.http

    @property
    def limits(self) -> Limits:
        return self.transport.limits

    @limits.setter
    def limits(self, limits: Limits) -> None:
        self.transport.limits = limits

    # ---- asking

    def ask(self, ask: Ask) -> Reply:
        """Send one request and wait for its whole reply. Raises EngineError's kinds; a full queue is waited out."""
        deadline = self.transport.deadline()
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
        sent, reply = body, None
        while reply is None:
            try:
                reply = self._send(ask, path, sent, deadline)
            except Rejected as refusal:
                slim = bodies.plain(sent, self.dialect, str(refusal))
                if slim is None:
                    raise
                sent = slim
        self._unknown |= body.keys() - sent.keys()  # it was these fields: they are left out from now on
        if ask.mode is not None and not reply.cancelled and reply.meta.mode != ask.mode:
            raise Unsupported(f"the engine ignored `speculative`: it was asked for {ask.mode} and does not say that it did so")
        return reply

    def _send(self, ask: Ask, path: str, body: dict[str, Any], deadline: float) -> Reply:
        started = time.monotonic()
        if ask.streamed:
            return _assemble(ask, self.transport.events(path, body, deadline), started)
        raw = self.transport.json("POST", path, body, deadline=deadline)
        return reply_of(ask, raw, started, time.monotonic() - started)

    def _body(self, ask: Ask) -> tuple[str, dict[str, Any]]:
        if ask.mode is not None and not self.dialect.spec_switch:
            raise Unsupported(f"{self.dialect.kind} cannot switch speculation per request")
        if self.dialect.native and not ask.messages and not ask.openai:
            return "/generate", bodies.native(ask)
        path = "/v1/chat/completions" if ask.messages else "/v1/completions"
        return path, bodies.openai(ask, self.dialect, self.model, self._unknown)

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
        body = bodies.scoring(ids, first, top)
        raw = self.transport.json("POST", "/generate", body)
        info = raw.get("meta_info")
        if not isinstance(info, Mapping) or not isinstance(info.get("input_token_logprobs"), list):
            raise Unsupported("the engine returned no input_token_logprobs")
        pairs = info["input_token_logprobs"]
        tops = info.get("input_top_logprobs") or [None] * len(pairs)
        scored = [scored_native(p, t) for p, t in zip(pairs, tops, strict=False)]
        tail = _aligned(scored, ids, start, masked=self.dialect.kind == "sglang")
        return Scores(start, tail, dialects.meta(info).cached_tokens)

    def _score_openai(self, ids: tuple[int, ...], start: int, top: int) -> Scores:
        body = {"model": self.model, "prompt": list(ids), "prompt_logprobs": top, **_ONE_TOKEN}
        raw = self.transport.json("POST", "/v1/completions", body)
        choice = choice_of(raw)
        listed = choice.get("prompt_logprobs") or raw.get("prompt_logprobs")
        if not isinstance(listed, list) or len(listed) != len(ids):
            raise Unsupported("the engine returned no prompt_logprobs")
        tail = [scored_openai(ids[i], listed[i]) for i in range(start, len(ids))]
        return Scores(start, tuple(tail), dialects.meta(raw.get("usage")).cached_tokens)

    # ---- text and ids

    def tokenize(self, text: str) -> tuple[int, ...]:
        """Ids of raw text (no special tokens added). Raises Unsupported where the engine does not say."""
        try:
            return self._tokens({"prompt": text, "content": text} if self.dialect.kind == "openai" else {"prompt": text})
        except Unsupported:
            if not self.dialect.native:
                raise
        return self._ids_by_scoring(text)

    def _ids_by_scoring(self, text: str) -> tuple[int, ...]:
        """Ids of a text as the engine lists them beside their scores, for versions without /tokenize."""
        info = self.transport.json("POST", "/generate", bodies.scoring(text, 0, 0)).get("meta_info")
        pairs = info.get("input_token_logprobs") if isinstance(info, Mapping) else None
        if not isinstance(pairs, list) or not pairs:
            raise Unsupported("the engine has no /tokenize and lists no ids")
        return tuple(scored_native(p, None).token for p in pairs)

    def _tokens(self, body: dict[str, Any]) -> tuple[int, ...]:
        found = dialects.ids(self._text_call("/tokenize", body | self.dialect.tokenize), ("tokens", "token_ids", "ids"))
        if not found:
            raise Unsupported("/tokenize returned no ids")
        return found

    def detokenize(self, ids: Sequence[int]) -> str:
        """The text of ids. Raises Unsupported where the engine does not say."""
        text = dialects.first(self._text_call("/detokenize", {"tokens": list(ids)}), ("text", "prompt", "content"))
        if not isinstance(text, str):
            raise Unsupported("/detokenize returned no text")
        return text

    def _text_call(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        named = {} if self.dialect.kind == "ddtree" else {"model": self.model}
        return self.transport.json("POST", path, body | named)

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
        chat = {"messages": [{"role": r, "content": c} for r, c in ask.messages], **self.dialect.tokenize_chat}
        kwargs = ask.extra.get("chat_template_kwargs")
        try:
            return self._counted(self._tokens(chat | ({"chat_template_kwargs": kwargs} if kwargs else {})), reply)
        except (Unsupported, Broken):
            pass
        # ChatML is a guess, so it counts only when the engine's own count confirms it.
        if reply.meta.prompt_tokens is not None and not kwargs:
            try:
                return self._counted(self.tokenize(chatml(ask.messages)), reply)
            except (Unsupported, Broken):
                pass
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
        """The served model's name: the one given, else the only one (adapters of it left out) that the engine lists.

        Raises Unsupported when it must be given.
        """
        if self._model is None:
            try:
                named = model_names(self.transport.maybe("/v1/models"))
            except Broken as exc:
                raise Unsupported(f"the engine cannot list its models ({exc}): say which one is meant") from exc
            if len(named) != 1:
                found = f"serves {', '.join(named[:6])}" if named else "names no model at /v1/models"
                raise Unsupported(f"the engine {found}: say which one is meant")
            self._model = named[0]
        return self._model

    def facts(self, *, again: bool = False) -> ServerFacts:
        """What the engine says it runs with; empty facts where it has no such endpoint."""
        if self._facts is None or again:
            self._facts = self._read_facts()
        return self._facts

    def _read_facts(self) -> ServerFacts:
        for path in self.dialect.info:
            if (found := self.transport.maybe(path)) is not None:
                return server_facts(found)
        try:
            facts = server_facts(first_model(self.transport.maybe("/v1/models")))
        except Broken:  # facts are a convenience; whether it answers is for the requests to show
            facts = ServerFacts()
        if self.dialect.kind != "vllm":
            return facts
        try:
            return with_vllm_metrics(facts, self._metrics_text())
        except Unsupported:
            return facts

    def metrics(self) -> dict[str, float]:
        """Sums by metric name. Raises Unsupported where there is no /metrics."""
        return dialects.metrics(self._metrics_text())

    def _metrics_text(self) -> str:
        return self.transport.raw("GET", "/metrics").decode("utf-8", "replace")

    def flush(self) -> None:
        """Empty the prefix cache. Raises Unsupported where the engine has no such call."""
        for path in self.dialect.flush:
            try:
                self.transport.raw("POST", path, {})
                return
            except Unsupported:
                continue
        raise Unsupported(f"{self.dialect.kind} cannot flush its cache here")

    def server_info(self) -> dict[str, Any] | None:
        """The engine's own report of its launch arguments, as it stands; None where there is no such endpoint."""
        return self.facts(again=True).raw or None

    def healthy(self, *, timeout: float = 5.0) -> bool:
        """Whether `/health` answers 200, asked once. A server of an unknown kind may lack it: its model list counts then."""
        deadline = time.monotonic() + timeout
        for path in ("/health", "/v1/models") if self.dialect.kind == "openai" else ("/health",):
            try:
                self.transport.raw("GET", path, deadline=deadline)
                return True
            except Unsupported:
                continue
            except EngineError:
                return False
        return False

    def answers(self, *, timeout: float = 10.0) -> bool:
        """Whether one real token can be generated. It says nothing about whether the token is right."""
        try:
            self._once(Ask.user("What is 1 + 1?", max_tokens=1), time.monotonic() + timeout)
        except EngineError:
            return False
        return True


def identify(http: httpx.Client, *, api_key: str | None = None, seconds: float = 10.0) -> str:
    """Which dialect the server behind `http` speaks: ddtree, sglang, vllm, or openai for any other.

    Raises Denied when it wants a key, and what the transport raises when nothing answers.
    """
    transport = Transport(http, api_key, Limits(seconds, seconds))
    try:
        info = next((found for path in DIALECTS["sglang"].info if (found := transport.maybe(path)) is not None), None)
    except Broken:
        info = None
    try:
        models = transport.json("GET", "/v1/models")
    except Denied:
        raise
    except (Unsupported, Malformed, Broken):  # a list that fails is no engine that fails
        models = None
    return kind_of(info, models)


def chatml(messages: Sequence[tuple[str, str]]) -> str:
    """The ChatML prompt text of a conversation, ready for the assistant's turn."""
    turns = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in messages)
    return f"{turns}<|im_start|>assistant\n"


def _aligned(scored: Sequence[Scored], ids: Sequence[int], start: int, *, masked: bool) -> tuple[Scored, ...]:
    """The scores of ids[start:]. `masked`: SGLang reports the vocabulary's last id, and what stands for images, as 0.

    Raises Malformed when they are the scores of other ids.
    """
    first = len(ids) - len(scored)
    sent = ids[first:] if 0 <= first <= start else ()
    same = [s.token == i for s, i in zip(scored, sent, strict=False)]
    fits = all(equal or (masked and s.token == 0) for s, equal in zip(scored, same, strict=False))
    if not fits or 2 * sum(same) <= len(same) or len(sent) < len(ids) - start:
        raise Malformed("the scored ids are not the ids that were sent")
    return tuple(replace(s, token=i) for s, i in zip(scored, sent, strict=True))[start - first :]


def _assemble(ask: Ask, events: Generator[dict[str, Any], None, None], started: float) -> Reply:
    parts = Assembler(started)
    for event in events:
        parts.take(event, time.monotonic() - started)
        if ask.cancel_after_chunks and len(parts.chunks) >= ask.cancel_after_chunks:
            events.close()
            return parts.reply(ask, time.monotonic() - started, cancelled=True)
    return parts.reply(ask, time.monotonic() - started, cancelled=False)
