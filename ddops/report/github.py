"""GitHub Actions: annotations, the step summary, outputs and log groups. Pure.

GitHub shows ten annotations of a kind per step, so nine hosts are named and the rest are counted.
"""

from __future__ import annotations

from collections.abc import Sequence

from ddops.report.markdown import markdown
from ddops.report.model import NOT_STARTED, Run
from ddops.report.progress import Sections
from ddops.report.text import clean, count_text, one_line

SHOWN = 9
SUMMARY_LIMIT_BYTES = 1_048_576


class GitHubGroups(Sections):
    """A log group per host."""

    def _start(self, host: str, at: int) -> str:
        return f"::group::{escape(one_line(host))}"

    def _end(self, host: str, at: int) -> str:
        return "::endgroup::"


def escape(text: object) -> str:
    """A message: no character of it can end the command it stands in."""
    return clean(text).replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def escape_property(text: object) -> str:
    return escape(text).replace(":", "%3A").replace(",", "%2C")


def annotate(run: Run) -> list[str]:
    """One error per host that did not end well, one warning per warning; nine of each and "and N more"."""
    errors = [
        _annotation("error", f"ddops: {host.host} {host.result}", _words(host.outcome) or host.result)
        for host in run.hosts
        if not host.good and host.result != NOT_STARTED
    ]
    if run.halted:
        errors.insert(0, _annotation("error", "ddops: halted", run.halted))
    warnings = [_annotation("warning", f"ddops: {host.host}", text) for host in run.hosts for text in host.warnings]
    warnings += [_annotation("warning", "ddops", text) for text in run.warnings]
    return [*_limited("error", errors), *_limited("warning", warnings)]


def _words(outcome: dict[str, object]) -> str:
    return "\n".join(str(outcome[key]) for key in ("what", "means", "hint") if outcome.get(key))


def _annotation(kind: str, title: str, text: str) -> str:
    return f"::{kind} title={escape_property(one_line(title, 120))}::{escape(text)}"


def _limited(kind: str, lines: Sequence[str]) -> list[str]:
    # The tenth one is the last GitHub shows, and it says how many there are besides.
    if len(lines) <= SHOWN:
        return list(lines)
    return [*lines[:SHOWN], _annotation(kind, "ddops", f"and {len(lines) - SHOWN} more; see the job summary")]


def step_summary(run: Run) -> str:
    """Markdown for $GITHUB_STEP_SUMMARY, under its limit of 1 MiB."""
    text = markdown(run)
    if len(text.encode()) <= SUMMARY_LIMIT_BYTES:
        return text
    note = "\n\n(cut off: over GitHub's limit of 1 MiB; use --report for all of it)\n"
    return text.encode()[: SUMMARY_LIMIT_BYTES - len(note) - 16].decode("utf-8", "ignore") + note


def outputs(run: Run) -> list[str]:
    """Lines for $GITHUB_OUTPUT. Every value is one line."""
    good = [host.host for host in run.hosts if host.good]
    bad = [host.host for host in run.hosts if not host.good]
    return [
        f"run={one_line(run.run)}",
        f"result={one_line(run.result)}",
        f"exit={'' if run.exit is None else run.exit}",
        f"hosts-good={one_line(' '.join(good), 10_000)}",
        f"hosts-not-good={one_line(' '.join(bad), 10_000)}",
        f"summary={one_line(', '.join(count_text(n, 'host') + ' ' + result for result, n in run.counts.items()))}",
    ]
