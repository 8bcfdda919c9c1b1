"""What goes over the wire to an engine and what comes back, as plain values: requests, replies, scores. Pure.

Replies are read from parsed JSON; whatever does not look as the protocol says is `Malformed`, never a crash of ours.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ddops.prove import dialects
from ddops.prove.dialects import Meta


class EngineError(Exception):
    """The engine did not give what was asked for."""


class Unsupported(EngineError):
    """The engine refuses or lacks this (4xx): a probe that needs it is not scored."""


class Busy(EngineError):
    """The engine's queue stayed full until the deadline."""


class Failure(EngineError):
    """The engine failed: it counts against the engine."""


class Broken(Failure):
    """An error answer (5xx, or an error inside a stream)."""


class Gone(Failure):
    """No connection, or one that was cut before the reply was whole."""


class Hung(Failure):
    """Silence beyond the stall limit, or no end before the deadline."""


class Malformed(Failure):
    """An answer that is not what the protocol says."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. Exactly one of `messages` (chat), `text` and `ids` (raw prompt) is set."""

    messages: tuple[tuple[str, str], ...] = ()
    text: str = ""
    ids: tuple[int, ...] = ()
    max_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    mode: str | None = None  # off | chain | tree; None: what the server was started with
    stream: bool = False
    ignore_eos: bool = False
    cancel_after_chunks: int = 0  # >0: hang up after so many chunks
    top_logprobs: int = 0  # >0: ask for the output tokens' log-probabilities
    extra: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def user(cls, content: str, **options: Any) -> Ask:
        return cls(messages=(("user", content),), **options)

    def to_dict(self) -> dict[str, Any]:
        """Enough to send it again (replay.py)."""
        return {name: getattr(self, name) for name in self.__slots__ if getattr(self, name) not in ((), "", None, {})}


@dataclass(frozen=True, slots=True)
class Chunk:
    """One piece of a streamed reply: when it came, and the request's counters as of then."""

    at: float  # seconds since the request was sent
    text: str
    completion_tokens: int | None = None
    verify_passes: int | None = None


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole reply. `text` is what the user sees; `reasoning` what a reasoning model thought before it."""

    ask: Ask
    text: str
    finish: str
    meta: Meta
    seconds: float
    reasoning: str = ""
    first_token_seconds: float | None = None
    chunks: tuple[Chunk, ...] = ()
    sent_at: float = 0.0  # monotonic clock
    logprobs: tuple[Scored, ...] = ()
    cancelled: bool = False

    @property
    def ids(self) -> tuple[int, ...] | None:
        return self.meta.output_ids

    @property
    def tokens(self) -> int | None:
        return (
            self.meta.completion_tokens
            if self.meta.completion_tokens is not None
            else (len(self.ids) if self.ids is not None else None)
        )


@dataclass(frozen=True, slots=True)
class Scored:
    """One token under the target model: its log-probability (None: not given) and the best alternatives, best first."""

    token: int
    logprob: float | None
    top: tuple[tuple[float, int], ...] = ()

    @property
    def gap(self) -> float | None:
        """Nats below the most probable token; 0 for the top one. None without alternatives."""
        if self.logprob is None or not self.top:
            return None
        return max(0.0, self.top[0][0] - self.logprob)


@dataclass(frozen=True, slots=True)
class Scores:
    """Every position from `start` on."""

    start: int
    tokens: tuple[Scored, ...]
    cached_tokens: int | None


def event_of(data: bytes) -> dict[str, Any]:
    try:
        raw = json.loads(data)
    except ValueError:
        raise Malformed(f"a stream event is not JSON: {data[:80]!r}") from None
    if not isinstance(raw, dict):
        raise Malformed("a stream event is not an object")
    raise_error_body(raw)
    return raw


def raise_error_body(raw: Mapping[str, Any]) -> None:
    """vLLM and SGLang may answer 200 and put the failure into the body."""
    error = raw.get("error")
    if error:
        text = error.get("message") if isinstance(error, Mapping) else error
        raise Broken(f"the engine answered an error: {str(text)[:200]}")


def raise_status(path: str, status: int, body: bytes) -> None:
    said = _said(body)
    if status in (429, 503) and b"queue" in body.lower():
        raise Busy(f"{path}: {status} {said}")
    if status >= 500 and status != 501:
        raise Broken(f"{path}: {status} {said}")
    raise Unsupported(f"{path}: {status} {said}")


def _said(body: bytes) -> str:
    text = body.decode("utf-8", "replace")
    try:
        raw = json.loads(text)
        error = raw.get("error", raw) if isinstance(raw, dict) else raw
        text = str(error.get("message", text)) if isinstance(error, dict) else str(error)
    except (ValueError, RecursionError):
        pass
    return " ".join(text.split())[:200]


def choice_of(raw: Mapping[str, Any]) -> dict[str, Any]:
    choices = raw.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise Malformed("the reply has no choices")
    return choices[0]


def reply_of(ask: Ask, raw: dict[str, Any], started: float, seconds: float) -> Reply:
    """A whole reply from its JSON, in either dialect. Raises Malformed."""
    if "choices" not in raw:
        if not isinstance(raw.get("text"), str):
            raise Malformed("the reply has no text")
        info = raw.get("meta_info") if isinstance(raw.get("meta_info"), Mapping) else {}
        return Reply(
            ask,
            raw["text"],
            _finish(info),
            dialects.meta(raw, info),
            seconds,
            sent_at=started,
            logprobs=_output_scores(info or {}),
        )
    choice = choice_of(raw)
    message = choice.get("message") if isinstance(choice.get("message"), dict) else {}
    text = (message or {}).get("content") if message else choice.get("text")
    reasoning = dialects.first(message, ("reasoning_content", "reasoning"))
    info = choice.get("meta_info") if isinstance(choice.get("meta_info"), Mapping) else {}
    found = dialects.meta(choice, info, raw.get("usage"), raw)
    return Reply(
        ask,
        text if isinstance(text, str) else "",
        _finish(choice),
        found,
        seconds,
        sent_at=started,
        reasoning=reasoning if isinstance(reasoning, str) else "",
        logprobs=_output_scores(info or {}),
    )


def _text_of(source: Mapping[str, Any] | None, names: tuple[str, ...]) -> str:
    value = dialects.first(source, names)
    if value is not None and not isinstance(value, str):
        raise Malformed(f"{names[0]} is not text")
    return value or ""


def _finish(source: Mapping[str, Any] | None) -> str:
    reason = (source or {}).get("finish_reason")
    kind = reason.get("type") if isinstance(reason, Mapping) else reason
    return str(kind) if kind else ""


def _output_scores(info: Mapping[str, Any]) -> tuple[Scored, ...]:
    pairs = info.get("output_token_logprobs")
    if not isinstance(pairs, list):
        return ()
    tops = info.get("output_top_logprobs") or [None] * len(pairs)
    return tuple(scored_native(p, t) for p, t in zip(pairs, tops, strict=False))


def scored_native(pair: Any, top: Any) -> Scored:
    """[logprob | null, id, text | null] and a list of the same for the alternatives."""
    try:
        alternatives = tuple(sorted(((float(t[0]), int(t[1])) for t in top or ()), key=lambda t: -t[0]))
        return Scored(int(pair[1]), None if pair[0] is None else float(pair[0]), alternatives)
    except (TypeError, ValueError, IndexError, KeyError):
        raise Malformed("log-probabilities of an unknown shape") from None


def scored_openai(token: int, entry: Any) -> Scored:
    """{"id": {"logprob": x, "rank": n}, ...}: the prompt's own token and the best ones."""
    if not isinstance(entry, Mapping):
        return Scored(token, None)
    try:
        listed = {int(i): float(e["logprob"] if isinstance(e, Mapping) else e) for i, e in entry.items()}
    except (TypeError, ValueError, KeyError):
        raise Malformed("prompt_logprobs of an unknown shape") from None
    best = tuple(sorted(((lp, i) for i, lp in listed.items()), reverse=True))
    return Scored(token, listed.get(token), best)


