"""The commands that look: status, history, logs, wait, doctor, and unlock, which takes only a dead lease.

None of them starts, stops or changes an engine.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from ddops import commands, plan, proof, readiness, units
from ddops.agent import Agent
from ddops.errors import DdopsError, Exit, Refused, UsageError
from ddops.journal import redact
from ddops.outcome import Outcome, Result
from ddops.state import Observed

if TYPE_CHECKING:
    from ddops.journal import Journal
    from ddops.session import Session

_UNITS = {"s": 1, "m": 60, "h": 3600}


def duration(text: str) -> float:
    """`90s`, `15m`, `1h`, `90` (seconds) -> seconds. UsageError for anything else."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text.strip())
    if found is None or float(found[1]) <= 0:
        raise UsageError(f"{text!r} is not a duration", means="nothing was done", hint="such as 90s, 15m or 1h")
    return float(found[1]) * _UNITS[found[2] or "s"]


# ---------------------------------------------------------------- wait
def wait(agent: Agent, journal: Journal, until: str, seconds: float) -> Outcome:
    """Poll until ready or verified; the unit's death ends the wait at once."""
    begun = time.monotonic()
    name = agent.config.name
    while True:
        observed = agent.look()
        reached, said = _reached(agent, observed, until)
        if reached:
            return Outcome(name, Result.UNCHANGED, f"{name} is {until}: {said}")
        if observed.unit.dead and not (observed.trial and observed.trial.open):
            what = f"{name} will not get {until}: {said}"
            return Outcome(name, Result.NOT_PROVEN, what, hint=f"ddops logs --host {name}")
        elapsed = time.monotonic() - begun
        journal.emit("phase", host=name, text=said, fraction=None, elapsed=elapsed, budget=seconds)
        if elapsed >= seconds:
            what = f"{name} is not {until} after {seconds:.0f} s: {said}"
            return Outcome(name, Result.UNKNOWN, what, hint=f"ddops status --host {name}")
        time.sleep(0.25 if until == "ready" else 1.0)


def _reached(agent: Agent, observed: Observed, until: str) -> tuple[bool, str]:
    standing = plan.verification(observed)
    unit = observed.unit
    if until == "verified":
        return standing.verified, standing.text
    said = unit.status_text or f"{unit.active_state} ({unit.sub_state})"
    if not unit.running and unit.active_state != "activating":
        return False, said
    with proof.client(agent) as engine:
        ready = readiness.serves(engine, timeout=agent.config.ready.probe_timeout_seconds)
    return ready, standing.text if ready else said


# ---------------------------------------------------------------- unlock
def unlock(agent: Agent) -> Outcome:
    """Break the lease; refused while a trial is open, since its guard settles that by itself."""
    name = agent.config.name
    observed = agent.look()
    if observed.trial is not None and observed.trial.open:
        raise Refused(
            f"{name} has an open trial of run {observed.trial.run}",
            means=f"its guard undoes it in {max(0.0, observed.trial.guard_in_seconds):.0f} s, unless its run goes on",
            hint=f"ddops resume --host {name}",
        )
    if observed.lease is None:
        return Outcome(name, Result.UNCHANGED, f"{name} is not held by anybody")
    agent.call(commands.lease_break(agent.unit))
    return Outcome(name, Result.UNCHANGED, f"{name}: the lease of {observed.lease.holder} was taken away")


# ---------------------------------------------------------------- status, history, logs
def status(run: Session, as_json: bool) -> int:
    from ddops import report

    rows, code = _each(run, lambda agent: _status_row(agent.look()))
    if as_json:
        click.echo(json.dumps({"v": 1, "hosts": rows}, indent=2))
    else:
        click.echo(report.status_table(rows))
    return code


def _status_row(observed: Observed) -> dict[str, Any]:
    standing = plan.verification(observed)
    trial = observed.trial
    return {
        "host": observed.host,
        "unit": observed.unit.active_state,
        "verification": standing.text,
        "verified": standing.verified,
        "settings": plan.settings_text(observed),
        "digest": units.digest(observed.etc_unit) if observed.etc_unit else "",
        "drift": plan.drift(observed),
        "lease": asdict(observed.lease) if observed.lease and observed.lease.expires_in_seconds > 0 else None,
        "trial": asdict(trial) if trial and trial.open else None,
        "arch": observed.arch,
        "boot": observed.boot,
        "invocation": observed.unit.invocation_id,
        "n_restarts": observed.unit.n_restarts,
        "notes": list(observed.notes),
    }


