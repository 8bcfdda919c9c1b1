"""Requests as the JSON bodies that each dialect takes. Pure.

What changes the answer is always said in full; what only adds facts to the reply can be left out again (`plain`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ddops.prove.dialects import Dialect
from ddops.prove.wire import Ask


def openai(ask: Ask, dialect: Dialect, model: str, unknown: Collection[str] = ()) -> dict[str, Any]:
    """A chat or a completion. `unknown`: fields that this server was found not to take."""
    streamed = ask.streamed
    body: dict[str, Any] = {
        "model": model,
        "temperature": ask.temperature,
        "top_p": ask.top_p,
        "max_completion_tokens" if "max_tokens" in unknown else "max_tokens": ask.max_tokens,
        "stream": streamed,
        **dialect.meta(chat=bool(ask.messages), streamed=streamed),
        **({"stream_options": {"include_usage": True}} if streamed else {}),
        **_choices(ask),
        **(_scores(ask, dialect) if ask.top_logprobs else {}),
    }
    return {k: v for k, v in body.items() if k not in unknown} | _prompt(ask) | ask.extra


def _prompt(ask: Ask) -> dict[str, Any]:
    if ask.messages:
        return {"messages": [{"role": role, "content": content} for role, content in ask.messages]}
    return {"prompt": list(ask.ids) if ask.ids else ask.text}


def _choices(ask: Ask) -> dict[str, Any]:
    """What is said only when it was asked for: engines differ in what they make of a null."""
    found = {"seed": ask.seed, "speculative": ask.mode, "ignore_eos": ask.ignore_eos or None}
    return {name: value for name, value in found.items() if value is not None}


def _scores(ask: Ask, dialect: Dialect) -> dict[str, Any]:
    chat = {"logprobs": True, "top_logprobs": ask.top_logprobs}
    return dialect.score_meta | (chat if ask.messages else {"logprobs": ask.top_logprobs})


def plain(body: Mapping[str, Any], dialect: Dialect, refusal: str) -> dict[str, Any] | None:
    """A refused body as every OpenAI server knows it, or None when it was that already. The answer stays the same."""
    slim = {name: value for name, value in body.items() if name not in dialect.extras}
    if "max_completion_tokens" in refusal and "max_tokens" in slim:
        slim["max_completion_tokens"] = slim.pop("max_tokens")
    return slim if slim != body else None


def native(ask: Ask) -> dict[str, Any]:
    """/generate: raw text or ids."""
    params: dict[str, Any] = {
        "temperature": ask.temperature,
        "top_p": ask.top_p,
        "max_new_tokens": ask.max_tokens,
        "ignore_eos": ask.ignore_eos,
    }
    if ask.seed is not None:
        params["sampling_seed"] = ask.seed
    body: dict[str, Any] = {"input_ids": list(ask.ids)} if ask.ids else {"text": ask.text}
    body |= {"sampling_params": params, "stream": ask.streamed}
    if ask.mode is not None:
        body["speculative"] = ask.mode
    if ask.top_logprobs:
        body |= {"return_logprob": True, "logprob_start_len": -1, "top_logprobs_num": ask.top_logprobs}
    return body | ask.extra


def scoring(prompt: Sequence[int] | str, first: int, top: int) -> dict[str, Any]:
    """/generate that generates nothing and scores the prompt from token `first` on."""
    return {
        **({"text": prompt} if isinstance(prompt, str) else {"input_ids": list(prompt)}),
        "return_logprob": True,
        "logprob_start_len": first,
        "top_logprobs_num": top,
        "sampling_params": {"temperature": 0.0, "top_p": 1.0, "max_new_tokens": 0},
        "stream": False,
    }
