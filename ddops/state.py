"""What a host looks like: the facts that decisions are made from. Pure data and pure questions about it.

It does not fetch anything (observe.py does) and decides nothing about changes (plan.py does).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Kind(StrEnum):
    """Kinds of ledger entries. The ledger is append-only; the latest entry about a digest counts."""

    ATTEMPT = "attempt"  # a trial was staged
    PROVEN = "proven"  # the battery passed; written and fsynced before the unit goes into /etc
    CONFIRMED = "confirmed"  # the unit is in /etc
    UNDONE = "undone"  # the trial was taken back, by the controller, Ctrl-C or the guard
    VERIFIED = "verified"  # the running engine was proven without a restart (restored, re-verified, baseline)
    FAILED = "failed"  # a verdict other than pass (its verdict says which)
    REVOKED = "revoked"  # taken back by `ddops rollback`: never restored by a guard
    ADOPTED = "adopted"  # a hand-written unit was proven and recorded


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of the host's ledger (`/var/lib/ddops/UNIT/ledger.ndjson`)."""

    kind: Kind
    run: str
    time: str  # UTC, ISO 8601
    digest: str  # sha256 of the unit's bytes
    invocation: str = ""
    boot: str = ""
    by: str = ""  # controller | guard | operator (login name and host of the controller)
    why: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    key: dict[str, Any] = field(default_factory=dict)  # what a known-good or known-bad is remembered by
    verdict: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class UnitState:
    """`systemctl show` of one unit, the parts that matter."""

    load_state: str = "not-found"
    active_state: str = "inactive"
    sub_state: str = "dead"
    result: str = "success"
    main_pid: int = 0
    n_restarts: int = 0
    invocation_id: str = ""
    need_daemon_reload: bool = False
    fragment_path: str = ""
    drop_in_paths: tuple[str, ...] = ()
    status_text: str = ""
    exec_main_status: int = 0
    exec_main_code: int = 0
    control_group: str = ""
    active_enter_usec: int = 0  # host's monotonic clock
    unit_type: str = ""

    @property
    def running(self) -> bool:
        return self.active_state == "active" and self.main_pid > 0

    @property
    def dead(self) -> bool:
        """True when a start has ended for good (a trial has Restart=no, so death is final)."""
        return self.active_state in ("failed", "inactive")


@dataclass(frozen=True, slots=True)
class Lease:
    """Who holds the host."""

    run: str
    holder: str
    command: str
    expires_in_seconds: float  # by the host's monotonic clock; negative: expired


@dataclass(frozen=True, slots=True)
class Trial:
    """A trial in progress on the host, as the host's own state machine sees it."""

    run: str
    digest: str
    previous: str  # digest in /etc when the guard was armed; "" when there was none
    token: str  # "" (open), "confirm" or "undo"
    guard_in_seconds: float  # until the guard undoes; negative: due
    outcome: str = ""  # "", "confirmed", "confirmed-restarted", "undone"
    open: bool = False  # False: settled, this is the last one
    step: str = ""  # armed staged stopping started "fault ..."
    invocation: str = ""


@dataclass(frozen=True, slots=True)
class Gpu:
    """The first GPU of the host (all of one kind); arch is e.g. "sm_103"."""

    name: str
    arch: str
    driver: str
    count: int
    memory_free_mib: int
    memory_total_mib: int


@dataclass(frozen=True, slots=True)
class Observed:
    """A read-only look at one host."""

    host: str
    boot: str
    uptime_seconds: float
    systemd: int
    unit: UnitState
    etc_unit: bytes | None  # /etc/systemd/system/UNIT
    trial_unit: bytes | None  # /run/systemd/system.control/UNIT
    argv: tuple[str, ...]  # of MainPID; empty when not running
    ledger: tuple[Entry, ...]
    lease: Lease | None = None
    trial: Trial | None = None
    gpu: Gpu | None = None
    arch: str = "cpu"  # gpu.arch, else "cpu"
    disk_free_mib: dict[str, int] = field(default_factory=dict)  # path -> MiB
    port_owner: int | None = None  # a listener on the engine's port that is not in the unit's cgroup: its pid (0: unknown)
    releases: dict[str, str] = field(default_factory=dict)  # name -> sha256 of its SHA256SUMS
    script_digest: str = ""  # sha256 of the installed ddops-host script; "" when absent
    fence_works: bool = True
    addresses: tuple[str, ...] = ()  # the host's own, without prefix length
    notes: tuple[str, ...] = ()  # "ledger line 7 is torn", ...
    loaded_fragment: bytes | None = None  # the bytes at unit.fragment_path
    # What the loaded unit sets, drop-ins included, and what the process was started with of that; None: it can't be told.
    loaded_environment: dict[str, str] = field(default_factory=dict, repr=False)
    environment: dict[str, str] | None = field(default=None, repr=False)

    @property
    def other_environment(self) -> tuple[str, ...]:
        """Names of variables that the loaded unit sets and the process was started without, or with another value."""
        if self.environment is None:
            return ()
        started = self.environment
        return tuple(sorted(name for name, value in self.loaded_environment.items() if started.get(name) != value))
