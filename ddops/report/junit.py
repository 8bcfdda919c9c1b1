"""JUnit XML: a suite per host, a case per step, probe and verdict, and one for the outcome. Pure.

What could not be decided is an error, not a failure; what was not needed is skipped.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from ddops.report.model import NOT_STARTED, UNCERTAIN, HostRun, Run, Step
from ddops.report.progress import evidence_text
from ddops.report.samples import exchange
from ddops.report.text import clean, one_line

# What XML 1.0 cannot hold even escaped.
_ILLEGAL = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


@dataclass(frozen=True, slots=True)
class Case:
    """One test case; `group` is the step it belongs to, state is "", failure, error or skipped."""

    group: str
    name: str
    seconds: float = 0.0
    state: str = ""
    kind: str = ""
    message: str = ""
    detail: str = ""


def junit(run: Run) -> str:
    """The report as text."""
    from xml.etree import ElementTree

    suites = [(host.host, _numbered(_cases(host))) for host in run.hosts]
    root = ElementTree.Element("testsuites", {"name": "ddops", **_totals([c for _, cases in suites for c in cases])})
    for name, cases in suites:
        suite = ElementTree.SubElement(root, "testsuite", {"name": _xml(name), **_totals(cases)})
        if run.started:
            suite.set("timestamp", _xml(run.started.rstrip("Z")))
        for case in cases:
            attributes = {
                "classname": _xml(f"{name}.{case.group}" if case.group else name),
                "name": _xml(case.name),
                "time": f"{case.seconds:.3f}",
            }
            element = ElementTree.SubElement(suite, "testcase", attributes)
            if case.state:
                state = ElementTree.SubElement(element, case.state, {"message": _xml(case.message)})
                if case.state != "skipped":
                    state.set("type", _xml(case.kind or case.state))
                state.text = _xml(case.detail) or None
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def _xml(text: str) -> str:
    return _ILLEGAL.sub("", clean(text))


def _totals(cases: list[Case]) -> dict[str, str]:
    states = [case.state for case in cases]
    return {
        "tests": str(len(cases)),
        "failures": str(states.count("failure")),
        "errors": str(states.count("error")),
        "skipped": str(states.count("skipped")),
        # What a step contains has its time within that of the step.
        "time": f"{sum(case.seconds for case in cases if not case.group):.3f}",
    }


def _numbered(cases: list[Case]) -> list[Case]:
    """Distinct names: a host may prove twice (the change, then what was restored)."""
    seen: dict[tuple[str, str], int] = {}
    numbered = []
    for case in cases:
        key = (case.group, case.name)
        seen[key] = seen.get(key, 0) + 1
        name = case.name if seen[key] == 1 else f"{case.name} ({seen[key]})"
        numbered.append(Case(case.group, name, case.seconds, case.state, case.kind, case.message, case.detail))
    return numbered


def _cases(host: HostRun) -> list[Case]:
    cases = []
    for step in host.steps:
        cases.append(_step(step))
        cases += [_probe(step, probe, accepted=host.good) for probe in step.probes]
        if step.verdict:
            cases.append(_verdict(step, step.verdict, accepted=host.good))
    return [*cases, _outcome(host)]


def _step(step: Step) -> Case:
    seconds = step.seconds
    detail = "\n".join(clean(line) for line in (step.died or {}).get("lines", []))
    if step.ok is None:
        return Case("", step.name, seconds, "error", "unfinished", "its end was not seen", detail)
    if step.died:
        return Case("", step.name, seconds, "failure", "died", one_line(step.died.get("why")), detail)
    if not step.ok:
        return Case("", step.name, seconds, "failure", "step", f"{step.name} failed", detail)
    return Case("", step.name, seconds)


def _probe(step: Step, probe: dict[str, Any], *, accepted: bool) -> Case:
    outcome, name = str(probe.get("outcome")), str(probe.get("probe", "probe"))
    state = {"pass": "", "fail": "failure", "error": "error", "not_scored": "skipped"}.get(outcome, "failure")
    if outcome == "degraded" and accepted:
        state = ""  # the policy takes it
    seconds = probe.get("seconds")
    return Case(
        step.name,
        name,
        float(seconds) if isinstance(seconds, (int, float)) else 0.0,
        state,
        outcome,
        evidence_text(probe) if state else "",
        _detail(probe, state),
    )


def _detail(probe: dict[str, Any], state: str) -> str:
    shown = exchange(probe) if state in ("failure", "error") else []
    return "\n".join([clean(probe.get("detail") or ""), *shown]).strip() if state else ""


def _verdict(step: Step, verdict: dict[str, Any], *, accepted: bool) -> Case:
    kind = str(verdict.get("kind"))
    state = {"pass": "", "inconclusive": "error"}.get(kind, "failure")
    if kind == "degraded" and accepted:
        state = ""
    why = one_line(verdict.get("why") or kind, 600)
    return Case(step.name, "verdict", 0.0, state, kind, f"{kind}: {why}" if state else "")


def _outcome(host: HostRun) -> Case:
    result = host.result
    words = "\n".join(str(host.outcome[key]) for key in ("what", "means", "hint") if host.outcome.get(key))
    if result in ("unchanged", NOT_STARTED):
        return Case("", "outcome", state="skipped", message=one_line(host.outcome.get("what") or result, 600))
    if host.good:
        return Case("", "outcome")
    state = "error" if result in UNCERTAIN else "failure"
    return Case("", "outcome", 0.0, state, result, one_line(host.outcome.get("what") or result, 600), words)
