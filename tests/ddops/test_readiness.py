"""Ready is seen at once, death is final at once, and no wait lasts longer than its budget."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest

from ddops import inventory, readiness
from ddops.errors import ConnectionLost, RemoteTimeout
from ddops.journal import Collector, Journal
from ddops.state import Trial, UnitState

LOADING = UnitState("loaded", "activating", "start", main_pid=7, invocation_id="i1", status_text="loading weights 41 %")
ACTIVE = replace(LOADING, active_state="active", sub_state="running", status_text="serving")
TRIAL = Trial("r", "d", "", "", 10.0, open=True)


def _config() -> inventory.HostConfig:
    engine = "{release: r1, model: models/target, drafter: models/drafter-b16}"
    text = f"version: 1\nhosts:\n  h: {{address: 10.0.0.1, engine: {engine}, ready: {{probe_timeout_seconds: 1}}}}\n"
    return inventory.load(text, "test.yaml").hosts["h"]


@dataclass
class FakeHost:
    """Answers as the host script does: the unit's states in order, the last one for ever."""

    units: list[UnitState]
    trial_state: Trial | None = TRIAL
    log: list[str] = field(default_factory=list)
    config: Any = field(default_factory=_config)

    def trial(self) -> tuple[Trial | None, UnitState]:
        return self.trial_state, self.units.pop(0) if len(self.units) > 1 else self.units[0]

    def logs(self, invocation: str, lines: int) -> list[str]:
        return self.log


def _engine(*, healthy: bool, answers: bool = True) -> Any:
    return SimpleNamespace(healthy=lambda timeout: healthy, answers=lambda timeout: answers)


def _wait(host: FakeHost, engine: Any, *, budget: float = 3.0, trial: bool = True) -> Any:
    events = Collector()
    journal = Journal("r", [events])
    found = readiness.wait(host, engine, journal, invocation="i1", budget_seconds=budget, trial=trial)  # type: ignore[arg-type]
    return found, events.events


def test_ready_is_health_and_a_real_answer() -> None:
    found, _ = _wait(FakeHost([ACTIVE]), _engine(healthy=True))
    assert isinstance(found, readiness.Ready)
    assert found.seconds < 1


def test_a_connection_that_breaks_while_health_is_asked_is_no_end_of_the_wait() -> None:
    broken = [ConnectionLost("the connection to h is lost"), RemoteTimeout("no session"), None]

    def healthy(timeout: float) -> bool:
        if problem := broken.pop(0) if len(broken) > 1 else None:
            raise problem
        return True

    found, _ = _wait(FakeHost([ACTIVE]), SimpleNamespace(healthy=healthy, answers=lambda timeout: True))
    assert isinstance(found, readiness.Ready)
    assert broken == [None]


def test_health_without_an_answer_is_not_ready() -> None:
    found, _ = _wait(FakeHost([ACTIVE]), _engine(healthy=True, answers=False), budget=1.0)
    assert isinstance(found, readiness.Died)
    assert found.hung


@pytest.mark.parametrize(
    "unit",
    [
        replace(LOADING, active_state="failed", result="exit-code", exec_main_status=1),
        replace(LOADING, active_state="failed", result="signal", exec_main_code=2, exec_main_status=9),
        replace(LOADING, active_state="activating", sub_state="auto-restart"),
        replace(LOADING, active_state="inactive", sub_state="dead"),
        replace(ACTIVE, invocation_id="i2"),
    ],
)
def test_a_death_ends_the_wait_at_once(unit: UnitState) -> None:
    begun = time.monotonic()
    found, _ = _wait(FakeHost([unit]), _engine(healthy=False), budget=60.0)
    assert isinstance(found, readiness.Died)
    assert not found.hung
    assert time.monotonic() - begun < 5


def test_out_of_memory_is_the_hosts_fault_not_the_configurations() -> None:
    host = FakeHost([replace(LOADING, active_state="failed")], log=["torch.OutOfMemoryError: CUDA out of memory."])
    found, _ = _wait(host, _engine(healthy=False))
    assert isinstance(found, readiness.Died)
    assert found.environment


FAILED = replace(LOADING, active_state="failed")


@pytest.mark.parametrize(
    "unit",
    [
        replace(LOADING, active_state="inactive", sub_state="dead"),  # systemctl stop
        replace(ACTIVE, invocation_id="i2"),  # systemctl restart
        replace(FAILED, result="oom-kill", exec_main_code=2, exec_main_status=9),
        replace(FAILED, result="signal", exec_main_code=2, exec_main_status=9),  # kill -9, or the kernel's own
        replace(FAILED, result="exit-code", exec_main_code=1, exec_main_status=203),  # no such interpreter
        replace(FAILED, result="resources"),
    ],
)
def test_an_end_from_outside_says_nothing_of_the_configuration(unit: UnitState) -> None:
    found, _ = _wait(FakeHost([unit]), _engine(healthy=False))
    assert isinstance(found, readiness.Died)
    assert found.environment


