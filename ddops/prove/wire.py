"""What goes over the wire to an engine and what comes back, as plain values: requests, replies, scores, errors. Pure.

How replies are read from JSON is in replies.py, how they get here in transport.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ddops.prove.dialects import Meta


class EngineError(Exception):
    """The engine did not give what was asked for."""


class Unsupported(EngineError):
    """The engine refuses or lacks this (4xx): a probe that needs it is not scored."""


class Denied(Unsupported):
    """The engine wants a key, or another one (401, 403)."""


class Rejected(Unsupported):
    """The engine does not take this body (400, 422): maybe a field of it is unknown there."""


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
    openai: bool = False  # a raw prompt by /v1/completions, also where there is /generate
    cancel_after_chunks: int = 0  # >0: hang up after so many chunks
    top_logprobs: int = 0  # >0: ask for the output tokens' log-probabilities
    extra: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def user(cls, content: str, **options: Any) -> Ask:
        return cls(messages=(("user", content),), **options)

    @property
    def streamed(self) -> bool:
        return bool(self.stream or self.cancel_after_chunks)

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
