"""How the engines' HTTP dialects name the same things about a request. Pure: replies as plain dicts in, facts out.

Names vary by engine version, so each fact is looked for under several; a fact that is not there is None, never zero.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Dialect:
    """What one kind of engine can be asked. `native`: it has /generate with token ids in and out.

    `whole_meta` and `stream_meta` are what to add to a chat so that its reply carries ids and numbers, and
    `score_meta` so that its log-probabilities name tokens by id. They change nothing of what is generated: an engine
    that does not know them is asked again without.
    """

    kind: str
    native: bool = False
    spec_switch: bool = False  # speculation can be chosen per request
    keyed_noise: bool = False  # T>0 output depends on (seed, position) only
    exact: bool = False  # text, ids and counts of a reply agree to the letter; others trim ends and count them their own way
    whole_meta: dict[str, Any] = field(default_factory=dict)
    stream_meta: dict[str, Any] = field(default_factory=dict)
    completion_meta: dict[str, Any] | None = None  # on /v1/completions in place of the two, where it differs
    score_meta: dict[str, Any] = field(default_factory=dict)
    tokenize: dict[str, Any] = field(default_factory=dict)  # added to every /tokenize
    tokenize_chat: dict[str, Any] = field(default_factory=dict)  # added to /tokenize of messages
    flush: tuple[str, ...] = ()
    info: tuple[str, ...] = ()

    def meta(self, *, chat: bool, streamed: bool) -> dict[str, Any]:
        if not chat and self.completion_meta is not None:
            return self.completion_meta
        return self.stream_meta if streamed else self.whole_meta

    @property
    def extras(self) -> frozenset[str]:
        """Every field that may be left out again."""
        added = (self.whole_meta, self.stream_meta, self.completion_meta or {}, self.score_meta)
        return frozenset({"stream_options"}.union(*added))


_SGLANG = {"return_output_ids_in_sglext": True, "return_input_ids_in_sglext": True, "return_spec_tokens_details": True}

DIALECTS = {
    d.kind: d
    for d in (
        Dialect(
            "ddtree",
            native=True,
            spec_switch=True,
            keyed_noise=True,
            exact=True,
            whole_meta={"return_meta_info": True},
            stream_meta={"return_meta_info": True},
            tokenize_chat={"add_generation_prompt": True},
            flush=("/flush_cache",),
            info=("/server_info", "/get_server_info"),
        ),
        Dialect(
            "sglang",
            native=True,
            # meta_info of a chat holds no ids, and a stream with either of the two is refused: `sglext` has all of it on both.
            whole_meta={"return_meta_info": True, "return_token_ids": True} | _SGLANG,
            stream_meta=_SGLANG,
            completion_meta={"return_token_ids": True, "return_spec_tokens_details": True},
            tokenize={"add_special_tokens": False},
            flush=("/flush_cache",),
            info=("/server_info", "/get_server_info"),
        ),
        Dialect(
            "vllm",
            whole_meta={"return_token_ids": True},
            stream_meta={"return_token_ids": True},
            score_meta={"return_tokens_as_token_ids": True},
            tokenize={"add_special_tokens": False},
            tokenize_chat={"add_generation_prompt": True},
            flush=("/reset_prefix_cache",),
        ),
        # Any server with OpenAI's chat: what it can do beyond that shows in its replies. `content`: llama.cpp's name.
        Dialect(
            "openai",
            whole_meta={"return_token_ids": True},
            stream_meta={"return_token_ids": True},
            score_meta={"return_tokens_as_token_ids": True},
            tokenize={"add_special_tokens": False},
        ),
    )
}


@dataclass(frozen=True, slots=True)
class SpecNumbers:
    """Speculation over one request or one span: passes of the target and tokens they committed."""

    verify_passes: float
    committed: float

    @property
    def length(self) -> float | None:
        return self.committed / self.verify_passes if self.verify_passes > 0 else None


_PASSES = ("spec_verify_ct", "spec_verify_count", "spec_num_verify", "num_verify_passes", "spec_decode_num_drafts")
ACCEPT_LENGTH = ("spec_accept_length", "avg_spec_accept_length", "accept_length", "mean_acceptance_length")
_COMPLETION = ("completion_tokens", "output_tokens", "num_output_tokens")
_PROMPT = ("prompt_tokens", "input_tokens", "num_prompt_tokens")
_CACHED = ("cached_tokens", "num_cached_tokens", "cached_prompt_tokens")
_IDS = ("output_ids", "output_token_ids", "token_ids", "response_token_ids", "completion_token_ids")


def first(source: Mapping[str, Any] | None, names: Iterable[str]) -> Any:
    for name in names:
        if source and source.get(name) is not None:
            return source[name]
    return None


def number(source: Mapping[str, Any] | None, names: Iterable[str]) -> float | None:
    value = first(source, names)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value)


def whole(source: Mapping[str, Any] | None, names: Iterable[str]) -> int | None:
    value = number(source, names)
    return int(value) if value is not None and value >= 0 else None


def ids(source: Mapping[str, Any] | None, names: Iterable[str] = _IDS) -> tuple[int, ...] | None:
    value = first(source, names)
    if not isinstance(value, list) or not all(isinstance(i, int) and not isinstance(i, bool) for i in value):
        return None
    return tuple(value)


@dataclass(frozen=True, slots=True)
class Meta:
    """A request's own numbers, wherever the engine put them."""

    output_ids: tuple[int, ...] | None = None
    prompt_ids: tuple[int, ...] | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    verify_passes: int | None = None
    accept_length: float | None = None
    mode: str | None = None  # off | chain | tree: how this request was decoded


