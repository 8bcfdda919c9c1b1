"""The outputs of one command: which sinks its journal has, and what is written when it ends.

Data goes to stdout, everything else to stderr. An output that cannot be written is said and never changes
what happened on a host.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TextIO

from ddops import report as views
from ddops.errors import Exit, UsageError
from ddops.journal.events import Journal, Sink
from ddops.journal.lines import Lines
from ddops.journal.secrets import redact
from ddops.journal.sinks import Collector, Ndjson
from ddops.report.github import GitHubGroups
from ddops.report.gitlab import GitLabSections
from ddops.report.progress import Sections

# A command that only looks shows no steps, but what was decided along the way must be seen.
QUIET = frozenset({"warning"})


class Outputs:
    """Where a run's events and reports go.

    Args:
        as_json: one JSON object on stdout instead of the summary.
        events: a file for NDJSON, or "-" for stdout.
        junit, report: files to write at the end; the report is Markdown or HTML by its ending.
        quiet: no progress, only warnings.

    Raises:
        UsageError: two outputs on stdout, a report of unknown kind, a folder that does not exist.
    """

    def __init__(
        self,
        *,
        as_json: bool = False,
        events: str | None = None,
        junit: str | None = None,
        report: str | None = None,
        quiet: bool = False,
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        if as_json and events == "-":
            raise UsageError(
                "--json and --events - both write to stdout",
                means="nothing was done",
                hint="give --events a file",
            )
        if report is not None and not report.endswith((".md", ".html")):
            raise UsageError(
                f"--report {report}: the kind of report is not known",
                means="nothing was done",
                hint="end its name with .md or .html",
            )
        for option, path in (("--junit", junit), ("--report", report)):
            check_writable(option, path)
        self._as_json = as_json
        self._events = events
        self._junit = junit
        self._report = report
        self._quiet = quiet
        self._environ = environ
        self._collector = Collector()
        self._journal: Journal | None = None

    def journal(self, run: str) -> Journal:
        """The run's journal, with every sink. Raises UsageError when the events file cannot be written."""
        sinks: list[Sink] = [self._collector]
        if self._events is not None:
            sinks.append(Ndjson.open(self._events, run))
        sinks.append(self._view())
        self._journal = Journal(run, sinks)
        return self._journal

    @property
    def events(self) -> list[dict[str, object]]:
        return self._collector.events

    def _view(self) -> Sink:
        if self._quiet:
            return Lines(sys.stderr, only=QUIET)
        if sys.stderr.isatty() and self._environ.get("TERM", "") not in ("", "dumb") and not self._in_ci():
            from ddops.journal.screen import Screen

            return Screen(sys.stderr)
        return Lines(sys.stderr, sections=self._sections())

    def _in_ci(self) -> bool:
        return bool(self._environ.get("GITHUB_ACTIONS") or self._environ.get("GITLAB_CI"))

    def _sections(self) -> Sections | None:
        if self._environ.get("GITHUB_ACTIONS") == "true":
            return GitHubGroups()
        return GitLabSections() if self._environ.get("GITLAB_CI") == "true" else None

    def write(self) -> None:
        """Close the sinks and write everything that is made at the end."""
        if self._journal is not None:
            self._journal.close()
        run = views.fold(self._collector.events)
        stdout_taken = self._as_json or self._events == "-"
        summary = views.summary(run)
        if self._environ.get("GITHUB_ACTIONS") == "true":
            summary = views.for_ci(summary)
            _say(sys.stderr, "".join(line + "\n" for line in views.annotate(run)))
        failed = run.exit not in (None, int(Exit.OK), int(Exit.CHANGES))  # an error is no data: it goes to stderr
        _say(sys.stderr if stdout_taken or failed else sys.stdout, summary)
        if self._as_json:
            _say(sys.stdout, json.dumps(views.document(run), indent=2, ensure_ascii=False, allow_nan=False) + "\n")
        if self._junit:
            _save(self._junit, lambda: views.junit(run))
        if self._report:
            made = views.html if self._report.endswith(".html") else views.markdown
            _save(self._report, lambda: made(run))
        if path := self._environ.get("GITHUB_STEP_SUMMARY"):
            _save(path, lambda: views.step_summary(run), append=True)
        if path := self._environ.get("GITHUB_OUTPUT"):
            _save(path, lambda: "".join(line + "\n" for line in views.outputs(run)), append=True)


def check_writable(option: str, path: str | None) -> None:
    """A report nobody can write is found out before a host is touched, not after."""
    if path is None:
        return
    folder = Path(path).parent
    if not folder.is_dir() or Path(path).is_dir() or not os.access(folder, os.W_OK):
        raise UsageError(
            f"{option} {path} cannot be written there",
            means="nothing was done",
            hint=f"make the folder {folder} first, or name another file",
        )


def _say(stream: TextIO, text: str) -> None:
    try:
        stream.write(redact(text))
        stream.flush()
    except (OSError, ValueError):
        # The reader has gone (a closed pipe). Python would complain once more at its own exit.
        with contextlib.suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)


def _save(path: str, make: Callable[[], str], *, append: bool = False) -> None:
    try:
        with Path(path).open("a" if append else "w", encoding="utf-8") as file:
            file.write(redact(make()))
    except OSError as exc:
        _say(sys.stderr, f"warning: {path} could not be written: {exc.strerror or exc}\n")
