"""What a fleet remembers: configurations proven good and found bad, merged over its hosts. Looks only.

A memory is keyed by everything that matters (GPU, driver, engine, models, settings): nothing is inferred from
a neighbouring budget, and a pass on one architecture says nothing about another.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
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

_GOOD = (Kind.CONFIRMED, Kind.VERIFIED, Kind.ADOPTED)


@dataclass(slots=True)
class Memory:
    """One key, and what was found about it where. `last` is the latest word."""

    key: dict[str, Any]
    good: int = 0
    bad: int = 0
    hosts: list[str] = field(default_factory=list)
    last: str = ""
    when: str = ""
    why: str = ""

    def to_dict(self) -> dict[str, Any]:
        names = ("key", "last", "good", "bad", "hosts", "when", "why")
        return {name: getattr(self, name) for name in names}


def merge(ledgers: Mapping[str, Iterable[Entry]]) -> list[Memory]:
    """All memories of a fleet, the newest first.

    Args:
        ledgers: host -> its entries, oldest first.
    """
    found: dict[str, Memory] = {}
    for host, entries in ledgers.items():
        for entry in entries:
            bad = condemns(entry)
            if not entry.key or not (bad or entry.kind in _GOOD):
                continue
            memory = found.setdefault(json.dumps(entry.key, sort_keys=True), Memory(entry.key))
            memory.good += not bad
            memory.bad += bad
            if host not in memory.hosts:
                memory.hosts.append(host)
            if entry.time >= memory.when:
                memory.when, memory.last = entry.time, "bad" if bad else "good"
                memory.why = entry.verdict.get("why", "") or entry.why
    return sorted(found.values(), key=lambda memory: memory.when, reverse=True)


def line(memory: Memory) -> str:
    """One memory for a person: the latest word, the configuration, where, how often, why."""
    key = memory.key
    where = " ".join(str(key[name]) for name in ("arch", "driver", "engine", "release") if key.get(name))
    settings = Settings.from_dict(key).describe()
    counts = f"{memory.good} good, {memory.bad} bad"
    return f"{memory.last:<4}  {settings}  [{where}]  {counts} on {', '.join(memory.hosts)}; {memory.when}: {memory.why}"


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
    else:
        click.echo("\n".join(map(line, memories)) or "nothing is known yet")
    return int(code)
