"""Sends the requests of a saved verdict again and says which replies are the same, and which are right.

For looking into a finding after the run: the evidence holds requests, ids and replies. It reaches no verdict.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from ddops.prove import prompts
from ddops.prove.evidence import Evidence, Verdict
from ddops.prove.prompts import Item, Kind
from ddops.prove.wire import Ask, EngineError

if TYPE_CHECKING:
    from ddops.prove.client import EngineClient


@dataclass(frozen=True, slots=True)
class Replayed:
    """One request sent again. `right` is None for code, which only a battery run executes."""

    probe: str
    label: str
    before: str
    now: str
    same: bool  # the same ids, or the same text where there are no ids
    right: bool | None
    error: str = ""


def load(text: str) -> tuple[Evidence, ...]:
    """Evidence of a saved verdict. Raises ValueError when the text is no verdict."""
    return Verdict.from_json(text).evidence


def replay(client: EngineClient, evidence: Iterable[Evidence], *, workers: int = 8, mode: str | None = None) -> list[Replayed]:
    """Send every kept request again, `workers` at a time.

    Args:
        mode: off, chain or tree in place of the mode that was used (where the engine can switch).
    """
    jobs = [(e.probe, turn) for e in evidence for turn in e.replay]
    with ThreadPoolExecutor(max_workers=workers) as pool:
        return list(pool.map(lambda job: _one(client, job[0], job[1], mode), jobs))


def _one(client: EngineClient, probe: str, turn: Mapping[str, Any], mode: str | None) -> Replayed:
    label, before = str(turn.get("label", "")), str(turn.get("text", ""))
    try:
        reply = client.ask(ask_from(turn.get("ask", {}), mode))
    except EngineError as exc:
        return Replayed(probe, label, before, "", same=False, right=None, error=f"{type(exc).__name__.lower()}: {exc}")
    ids = tuple(turn.get("ids", ()))
    same = reply.ids == ids if ids and reply.ids else reply.text == before
    return Replayed(probe, label, before, reply.text, same, _right(turn, reply.text))


def ask_from(raw: Mapping[str, Any], mode: str | None = None) -> Ask:
    """The request as it was saved. Raises ValueError for keys that no request has."""
    unknown = set(raw) - {f.name for f in fields(Ask)}
    if unknown:
        raise ValueError(f"a saved request has an unknown key {sorted(unknown)[0]!r}")
    values = dict(raw)
    values["messages"] = tuple((str(role), str(content)) for role, content in raw.get("messages", ()))
    values["ids"] = tuple(raw.get("ids", ()))
    values["cancel_after_chunks"] = 0  # a replay waits for whole replies
    return Ask(**(values | ({"mode": mode} if mode else {})))


def _right(turn: Mapping[str, Any], text: str) -> bool | None:
    kind = turn.get("kind")
    if kind not in set(Kind) or not isinstance(turn.get("expect"), Mapping):
        return None
    found = prompts.check(Item(Kind(kind), "", dict(turn["expect"])), text)
    return None if found is None else found.ok
