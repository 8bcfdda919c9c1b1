"""One arm's process: started in its own process group, called over JSON lines, stopped (SIGSTOP) while others are measured.

Stopping matters: idle runtimes spin or poll, and on two cores that would be measured in the other arms. Every wait has a
deadline; only groups started here are signalled.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

WORKERS = Path(__file__).resolve().parent / "workers"


class WorkerError(Exception):
    """An arm that did not start, answered with an error, or was too late; the message names its log."""


@dataclass(frozen=True, slots=True)
class Answer:
    value: Any
    own_cpu: float  # seconds of CPU time the arm used
    other_cores: float  # cores that everything else on the machine used meanwhile
    load1: float  # the machine's one-minute load average afterwards


class Worker:
    """Raises WorkerError unless the arm is ready within `deadline` seconds."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], log: Path, deadline: float = 300.0) -> None:
        self._log = log
        begun = time.monotonic()
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**os.environ, **env},
                start_new_session=True,
                cwd=WORKERS,
            )
        try:
            self._read(deadline)
        except WorkerError:
            self.close()
            raise
        self.seconds_to_ready = time.monotonic() - begun
        self.rss_bytes = self._rss()
        self.pause()

    def call(self, do: str, deadline: float = 300.0, **arguments: Any) -> Answer:
        """Wake the arm, ask, put it back to sleep. Raises WorkerError."""
        self._signal(signal.SIGCONT)
        busy, own, begun = _busy_seconds(), self._cpu(), time.monotonic()
        try:
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
            self._process.stdin.flush()
            value = self._read(deadline)
        except OSError as exc:
            raise WorkerError(f"the arm has ended: {exc}; see {self._log}") from exc
        elapsed = max(time.monotonic() - begun, 1e-9)
        used = self._cpu() - own
        others = max(0.0, (_busy_seconds() - busy - used) / elapsed)
        self.rss_bytes = max(self.rss_bytes, self._rss())
        self.pause()
        return Answer(value, used, others, os.getloadavg()[0])

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def close(self) -> None:
        """End the arm and everything it started."""
        self._signal(signal.SIGCONT)
        self._signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        self._signal(signal.SIGKILL)  # the group, in case a child of it stayed
        self._process.wait(10)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe:
                with contextlib.suppress(OSError):
                    pipe.close()

    def _read(self, deadline: float) -> Any:
        """One answer line. The arm writes a line at a time, so a readable pipe holds one soon."""
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            if not selector.select(deadline):
                raise WorkerError(f"no answer within {deadline:.0f} s; see {self._log}")
        line = self._process.stdout.readline()
        if not line:
            raise WorkerError(f"the arm ended without an answer; see {self._log}")
        message = json.loads(line)
        if "error" in message:
            raise WorkerError(f"{message['error']}; see {self._log}")
        return message["ok"]

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _family(self) -> list[psutil.Process]:
        try:
            root = psutil.Process(self._process.pid)
            return [root, *root.children(recursive=True)]
        except psutil.Error:
            return []

    def _rss(self) -> int:
        total = 0
        for process in self._family():
            with contextlib.suppress(psutil.Error):
                total += process.memory_info().rss
        return total

    def _cpu(self) -> float:
        total = 0.0
        for process in self._family():
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                total += times.user + times.system
        return total


def wait_for_quiet(patience: float, cores: float = 0.25) -> bool:
    """Wait until other work uses less than `cores` for half a second; False when it never did within `patience` seconds."""
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        if psutil.cpu_percent(0.5) / 100 * (psutil.cpu_count() or 1) < cores:
            return True
    return False


def _busy_seconds() -> float:
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - getattr(times, "iowait", 0.0) - getattr(times, "guest", 0.0))