@pytest.mark.parametrize(("code", "status"), [(1, 1), (1, 2), (2, 6), (3, 11)])
def test_an_end_of_its_own_counts_against_the_configuration(code: int, status: int) -> None:
    unit = replace(FAILED, result="exit-code" if code == 1 else "core-dump", exec_main_code=code, exec_main_status=status)
    found, _ = _wait(FakeHost([unit]), _engine(healthy=False))
    assert isinstance(found, readiness.Died)
    assert not found.environment


def test_a_cublas_failure_is_named_and_counts_against_the_configuration() -> None:
    line = "RuntimeError: CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmStridedBatchedEx`"
    host = FakeHost([replace(LOADING, active_state="failed")], log=["loading", line])
    found, _ = _wait(host, _engine(healthy=False))
    assert isinstance(found, readiness.Died)
    assert "CUBLAS_STATUS_EXECUTION_FAILED" in found.why
    assert not found.environment


def test_a_hang_ends_with_the_budget_and_says_the_last_status() -> None:
    found, events = _wait(FakeHost([LOADING]), _engine(healthy=False), budget=1.0)
    assert isinstance(found, readiness.Died)
    assert found.hung
    assert "loading weights 41 %" in found.why
    phases = [event for event in events if event["event"] == "phase"]
    assert phases[0]["fraction"] == 0.41


@pytest.mark.parametrize("state", [None, replace(TRIAL, open=False), replace(TRIAL, token="undo")])
def test_a_trial_that_was_taken_ends_the_wait(state: Trial | None) -> None:
    found, _ = _wait(FakeHost([LOADING], trial_state=state), _engine(healthy=False))
    assert isinstance(found, readiness.Taken)


def test_outside_a_trial_nobody_can_take_it() -> None:
    found, _ = _wait(FakeHost([ACTIVE], trial_state=None), _engine(healthy=True), trial=False)
    assert isinstance(found, readiness.Ready)


@pytest.mark.parametrize(
    ("status", "fraction"),
    [("loading weights 41 %", 0.41), ("7% done", 0.07), ("100.0 %", 1.0), ("250 %", 1.0), ("serving", None), ("", None)],
)
def test_a_percentage_in_the_status_is_progress(status: str, fraction: float | None) -> None:
    assert readiness.fraction_of(status) == fraction


# ---------------------------------------------------------------- an engine that dies in its proof
GONE = replace(ACTIVE, active_state="failed", sub_state="failed", result="core-dump", exec_main_code=3, exec_main_status=11)
LOG = [f"line {number}" for number in range(100)]


def _autopsy(*units: UnitState, log: list[str] = LOG) -> readiness.Died:
    return readiness.autopsy(FakeHost([*units], log=log), ACTIVE, seconds=0.5)  # type: ignore[arg-type]


def test_an_engine_that_dies_in_its_proof_is_told_with_its_last_lines_in_order() -> None:
    death = _autopsy(ACTIVE, ACTIVE, GONE)
    assert death.why == "the engine ended (core-dump, signal 11)"
    assert death.lines == tuple(LOG[-20:])
    assert not death.environment


def test_a_death_in_the_proof_that_is_the_hosts_is_told_from_one_of_the_configuration() -> None:
    assert _autopsy(replace(GONE, result="oom-kill")).environment
    assert _autopsy(replace(GONE, active_state="inactive", result="success")).environment, "somebody stopped it"
    assert _autopsy(replace(ACTIVE, invocation_id="i2")).environment, "somebody restarted it"
    crashed = _autopsy(replace(ACTIVE, invocation_id="i2", n_restarts=1))
    assert (crashed.why, crashed.environment) == ("the engine ended by itself", False)


def test_an_engine_that_hangs_in_its_proof_is_not_called_dead() -> None:
    stuck = _autopsy(ACTIVE)
    assert stuck.hung
    assert stuck.why == "its process has not ended"


@pytest.mark.parametrize("cause", [0, 39, 40, 60, 79, 80, 99])
def test_no_line_is_missing_between_the_one_that_explains_a_death_and_the_last(cause: int) -> None:
    log = [*LOG[:cause], "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED", *LOG[cause + 1 :]]
    death = _autopsy(GONE, log=log)
    assert "CUBLAS_STATUS_EXECUTION_FAILED" in death.why
    assert "CUBLAS_STATUS_EXECUTION_FAILED" in "".join(death.lines)
    assert death.lines[-20:] == tuple(log[-20:])
    if cause >= 40:
        assert death.lines == tuple(log[min(cause, 80) :])
    else:
        assert death.lines[1] == f"({79 - cause} lines left out)"
