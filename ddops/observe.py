"""A read-only look at one host, in one round trip. It changes nothing and judges nothing."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ddops import commands, ledger
from ddops.errors import RemoteFailed
from ddops.state import Gpu, Lease, Observed, Trial, UnitState
from ddops.units import shown

if TYPE_CHECKING:
    from ddops.hosts import Remote
    from ddops.inventory import HostConfig

_MISSING = (126, 127)  # the shell's "not executable" and "not found"


class _Facts:
    """The host script's "key value" lines; a key may repeat."""

    def __init__(self, text: str) -> None:
        self._values: dict[str, list[str]] = {}
        for line in text.splitlines():
            key, _, value = line.partition(" ")
            self._values.setdefault(key, []).append(value)

    def all(self, key: str) -> list[str]:
        return self._values.get(key, [])

    def text(self, key: str, default: str = "") -> str:
        return self._values.get(key, [default])[0]

    def integer(self, key: str, default: int = 0) -> int:
        value = self.text(key)
        return int(value) if value.lstrip("-").isdigit() else default

    def number(self, key: str) -> float:
        try:
            return float(self.text(key, "0"))
        except ValueError:
            return 0.0

    def bytes(self, key: str) -> bytes | None:
        if key not in self._values:
            return None
        try:
            return base64.b64decode(self.text(key), validate=True)
        except binascii.Error:
            return None


def look(remote: Remote, config: HostConfig) -> Observed:
    """Observe the host over an open connection.

    Works on a host where ddops was never installed (the look is then sent over stdin and may see less:
    a login without root rights cannot read other users' processes).

    Raises:
        RemoteFailed: the host answered with an error, or with something that is no observation.
        ConnectionLost, RemoteTimeout: see hosts.py.
    """
    engine = config.engine
    command = commands.observe(engine.unit, engine.port, engine.releases_dir)
    result = remote.run(command.argv, stdin=command.stdin, deadline=command.deadline_seconds, sudo=True)
    if result.status in _MISSING or b"command not found" in result.stderr:
        command = commands.observe_uninstalled(engine.unit, engine.port, engine.releases_dir)
        result = remote.run(command.argv, stdin=command.stdin, deadline=command.deadline_seconds, sudo=False)
    if result.status != 0:
        raise RemoteFailed(
            f"{config.name} could not be observed: {_last_line(result.stderr) or result.status}",
            status=result.status,
            stderr=result.stderr.decode(errors="replace"),
            means="nothing was changed",
            hint=f"ddops doctor --host {config.name}",
        )
    return parse(config.name, result.stdout.decode(errors="replace"))


def parse(host: str, text: str) -> Observed:
    """Facts from the host script's answer; unknown keys are from a newer script and are left alone."""
    facts = _Facts(text)
    if not facts.all("boot"):
        raise RemoteFailed(f"{host} answered with something that is no observation", status=0, stderr=text[:400])
    entries, notes = ledger.parse(facts.bytes("ledger") or b"")
    gpu = _gpu(facts.all("gpu"))
    owner = facts.text("port_owner")
    return Observed(
        host=host,
        boot=facts.text("boot"),
        uptime_seconds=facts.number("uptime"),
        systemd=_leading_integer(facts.text("systemd")),
        unit=unit_state(facts),
        etc_unit=facts.bytes("etc"),
        trial_unit=facts.bytes("trial_unit"),
        loaded_fragment=facts.bytes("fragment"),
        argv=_argv(facts.bytes("argv") or b""),
        ledger=entries,
        lease=_lease(facts),
        trial=trial(facts),
        gpu=gpu,
        arch=gpu.arch if gpu else "cpu",
        disk_free_mib=_disks(facts.all("disk")),
        port_owner=int(owner) if owner.isdigit() else None,
        releases={name: digest for digest, _, name in (line.partition(" ") for line in facts.all("release"))},
        script_digest=facts.text("script"),
        fence_works=not facts.all("no_fence"),
        addresses=tuple(facts.text("address").split()),
        notes=notes,
        loaded_environment=_loaded_environment(facts),
        environment=_environment(facts),
    )


