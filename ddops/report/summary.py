"""The last words of a run on a terminal: what happened, what it means, what to do. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ddops.report.model import GOOD, HostRun, Run, not_passed
from ddops.report.progress import evidence_text
from ddops.report.samples import exchange, reason
from ddops.report.text import clean, count_text, mapping, one_line, sequence, settings_text

# The names under which probes report their speed, best first.
SPEED_KEYS = ("throughput", "coding_tokens_per_second")
SHOWN_EVIDENCE = 5
SHOWN_SAMPLES = 2


def summary(run: Run) -> str:
    """All hosts' outcomes, then one line that counts them when there are several."""
    blocks = [_host_block(host) for host in run.hosts if host.outcome]
    tail = []
    if run.halted:
        tail.append(f"halted: {one_line(run.halted)}")
        if run.left:
            tail.append(f"not started: {one_line(', '.join(run.left), 600)}")
    if len(run.hosts) > 1:
        tail.append(counts_line(run))
    return "\n\n".join(block for block in [*blocks, "\n".join(tail)] if block) + "\n"


def counts_line(run: Run) -> str:
    """`8 hosts: 5 applied, 1 rolled-back, 2 not-started`."""
    parts = ", ".join(f"{number} {result}" for result, number in run.counts.items())
    return f"{count_text(len(run.hosts), 'host')}: {parts}"


def _host_block(host: HostRun) -> str:
    outcome, verdict = host.outcome, host.verdict
    good = host.result in GOOD
    lines = [f"{'' if good else 'error: '}{one_line(outcome.get('what') or host.result, 600)}"]
    indent = "       "
    if verdict and good:
        lines.append(indent + score(verdict))
    if verdict and not good:
        lines += [indent + line for line in wrong([host.with_replay(item) for item in not_passed(verdict)])]
    if outcome.get("means"):
        lines.append(indent + one_line(outcome["means"], 600))
    if host.result == "planned":
        lines += _plan_lines(host)
    if outcome.get("hint"):
        lines.append(f"hint:  {one_line(outcome['hint'], 600)}")
    return "\n".join(line.rstrip() for line in lines)


def wrong(evidence: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """A line for each probe that did not pass; for the first of them also why, what was asked and what came."""
    told: list[list[str]] = []
    for number, item in enumerate(evidence[:SHOWN_EVIDENCE]):
        yield evidence_text(item)
        if number < SHOWN_SAMPLES:
            again = (found := exchange(item)) in told  # the same reply tells of several probes
            yield from ("  " + line for line in [*reason(item), *([] if again else found)])
            told.append(found)


def score(verdict: Mapping[str, Any]) -> str:
    """`5/5 passed, 301.2 tok/s avg; 9 of 9 probes passed, 2 not scored`: the coding check in its own words, then
    how many of the probes that measured something are good."""
    items = [mapping(item) for item in sequence(verdict.get("evidence"))]
    measured = [item for item in items if item.get("outcome") in ("pass", "fail", "degraded")]
    passed = sum(item.get("outcome") == "pass" for item in measured)
    lead = [one_line(item["got"], 120) for item in measured if item.get("probe") == "coding" and item.get("got")]
    speed = speed_of(items)
    if not lead and speed is not None:
        lead = [f"{speed:.1f} tok/s avg"]
    skipped = sum(item.get("outcome") == "not_scored" for item in items)
    counted = f"{passed} of {count_text(len(measured), 'probe')} passed"
    return "; ".join([*lead[:1], counted + (f", {skipped} not scored" if skipped else "")])


def speed_of(evidence: list[dict[str, Any]]) -> float | None:
    """The measured tokens per second, if a probe reported one."""
    for key in SPEED_KEYS:
        for item in evidence:
            value = mapping(item.get("values")).get(key)
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                return float(value)
    return None


def _plan_lines(host: HostRun) -> list[str]:
    """A dry run's findings: every setting with where it comes from, and both differences."""
    made = host.plan or mapping(mapping(host.outcome.get("facts")).get("plan"))
    sources = mapping(made.get("sources"))
    lines = []
    for key, value in mapping(made.get("settings")).items():
        if value is not None:
            source = f"  ({one_line(sources[key])})" if key in sources else ""
            lines.append(f"       {settings_text({key: value})}{source}")
    for name, key in (("argv", "argv_diff"), ("unit", "diff")):
        text = clean(made.get(key) or "").strip("\n")
        if text:
            lines += ["", f"{name}:", *("  " + line for line in text.splitlines())]
    return lines
