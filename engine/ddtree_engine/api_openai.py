"""OpenAI's endpoints: /v1/completions and /v1/chat/completions, whole and streamed.

Both are one set of functions over a `Style`, which is all that differs between them.
`return_meta_info: true` adds SGLang's meta_info and the output's token ids to the choice.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from ddtree_engine.api_native import meta_info
from ddtree_engine.generation import Ask, Job, Service, finished
from ddtree_engine.reply import Piece, Reply, Token
from ddtree_engine.schemas import ChatBody, CompletionBody
from ddtree_engine.text import Tokenizer
from ddtree_engine.web import sse

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's
Body = CompletionBody | ChatBody


@dataclass(frozen=True, slots=True)
class Style:
    """The names that differ between the two endpoints."""

    id_prefix: str
    whole: str
    chunk: str


_COMPLETION = Style("cmpl", "text_completion", "text_completion")
_CHAT = Style("chatcmpl", "chat.completion", "chat.completion.chunk")


async def job_for(body: Body, service: Service) -> Job:
    service.check_model(body.model)
    ask = await (_chat_ask(body, service) if isinstance(body, ChatBody) else _completion_ask(body, service))
    return service.job(_style(body).id_prefix, ask)


async def whole(body: Body, service: Service) -> dict[str, Any]:
    """The reply in one piece."""
    job = await job_for(body, service)
    reply = await finished(job, service)
    choice: dict[str, Any] = {"index": 0, "finish_reason": _finish(reply)}
    if isinstance(body, ChatBody):
        choice["message"] = {"role": "assistant", "content": reply.text}
    else:
        choice["text"] = reply.text
    choice["logprobs"] = _logprobs(body, reply.tokens, service.tokenizer, 0)
    choice |= _meta(body, reply, job)
    return _envelope(_style(body).whole, job, service) | {"choices": [choice], "usage": _usage(reply, job)}


async def events(body: Body, service: Service) -> AsyncGenerator[bytes]:
    """The reply as it grows: new text in each event, the finish reason in the last, then usage if asked for."""
    job = await job_for(body, service)
    reply = service.new_reply(job)
    head = _envelope(_style(body).chunk, job, service)
    async with aclosing(service.pieces(job, reply)) as pieces:
        async for piece in pieces:
            for choice in _chunk_choices(body, piece, reply, job, service):
                yield sse(head | {"choices": [choice]})
    if body.stream_options is not None and body.stream_options.include_usage:
        yield sse(head | {"choices": [], "usage": _usage(reply, job)})


def _chunk_choices(body: Body, piece: Piece, reply: Reply, job: Job, service: Service) -> Iterator[dict[str, Any]]:
    """What one piece adds to a stream: a chat begins with the role alone; a piece with nothing to show is skipped."""
    if isinstance(body, ChatBody) and len(piece.tokens) == len(reply.tokens):
        yield _delta(body, "", role=True)
    text, last = service.streamed(piece.text, job, reply), reply.finish is not None
    if text or last or (piece.tokens and body.logprobs):
        scores = _logprobs(body, piece.tokens, service.tokenizer, len(reply.text) - len(piece.text))
        choice = _delta(body, text) | {"logprobs": scores, "finish_reason": _finish(reply)}
        yield choice | (_meta(body, reply, job) if last else {})


def _style(body: Body) -> Style:
    return _CHAT if isinstance(body, ChatBody) else _COMPLETION


async def _chat_ask(body: ChatBody, service: Service) -> Ask:
    messages = [message.as_template_value() for message in body.messages]
    prompt = service.template.render(messages, body.chat_template_kwargs)
    newer = body.max_completion_tokens is not None
    return Ask(
        prompt_ids=await service.encode(prompt),
        field="messages",
        body=body,
        max_new_tokens=body.max_completion_tokens if newer else body.max_tokens,
        max_field="max_completion_tokens" if newer else "max_tokens",
        seed=body.seed,
        mode=body.speculative,
        want_logprobs=body.logprobs,
        top_logprobs=body.top_logprobs or 0,
    )


async def _completion_ask(body: CompletionBody, service: Service) -> Ask:
    return Ask(
        prompt_ids=await _prompt_ids(body, service),
        field="prompt",
        body=body,
        max_new_tokens=DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens,
        max_field="max_tokens",
        seed=body.seed,
        mode=body.speculative,
        want_logprobs=body.logprobs is not None,
        top_logprobs=body.logprobs or 0,
    )


async def _prompt_ids(body: CompletionBody, service: Service) -> tuple[int, ...]:
    prompt = body.prompt
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str):
        prompt = prompt[0]  # a list of texts holds exactly one
    if isinstance(prompt, str):
        return await service.encode(prompt)
    return tuple(i for i in prompt if isinstance(i, int))


def _envelope(kind: str, job: Job, service: Service) -> dict[str, Any]:
    return {"id": job.request.id, "object": kind, "created": job.created, "model": service.model_name}


def _delta(body: Body, text: str, *, role: bool = False) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": 0, "finish_reason": None}
    if isinstance(body, ChatBody):
        choice["delta"] = {"role": "assistant", "content": text} if role else ({"content": text} if text else {})
    else:
        choice["text"] = text
    return choice


def _finish(reply: Reply) -> str | None:
    return str(reply.finish.kind) if reply.finish is not None else None


def _meta(body: Body, reply: Reply, job: Job) -> dict[str, Any]:
    if not body.return_meta_info:
        return {}
    return {"meta_info": meta_info(reply, job) | {"output_ids": reply.output_ids}}


def _usage(reply: Reply, job: Job) -> dict[str, Any]:
    prompt, completion = len(job.request.prompt_ids), len(reply.tokens)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": reply.cached_tokens},
    }


def _logprobs(body: Body, tokens: Sequence[Token], tokenizer: Tokenizer, offset: int) -> dict[str, Any] | None:
    if isinstance(body, ChatBody):
        return {"content": [_chat_logprob(token, tokenizer) for token in tokens]} if body.logprobs else None
    if body.logprobs is None:
        return None
    texts = [tokenizer.token_text(token.id) for token in tokens]
    return {
        "tokens": texts,
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": [{tokenizer.token_text(i): lp for lp, i in token.top} for token in tokens],
        "text_offset": [offset + sum(map(len, texts[:i])) for i in range(len(texts))],
    }


def _chat_logprob(token: Token, tokenizer: Tokenizer) -> dict[str, Any]:
    alternatives = [_scored(i, lp, tokenizer) for lp, i in token.top]
    return _scored(token.id, token.logprob, tokenizer) | {"top_logprobs": alternatives}


def _scored(token_id: int, logprob: float | None, tokenizer: Tokenizer) -> dict[str, Any]:
    raw = tokenizer.token_bytes(token_id)
    return {"token": raw.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(raw)}
