"""Fold a run's events into one picture of it: hosts, steps, probes, verdicts, outcome. Pure.

It takes what is there: an event stream may be cut off, or come from a newer version.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from ddops.report.text import mapping, sequence

GOOD = frozenset({"applied", "unchanged", "verified", "planned"})
UNCERTAIN = frozenset({"unknown", "inconclusive", "locked", "host-key", "interrupted", "refused"})
NOT_STARTED = "not-started"


@dataclass(slots=True)
class Step:
    """One step on one host. ok None: it was begun and its end was not seen."""

    name: str
    ok: bool | None = None
    seconds: float = 0.0
    probes: list[dict[str, Any]] = field(default_factory=list)
    verdict: dict[str, Any] | None = None
    died: dict[str, Any] | None = None

    @property
    def passed(self) -> bool | None:
        """Ran to its end, and neither its verdict nor the engine's death says otherwise."""
        bad = self.died is not None or (self.verdict or {"kind": "pass"}).get("kind") != "pass"
        return False if bad else self.ok


@dataclass(slots=True)
class HostRun:
    """One host's part of the run."""

    host: str
    steps: list[Step] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    plan: dict[str, Any] = field(default_factory=dict)
    outcome: dict[str, Any] = field(default_factory=dict)

    @property
    def result(self) -> str:
        return str(self.outcome.get("result") or ("unknown" if self.steps else NOT_STARTED))

    @property
    def good(self) -> bool:
        return self.result in GOOD

    @property
    def probes(self) -> list[tuple[Step, dict[str, Any]]]:
        return [(step, probe) for step in self.steps for probe in step.probes]

    @property
    def verdict(self) -> dict[str, Any] | None:
        """The verdict the outcome rests on: that of the change, not of the baseline or the restored state."""
        told = mapping(mapping(self.outcome.get("facts")).get("verdict"))
        if told:
            return told
        verdicts = [(step.name, step.verdict) for step in self.steps if step.verdict]
        of_change = [verdict for name, verdict in verdicts if name == "prove"]
        return of_change[-1] if of_change else (verdicts[-1][1] if verdicts else None)

    def with_replay(self, item: Mapping[str, Any]) -> dict[str, Any]:
        """A piece of a verdict's evidence with the requests it rests on, which only its own event carries."""
        same = ("probe", "outcome", "got", "detail")
        told = (probe for _, probe in self.probes if all(probe.get(key) == item.get(key) for key in same))
        return next(told, dict(item))

    def step(self) -> Step:
        """The step that events without one belong to."""
        if not self.steps:
            self.steps.append(Step("run"))
        return self.steps[-1]


@dataclass(slots=True)
class Run:
    """The whole run."""

    run: str = ""
    command: str = ""
    started: str = ""
    finished: str = ""
    exit: int | None = None
    halted: str = ""  # why no further host was started
    left: list[str] = field(default_factory=list)  # the hosts that were not started then
    warnings: list[str] = field(default_factory=list)
    hosts: list[HostRun] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        try:
            begun, ended = (datetime.fromisoformat(text) for text in (self.started, self.finished))
        except ValueError:
            return 0.0
        return round((ended - begun).total_seconds(), 3)

    @property
    def counts(self) -> dict[str, int]:
        """How many hosts ended how, in order of first appearance."""
        found: dict[str, int] = {}
        for host in self.hosts:
            found[host.result] = found.get(host.result, 0) + 1
        return found

    @property
    def result(self) -> str:
        """The one result all hosts share, or "mixed"."""
        return next(iter(self.counts)) if len(self.counts) == 1 else ("mixed" if self.counts else "")

    def host(self, name: str) -> HostRun:
        found = next((host for host in self.hosts if host.host == name), None)
        if found is None:
            found = HostRun(name)
            self.hosts.append(found)
        return found


def fold(events: Iterable[Mapping[str, Any]]) -> Run:
    """The run the events tell of."""
    run = Run()
    for event in events:
        run.run = run.run or str(event.get("run") or "")
        run.finished = str(event.get("time") or run.finished)
        kind, host = str(event.get("event")), event.get("host")
        if host:
            _fold_host(run.host(str(host)), kind, event)
        elif kind == "run.started":
            run.command, run.started = str(event.get("command") or ""), str(event.get("time") or "")
            for name in sequence(event.get("hosts")):
                run.host(str(name))
        elif kind == "run.finished":
            code = event.get("exit")
            run.exit = code if isinstance(code, int) else None
        elif kind == "halted":
            run.halted = str(event.get("reason") or "")
            run.left = [str(name) for name in sequence(event.get("left"))]
        elif kind == "warning":
            run.warnings.append(str(event.get("text") or ""))
    return run


def _fold_host(host: HostRun, kind: str, event: Mapping[str, Any]) -> None:
    if kind == "step.started":
        host.steps.append(Step(str(event.get("step") or "step")))
    elif kind == "step.finished":
        _finish(host, event)
    elif kind == "probe":
        host.step().probes.append(mapping(event.get("evidence")))
    elif kind == "verdict":
        host.step().verdict = mapping(event.get("verdict"))
    elif kind == "died":
        host.step().died = {"why": event.get("why"), "lines": sequence(event.get("lines"))}
    elif kind == "warning":
        host.warnings.append(str(event.get("text") or ""))
    elif kind == "plan":
        host.plan = {key: value for key, value in event.items() if key not in ("v", "seq", "time", "run", "event")}
    elif kind == "outcome":
        host.outcome = {key: event[key] for key in ("result", "exit", "what", "means", "hint", "facts") if key in event}


def _finish(host: HostRun, event: Mapping[str, Any]) -> None:
    name = str(event.get("step") or "step")
    open_step = next((step for step in reversed(host.steps) if step.name == name and step.ok is None), None)
    if open_step is None:
        open_step = Step(name)
        host.steps.append(open_step)
    seconds = event.get("seconds")
    open_step.ok = bool(event.get("ok"))
    open_step.seconds = float(seconds) if isinstance(seconds, (int, float)) else 0.0


def not_passed(verdict: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The evidence that speaks against a verdict, worst first."""
    order = {"fail": 0, "error": 1, "degraded": 2}
    items = [mapping(item) for item in sequence(verdict.get("evidence"))]
    bad = [item for item in items if str(item.get("outcome")) in order]
    return sorted(bad, key=lambda item: order[str(item.get("outcome"))])
