"""Progress as plain lines: for pipelines, log files and dumb terminals. One event, at most a few lines.

While something is waited for, at most one line every 30 s says so: CI systems kill silent jobs.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TextIO

from ddops.journal.events import Event
from ddops.report import progress
from ddops.report.text import for_ci

HEARTBEAT_SECONDS = 30.0


class Lines:
    """A sink that writes lines to a stream (stderr).

    Args:
        only: the events that are shown; None shows all that have a line. Commands that only look show
            warnings alone.
        sections: how the CI folds its log, if it does.
        clock: seconds; for tests.
    """

    name = "the terminal"

    def __init__(
        self,
        stream: TextIO,
        *,
        only: frozenset[str] | None = None,
        sections: progress.Sections | None = None,
        heartbeat_seconds: float = HEARTBEAT_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream = stream
        self._only = only
        self._sections = sections
        self._steps = progress.Steps()
        self._heartbeat = heartbeat_seconds
        self._clock = clock
        self._lock = threading.RLock()
        self._spoke = clock()
        self._open: dict[str, tuple[str, float]] = {}  # host -> the step under way and when it began
        self._phase: dict[str, Event] = {}  # host -> the last phase of that step
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def write(self, event: Event) -> None:
        with self._lock:
            if self._only is not None and event["event"] not in self._only:
                return
            event = dict(self._steps.seen(event))
            self._track(event)
            if self._sections is not None:
                self._say(self._sections.around(event), raw=True)
            if event["event"] == "phase":
                self._say_phase(event)
            else:
                self._say(progress.lines(event))

    def close(self) -> None:
        self._stopped.set()
        with self._lock:
            thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            thread.join(2)
        if self._sections is not None:
            self._say(self._sections.close(), raw=True)

    def beat(self) -> None:
        """Say what is waited for, when nothing was said for a while."""
        with self._lock:
            now = self._clock()
            if not self._open or now - self._spoke < self._heartbeat:
                return
            host, (step, begun) = next(reversed(self._open.items()))
            last = self._phase.get(host)
            self._say([progress.waiting(host, step, now - begun, last)])

    def _track(self, event: Event) -> None:
        host = event["host"] or ""
        if event["event"] == "step.started":
            self._open[host] = (str(event.get("step")), self._clock())
            self._start_beating()
        elif event["event"] in ("step.finished", "outcome"):
            self._open.pop(host, None)
            self._phase.pop(host, None)
        elif event["event"] in ("probe", "probe.again", "verdict"):  # what was waited for before has come
            self._phase.pop(host, None)

    def _say_phase(self, event: Event) -> None:
        host = event["host"] or ""
        first = host not in self._phase
        self._phase[host] = event
        if first or self._clock() - self._spoke >= self._heartbeat:
            self._say(progress.lines(event))

    def _say(self, lines: list[str], *, raw: bool = False) -> None:
        for line in lines:
            self._stream.write((line if raw else for_ci(line)) + "\n")
        if lines:
            self._stream.flush()
            self._spoke = self._clock()

    def _start_beating(self) -> None:
        if self._thread is None and not self._stopped.is_set():
            self._thread = threading.Thread(target=self._beating, name="ddops-heartbeat", daemon=True)
            self._thread.start()

    def _beating(self) -> None:
        while not self._stopped.wait(min(1.0, self._heartbeat / 4)):
            try:
                self.beat()
            except (OSError, ValueError):
                return  # the stream is gone; the next event finds that out as well
