"""Reads replies, scores and error answers from parsed JSON, in every dialect. Pure.

Whatever does not look as the protocol says is `Malformed`, never a crash of ours; what the engine says went wrong is
raised as what it means for a probe. Names of facts are in dialects.py, streams in assembly.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ddops.prove import dialects
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
    Unsupported,
)

_ENDED_BADLY = ("abort", "error")  # finish reasons that are no end of an answer


# ---- what went wrong


def error_of(status: int, said: str, *, path: str = "") -> EngineError:
    """What an error answer means: a full queue, a refusal, or a failure that counts against the engine."""
    text = f"{path}: {status} {said}" if path else f"the engine answered an error: {said}"
    if status == 429 or (status == 503 and "queue" in said.lower()):
        return Busy(text)
    if status in (401, 403):
        return Denied(text)
    if status in (400, 422):
        return Rejected(text)
    return Unsupported(text) if 300 <= status < 500 or status == 501 else Broken(text)


def raise_status(path: str, status: int, body: bytes, location: str = "") -> None:
    said = f"redirects to {location}; name that address" if location else _said(body)
    raise error_of(status, said, path=path)


def raise_error_body(raw: Mapping[str, Any]) -> None:
    """Engines may answer 200 and put the failure into the body, or into an event of a stream."""
    error = raw if raw.get("object") == "error" else raw.get("error")
    if not error:
        return
    code = error.get("code") if isinstance(error, Mapping) else None
    text = error.get("message", error) if isinstance(error, Mapping) else error
    status = code if isinstance(code, int) and 400 <= code < 600 else 500
    raise error_of(status, str(text)[:200])


def _said(body: bytes) -> str:
    text = body.decode("utf-8", "replace")
    try:
        raw = json.loads(text)
        error = raw.get("error") or raw if isinstance(raw, dict) else raw
        text = str(dialects.first(error, ("message", "detail", "msg")) or text) if isinstance(error, dict) else str(error)
    except (ValueError, RecursionError):
        pass
    return " ".join(text.split())[:200]


def object_of(data: bytes, what: str) -> dict[str, Any]:
    """A JSON object that carries no error. Raises Malformed, or what the error means."""
    try:
        raw = json.loads(data)
    except (ValueError, RecursionError):
        raise Malformed(f"{what} is not JSON: {data[:80]!r}") from None
    if not isinstance(raw, dict):
        raise Malformed(f"{what} is not an object")
    raise_error_body(raw)
    return raw


# ---- whole replies


def choice_of(raw: Mapping[str, Any]) -> dict[str, Any]:
    choices = raw.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise Malformed("the reply has no choices")
    return choices[0]


def reply_of(ask: Ask, raw: dict[str, Any], started: float, seconds: float) -> Reply:
    """A whole reply from its JSON, in either dialect. Raises Malformed, or Broken when the engine gave up on it."""
    if "choices" not in raw:
        return _native(ask, raw, started, seconds)
    choice = choice_of(raw)
    message = mapping_of(choice, "message")
    info = mapping_of(choice, "meta_info")
    return Reply(
        ask,
        text_of(message or choice, ("content", "text")),
        finish_of(choice),
        dialects.meta(choice, info, *extensions_of(raw), raw.get("usage"), raw),
        seconds,
        sent_at=started,
        reasoning=text_of(message, ("reasoning_content", "reasoning")),
        logprobs=_output_scores(info) or _openai_scores(choice.get("logprobs")),
    )


def _native(ask: Ask, raw: dict[str, Any], started: float, seconds: float) -> Reply:
    if not isinstance(raw.get("text"), str):
        raise Malformed("the reply has no text")
    info = mapping_of(raw, "meta_info")
    found = dialects.meta(raw, info)
    return Reply(ask, raw["text"], finish_of(info), found, seconds, sent_at=started, logprobs=_output_scores(info))


def mapping_of(source: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = source.get(name)
    return value if isinstance(value, dict) else {}


def extensions_of(raw: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
    """SGLang's own facts on an OpenAI reply: ids of the prompt and of every choice, and figures of speculation."""
    found = mapping_of(raw, "sglext")
    outputs = found.get("output_ids")
    first = outputs[0] if isinstance(outputs, list) and outputs else None
    return ({"output_ids": first, "prompt_token_ids": found.get("input_ids")}, mapping_of(found, "spec_tokens_details"))


def text_of(source: Mapping[str, Any], names: tuple[str, ...]) -> str:
    """Text, or a list of text parts (`[{"type": "text", "text": "..."}]`)."""
    value = dialects.first(source, names)
    if isinstance(value, list) and all(isinstance(part, Mapping) for part in value):
        value = "".join(str(part.get("text", "")) for part in value)
    if value is not None and not isinstance(value, str):
        raise Malformed(f"{names[0]} is not text")
    return value or ""


def finish_of(source: Mapping[str, Any]) -> str:
    """The finish reason. Raises what it means when the engine gave the request up: that is no answer to judge."""
    reason = source.get("finish_reason")
    kind = reason.get("type") if isinstance(reason, Mapping) else reason
    if kind not in _ENDED_BADLY:
        return str(kind) if kind else ""
    found = reason if isinstance(reason, Mapping) else {}
    code = found.get("status_code")
    raise error_of(code if isinstance(code, int) else 500, f"{kind}: {found.get('message') or 'no reason given'}")


# ---- scores


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


def _openai_scores(raw: Any) -> tuple[Scored, ...]:
    """Scores of generated tokens, chat's or completions'; () unless every token is named by its id."""
    if not isinstance(raw, Mapping):
        return ()
    try:
        rows = raw["content"] if isinstance(raw.get("content"), list) else _completion_rows(raw)
        return tuple(_openai_row(row) for row in rows)
    except (TypeError, ValueError, KeyError, AttributeError):
        return ()


def _completion_rows(raw: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Completions list the same facts column by column."""
    tops = raw.get("top_logprobs") or [{}] * len(raw["tokens"])
    return [
        {"token": t, "logprob": lp, "top_logprobs": [{"token": o, "logprob": v} for o, v in (top or {}).items()]}
        for t, lp, top in zip(raw["tokens"], raw["token_logprobs"], tops, strict=True)
    ]


def _openai_row(row: Mapping[str, Any]) -> Scored:
    best = [(float(other["logprob"]), _id_of(other)) for other in row.get("top_logprobs") or ()]
    return Scored(_id_of(row), float(row["logprob"]), tuple(sorted(best, key=lambda b: -b[0])))


def _id_of(entry: Mapping[str, Any]) -> int:
    """A token's id: an `id` of its own, or the text `token_id:N` that vLLM gives when asked to. Raises ValueError."""
    if isinstance(entry.get("id"), int):
        return int(entry["id"])
    prefix, _, number = str(entry.get("token")).partition(":")
    if prefix != "token_id":
        raise ValueError("a token without its id")
    return int(number)
