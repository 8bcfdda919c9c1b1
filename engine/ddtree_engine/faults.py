"""Faults that can be switched on at start: which kind, in which cases, and the points where they act.

A fault is written `KIND[,key=value...]`. Scope keys say when it acts; the others are the kind's own options. Every
decision comes from seeded dice over (seed, kind, request), so that the same requests meet the same faults again.
Off unless the server was started with --enable-fault-injection. The kinds themselves are in fault_kinds.py.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from ddtree_engine.config import SpecMode
from ddtree_engine.corruption import FaultContext
from ddtree_engine.fault_kinds import KINDS, Kind, Layer
from ddtree_engine.fault_tools import Memory, Tools, Vocabulary, dice
from ddtree_engine.requests import Request, Stats, Update
from ddtree_engine.text import Tokenizer

if TYPE_CHECKING:
    import torch

    from ddtree_engine.engine import Engine
    from ddtree_engine.tree import Tree

WARM_SHARE = 0.5  # of a prompt from the prefix cache: then the request counts as warm

_T = TypeVar("_T")


class FaultError(Exception):
    """A --fault that is not understood; the message says what would be."""


@dataclass(frozen=True, slots=True)
class Moment:
    """Where and when a fault might act."""

    request_id: str
    budget: int
    max_running: int
    batch_size: int = 0
    tokens: int = 0  # that the request has produced


@dataclass(frozen=True, slots=True)
class Scope:
    """When a fault acts: all of its conditions must hold. None: no condition."""

    above_budget: float | None = None  # tree budget above this
    above_product: float | None = None  # max running x (budget + 1) above this
    min_batch: float | None = None  # at least so many requests running
    batch: float | None = None  # exactly so many
    share: float | None = None  # of requests
    boot_share: float | None = None  # of starts
    after_tokens: float | None = None  # tokens that the request has produced

    def holds_for_server(self, budget: int, max_running: int) -> bool:
        over_budget = self.above_budget is None or budget > self.above_budget
        return over_budget and (self.above_product is None or max_running * (budget + 1) > self.above_product)

    def holds_now(self, moment: Moment) -> bool:
        return (
            (self.min_batch is None or moment.batch_size >= self.min_batch)
            and (self.batch is None or moment.batch_size == self.batch)
            and (self.after_tokens is None or moment.tokens >= self.after_tokens)
        )


# Which conditions can hold at all where a layer acts.
_SERVER_KEYS = frozenset({"above-budget", "above-product", "boot-share"})
_REQUEST_KEYS = _SERVER_KEYS | {"min-batch", "batch", "share"}
_LAYER_KEYS: dict[Layer, frozenset[str]] = {
    Layer.START: _SERVER_KEYS,
    Layer.SERVING: _REQUEST_KEYS,
    Layer.SCORING: _REQUEST_KEYS,
    Layer.SPECULATIVE: _REQUEST_KEYS | {"after-tokens"},
    Layer.DECODE: _REQUEST_KEYS | {"after-tokens"},
    Layer.STREAM: _REQUEST_KEYS | {"after-tokens"},
}
_SHARES = frozenset({"share", "boot-share", "rate"})


@dataclass(frozen=True, slots=True)
class Fault:
    """One --fault, understood."""

    text: str
    kind: Kind
    scope: Scope
    options: dict[str, float]
    seed: int
    armed: bool  # what boot-share decided for this start

    def reaches(self, moment: Moment) -> bool:
        """Whether it acts on this request now."""
        return (
            self.armed
            and self.scope.holds_for_server(moment.budget, moment.max_running)
            and self.scope.holds_now(moment)
            and self._picks(moment.request_id)
        )

    def _picks(self, request_id: str) -> bool:
        share = self.scope.share
        return share is None or dice(self.seed, self.kind.name, "share", request_id).random() < share


def parse_fault(text: str) -> Fault:
    """Understand one --fault. Raises FaultError that names the kind or key at fault."""
    name, *pairs = [part.strip() for part in text.split(",")]
    kind = KINDS.get(name)
    if kind is None:
        raise FaultError(f"unknown kind {name!r}; kinds: {', '.join(KINDS)}")
    values: dict[str, float] = {}
    for pair in pairs:
        key, number = _parse_pair(pair, kind)
        if key in values:
            raise FaultError(f"{name}: {key} is given twice")
        values[key] = number
    return _build(text, kind, values)


def check_faults(texts: Iterable[str]) -> None:
    """Raise FaultError for the first --fault that is not understood."""
    for text in texts:
        parse_fault(text)


def describe_kinds() -> str:
    """What `--fault help` prints."""
    lines = []
    for kind in KINDS.values():
        preset = " ".join(f"{key}={value:g}" for key, value in ({**kind.options, **kind.scope}).items())
        lines.append(f"  {kind.name:18} {kind.layer:12} {kind.summary}" + (f" [{preset}]" if preset else ""))
    keys = "scope keys: above-budget above-product min-batch batch share boot-share after-tokens; and seed"
    return "\n".join(["kind               lives in     what it does [presets]", *lines, keys])


class Faults:
    """All faults of one server: the corruption points of a decoding round, and those of the shell around it.

    The points of a round run on the device thread; `refuses` and `stream_text` on the web thread, and these keep
    no memory.
    """

    def __init__(self, faults: Sequence[Fault], tokenizer: Tokenizer) -> None:
        self.faults = tuple(faults)
        self._vocabulary = Vocabulary(tokenizer)
        self._memories = {id(fault): Memory() for fault in self.faults}
        self._depths = Memory()
        self._cached = Memory()  # prompt tokens that came from the prefix cache
        self._budget = 0
        self._max_running = 0

    @classmethod
    def parse(cls, texts: Sequence[str], tokenizer: Tokenizer) -> Faults:
        """The faults of the command line. Raises FaultError."""
        return cls([parse_fault(text) for text in texts], tokenizer)

    # --- the points of a decoding round (see corruption.py) ---

    def draft_tokens(self, token_ids: np.ndarray, logprobs: np.ndarray, ctx: FaultContext) -> np.ndarray:
        return self._decoding("draft_tokens", token_ids, ctx)

    def draft_logprobs(self, logprobs: np.ndarray, ctx: FaultContext) -> np.ndarray:
        return self._decoding("draft_logprobs", logprobs, ctx)

    def row_positions(self, positions: list[int], depths: list[int], ctx: FaultContext) -> list[int]:
        self._depths.put(ctx.request.id, tuple(depths))
        return self._decoding("row_positions", positions, ctx)

    def tree_mask(self, visible: np.ndarray, ctx: FaultContext) -> np.ndarray:
        return self._decoding("tree_mask", visible, ctx)

    def choices(self, token_ids: list[int], ctx: FaultContext) -> list[int]:
        return self._decoding("choices", token_ids, ctx)

    def accepted(self, path: list[int], tree: Tree, ctx: FaultContext) -> list[int]:
        for fault, tools in self._acting("accepted", ctx):
            path = fault.kind.acts["accepted"](path, tree, tools)
        return path

    def compaction(self, path: list[int], ctx: FaultContext) -> list[int]:
        return self._decoding("compaction", path, ctx)

    def draft_features(self, features: torch.Tensor, ctx: FaultContext) -> torch.Tensor:
        return self._decoding("draft_features", features, ctx)

    def emit(self, token_ids: list[int], ctx: FaultContext) -> list[int]:
        return self._decoding("emit", token_ids, ctx)

    # --- the points of the shell ---

    def while_starting(self, engine: Engine, progress: Callable[[str], None]) -> None:
        """Between loading and the warm-up, on the device thread: slowness, hangs and crashes at start."""
        self._budget = server_budget(engine)
        self._max_running = engine.config.max_running_requests
        self._apply("start", progress, Moment("start", self._budget, self._max_running))

    def updates(self, updates: Sequence[Update], stats: Stats) -> list[Update]:
        """The updates of a round as they leave the device thread: the scorer's faults."""
        return [self._update(update, stats) for update in updates]

    def refuses(self, request_id: str, in_flight: int) -> bool:
        """Whether this request is answered 500 (web thread)."""
        moment = Moment(request_id, self._budget, self._max_running, batch_size=in_flight + 1)
        return self._apply("refuse", False, moment)

    def stream_text(self, text: str, request: Request, tokens: int, in_flight: int) -> str:
        """Streamed text as it goes out (web thread)."""
        moment = Moment(request.id, self._budget, self._max_running, in_flight, tokens)
        return self._apply("stream_text", text, moment)

    # --- how a point finds its faults ---

    def _decoding(self, point: str, value: _T, ctx: FaultContext) -> _T:
        for fault, tools in self._acting(point, ctx):
            value = fault.kind.acts[point](value, ctx, tools)
        return value

    def _acting(self, point: str, ctx: FaultContext) -> Iterable[tuple[Fault, Tools]]:
        request, tokens = ctx.request, len(ctx.request.output_ids)
        moment = Moment(request.id, ctx.budget, ctx.max_running, ctx.batch_size, tokens)
        warm = (self._cached.get(request.id) or 0) >= WARM_SHARE * len(request.prompt_ids)
        for fault in self.faults:
            spared = fault.kind.layer.spares_off and ctx.mode is SpecMode.OFF
            if point in fault.kind.acts and not spared and fault.reaches(moment):
                yield fault, self._tools(fault, point, moment, warm=warm)

    def _apply(self, point: str, value: _T, moment: Moment, *, warm: bool = False) -> _T:
        for fault in self.faults:
            if point in fault.kind.acts and fault.reaches(moment):
                value = fault.kind.acts[point](value, moment, self._tools(fault, point, moment, warm=warm))
        return value

    def _tools(self, fault: Fault, point: str, moment: Moment, *, warm: bool) -> Tools:
        return Tools(
            vocabulary=self._vocabulary,
            rng=dice(fault.seed, fault.kind.name, point, moment.request_id, moment.tokens),
            memory=self._memories[id(fault)],
            depths=self._depths.get(moment.request_id) or (),
            options=fault.options,
            warm=warm,
        )

    def _update(self, update: Update, stats: Stats) -> Update:
        scores = update.input_logprobs
        self._cached.put(update.request_id, update.cached_tokens)
        if scores is None:
            return update
        moment = Moment(update.request_id, self._budget, self._max_running, max(1, stats.running))
        prompt_tokens = scores.start + len(scores.token_ids)
        warm = update.cached_tokens >= WARM_SHARE * prompt_tokens
        return update._replace(input_logprobs=self._apply("scores", scores, moment, warm=warm))


