"""Wait until an engine can really serve, or has really died. It starts and stops nothing.

Ready means: `/health` answers 200 *and* one real generation came back. A listed model is not readiness,
and a unit that systemd calls active may be nothing but a process.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddops import stops
from ddops.errors import ConnectionLost, DdopsError, RemoteTimeout
from ddops.state import UnitState

if TYPE_CHECKING:
    from ddops.agent import Agent
    from ddops.journal import Journal
    from ddops.prove.client import EngineClient

# Health is asked often over the open connection (a few ms each), so that ready is seen within 0.3 s;
# the unit is asked less often, since every look starts a process on the host.
HEALTH_SECONDS = 0.2
UNIT_SECONDS = 1.0
LOG_LINES = 200
SHOWN_LINES = 20  # the last ones; more when the line that explains the end stands before them
_SHOWN_AT_MOST = 60
AUTOPSY_SECONDS = 3.0  # within which a process that has crashed is gone, its core written

_PERCENT = re.compile(r"(\d{1,3}(?:\.\d+)?)\s*%")


@dataclass(frozen=True, slots=True)
class Ready:
    """The engine answered a real request."""

    seconds: float
    invocation: str


@dataclass(frozen=True, slots=True)
class Died:
    """The start ended for good: what systemd says, what the log says, and whether the host is to blame.

    `environment` is True for faults that say nothing about the configuration (out of memory, a port that
    is taken): they never make it known-bad.
    """

    seconds: float
    why: str
    lines: tuple[str, ...] = ()
    environment: bool = False
    hung: bool = False


@dataclass(frozen=True, slots=True)
class Taken:
    """The guard, or another operator, has settled the trial while we waited."""


def fraction_of(status: str) -> float | None:
    """`loading weights 41 %` -> 0.41; None when the status names no percentage."""
    found = _PERCENT.search(status)
    if found is None:
        return None
    return min(1.0, float(found.group(1)) / 100)


def wait(
    agent: Agent,
    client: EngineClient,
    journal: Journal,
    *,
    invocation: str,
    budget_seconds: float,
    trial: bool,
) -> Ready | Died | Taken:
    """Poll until the start with this invocation is ready, dead, taken, or out of time.

    Args:
        invocation: the start that counts; another one means a restart, which a trial never has.
            "" takes whatever start is current.
        budget_seconds: the one number that bounds the whole wait.
        trial: True while an undecided trial of ours runs; it may be taken from us.
    """
    begun = time.monotonic()
    next_look = 0.0
    unit = UnitState()
    while (elapsed := time.monotonic() - begun) < budget_seconds:
        stops.check()
        if elapsed >= next_look:
            state, unit = agent.trial()
            next_look = elapsed + UNIT_SECONDS
            if trial and (state is None or not state.open or state.token):
                return Taken()
            invocation = invocation or unit.invocation_id
            _show(journal, agent.config.name, unit, elapsed, budget_seconds)
            if death := _death(unit, invocation):
                return died(agent, invocation, death, elapsed, environment=_from_outside(unit, invocation))
        if serves(client, timeout=agent.config.ready.probe_timeout_seconds):
            return Ready(time.monotonic() - begun, invocation)
        time.sleep(HEALTH_SECONDS)
    said = unit.status_text or unit.sub_state
    why = f"not ready after {budget_seconds:.0f} s (last status: {said})"
    return died(agent, invocation, why, budget_seconds, hung=True)


def serves(client: EngineClient, *, timeout: float) -> bool:
    """Whether the engine is healthy and answers now; not through a connection that breaks meanwhile.

    Whoever waits looks at the host again, and that reconnects, or says that the host stays away.
    """
    try:
        return client.healthy(timeout=5.0) and client.answers(timeout=timeout)
    except (ConnectionLost, RemoteTimeout):
        return False


def _show(journal: Journal, host: str, unit: UnitState, elapsed: float, budget: float) -> None:
    text = unit.status_text or f"{unit.active_state} ({unit.sub_state})"
    journal.emit("phase", host=host, text=text, fraction=fraction_of(unit.status_text), elapsed=elapsed, budget=budget)


def autopsy(agent: Agent, before: UnitState, seconds: float = AUTOPSY_SECONDS) -> Died:
    """What became of an engine that stopped answering in the middle of its proof, with the last lines of its log.

    Args:
        before: the unit as it was while that start still answered.
    """
    begun = time.monotonic()
    while True:
        _, unit = agent.trial()
        elapsed = time.monotonic() - begun
        if death := _death(unit, before.invocation_id):
            break
        if elapsed >= seconds:
            return died(agent, before.invocation_id, "its process has not ended", elapsed, hung=True)
        time.sleep(HEALTH_SECONDS)
    if unit.n_restarts > before.n_restarts:  # nobody else starts an engine in this way
        return died(agent, before.invocation_id, "the engine ended by itself", elapsed)
    outside = _from_outside(unit, before.invocation_id)
    return died(agent, before.invocation_id, death, elapsed, environment=outside)


def _death(unit: UnitState, invocation: str) -> str:
    """Why this start has ended, or "" while it has not."""
    if invocation and unit.invocation_id and unit.invocation_id != invocation:
        return "the engine was started anew while it was waited for"
    if unit.active_state == "failed" or unit.sub_state == "auto-restart":
        return f"the engine ended ({_ended(unit)})"
    if unit.active_state == "inactive" and invocation:
        return f"the engine stopped ({_ended(unit)})"
    return ""


def _from_outside(unit: UnitState, invocation: str) -> bool:
    """Ends that say nothing of the configuration: somebody stopped or restarted it, memory ran out, or systemd
    could not even start it."""
    if invocation and unit.invocation_id and unit.invocation_id != invocation:
        return True
    if unit.active_state == "inactive" or unit.result in ("oom-kill", "resources"):
        return True
    if unit.exec_main_code == 2:  # CLD_KILLED
        return unit.exec_main_status in (9, 15)  # no engine sends itself SIGKILL or SIGTERM
    return unit.exec_main_code == 1 and unit.exec_main_status in _SETUP


# systemd's own set-up failures, systemd.exec(5): the engine never ran.
_SETUP = {200: "chdir", 203: "exec", 208: "stdin", 209: "stdout", 214: "cpu", 217: "user", 226: "namespace"}
_SETUP |= {
    216: "group",
    218: "capabilities",
    228: "seccomp",
    231: "bus",
    238: "state directory",
    243: "credentials",
}


def _ended(unit: UnitState) -> str:
    if unit.exec_main_code in (2, 3):  # CLD_KILLED, CLD_DUMPED
        return f"{unit.result}, signal {unit.exec_main_status}"
    if unit.exec_main_status in _SETUP:
        return f"systemd could not set it up: {_SETUP[unit.exec_main_status]}, status {unit.exec_main_status}"
    return f"{unit.result}, exit status {unit.exec_main_status}"


def died(agent: Agent, invocation: str, why: str, seconds: float, *, hung: bool = False, environment: bool = False) -> Died:
    """Say what this start's own log lines mean; a log that can't be read takes nothing away from `why`."""
    from ddops.engines import profile_of

    try:
        lines = agent.logs(invocation, LOG_LINES)
    except DdopsError as problem:
        return Died(seconds, f"{why}; its log could not be read: {problem.what}", (), environment, hung)
    findings = profile_of(agent.config.engine).classify_log(lines)
    if not findings:
        return Died(seconds, why, tuple(lines[-SHOWN_LINES:]), environment, hung)
    worst = findings[-1]
    return Died(
        seconds,
        f"{why}: {worst.meaning} ({worst.line.strip()[:200]})",
        _shown(lines, worst.number),
        worst.environment or environment,
        hung,
    )


def _shown(lines: list[str], cause: int) -> tuple[str, ...]:
    """The last lines, oldest first, and all from the one that explains the end; what is left out is said."""
    first = min(cause, max(0, len(lines) - SHOWN_LINES))
    if len(lines) - first <= _SHOWN_AT_MOST:
        return tuple(lines[first:])
    last = lines[-SHOWN_LINES:]
    return (lines[cause], f"({len(lines) - len(last) - cause - 1} lines left out)", *last)