def history(run: Session, as_json: bool, limit: int) -> int:
    from ddops import report

    rows, code = _each(
        run,
        lambda agent: {
            "host": agent.config.name,
            "entries": [asdict(entry) for entry in agent.look().ledger[-limit:]],
        },
    )
    if as_json:
        click.echo(json.dumps({"v": 1, "hosts": rows}, indent=2))
    else:
        click.echo(report.history_table(rows))
    return code


def logs(run: Session, lines: int) -> int:
    from ddops import report

    def of(agent: Agent) -> dict[str, Any]:
        found = agent.logs(agent.look().unit.invocation_id, lines)
        return {"host": agent.config.name, "lines": found}

    rows, code = _each(run, of)
    for row in rows:
        for line in map(report.for_ci, map(report.clean, row.get("lines", []))):
            click.echo(f"{row['host']}  {line}" if len(rows) > 1 else line)
    return code


def _each(run: Session, ask: Callable[[Agent], dict[str, Any]]) -> tuple[list[dict[str, Any]], int]:
    """Ask every host; one that does not answer gets a row that says so, and the worst code is returned."""
    rows: list[dict[str, Any]] = []
    code = Exit.OK
    for config in run.hosts:
        try:
            with run.connected(config) as agent:
                rows.append(ask(agent))
        except DdopsError as problem:
            rows.append({"host": config.name, "error": problem.what, "exit": int(problem.exit)})
            click.echo(redact(str(problem)), err=True)
            code = max(code, problem.exit)
    return rows, int(code)


# ---------------------------------------------------------------- doctor
def doctor(run: Session) -> int:
    """One line a check: what is there, and what to do where something is missing."""
    code = Exit.OK
    for config in run.hosts:
        try:
            with run.connected(config) as agent:
                checks = _checks(agent, agent.look())
        except DdopsError as problem:
            click.echo(redact(f"{config.name}  NO  {problem.what}{f'  -> {problem.hint}' if problem.hint else ''}"))
            code = max(code, problem.exit)
            continue
        for good, what, hint in checks:
            click.echo(f"{config.name}  {'ok' if good else 'NO'}  {what}{'' if good else '  -> ' + hint}")
            if not good:
                code = max(code, Exit.REFUSED)
    return int(code)


def _checks(agent: Agent, observed: Observed) -> list[tuple[bool, str, str]]:
    config = agent.config
    engine = config.engine
    install = f"ddops install --host {config.name}"
    script = observed.script_digest == commands.script_digest()
    release = engine.kind != "ddtree" or engine.release in observed.releases
    disk = min(observed.disk_free_mib.values(), default=0)
    python = [_python(agent)] if engine.kind == "ddtree" and release else []
    prove = install if observed.etc_unit is None else f"ddops verify --host {config.name}"
    return [
        (True, f"login as {config.ssh.user}, one connection", ""),
        (observed.systemd >= 250, f"systemd {observed.systemd}", "systemd 250 or later is needed (252 is tried)"),
        (script, "host script", install),
        (release, f"release {engine.release or '(none named)'}", install),
        *python,
        (disk >= config.limits.disk_free_mib, f"{disk} MiB free", "make room below /opt and /var/lib"),
        (observed.fence_works, "fence", "unproven engines can be reached by users here"),
        (observed.etc_unit is not None, engine.unit, install),
        (plan.verification(observed).verified, plan.verification(observed).text, prove),
    ]


def _python(agent: Agent) -> tuple[bool, str, str]:
    """Can the host's own Python run the engine that is there?"""
    from ddops import pythons
    from ddops.journal import Journal

    try:
        pythons.check(agent, Journal(agent.run))
    except Refused as problem:
        return False, problem.what, problem.hint
    return True, f"{agent.config.engine.python} runs the engine", ""