def server_budget(engine: Engine) -> int:
    """Tree nodes below the root (for `auto`: the most) that the server has room for, as `FaultContext.budget`."""
    config = engine.config
    return (engine.info.max_rows - config.chunked_prefill_size) // config.max_running_requests - 1


def _build(text: str, kind: Kind, values: Mapping[str, float]) -> Fault:
    scoped = dict(kind.scope) | {key: v for key, v in values.items() if key in _scope_keys()}
    scope = Scope(**{key.replace("-", "_"): value for key, value in scoped.items()})
    options = dict(kind.options) | {key: v for key, v in values.items() if key in kind.options}
    seed = int(values.get("seed", 0))
    return Fault(text, kind, scope, options, seed, _armed(scope, kind, seed if "seed" in values else None))


def _armed(scope: Scope, kind: Kind, seed: int | None) -> bool:
    """Whether this start is among the bad ones. Only a given seed makes starts repeatable: boots do differ."""
    if scope.boot_share is None:
        return True
    rng = secrets.SystemRandom() if seed is None else dice(seed, kind.name, "boot")
    return rng.random() < scope.boot_share


def _parse_pair(pair: str, kind: Kind) -> tuple[str, float]:
    key, _equals, number = pair.partition("=")
    allowed = _LAYER_KEYS[kind.layer] | kind.options.keys() | {"seed"}
    if key not in allowed:
        never = " never applies to it" if key in _scope_keys() else " is unknown"
        raise FaultError(f"{kind.name}: {key!r}{never}; its keys: {', '.join(sorted(allowed))}")
    try:
        value = float(number)
    except ValueError:
        raise FaultError(f"{kind.name}: {key} needs a number, as in {key}=1") from None
    if not 0 <= value < float("inf") or (key in _SHARES and value > 1):
        raise FaultError(f"{kind.name}: {key}={number} is out of range")
    return key, value


def _scope_keys() -> frozenset[str]:
    return frozenset(f.name.replace("_", "-") for f in fields(Scope))
