"""What a fleet remembers: configurations proven good, found bad or slower than before, merged over its hosts. Looks only.

A memory is keyed by everything that matters (GPU, driver, engine, models, settings): nothing is inferred from
a neighbouring budget, and a pass on one architecture says nothing about another.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import click

from ddops.engines import Settings
from ddops.errors import DdopsError, Exit
from ddops.journal import redact
from ddops.plan.memory import condemns
from ddops.state import Entry, Kind

if TYPE_CHECKING:
    from ddops.session import Session

WORDS = ("good", "bad", "degraded")
_GOOD = (Kind.CONFIRMED, Kind.VERIFIED, Kind.ADOPTED)


@dataclass(slots=True)
class Memory:
    """One key, and what was found about it where. `last` is the latest word."""

    key: dict[str, Any]
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(WORDS, 0))
    hosts: list[str] = field(default_factory=list)
    last: str = ""
    when: str = ""
    why: str = ""

    def to_dict(self) -> dict[str, Any]:
        names = ("key", "last", "hosts", "when", "why")
        return {name: getattr(self, name) for name in names} | self.counts


def merge(ledgers: Mapping[str, Iterable[Entry]]) -> list[Memory]:
    """All memories of a fleet, the newest first.

    Args:
        ledgers: host -> its entries, oldest first.
    """
    found: dict[str, Memory] = {}
    for host, entries in ledgers.items():
        for entry in entries:
            word = _word(entry)
            if not entry.key or not word:
                continue
            memory = found.setdefault(json.dumps(entry.key, sort_keys=True), Memory(entry.key))
            memory.counts[word] += 1
            if host not in memory.hosts:
                memory.hosts.append(host)
            if entry.time >= memory.when:
                memory.when, memory.last = entry.time, word
                memory.why = entry.verdict.get("why", "") or entry.why
    return sorted(found.values(), key=lambda memory: memory.when, reverse=True)


def _word(entry: Entry) -> str:
    """What this entry says of its configuration; "" when it says nothing."""
    if condemns(entry):
        return "bad"
    if entry.kind in _GOOD:
        return "good"
    return "degraded" if entry.kind is Kind.FAILED and entry.verdict.get("kind") == "degraded" else ""


def lines(memories: Sequence[Memory]) -> list[str]:
    """One line a memory for a person: the latest word, the configuration, where, how often, why.

    Where several would read the same, each says in what it differs from the others.
    """
    names = [_name(memory.key) for memory in memories]
    told = []
    for memory, name in zip(memories, names, strict=True):
        twins = [other.key for other, same in zip(memories, names, strict=True) if same == name]
        counts = ", ".join(f"{count} {word}" for word, count in memory.counts.items() if count)
        where = f"{counts} on {', '.join(memory.hosts)}; {memory.when}: {memory.why}"
        told.append(f"{memory.last:<8}  {name}{_differences(memory.key, twins)}  {where}")
    return told


def _name(key: Mapping[str, Any]) -> str:
    where = " ".join(str(key[name]) for name in ("arch", "driver", "engine", "release") if key.get(name))
    return f"{Settings.from_dict(dict(key)).describe()}  [{where}]"


def _differences(key: Mapping[str, Any], twins: Sequence[Mapping[str, Any]]) -> str:
    names = sorted({name for twin in twins for name in twin if any(twin[name] != other.get(name) for other in twins)})
    return f"  ({'; '.join(f'{name} {_value(key.get(name))}' for name in names)})" if names else ""


def _value(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return shlex.join(map(str, value)) or "none"
    return "not known" if value in (None, "") else str(value)[:40]


def show(run: Session, as_json: bool) -> int:
    """Print the fleet's memory; the worst exit code of hosts that did not answer is returned."""
    ledgers: dict[str, tuple[Entry, ...]] = {}
    code = Exit.OK
    for config in run.hosts:
        try:
            with run.connected(config) as agent:
                ledgers[config.name] = agent.look().ledger
        except DdopsError as problem:
            click.echo(redact(str(problem)), err=True)
            code = max(code, problem.exit)
    memories = merge(ledgers)
    if as_json:
        click.echo(json.dumps({"v": 1, "known": [memory.to_dict() for memory in memories]}, indent=2))
    elif memories or code is Exit.OK:  # of hosts that did not answer nothing can be said
        click.echo(redact("\n".join(lines(memories))) or "nothing is known yet")
    return int(code)
