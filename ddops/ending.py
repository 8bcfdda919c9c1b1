"""How a trial on one host ends: confirmed, taken back and proven again, or not seen from here.

Every trial ends in one of these, whatever stopped it; transaction.py is the way there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from ddops import commands, plan, standing, stops
from ddops.agent import SETTLE_SECONDS, Agent, NotSettled, TooLate
from ddops.engines import Settings
from ddops.errors import DdopsError, Exit, Interrupted, Locked, Refused, RemoteFailed, Unreachable
from ddops.ground import Ground, Options
from ddops.outcome import Outcome, Result
from ddops.state import Kind, Observed, Trial
from ddops.units import Unit

if TYPE_CHECKING:
    from ddops.journal import Journal
    from ddops.proof import Proof
    from ddops.prove.evidence import Baseline

LONGEST_WHY = 900  # characters of a reason that travel to the host, whole


@dataclass(frozen=True, slots=True)
class Undo:
    """Why a trial is taken back, and what that makes of the run."""

    why: str
    result: Result = Result.ROLLED_BACK
    proof: Proof | None = None
    known_bad: bool = False
    exit_override: Exit | None = None
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Change:
    """What a trial tries. `revoke`: a rollback, which leaves the current configuration for good."""

    unit: Unit
    settings: Settings
    observed: Observed
    baseline: Baseline | None = None
    revoke: bool = False


class Ending(Ground):
    """The ends of a trial. `confirmed`, `took_back` and `unknown` each return the run's outcome on this host."""

    def __init__(self, agent: Agent, journal: Journal, options: Options) -> None:
        super().__init__(agent, journal, options)
        floor = self.config.limits.gpu_memory_free_mib
        self.room = commands.Room(self.config.engine.port, floor)

    def confirmed(self, state: Trial, change: Change, found: Proof | None, stop: Exit | None = None) -> Outcome:
        """The change is in /etc. `found`: its proof; None when a stop came after the confirmation was claimed."""
        runs = f"{'is back on' if change.revoke else 'runs'} {change.settings.describe()}"
        if state.outcome == "confirmed-restarted":
            # This start is not the one that was proven: the proof is made again, where it runs.
            self.warn("the engine was started anew between its proof and its confirmation")
            self.taken.clear()
            self.hold()
            observed = self.agent.look()
            ended = standing.in_place(self, change.unit, change.settings, observed, result=Result.APPLIED)
            return replace(ended, exit_override=stop) if stop and ended.exit is Exit.OK else ended
        if found is None:
            what = f"{self.name} {runs}: it was proven and confirmed already"
            return Outcome(self.name, Result.APPLIED, what, exit_override=stop)
        what = f"{self.name} {runs}: proven, and now the last known good"
        return Outcome(self.name, Result.APPLIED, what, facts=self.facts(found, change.unit))

    def took_back(self, end: Undo, change: Change) -> Outcome:
        """Undo, and end with an outcome whatever comes."""
        try:
            stop = stops.meet()  # it may have been lost on its way here
            return self._undo(self.stopped(stop) if stop else end, change)
        except Interrupted as stop:
            return self._left(stop)
        except Locked as held:
            return self._overtaken(end, held)
        except Unreachable as lost:
            return self.unknown(lost)
        except DdopsError as problem:
            # The host was touched: whatever this is, it is no refusal.
            means = "whether the host is back on a verified configuration was not established"
            return Outcome(self.name, Result.RESTORE_FAILED, problem.what, means, problem.hint)

    def stopped(self, stop: Interrupted) -> Undo:
        return Undo(f"stopped by {self.by}", Result.INTERRUPTED, exit_override=stop.exit)

    def _undo(self, end: Undo, change: Change) -> Outcome:
        agent = self.agent
        with self.step("undo"):
            try:
                agent.call(commands.undo(agent.unit, agent.run, self.by, self.room, end.why[:LONGEST_WHY]))
            except TooLate:
                self.warn("the other side was first; waiting for what it does")
            state = agent.settled(agent.run, SETTLE_SECONDS)
        if state.outcome != "undone":
            return self.confirmed(state, change, None, end.exit_override)
        return self._restored(end, change)

    def _restored(self, end: Undo, change: Change) -> Outcome:
        """After an undo: prove what the host went back to. One undo a run; there is no second try."""
        self.hold()
        self._remember(end, change)
        observed = self.agent.look()
        if self.note_lost(observed):
            self.warn("the host was booted in mid-trial; it came up with what is in /etc")
        facts = dict(end.facts) | ({"verdict": end.proof.verdict.to_dict(replay=False)} if end.proof else {})
        if observed.etc_unit is None:
            what = f"{self.name}: not proven ({end.why})"
            means = "the unit was taken away again; there was none before"
            return Outcome(self.name, end.result, what, means, facts=facts, exit_override=end.exit_override)
        stands = plan.verification(observed)
        if stands.entry is not None and stands.verified:
            with self._on_record():
                self.reaffirm(stands.entry, why="untouched by a trial that was undone")
            return self._back(end, change, stands.text, facts)
        before, settings = self.running(observed)
        self.taken.clear()  # from here on the guard has nothing more to take
        with self.step("prove the restored configuration"):
            broken, found = self.prove_current(before, settings, observed)
        if found is None or broken:
            with self._on_record():
                self._not_restored(before, found, broken)
            return Outcome(
                self.name,
                Result.RESTORE_FAILED,
                f"{self.name}: not proven ({end.why}), and what was restored is not verified either: {broken}",
                means="the host needs a person; it was not tried a second time",
                hint=f"ddops status --host {self.name}; take it out of service",
                facts=facts,
            )
        with self._on_record():
            self.record(Kind.VERIFIED, before.digest, found, why="restored after an undo")
        facts["restored"] = found.verdict.to_dict(replay=False)
        return self._back(end, change, f"{settings.describe()}, proven again: {found.verdict.why}", facts)

    @contextmanager
    def _on_record(self) -> Iterator[None]:
        """What was found stays true when a full disk forgets it."""
        try:
            yield
        except (Refused, RemoteFailed) as problem:
            self.warn(f"what was found could not be recorded on the host: {problem.what}")

    def _not_restored(self, before: Unit, found: Proof | None, broken: str) -> None:
        entry = self.entry(Kind.FAILED, before.digest, why=broken)
        if found is not None:
            entry = self.proof_entry(Kind.FAILED, before.digest, found, why=broken)
            self.keep_evidence(found)
        self.agent.record(replace(entry, extra=entry.extra | {"restored": True}))

    def _back(self, end: Undo, change: Change, restored: str, facts: dict[str, Any]) -> Outcome:
        if change.revoke and end.exit_override is None:
            # The previous configuration failed its own proof; that a restart of it passes is no verdict.
            end = replace(end, result=Result.RESTORE_FAILED)
        return Outcome(
            self.name,
            end.result,
            f"{self.name}: not proven ({end.why})",
            means=f"{self.name} is back on its last verified configuration ({restored})",
            hint=f"ddops history --host {self.name}",
            facts=facts,
            exit_override=end.exit_override,
        )

    def _remember(self, end: Undo, change: Change) -> None:
        """Known-bad is only what a verdict or a death says of the configuration, never a fault of the host."""
        if end.proof is None and not end.known_bad:
            return
        with self._on_record():
            key = end.proof.key if end.proof else plan.key(self.config, change.settings, self.agent.look(), None)
            entry = self.entry(
                Kind.FAILED,
                change.unit.digest,
                verdict=end.proof.verdict if end.proof else None,
                settings=change.settings.to_dict(),
                key=key,
                why=end.why,
                extra={"known_bad": end.known_bad} | ({"environment": True} if end.facts.get("environment") else {}),
            )
            self.agent.record(entry)
            if end.proof is not None:
                self.keep_evidence(end.proof)

    # ================================================================ ends that are not seen from here
    def unknown(self, lost: DdopsError) -> Outcome:
        return Outcome(
            self.name,
            Result.UNKNOWN,
            lost.what,
            means=lost.means if isinstance(lost, NotSettled) else self._guarded(),
            hint=f"ddops resume --host {self.name}",
        )

    def _guarded(self) -> str:
        return f"its state is not known from here; its guard undoes the trial by {self._latest()} at the latest"

    def _overtaken(self, end: Undo, held: Locked) -> Outcome:
        """The guard was faster, and another run holds the host by now: what it runs is that run's to say."""
        return Outcome(
            self.name,
            Result.UNKNOWN,
            f"{self.name}: not proven ({end.why}); {held.what}",
            means="the trial was taken back by the host itself; what it went back to was not proven by this run",
            hint=f"ddops status --host {self.name}",
        )

    def _left(self, stop: Interrupted) -> Outcome:
        """The operator would not wait for the undo: the host finishes it, or its guard starts it."""
        return Outcome(
            self.name,
            Result.INTERRUPTED,
            f"{self.name}: left before the host was back on its last verified configuration",
            means=f"the host undoes the trial by itself, by {self._latest()} at the latest; it is then not proven",
            hint=f"ddops resume --host {self.name}",
            exit_override=stop.exit,
        )

    def _latest(self) -> str:
        return f"{datetime.now() + timedelta(seconds=self.config.guard.seconds):%H:%M:%S}"
