"""What clients may send: every field of the HTTP bodies, and what its value must look like.

An unknown field is refused by name, and so is a known one that this engine does not support, unless it carries the
value that changes nothing (`n: 1`, `presence_penalty: 0`, ...): clients send those without being asked.
Not here: running a request (api_native.py, api_openai.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NoReturn, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

MAX_STOPS = 16
MAX_TOP_LOGPROBS = 20
_ANYTHING = object()

# Field -> the values that change nothing. null always is one of them.
_NEUTRAL_SAMPLING: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "min_tokens": (0,),
    "min_new_tokens": (0,),
    "logit_bias": ({},),
    "json_schema": (),
    "regex": (),
    "ebnf": (),
    "structural_tag": (),
    "stop_regex": (),
    "custom_params": (),
    "no_stop_trim": (False,),
    "spaces_between_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "use_beam_search": (False,),
    "allowed_token_ids": (),
    "bad_words": ([],),
}
# What SGLang's own server and router add to every request: facts for the reply that this engine does not have.
_NEUTRAL_ROUTED: dict[str, tuple[Any, ...]] = {
    "return_hidden_states": (False,),
    "return_routed_experts": (False,),
    "return_token_ids": (False,),
    "return_prompt_token_ids": (False,),
    "return_cached_tokens_details": (False,),
    "return_spec_tokens_details": (False,),
    "lora_path": (),
    "session_params": (),
    "priority": (),
    "data_parallel_rank": (),
    "bootstrap_host": (),
    "bootstrap_port": (),
    "bootstrap_room": (),
}
_NEUTRAL_GENERATE: dict[str, tuple[Any, ...]] = _NEUTRAL_ROUTED | {
    "token_ids_logprob": (),
    "image_data": (),
    "audio_data": (),
    "log_metrics": (True, False),
    "background": (False,),
    "no_logs": (True, False),  # requests are never logged
    "return_bytes": (False,),
    "return_entropy": (False,),
}
_NEUTRAL_OPENAI = (
    _NEUTRAL_SAMPLING
    | _NEUTRAL_ROUTED
    | {
        "user": (_ANYTHING,),
        "safety_identifier": (_ANYTHING,),
        "prompt_cache_key": (_ANYTHING,),
        "metadata": (_ANYTHING,),
        "store": (False,),
        "service_tier": ("auto", "default"),
        "best_of": (1,),
        "echo": (False,),
        "suffix": ("",),
        "tools": ([],),
        "functions": ([],),
        "tool_choice": ("none", "auto"),
        "function_call": ("none",),
        "parallel_tool_calls": (True, False),
        "response_format": ({"type": "text"},),
        "modalities": (["text"],),
        "reasoning_effort": (),
        "prediction": (),
        "verbosity": (),
        "prompt_logprobs": (),
        "truncate_prompt_tokens": (),
        "add_special_tokens": (True, False),  # this vocabulary adds none either way
        "add_generation_prompt": (True,),
        "continue_final_message": (False,),
        "separate_reasoning": (True, False),
        "stream_reasoning": (True, False),
    }
)


class FieldError(Exception):
    """A body that cannot be served; `field` names the field at fault (None: the body as a whole)."""

    def __init__(self, field: str | None, message: str) -> None:
        super().__init__(message)
        self.field = field
        self.message = message


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


Temperature = Annotated[float, Field(ge=0, le=100)]
TopP = Annotated[float, Field(gt=0, le=1)]
TokenIds = list[Annotated[int, Field(ge=0)]]
Mode = Literal["off", "chain", "tree"]


def _no_empty_stop(value: Any) -> Any:
    stops = [value] if isinstance(value, str) else value
    if isinstance(stops, list) and "" in stops:
        raise ValueError("an empty stop string would end every reply at once")
    return value


class Sampled(_Body):
    """The sampling fields that all three generating endpoints share. None means "not given"."""

    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None  # -1 and 0: no limit
    stop: str | Annotated[list[str], Field(max_length=MAX_STOPS)] | None = None
    stop_token_ids: TokenIds | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True

    _stops = field_validator("stop")(_no_empty_stop)

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class SamplingParams(Sampled):
    """`sampling_params` of /generate."""

    max_new_tokens: Annotated[int, Field(ge=0)] | None = None  # None: 128, as in SGLang
    sampling_seed: int | None = None


class GenerateBody(_Body):
    """POST /generate, as SGLang has it; one prompt per request."""

    model: str | None = None
    text: str | None = None
    input_ids: TokenIds | None = None
    sampling_params: SamplingParams = SamplingParams()
    stream: bool = False
    return_logprob: bool = False
    logprob_start_len: Annotated[int, Field(ge=-1)] = -1
    top_logprobs_num: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] = 0
    return_text_in_logprobs: bool = False
    speculative: Mode | None = None

    @model_validator(mode="after")
    def _one_prompt(self) -> GenerateBody:
        if (self.text is None) == (self.input_ids is None):
            raise ValueError("give exactly one of text and input_ids")
        return self


class StreamOptions(_Body):
    include_usage: bool = False
    continuous_usage_stats: Literal[False] = False


class _OpenAi(Sampled):
    """Fields that /v1/completions and /v1/chat/completions share."""

    model: str | None = None
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    seed: int | None = None
    speculative: Mode | None = None
    return_meta_info: bool = False

    @model_validator(mode="after")
    def _usage_needs_a_stream(self) -> _OpenAi:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is only allowed with stream: true")
        return self


class CompletionBody(_OpenAi):
    """POST /v1/completions: one prompt, as text or token ids."""

    prompt: str | TokenIds | Annotated[list[str], Field(min_length=1, max_length=1)]
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None


class TextPart(_Body):
    type: Literal["text"]
    text: str


class Message(_Body):
    """One turn. Its text is `content`, whole or in parts; pictures, audio and tool calls are refused."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = None

    def as_template_value(self) -> dict[str, str]:
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": self.role, "content": text} | ({"name": self.name} if self.name else {})


