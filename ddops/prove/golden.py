"""Answers recorded on this host with speculation off, and the comparison of today's with them.

For engines whose output nothing else can score: those that refuse prompt log-probabilities. A recording holds the token
ids and, where the engine gives them, how far the second best token was behind, so that a near tie is told from a fault.
It is valid for the same weights on the same host only.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ddops.prove.wire import Ask, Reply

if TYPE_CHECKING:
    from ddops.prove.session import Session

NEAR_TIE = 0.5  # nats between the two best tokens of the recording


@dataclass(frozen=True, slots=True)
class Take:
    """One recorded answer. `gaps`: nats between the best and the second best token at each position (-1: not known)."""

    prompt: str
    max_tokens: int
    text: str
    ids: tuple[int, ...] = ()
    gaps: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Golden:
    """Recorded answers and what they were recorded on."""

    takes: tuple[Take, ...]
    model: str = ""
    source: str = ""  # digest of the unit, or the name of the peer

    def to_json(self) -> str:
        return json.dumps({"v": 1, **asdict(self)}, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> Golden:
        """Raises ValueError for anything that `to_json` would not write."""
        raw = json.loads(text)
        if not isinstance(raw, dict) or raw.get("v") != 1 or not isinstance(raw.get("takes"), list):
            raise ValueError("not a recording of version 1")
        try:
            takes = tuple(Take(**(t | {"ids": tuple(t["ids"]), "gaps": tuple(t["gaps"])})) for t in raw["takes"])
            return cls(takes, str(raw.get("model", "")), str(raw.get("source", "")))
        except (TypeError, KeyError) as exc:
            raise ValueError(f"not a recording: {exc}") from None


def record(session: Session, prompts: Sequence[tuple[str, int]], *, source: str = "", mode: str | None = None) -> Golden:
    """Ask the (prompt, max_tokens) pairs greedily, and keep what came. Speculation must be off, or `mode` "off"."""
    with_scores = asks_for(session, prompts, mode, top_logprobs=2)
    turns = session.send("golden", with_scores)
    if any(t.error is not None for t in turns):
        turns = session.send("golden", asks_for(session, prompts, mode))
    takes = [_take(t.ask, t.reply) for t in turns if t.whole and t.reply is not None]
    return Golden(tuple(takes), session.client.facts().model or "", source)


def asks_for(session: Session, prompts: Sequence[tuple[str, int]], mode: str | None, **more: Any) -> list[tuple[None, Ask]]:
    extra = {"chat_template_kwargs": session.policy.chat_template_kwargs} if session.policy.chat_template_kwargs else {}
    return [(None, Ask.user(p, max_tokens=n, mode=mode, extra=extra, **more)) for p, n in prompts]


def _take(ask: Ask, reply: Reply) -> Take:
    gaps = tuple(s.top[0][0] - s.top[1][0] if len(s.top) > 1 else -1.0 for s in reply.logprobs)
    return Take(ask.messages[0][1], ask.max_tokens, reply.text, reply.ids or (), gaps)


def reference_prompts(session: Session, count: int) -> list[tuple[str, int]]:
    """Prompts worth recording: code and copies."""
    items = [*session.make.standard(), *(session.make.copy(8) for _ in range(max(0, count - 5)))][:count]
    return [(i.prompt, i.max_tokens) for i in items]