def meta(*sources: Mapping[str, Any] | None) -> Meta:
    """Merge what several parts of a reply say (choice, meta_info, usage); the first that names a fact wins."""

    def pick(read: Any, names: Sequence[str]) -> Any:
        return next((v for s in sources if (v := read(s, names)) is not None), None)

    details = [s.get("prompt_tokens_details") for s in sources if isinstance(s, Mapping)]
    cached = pick(whole, _CACHED)
    if cached is None:
        cached = next((v for d in details if isinstance(d, Mapping) and (v := whole(d, _CACHED)) is not None), None)
    return Meta(
        output_ids=pick(ids, _IDS),
        prompt_ids=pick(ids, ("prompt_token_ids", "input_ids")),
        prompt_tokens=pick(whole, _PROMPT),
        completion_tokens=pick(whole, _COMPLETION),
        cached_tokens=cached,
        verify_passes=pick(whole, _PASSES),
        accept_length=pick(number, ACCEPT_LENGTH),
        mode=pick(lambda s, names: v if isinstance(v := first(s, names), str) else None, ("speculative",)),
    )


def speculation(found: Meta) -> SpecNumbers | None:
    """Passes and committed tokens of one request. The first token comes from prefill, not from a pass."""
    if found.verify_passes and found.completion_tokens is not None:
        return SpecNumbers(found.verify_passes, max(0, found.completion_tokens - 1))
    return None


_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(\{[^}]*\})?\s+(\S+)")


def metrics(text: str) -> dict[str, float]:
    """Prometheus text to sums by metric name (labels are added up; NaN and malformed lines are left out)."""
    sums: dict[str, float] = {}
    for line in text.splitlines():
        found = _SAMPLE.match(line)
        if not found:
            continue
        try:
            value = float(found.group(3))
        except ValueError:
            continue
        if math.isfinite(value):
            sums[found.group(1)] = sums.get(found.group(1), 0.0) + value
    return sums


@dataclass(frozen=True, slots=True)
class Counters:
    """Names of the counters that together give the acceptance, and what must be added or taken off first."""

    passes: str
    tokens: str
    bonus: bool = False  # tokens leave out the one that a pass always yields
    firsts: str = ""  # requests, whose first tokens came from prefill and are among the tokens


_COUNTERS = (
    Counters("ddtree:verify_passes_total", "ddtree:committed_tokens_total"),
    Counters("vllm:spec_decode_num_drafts_total", "vllm:spec_decode_num_accepted_tokens_total", bonus=True),
    Counters("vllm:spec_decode_num_drafts", "vllm:spec_decode_num_accepted_tokens", bonus=True),
    Counters("sglang:spec_verify_calls_total", "sglang:generation_tokens_total", firsts="sglang:num_requests_total"),
)


def speculation_between(before: Mapping[str, float], after: Mapping[str, float]) -> SpecNumbers | None:
    """Counters by difference, so that what happened before the probes does not count."""

    def grown(name: str) -> float:
        return after.get(name, 0.0) - before.get(name, 0.0)

    for names in _COUNTERS:
        if names.passes in after and names.tokens in after:
            passes = grown(names.passes)
            tokens = grown(names.tokens) + (passes if names.bonus else 0.0) - (grown(names.firsts) if names.firsts else 0.0)
            if passes > 0 and tokens >= 0:
                return SpecNumbers(passes, tokens)
    return None


_ACCEPT_LINE = re.compile(r"(?:accept len|Mean acceptance length):\s*([0-9.]+)")


def acceptance_from_log(lines: Sequence[str]) -> float | None:
    """The middle of the decode lines' accept lengths: the first and the last are warm-up and tail."""
    found = [float(m.group(1)) for line in lines if (m := _ACCEPT_LINE.search(line))]
    found = found[1:-1] if len(found) > 2 else found
    return sorted(found)[len(found) // 2] if found else None
