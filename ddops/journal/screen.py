"""Progress on a terminal: finished steps with ticks, and a live line with a bar for what is under way.

rich is imported here and only when a terminal is there. Meaning is never in colour alone.
"""

from __future__ import annotations

import threading
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Column
from rich.text import Text

from ddops.journal.events import Event
from ddops.report import progress
from ddops.report.text import clean

_STYLES = {"ok": "green", "fail": "bold red", "warn": "yellow", "": ""}


class _Bar(BarColumn):
    """A bar only where a share is known: a guess would be a lie."""

    def render(self, task: Any) -> Any:
        return super().render(task) if task.total else Text("")


class Screen:
    """A sink for a terminal on stderr."""

    name = "the terminal"

    def __init__(self, stream: TextIO, *, console: Console | None = None) -> None:
        # NO_COLOR is honoured by the console itself.
        self._console = console or Console(file=stream, highlight=False, markup=False, emoji=False)
        self._unicode = (self._console.encoding or "").lower().startswith("utf")
        columns: list[ProgressColumn] = [
            SpinnerColumn(spinner_name="dots" if self._unicode else "line"),
            TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis")),
            _Bar(bar_width=24),
            TimeElapsedColumn(),
        ]
        self._progress = Progress(*columns, console=self._console, transient=True, redirect_stdout=False, redirect_stderr=False)
        self._lock = threading.RLock()
        self._steps = progress.Steps()
        self._tasks: dict[str, tuple[TaskID, str]] = {}  # host -> live line and its step

    def write(self, event: Event) -> None:
        with self._lock:
            event = dict(self._steps.seen(event))
            kind, host = event["event"], event["host"] or ""
            if kind == "step.started":
                self._begin(host, str(event.get("step")))
            elif kind == "phase":
                self._move(host, event)
            else:
                if kind in ("step.finished", "outcome", "run.finished"):
                    self._end(host)
                elif kind in ("probe", "verdict"):
                    self._rest(host)  # what was waited for before has come
                self._print(event)

    def close(self) -> None:
        with self._lock:
            self._progress.stop()

    def _begin(self, host: str, step: str) -> None:
        self._end(host)
        self._tasks[host] = (self._progress.add_task(clean(f"{host}  {step}"), total=None), step)
        self._progress.start()

    def _move(self, host: str, event: Event) -> None:
        if host not in self._tasks:
            self._begin(host, "waiting")
        task, step = self._tasks[host]
        fraction = event.get("fraction")
        text = clean(f"{host}  {step}: {progress.phase_text(event)}")
        if isinstance(fraction, (int, float)):
            self._progress.update(task, description=text, total=1.0, completed=max(0.0, min(1.0, fraction)))
        else:
            self._progress.update(task, description=text, total=None)

    def _rest(self, host: str) -> None:
        task, step = self._tasks.get(host, (None, ""))
        if task is not None:
            self._progress.update(task, description=clean(f"{host}  {step}"), total=None)

    def _end(self, host: str) -> None:
        task, _ = self._tasks.pop(host, (None, ""))
        if task is not None:
            self._progress.remove_task(task)
        if not self._tasks:
            self._progress.stop()

    def _print(self, event: Event) -> None:
        tone = progress.tone(event)
        mark = progress.mark(event, unicode=self._unicode)
        for number, line in enumerate(progress.lines(event, mark=mark)):
            self._console.print(Text(line, style=_STYLES[tone] if number == 0 else ""), soft_wrap=True)