class ChatBody(_OpenAi):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=0)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _top_needs_logprobs(self) -> ChatBody:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs is only allowed with logprobs: true")
        return self


class TokenizeBody(_Body):
    """POST /tokenize."""

    prompt: str | None = None
    text: str | None = None
    model: str | None = None
    add_special_tokens: bool | None = None  # this vocabulary adds none either way

    @model_validator(mode="after")
    def _one_text(self) -> TokenizeBody:
        if (self.prompt is None) == (self.text is None):
            raise ValueError("give exactly one of prompt and text")
        return self


class DetokenizeBody(_Body):
    """POST /detokenize."""

    tokens: TokenIds
    model: str | None = None
    skip_special_tokens: bool = True


_B = TypeVar("_B", bound=_Body)
_NEUTRAL: dict[type[_Body], dict[str, tuple[Any, ...]]] = {
    GenerateBody: _NEUTRAL_GENERATE,
    CompletionBody: _NEUTRAL_OPENAI,
    ChatBody: _NEUTRAL_OPENAI,
}


def parse(kind: type[_B], body: bytes) -> _B:
    """The body as `kind`. Raises FieldError naming the first field that is wrong, unknown or unsupported."""
    try:
        value = json.loads(body, parse_constant=_no_constant)
    except (ValueError, RecursionError) as exc:
        raise FieldError(None, f"the body is not JSON: {exc}") from exc
    if not isinstance(value, dict):
        raise FieldError(None, "the body must be a JSON object")
    if rb"\ud" in body.lower():
        _refuse_half_characters(value)
    value = _without_neutral(value, _NEUTRAL.get(kind, {}))
    nested = value.get("sampling_params")
    if kind is GenerateBody and isinstance(nested, dict):
        nested = _without_neutral(nested, _NEUTRAL_SAMPLING, "sampling_params.")
        value["sampling_params"] = _without_nulls(nested, SamplingParams)
    value = _without_nulls(value, kind)
    try:
        return kind.model_validate(value)
    except ValidationError as exc:
        raise _field_error(exc, value) from exc


def _without_neutral(value: Mapping[str, Any], neutral: Mapping[str, tuple[Any, ...]], prefix: str = "") -> dict[str, Any]:
    for key in value.keys() & neutral.keys():
        if not _is_neutral(value[key], neutral[key]):
            allowed = [json.dumps(v) for v in neutral[key] if v is not _ANYTHING] or ["null"]
            raise FieldError(
                prefix + key,
                f"{prefix}{key} is not supported here; leave it out or send {' or '.join(allowed)}",
            )
    return {key: item for key, item in value.items() if key not in neutral}


def _without_nulls(value: Mapping[str, Any], kind: type[_Body]) -> dict[str, Any]:
    """null means "not given" for every field we know; one that we do not know stays, to be refused."""
    return {key: item for key, item in value.items() if item is not None or key not in kind.model_fields}


def _is_neutral(value: Any, allowed: tuple[Any, ...]) -> bool:
    # JSON's true is not 1, though Python's is.
    return value is None or any(
        want is _ANYTHING or (value == want and isinstance(value, bool) == isinstance(want, bool)) for want in allowed
    )


def _field_error(error: ValidationError, body: Mapping[str, Any]) -> FieldError:
    first = error.errors()[0]
    field = _field_name(first["loc"], body)
    if first["type"] == "extra_forbidden":
        return FieldError(field, f"unknown field {field}")
    if first["type"] == "missing":
        return FieldError(field, f"{field} is required")
    message = first["msg"].removeprefix("Value error, ")
    return FieldError(field, f"{field}: {message}" if field else message)


def _field_name(loc: tuple[int | str, ...], body: Any) -> str | None:
    """The path of a field as a client would write it; pydantic's names of union branches are dropped."""
    parts: list[str] = []
    for part in loc:
        if isinstance(body, list) and isinstance(part, int):
            parts[-1] += f"[{part}]"
            body = body[part] if part < len(body) else None
        elif isinstance(body, dict) and isinstance(part, str):
            parts.append(part)
            body = body.get(part)
    return ".".join(parts) or None


def _refuse_half_characters(value: Any) -> None:
    """JSON can escape one half of a surrogate pair alone, which is no text and cannot be encoded."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as exc:
        raise FieldError(None, f"the body holds half of a surrogate pair: {exc.object[exc.start]!a}") from exc


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")
