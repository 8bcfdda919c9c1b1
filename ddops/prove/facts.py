"""What a server says of itself: its kind, its models, what it runs with. Pure: parsed replies and metrics text in.

Names vary by engine version, so each fact is looked for under several; what is not said is None.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ddops.prove.dialects import ACCEPT_LENGTH, number, whole

_MAX_RUNNING = ("max_running_requests", "effective_max_running_requests_per_dp")


def kind_of(info: Mapping[str, Any] | None, models: Mapping[str, Any] | None) -> str:
    """Which dialect a server speaks, from its /server_info and /v1/models as far as it has them."""
    if info and isinstance(info.get("ddtree"), Mapping):
        return "ddtree"
    nested = info.get("server_args") if info else None
    said = {**(nested if isinstance(nested, Mapping) else {}), **(info or {})}
    if "speculative_algorithm" in said or "tp_size" in said:
        return "sglang"
    owners = [entry.get("owned_by") for entry in _listed(models)]
    return next((kind for kind in ("vllm", "sglang") if kind in owners), "openai")


def _listed(models: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    data = (models or {}).get("data")
    return [m for m in data if isinstance(m, Mapping)] if isinstance(data, list) else []


def first_model(models: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    return next(iter(_listed(models)), None)


def model_names(models: Mapping[str, Any] | None) -> list[str]:
    """Ids of the served models; an adapter names its base as `parent` and is not one of them."""
    return [str(m["id"]) for m in _listed(models) if isinstance(m.get("id"), str) and not m.get("parent")]


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
        max_running=whole(merged, ("max_running_requests",)) or whole(state, _MAX_RUNNING),
        context_length=whole(merged, ("context_length", "max_model_len")),
        dtype=text.get("dtype"),
        accept_length=number(state, ACCEPT_LENGTH),
        raw=dict(raw),
    )


_POSITION = re.compile(r'^vllm:spec_decode_num_accepted_tokens_per_pos(?:_total)?\{[^}]*position="(\d+)"', re.MULTILINE)


def with_vllm_metrics(facts: ServerFacts, text: str) -> ServerFacts:
    """What vLLM's metrics tell beside its model list: it has counters of drafting from the start, or does not draft."""
    if not re.search(r"^vllm:", text, re.MULTILINE):
        return facts  # started with --disable-log-stats, or not vLLM
    if not re.search(r"^vllm:spec_decode_", text, re.MULTILINE):
        return replace(facts, algorithm="NONE")
    drafted = max((int(p) + 1 for p in _POSITION.findall(text)), default=0)
    return replace(facts, block_size=drafted + 1) if drafted else facts
