"""The run as Markdown: for --report FILE.md and GitHub's step summary. Pure."""

from __future__ import annotations

import re
from typing import Any

from ddops.report.model import HostRun, Run, not_passed
from ddops.report.samples import exchange
from ddops.report.summary import SHOWN_SAMPLES, counts_line, score
from ddops.report.text import clean, one_line, seconds_text, settings_text

_SPECIAL = re.compile(r"([\\`*_{}\[\]()#+!|~<>])")


def cell(text: object, limit: int = 300) -> str:
    """One line of plain text: nothing in it is markup, a link, a mention or a column."""
    escaped = _SPECIAL.sub(r"\\\1", one_line(text, limit).replace("&", "&amp;"))
    return escaped.replace("\\<", "&lt;").replace("\\>", "&gt;").replace("@", "&#64;")


def fenced(text: str, language: str = "") -> list[str]:
    """A code block whose fence is longer than any run of backticks inside."""
    body = clean(text).strip("\n")
    longest = max((len(found) for found in re.findall(r"`+", body)), default=0)
    fence = "`" * max(3, longest + 1)
    return [f"{fence}{language}", body, fence]


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    return [*lines, *("| " + " | ".join(row) + " |" for row in rows)]


def markdown(run: Run) -> str:
    """The whole report."""
    lines = [f"# ddops {cell(run.run)}", "", f"`{_code(run.command)}`", "", _headline(run), ""]
    if run.halted:
        lines += [f"**Halted**: {cell(run.halted)}", ""]
    rows = [[cell(h.host), cell(h.result), cell(h.outcome.get("what", "")), _score(h)] for h in run.hosts]
    lines += [*table(["host", "result", "what happened", "proof"], rows), ""]
    for host in run.hosts:
        lines += _host(host)
    lines += [f"- warning: {cell(text)}" for text in run.warnings]
    return "\n".join(lines).rstrip() + "\n"


def _code(text: str) -> str:
    return one_line(text, 600).replace("`", "'")


def _headline(run: Run) -> str:
    code = "unfinished" if run.exit is None else f"exit {run.exit}"
    return f"{cell(counts_line(run))}; {code}; {seconds_text(run.seconds)}"


def _score(host: HostRun) -> str:
    return cell(score(host.verdict)) if host.verdict else ""


def _host(host: HostRun) -> list[str]:
    lines = [f"## {cell(host.host)}: {cell(host.result)}", ""]
    for label, key in (("What it means", "means"), ("What to do", "hint")):
        if host.outcome.get(key):
            lines += [f"{label}: {cell(host.outcome[key], 600)}", ""]
    if host.plan.get("settings"):
        lines += [f"Settings: {cell(settings_text(host.plan['settings']))}", ""]
    if host.steps:
        rows = [[cell(s.name), _ok(s.passed), seconds_text(s.seconds)] for s in host.steps]
        lines += [*table(["step", "", "time"], rows), ""]
    for step in host.steps:
        if step.probes:
            lines += [f"### {cell(step.name)}", "", *table(_PROBE_HEAD, [_probe(probe) for probe in step.probes]), ""]
            lines += _samples(step.probes)
        if step.verdict:
            lines += [f"Verdict: **{cell(step.verdict.get('kind'))}** {cell(step.verdict.get('why') or '')}", ""]
            if step.verdict.get("power"):
                lines += [cell(step.verdict["power"], 600), ""]
        if step.died:
            lines += [cell(step.died.get("why")), "", *fenced("\n".join(map(str, step.died["lines"]))), ""]
    for name, key in (("argv", "argv_diff"), ("unit", "diff")):
        if host.plan.get(key):
            lines += [f"Change of the {name}:", "", *fenced(str(host.plan[key]), "diff"), ""]
    lines += [f"- warning: {cell(text)}" for text in host.warnings]
    return [*lines, ""] if host.warnings else lines


def _samples(probes: list[dict[str, Any]]) -> list[str]:
    """What was asked and came, for the first probes that did not pass."""
    shown = [(probe, exchange(probe)) for probe in not_passed({"evidence": probes})]
    lines: list[str] = []
    for probe, said in [(probe, said) for probe, said in shown if said][:SHOWN_SAMPLES]:
        lines += [
            f"{cell(probe.get('probe'))}: {cell(probe.get('detail') or probe.get('got'))}",
            "",
            *fenced("\n".join(said)),
            "",
        ]
    return lines


_PROBE_HEAD = ["probe", "outcome", "expected", "got", "threshold", "n", "time"]


def _probe(probe: dict[str, Any]) -> list[str]:
    keys = ("probe", "outcome", "expected", "got", "threshold", "sample")
    return [*(cell(probe.get(key, ""), 120) for key in keys), seconds_text(probe.get("seconds"))]


def _ok(ok: bool | None) -> str:
    return {True: "ok", False: "failed", None: "unfinished"}[ok]
