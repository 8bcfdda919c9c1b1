"""What every command on one host stands on: its steps as events, its records, readiness and proof.

It changes no unit; transaction.py does.
"""

from __future__ import annotations

import getpass
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from ddops import commands, plan, proof, readiness, recording, stops, units
from ddops.agent import Agent
from ddops.engines import Settings
from ddops.errors import DdopsError, Refused, RemoteFailed
from ddops.state import Entry, Kind, Observed
from ddops.units import Unit

if TYPE_CHECKING:
    from ddops.journal import Journal
    from ddops.proof import Proof
    from ddops.prove.evidence import Baseline, Verdict


class Taken(DdopsError):
    """The trial is no longer ours to decide: the guard, or another operator, has settled it."""


@dataclass(frozen=True, slots=True)
class Options:
    """How a command is carried out; what is changed is the Request."""

    command: str  # as typed, for the lease and the ledger
    level: str | None = None  # None: the inventory's
    dry_run: bool = False


class Ground:
    """One run on one host.

    Args:
        agent: the host, over an open connection.
        journal: every step is an event there.
        options: how.
    """

    def __init__(self, agent: Agent, journal: Journal, options: Options) -> None:
        self.agent = agent
        self.config = agent.config
        self.name = agent.config.name
        self.journal = journal
        self.options = options
        self.level = options.level or self.config.prove.level
        self.by = f"{getpass.getuser()}@{socket.gethostname()}"
        self.taken = threading.Event()
        proof.only(self.config)  # a probe that does not exist is found before anything is touched

    # ------------------------------------------------------------ steps
    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """The block is a step of the run, with its time and how it ended. Raises Interrupted: a stop is unmet."""
        stops.check()
        with self.journal.step(self.name, name):
            stops.check()
            yield

    def warn(self, text: str) -> None:
        self.agent.warn(text)

    @contextmanager
    def leased(self) -> Iterator[None]:
        """The host is ours until the block ends, proof of a restored configuration included."""
        with self.agent.lease(self._holder):
            yield

    def hold(self) -> None:
        """Take the lease anew where a reboot has swept it away; nothing changes while it is still ours.

        Raises:
            Locked: another run holds the host by now.
        """
        seconds = int(self.config.guard.seconds)
        try:
            self.agent.call(commands.lease_take(self.agent.unit, self.agent.run, seconds, self._holder))
        except (Refused, RemoteFailed) as problem:  # a full /run must not keep us from proving what was restored
            self.warn(f"the lease could not be renewed: {problem.what}")

    def note_lost(self, observed: Observed) -> bool:
        """Put on record that a reboot has taken back an attempt; True when there was one."""
        lost = plan.lost_attempt(observed)
        if lost is None:
            return False
        entry = replace(self.entry(Kind.UNDONE, lost.digest, why="the host was booted in mid-trial"), run=lost.run, by="boot")
        self.agent.record(entry)
        return True

    @property
    def _holder(self) -> str:
        return f"{self.by}, run {self.agent.run}\n{self.options.command}\n"

    def check(self) -> None:
        """Raises Taken, or Interrupted: no more is to be done towards a confirmation."""
        stops.check()
        if self.taken.is_set():
            raise Taken("the trial was settled by the other side")

    # ------------------------------------------------------------ what runs
    def running(self, observed: Observed) -> tuple[Unit, Settings]:
        """The unit in /etc and its settings.

        Raises:
            Refused: there is none.
        """
        if observed.etc_unit is None:
            raise Refused(
                f"{self.name} has no {self.agent.unit}",
                means="there is nothing to prove",
                hint=f"ddops install --host {self.name}",
            )
        unit = units.from_text(self.agent.unit, observed.etc_unit)
        return unit, units.settings(unit, self.config)

    def ready(self, invocation: str, *, trial: bool) -> readiness.Ready | readiness.Died | readiness.Taken:
        with proof.client(self.agent) as engine:
            state = readiness.wait(
                self.agent,
                engine,
                self.journal,
                invocation=invocation,
                budget_seconds=self.config.ready.timeout_seconds,
                trial=trial,
            )
        if isinstance(state, readiness.Died):
            self._tell_death(state)
        return state

    def _tell_death(self, death: readiness.Died) -> None:
        self.journal.emit("died", host=self.name, why=death.why, lines=list(death.lines))

    def prove(self, unit: Unit, settings: Settings, invocation: str, baseline: Baseline | None) -> Proof:
        found = proof.prove(
            self.agent,
            unit,
            settings,
            invocation,
            self.journal,
            level=self.level,
            baseline=baseline,
            check=self.check,
        )
        if found.verdict.kind != "crashed":
            return found
        death = readiness.autopsy(self.agent, found.observed.unit)
        self._tell_death(death)
        return replace(found, death=death)

    def prove_current(self, unit: Unit, settings: Settings, observed: Observed) -> tuple[str, Proof | None]:
        """Wait for what runs now and prove it; the first value says what is wrong, "" when nothing is.

        A degraded verdict counts here: the output is right, and there is nothing faster to go back to.
        """
        if not observed.unit.running and observed.unit.active_state != "activating":
            return f"the unit is {observed.unit.active_state} ({observed.unit.result})", None
        if observed.unit.running and (stale := plan.stale(observed)):
            return f"it was not started from the unit in /etc: {'; '.join(stale)}", None
        state = self.ready(observed.unit.invocation_id, trial=False)
        if not isinstance(state, readiness.Ready):
            return getattr(state, "why", "the unit was taken by another run"), None
        found = self.prove(unit, settings, state.invocation, None)
        if found.verdict.kind == "degraded":
            self.warn(f"degraded: {found.verdict.why}")
        return ("" if found.verdict.kind in ("pass", "degraded") else found.why), found

    # ------------------------------------------------------------ records
    def entry(self, kind: Kind, digest: str, *, verdict: Verdict | None = None, **fields: Any) -> Entry:
        return Entry(
            kind=kind,
            run=self.agent.run,
            time=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            digest=digest,
            by=self.by,
            verdict=verdict.to_dict(replay=False) if verdict else {},
            **fields,
        )

    def record(self, kind: Kind, digest: str, found: Proof, *, why: str) -> None:
        """Put a verdict on the host's record, with its evidence in full beside it."""
        self.agent.record(self.proof_entry(kind, digest, found, why=why))
        self.keep_evidence(found)

    def reaffirm(self, proven: Entry, *, why: str) -> None:
        """Put on record that a proof stands: what it proved was not touched by what happened since."""
        again = self.entry(Kind.VERIFIED, proven.digest, why=why)
        self.agent.record(replace(proven, kind=again.kind, run=again.run, time=again.time, by=again.by, why=why))

    def proof_entry(self, kind: Kind, digest: str, found: Proof, *, why: str) -> Entry:
        return self.entry(
            kind,
            digest,
            verdict=found.verdict,
            settings=found.settings.to_dict(),
            key=found.key,
            invocation=found.verdict.invocation,
            boot=found.observed.boot,
            why=why,
            extra={"environment": True} if found.blames_host else {},
        )

    def keep_evidence(self, found: Proof) -> None:
        """The verdict in full, with prompts and replies, and answers that were recorded along the way."""
        document = json.dumps(found.verdict.to_dict(), ensure_ascii=False).encode()
        self.agent.call(commands.evidence(self.agent.unit, self.agent.run, document))
        if found.golden is not None:
            recording.keep(self.agent, found.golden)

    def facts(self, found: Proof, unit: Unit) -> dict[str, Any]:
        return {
            "verdict": found.verdict.to_dict(replay=False),
            "digest": unit.digest,
            "settings": found.settings.to_dict(),
        }
