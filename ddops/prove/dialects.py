"""How the engines' HTTP dialects name the same things. Pure: bodies and replies as plain dicts in, facts out.

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
    """What one kind of engine can be asked. `native`: it has /generate with token ids in and out."""

    kind: str
    native: bool
    spec_switch: bool  # speculation can be chosen per request
    keyed_noise: bool  # T>0 output depends on (seed, position) only
    chat_meta: dict[str, Any] = field(default_factory=dict)  # what to add to a chat request to get ids and numbers
    flush: tuple[str, ...] = ()
    info: tuple[str, ...] = ()


DIALECTS = {
    d.kind: d
    for d in (
        Dialect(
            "ddtree",
            native=True,
            spec_switch=True,
            keyed_noise=True,
            chat_meta={"return_meta_info": True},
            flush=("/flush_cache",),
            info=("/server_info", "/get_server_info"),
        ),
        Dialect(
            "sglang",
            native=True,
            spec_switch=False,
            keyed_noise=False,
            chat_meta={"return_meta_info": True},
            flush=("/flush_cache",),
            info=("/server_info", "/get_server_info"),
        ),
        Dialect(
            "vllm",
            native=False,
            spec_switch=False,
            keyed_noise=False,
            chat_meta={"return_token_ids": True},
            flush=("/reset_prefix_cache",),
            info=(),
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
_LENGTH = ("spec_accept_length", "avg_spec_accept_length", "accept_length", "mean_acceptance_length")
_COMPLETION = ("completion_tokens", "output_tokens", "num_output_tokens")
_PROMPT = ("prompt_tokens", "input_tokens", "num_prompt_tokens")
_CACHED = ("cached_tokens", "num_cached_tokens", "cached_prompt_tokens")
_IDS = ("output_ids", "output_token_ids", "token_ids", "completion_token_ids")


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
        accept_length=pick(number, _LENGTH),
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


# (passes, committed tokens, committed counts the passes' own token already)
_COUNTERS = (
    ("ddtree:verify_passes_total", "ddtree:committed_tokens_total", True),
    ("vllm:spec_decode_num_drafts_total", "vllm:spec_decode_num_accepted_tokens_total", False),
    ("vllm:spec_decode_num_drafts", "vllm:spec_decode_num_accepted_tokens", False),
    ("sglang:spec_verify_ct_total", "sglang:spec_committed_tokens_total", True),
)


def speculation_between(before: Mapping[str, float], after: Mapping[str, float]) -> SpecNumbers | None:
    """Counters by difference, so that what happened before the probes does not count."""
    for passes_name, tokens_name, whole_count in _COUNTERS:
        if passes_name in after and tokens_name in after:
            passes = after[passes_name] - before.get(passes_name, 0.0)
            tokens = after[tokens_name] - before.get(tokens_name, 0.0)
            if passes > 0 and tokens >= 0:
                return SpecNumbers(passes, tokens if whole_count else tokens + passes)
    return None


_ACCEPT_LINE = re.compile(r"(?:accept len|Mean acceptance length):\s*([0-9.]+)")


def acceptance_from_log(lines: Sequence[str]) -> float | None:
    """The middle of the decode lines' accept lengths: the first and the last are warm-up and tail."""
    found = [float(m.group(1)) for line in lines if (m := _ACCEPT_LINE.search(line))]
    found = found[1:-1] if len(found) > 2 else found
    return sorted(found)[len(found) // 2] if found else None


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What the engine says it runs with; None where it does not say."""

    model: str | None = None
    algorithm: str | None = None
    budget: int | None = None
    block_size: int | None = None
    max_running: int | None = None
    context_length: int | None = None
    dtype: str | None = None
    accept_length: float | None = None  # cumulative since the start: only a last resort
    raw: dict[str, Any] = field(default_factory=dict)

    @property
    def depth_cap(self) -> int | None:
        """The most tokens one pass can commit: block_size - 1 drafted and one of the target's own."""
        if self.block_size is None:
            return None
        return min(self.block_size, self.budget + 1) if self.budget else self.block_size

    @property
    def speculates(self) -> bool | None:
        return None if self.algorithm is None else self.algorithm.upper() not in ("", "NONE", "OFF")


def server_facts(raw: Mapping[str, Any] | None) -> ServerFacts:
    """Read /server_info (flat, or with `server_args` inside, as some versions nest it)."""
    if not raw:
        return ServerFacts()
    nested = raw.get("server_args")
    merged: dict[str, Any] = {**(nested if isinstance(nested, Mapping) else {}), **raw}
    states = raw.get("internal_states")
    state = states[0] if isinstance(states, list) and states and isinstance(states[0], Mapping) else None
    text = {k: v for k, v in merged.items() if isinstance(v, str)}
    algorithm = merged.get("speculative_algorithm", "")
    return ServerFacts(
        model=text.get("served_model_name") or text.get("model_path"),
        algorithm="NONE" if algorithm is None and "speculative_algorithm" in merged else (algorithm or None),
        budget=whole(merged, ("speculative_ddtree_budget",)),
        block_size=whole(merged, ("speculative_dflash_block_size", "speculative_num_draft_tokens")),
        max_running=whole(merged, ("max_running_requests",)) or whole(state, ("max_running_requests",)),
        context_length=whole(merged, ("context_length", "max_model_len")),
        dtype=text.get("dtype"),
        accept_length=number(state, _LENGTH),
        raw=dict(raw),
    )