class Assembler:
    """Puts a streamed reply together. SGLang sends the text so far, OpenAI what is new."""

    def __init__(self, started: float) -> None:
        self.started = started
        self._at = 0.0
        self.text = ""
        self.reasoning = ""
        self.finish = ""
        self.ids: list[int] = []
        self.sources: list[Mapping[str, Any]] = []
        self.chunks: list[Chunk] = []
        self.whole_ids: tuple[int, ...] | None = None

    def take(self, event: Mapping[str, Any], at: float) -> None:
        """One event, `at` seconds after the request was sent."""
        self._at = at
        if isinstance(event.get("choices"), list):
            self._openai(event)
        else:
            self._native(event)

    def _native(self, event: Mapping[str, Any]) -> None:
        info = event.get("meta_info") if isinstance(event.get("meta_info"), Mapping) else {}
        so_far = event.get("text")
        new = ""
        if isinstance(so_far, str):
            new = so_far[len(self.text) :] if so_far.startswith(self.text) else so_far
            self.text = so_far if so_far.startswith(self.text) else self.text + so_far
        found = dialects.ids(event)
        if found is not None:
            self._merge_ids(found)
        self.finish = _finish(info) or self.finish
        self._note(new, info or {}, bool(new) or found is not None)

    def _merge_ids(self, found: tuple[int, ...]) -> None:
        if list(found[: len(self.ids)]) == self.ids and len(found) >= len(self.ids):
            self.ids = list(found)
        else:
            self.ids += found

    def _openai(self, event: Mapping[str, Any]) -> None:
        usage = event.get("usage")
        if isinstance(usage, Mapping):
            self.sources.append(usage)
        for choice in event["choices"][:1]:
            if not isinstance(choice, Mapping):
                raise Malformed("a stream event's choice is not an object")
            delta = choice.get("delta") if isinstance(choice.get("delta"), Mapping) else choice
            new = _text_of(delta, ("content", "text"))
            self.reasoning += _text_of(delta, ("reasoning_content", "reasoning"))
            self.text += new
            info = choice.get("meta_info") if isinstance(choice.get("meta_info"), Mapping) else {}
            whole = dialects.ids(info, ("output_ids", "output_token_ids"))
            if whole is not None:
                self.whole_ids = whole
            self.ids += dialects.ids(choice, ("token_ids",)) or ()
            self.finish = _finish(choice) or self.finish
            self._note(new, info or {}, bool(new))

    def _note(self, new: str, info: Mapping[str, Any], counts: bool) -> None:
        if info:
            self.sources.append(info)
        found = dialects.meta(info)
        if counts:
            self.chunks.append(Chunk(self._at, new, found.completion_tokens, found.verify_passes))

    def reply(self, ask: Ask, seconds: float, *, cancelled: bool) -> Reply:
        found = dialects.meta(*reversed(self.sources))
        ids = self.whole_ids or (tuple(self.ids) if self.ids else found.output_ids)
        first = self.chunks[0].at if self.chunks else None
        return Reply(
            ask,
            self.text,
            self.finish,
            replace(found, output_ids=ids),
            seconds,
            self.reasoning,
            first,
            tuple(self.chunks),
            self.started,
            cancelled=cancelled,
        )
