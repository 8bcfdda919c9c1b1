"""SGLang's own endpoint, /generate: token ids, meta_info, scores of prompt and output.

As in SGLang, a streamed event carries everything so far, so the last one equals the whole reply.
Not here: OpenAI's shapes (api_openai.py), checks of the body (schemas.py).
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from ddtree_engine.config import SpecMode
from ddtree_engine.generation import Ask, Job, Service, finished
from ddtree_engine.reply import FinishReason, Reply
from ddtree_engine.requests import Finish, TopLogprobs
from ddtree_engine.schemas import GenerateBody
from ddtree_engine.text import Tokenizer
from ddtree_engine.web import sse

DEFAULT_MAX_NEW_TOKENS = 128  # SGLang's


async def job_for(body: GenerateBody, service: Service) -> Job:
    service.check_model(body.model)
    params = body.sampling_params
    prompt_ids = await service.encode(body.text) if body.text is not None else tuple(body.input_ids or ())
    max_new = DEFAULT_MAX_NEW_TOKENS if params.max_new_tokens is None else params.max_new_tokens
    return service.job(
        "gen",
        Ask(
            prompt_ids=prompt_ids,
            field="text" if body.text is not None else "input_ids",
            body=params,
            max_new_tokens=max_new,
            max_field="sampling_params.max_new_tokens",
            seed=params.sampling_seed,
            mode=body.speculative,
            want_logprobs=body.return_logprob,
            logprob_start=body.logprob_start_len,
            top_logprobs=body.top_logprobs_num if body.return_logprob else 0,
        ),
    )


async def whole(body: GenerateBody, service: Service) -> dict[str, Any]:
    """The reply in one piece."""
    job = await job_for(body, service)
    reply = await finished(job, service)
    return _as_json(reply.text, reply, job, body, service.tokenizer)


async def events(body: GenerateBody, service: Service) -> AsyncGenerator[bytes]:
    """The reply as it grows, one event per update."""
    job = await job_for(body, service)
    reply, shown = service.new_reply(job), ""
    async with aclosing(service.pieces(job, reply)) as pieces:
        async for piece in pieces:
            shown += service.streamed(piece.text, job, reply)
            yield sse(_as_json(shown, reply, job, body, service.tokenizer))


def meta_info(reply: Reply, job: Job) -> dict[str, Any]:
    """The figures of one request. `spec_*` are 0 and null for a request with speculation off."""
    drafts = job.request.mode is not SpecMode.OFF
    return {
        "id": job.request.id,
        "prompt_tokens": len(job.request.prompt_ids),
        "completion_tokens": len(reply.tokens),
        "cached_tokens": reply.cached_tokens,
        "finish_reason": finish_json(reply.finish, len(reply.tokens)),
        "e2e_latency": time.monotonic() - job.arrived,
        "speculative": str(job.request.mode),
        "spec_verify_ct": reply.verify_passes if drafts else 0,
        "spec_accept_length": reply.accept_length if drafts else None,
        "spec_accept_token_num": reply.accepted_drafts,
        "spec_draft_token_num": reply.proposed_drafts,
    }


def finish_json(finish: FinishReason | None, length: int) -> dict[str, Any] | None:
    if finish is None:
        return None
    if finish.kind is Finish.STOP:
        return {"type": "stop", "matched": finish.matched}
    if finish.kind is Finish.LENGTH:
        return {"type": "length", "length": length}
    return {"type": "abort", "message": finish.error or "cancelled"}


def _as_json(text: str, reply: Reply, job: Job, body: GenerateBody, tokenizer: Tokenizer) -> dict[str, Any]:
    meta = meta_info(reply, job)
    if body.return_logprob:
        meta |= _scores(reply, body, tokenizer)
    return {"text": text, "output_ids": reply.output_ids, "meta_info": meta}


def _scores(reply: Reply, body: GenerateBody, tokenizer: Tokenizer) -> dict[str, Any]:
    def entry(logprob: float | None, token_id: int) -> list[Any]:
        return [logprob, token_id, tokenizer.token_text(token_id) if body.return_text_in_logprobs else None]

    def tops(positions: Sequence[TopLogprobs]) -> list[Any]:
        return [[entry(lp, i) for lp, i in top] if top else None for top in positions]

    prompt = reply.input_logprobs
    scores: dict[str, Any] = {
        "input_token_logprobs": [entry(*pair) for pair in zip(prompt.logprobs, prompt.token_ids, strict=True)]
        if prompt
        else [],
        "output_token_logprobs": [entry(token.logprob, token.id) for token in reply.tokens],
    }
    if body.top_logprobs_num:
        scores["input_top_logprobs"] = tops(prompt.top) if prompt else []
        scores["output_top_logprobs"] = tops([token.top for token in reply.tokens])
    return scores
