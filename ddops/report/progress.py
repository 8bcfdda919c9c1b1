"""One event as the lines of progress a person reads. Pure; the journal's terminal sinks print them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from ddops.report.text import clean, mapping, one_line, seconds_text, sequence, settings_text

LOG_WIDTH = 300
Event = Mapping[str, Any]


def phase_text(event: Event) -> str:
    """`loading weights 41 % (12 s of 1200 s)`; the share is added when the text does not name it."""
    text = one_line(event.get("text") or "", 120)
    fraction = event.get("fraction")
    if isinstance(fraction, (int, float)) and "%" not in text:
        text = f"{text} {fraction * 100:.0f} %"
    elapsed, budget = seconds_text(event.get("elapsed")), seconds_text(event.get("budget"))
    if elapsed and budget:
        return f"{text} ({elapsed} of {budget})"
    return f"{text} ({elapsed})" if elapsed else text


def evidence_text(evidence: Mapping[str, Any]) -> str:
    """`coding: 5/5 (expected 5/5, threshold 1.0, n=5)`."""
    facts = [f"{name} {evidence[name]}" for name in ("expected", "threshold") if evidence.get(name)]
    if evidence.get("sample"):
        facts.append(f"n={evidence['sample']}")
    said = evidence.get("got") or evidence.get("detail") or ""
    return one_line(f"{evidence.get('probe', 'probe')}: {said}{' (' + ', '.join(facts) + ')' if facts else ''}")


def not_run(evidence: Mapping[str, Any]) -> str:
    """Why a probe was not even begun; one reason does for all that it stopped."""
    detail = str(evidence.get("detail") or "")
    return detail if evidence.get("outcome") == "not_scored" and detail.startswith("not run: ") else ""


def waiting(host: str, step: str, elapsed: float, phase: Event | None) -> str:
    """The line that shows a silent wait goes on."""
    said = f": {phase_text(phase)}" if phase is not None else ""
    return clean(f"{host}  ...   {step}{said or ' (' + seconds_text(elapsed) + ')'}")


def tone(event: Event) -> str:
    """ok, fail, warn or "": what colour may stress, never what it alone says."""
    kind = event.get("event")
    if kind == "step.finished":
        return "ok" if event.get("ok") else "fail"
    if kind == "probe":
        outcome = str(mapping(event.get("evidence")).get("outcome"))
        return {"pass": "ok", "fail": "fail", "error": "fail", "degraded": "warn"}.get(outcome, "")
    if kind == "verdict":
        return "ok" if mapping(event.get("verdict")).get("kind") == "pass" else "fail"
    if kind == "outcome":
        return "ok" if event.get("exit") == 0 else "fail"
    return {"warning": "warn", "halted": "fail", "died": "fail"}.get(str(kind), "")


def mark(event: Event, *, unicode: bool) -> str:
    """The tick of a finished step."""
    if event.get("event") != "step.finished":
        return ""
    if unicode:
        return "✓" if event.get("ok") else "✗"
    return "ok" if event.get("ok") else "FAIL"


def lines(event: Event, *, mark: str = "") -> list[str]:
    """The event's lines; none for those nobody needs to watch."""
    make = _LINES.get(str(event.get("event")))
    host = str(event.get("host") or "")
    made = make(event, mark) if make else []
    return [clean(f"{host}  {line}" if host else line) for line in made]


def _step_finished(event: Event, mark: str) -> list[str]:
    word = mark or ("ok" if event.get("ok") else "FAIL")
    return [f"{word:4}  {event.get('step')}  {seconds_text(event.get('seconds'))}".rstrip()]


def _probe(event: Event, _: str) -> list[str]:
    evidence = mapping(event.get("evidence"))
    if why := not_run(evidence):
        return [f"      not scored {one_line(evidence.get('probe'))} and others: {one_line(why)}"]
    return [f"      {str(evidence.get('outcome', '')).replace('_', ' '):10} {evidence_text(evidence)}"]


def _verdict(event: Event, _: str) -> list[str]:
    verdict = mapping(event.get("verdict"))
    return [f"      verdict: {verdict.get('kind')}{': ' + one_line(verdict['why']) if verdict.get('why') else ''}"]


def _plan(event: Event, _: str) -> list[str]:
    action, settings = event.get("action"), settings_text(event.get("settings"))
    return [f"plan  {one_line(action)}{': ' + settings if settings else ''}"]


def _died(event: Event, _: str) -> list[str]:
    said = [clean(line).replace("\n", " ").rstrip().expandtabs() for line in sequence(event.get("lines"))]
    return [f"FAIL  {one_line(event.get('why'), 600)}", *(f"      | {line[:LOG_WIDTH]}" for line in said)]


_LINES: dict[str, Any] = {
    "step.finished": _step_finished,
    "probe": _probe,
    "verdict": _verdict,
    "plan": _plan,
    "died": _died,
    "phase": lambda event, _: [f"...   {phase_text(event)}"],
    "python": lambda event, _: [f"      {one_line(event.get('text'))}"],
    "warning": lambda event, _: [f"warning: {one_line(event.get('text'))}"],
    "outcome": lambda event, _: [one_line(event.get("result"))],
    "halted": lambda event, _: [f"halted: {one_line(event.get('reason'))}"],
}


class Steps:
    """What one event alone does not tell: a step that ran to its end but whose verdict or engine was bad did not go
    well, and a reason why probes were not run is said once."""

    def __init__(self) -> None:
        self._bad: set[str] = set()
        self._why: dict[str, str] = {}  # host -> the reason that was said last

    def seen(self, event: Event) -> Event:
        """The event as it should be shown."""
        kind, host = event.get("event"), str(event.get("host") or "")
        if kind == "step.started":
            self._bad.discard(host)
            self._why.pop(host, None)
        elif kind == "probe" and (why := not_run(mapping(event.get("evidence")))):
            if self._why.get(host) == why:
                return {**event, "event": "probe.again"}  # which has no line
            self._why[host] = why
        elif kind == "died" or (kind == "verdict" and mapping(event.get("verdict")).get("kind") != "pass"):
            self._bad.add(host)
        elif kind == "step.finished" and host in self._bad:
            self._bad.discard(host)
            return {**event, "ok": False}
        return event


class Sections(ABC):
    """Fold the log by host in a CI's own way (GitLab sections, GitHub groups). One section at a time."""

    def __init__(self) -> None:
        self._open = ""
        self._at = 0

    def around(self, event: Event) -> list[str]:
        """Marker lines to print before the event's own lines."""
        host = str(event.get("host") or "")
        self._at = _unix(event.get("time")) or self._at
        if host == self._open:
            return []
        made = self.close()
        if host:
            self._open = host
            made.append(self._start(host, self._at))
        return made

    def close(self) -> list[str]:
        host, self._open = self._open, ""
        return [self._end(host, self._at)] if host else []

    @abstractmethod
    def _start(self, host: str, at: int) -> str:
        """The line that opens a host's section at a Unix time."""

    @abstractmethod
    def _end(self, host: str, at: int) -> str:
        """The line that closes it."""


def _unix(time: object) -> int:
    try:
        return int(datetime.fromisoformat(str(time)).timestamp())
    except ValueError:
        return 0