def parse_trial(text: str) -> tuple[Trial | None, UnitState]:
    """The answer of `ddops-host trial`: the trial (open or the last one) and the unit."""
    facts = _Facts(text)
    return trial(facts), unit_state(facts)


def unit_state(facts: _Facts) -> UnitState:
    return UnitState(
        load_state=facts.text("show.LoadState", "not-found"),
        active_state=facts.text("show.ActiveState", "inactive"),
        sub_state=facts.text("show.SubState", "dead"),
        result=facts.text("show.Result", "success"),
        main_pid=facts.integer("show.MainPID"),
        n_restarts=facts.integer("show.NRestarts"),
        invocation_id=facts.text("show.InvocationID"),
        need_daemon_reload=facts.text("show.NeedDaemonReload") == "yes",
        fragment_path=facts.text("show.FragmentPath"),
        drop_in_paths=tuple(facts.text("show.DropInPaths").split()),
        status_text=facts.text("show.StatusText"),
        exec_main_status=facts.integer("show.ExecMainStatus"),
        exec_main_code=facts.integer("show.ExecMainCode"),
        control_group=facts.text("show.ControlGroup"),
        active_enter_usec=facts.integer("show.ActiveEnterTimestampMonotonic"),
        unit_type=facts.text("show.Type"),
    )


def trial(facts: _Facts) -> Trial | None:
    if not facts.text("trial.run"):
        return None
    return Trial(
        run=facts.text("trial.run"),
        digest=facts.text("trial.digest"),
        previous=facts.text("trial.previous"),
        token=facts.text("trial.token"),
        guard_in_seconds=float(facts.integer("trial.left")),
        outcome=facts.text("trial.outcome"),
        open=facts.text("trial.open") == "1",
        step=facts.text("trial.step"),
        invocation=facts.text("trial.invocation"),
    )


def _lease(facts: _Facts) -> Lease | None:
    if not facts.text("lease.run"):
        return None
    holder, _, command = (facts.bytes("lease.holder") or b"").decode(errors="replace").partition("\n")
    return Lease(facts.text("lease.run"), holder, command.strip(), float(facts.integer("lease.left")))


def _gpu(lines: list[str]) -> Gpu | None:
    rows = [[cell.strip() for cell in line.split(",")] for line in lines]
    rows = [row for row in rows if len(row) == 5 and row[3].isdigit() and row[4].isdigit()]
    if not rows:
        return None
    name, capability, driver = rows[0][:3]
    return Gpu(
        name=name,
        arch="sm_" + capability.replace(".", ""),
        driver=driver,
        count=len(rows),
        memory_free_mib=min(int(row[3]) for row in rows),
        memory_total_mib=min(int(row[4]) for row in rows),
    )


def _disks(lines: Iterable[str]) -> dict[str, int]:
    pairs = (line.split(" ", 1) for line in lines)
    return {pair[1]: int(pair[0]) for pair in pairs if len(pair) == 2 and pair[0].isdigit()}


def _argv(cmdline: bytes) -> tuple[str, ...]:
    if not cmdline:
        return ()
    words = cmdline.removesuffix(b"\0").split(b"\0")
    return tuple(word.decode(errors="surrogateescape") for word in words)


def _loaded_environment(facts: _Facts) -> dict[str, str]:
    taken_away = facts.text("show.UnsetEnvironment").split()
    found = shown.assignments(facts.text("show.Environment"))
    return {name: value for name, value in found.items() if name not in taken_away}


def _environment(facts: _Facts) -> dict[str, str] | None:
    """None: no process, a file may say otherwise, or what /proc shows is not what systemd started it with."""
    raw = facts.bytes("environ")
    if raw is None or any(facts.all("show.EnvironmentFiles")):
        return None
    found = shown.of_process(raw)
    start = facts.text("show.InvocationID")  # a process may write over its own memory there
    return found if start and found.get("INVOCATION_ID") == start else None


def _leading_integer(text: str) -> int:
    digits = text.split(".", 1)[0].split("~", 1)[0]
    return int(digits) if digits.isdigit() else 0


def _last_line(stderr: bytes) -> str:
    lines = stderr.decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else ""
