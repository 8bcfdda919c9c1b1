"""One change on one host, from the first look to a proven end. The order of the steps is the safety.

    observe, plan -> lease -> fresh baseline -> arm the guard -> stage (fenced, under /run) -> switch -> ready
        -> applied and proven -> confirm (compare and swap)
        -> anything else      -> undo -> ready -> proven again

It takes no decision that plan.py, the battery or the host script can take, and it never repeats a step
without asking the host where it stands.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from ddops import commands, plan, proof, readiness, standing, units
from ddops.agent import SETTLE_SECONDS, Agent, NotSettled, TooLate, locked
from ddops.engines import Settings
from ddops.errors import DdopsError, Exit, Interrupted, Locked, Refused, RemoteFailed, RemoteTimeout, Unreachable
from ddops.ground import Ground, Options, Taken
from ddops.ledger import to_line
from ddops.outcome import Outcome, Result
from ddops.plan import Action, Plan, Request
from ddops.state import Kind, Observed, Trial
from ddops.units import Unit

if TYPE_CHECKING:
    from ddops.journal import Journal
    from ddops.proof import Proof
    from ddops.prove.evidence import Baseline

LONGEST_WHY = 900  # characters of a reason that travel to the host, whole
PROVE_SECONDS = {"quick": 300, "standard": 900, "deep": 7200}  # what the guard's cap allows for the battery


@dataclass(slots=True)
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


class Transaction(Ground):
    """See the module. One instance carries out one command."""

    def __init__(self, agent: Agent, journal: Journal, options: Options) -> None:
        super().__init__(agent, journal, options)
        floor = self.config.limits.gpu_memory_free_mib
        self.room = commands.Room(self.config.engine.port, floor)
        self._told: dict[str, Any] = {}

    # ================================================================ the commands
    def reconfigure(self, request: Request) -> Outcome:
        """Change the configuration, prove it, and otherwise put the host back and prove that."""
        planned = self._plan(request)
        if isinstance(planned, Outcome):
            return planned
        with self.leased():
            planned = self._plan(request)  # under the lease: nobody else changes the host from here on
            if isinstance(planned, Outcome):
                return planned
            made, observed = planned
            if made.action is Action.VERIFY:
                return standing.in_place(self, made.unit, made.settings, observed)
            baseline = standing.baseline(self, observed, request)
            self._check_unit(made.unit)
            return self._trial(Change(made.unit, made.settings, observed, baseline))

    def rollback(self, to: str | None = None) -> Outcome:
        """Revoke what is there and go back to a configuration that was verified before.

        Args:
            to: the start of a verified digest; None takes the previous verified one.
        """
        with self.leased():
            observed = self.agent.look()
            target = plan.rollback_target(observed, to)
            text = self.agent.call(commands.stored(self.agent.unit, target.digest)).stdout
            unit = units.from_text(self.agent.unit, text)
            self._check_unit(unit)
            return self._trial(Change(unit, units.settings(unit, self.config), observed, revoke=True))

    # ================================================================ before anything is touched
    def _plan(self, request: Request) -> Outcome | tuple[Plan, Observed]:
        with self.step("observe"):
            observed = self.agent.look()
        if observed.trial is not None and observed.trial.open:
            guard = f"the trial of run {observed.trial.run} is open"
            raise locked(self.name, self.agent.unit, guard)
        made = plan.make(self.config, request, observed, own_run=self.agent.run)
        self._tell(made, observed)
        if made.refusals:
            return _refused(self.name, made)
        if self.options.dry_run:
            changes = made.action is not Action.UNCHANGED
            what = f"dry run: would {'change' if changes else 'change nothing on'} {self.name}"
            facts = {"plan": made.to_dict(), "changes": changes}
            return Outcome(self.name, Result.PLANNED, what, facts=facts)
        if made.action is Action.UNCHANGED:
            what = f"{self.name} runs this already: {plan.verification(observed).text}"
            return Outcome(self.name, Result.UNCHANGED, what, means="the engine was not restarted")
        return made, observed

    def _tell(self, made: Plan, observed: Observed) -> None:
        """Show the plan; the second look, under the lease, says only what is new."""
        if (shown := made.to_dict()) == self._told:
            return
        self._told = shown
        self.journal.emit("plan", host=self.name, **shown)
        for note in (*observed.notes, *made.warnings):
            self.warn(note)

    def _check_unit(self, unit: Unit) -> None:
        with self.step("verify the unit on the host"):
            self.agent.call(commands.check_unit(unit.name, unit.text))

    def _check_connection(self) -> None:
        """The one connection must carry HTTP and commands at the same time; where sshd forbids forwarding, HTTP
        takes a session, and MaxSessions 1 leaves none for commands.

        Raises:
            Refused: it can't; better known before the switch than after it.
        """
        command = commands.trial(self.agent.unit)
        with proof.client(self.agent) as engine:
            engine.healthy(timeout=5.0)
            try:
                self.agent.remote.run(command.argv, deadline=command.deadline_seconds, sudo=True)
            except RemoteTimeout as problem:
                self.agent.remote.reconnect(15.0)  # HTTP lets go of its session, and the lease can be given back
                raise Refused(problem.what, means="nothing was changed", hint=problem.hint) from problem

    # ================================================================ the trial
    def _trial(self, change: Change) -> Outcome:
        agent = self.agent
        self._check_connection()
        guard = int(self.config.guard.seconds)
        longest = self.config.ready.timeout_seconds + PROVE_SECONDS[self.level] + 2 * SETTLE_SECONDS
        try:
            with self.step("arm the guard"):
                agent.call(commands.arm(agent.unit, agent.run, guard, int(max(self.config.guard.cap_seconds, longest))))
                agent.armed = True
        except Interrupted as stop:  # it may be armed
            agent.armed = True
            return self._took_back(Undo(f"stopped by {self.by}", Result.INTERRUPTED, exit_override=stop.exit), change)
        state: Trial | None = None
        try:
            with agent.heartbeat(self.taken.set):
                end = self._steps(change)
                if not isinstance(end, Undo):
                    state = self._confirm(change, end)
        except Interrupted as stop:
            end = Undo(f"stopped by {self.by}", Result.INTERRUPTED, exit_override=stop.exit)
        except (Taken, TooLate):
            end = Undo("the host's guard was faster: no heartbeat reached it in time")
        except Unreachable as lost:
            return self._unknown(lost)
        except DdopsError as problem:
            end = Undo(problem.what, facts={"error": str(problem)})
        if not isinstance(end, Undo):
            if state is not None and state.outcome != "undone":
                return self._confirmed(state, change, end)
            end = Undo("the engine was not the proven one any more when it was to be confirmed")
        return self._took_back(end, change)

    def _took_back(self, end: Undo, change: Change) -> Outcome:
        """Undo, and end with an outcome whatever comes."""
        try:
            return self._undo(end, change)
        except Interrupted as stop:
            return self._left(stop)
        except Locked as held:
            return self._overtaken(end, held)
        except Unreachable as lost:
            return self._unknown(lost)
        except DdopsError as problem:
            # The host was touched: whatever this is, it is no refusal.
            means = "whether the host is back on a verified configuration was not established"
            return Outcome(self.name, Result.RESTORE_FAILED, problem.what, means, problem.hint)

    def _steps(self, change: Change) -> Undo | Proof:
        if change.revoke:
            self._revoke(change)
        self._stage(change)
        with self.step("switch"):
            self.agent.call(commands.switch(self.agent.unit, self.agent.run, self.room))
            state = self._started()
        if state.step.startswith("fault"):
            return Undo(state.step.removeprefix("fault ").strip(), facts={"environment": True})
        with self.step("ready"):
            ready = self.ready(state.invocation, trial=True)
        if isinstance(ready, readiness.Taken):
            raise Taken("the trial was settled by the other side")
        if isinstance(ready, readiness.Died):
            return self._died(ready)
        with self.step("prove"):
            found = self.prove(change.unit, change.settings, ready.invocation, change.baseline)
        return self._judge(found)

    def _revoke(self, change: Change) -> None:
        current = units.digest(change.observed.etc_unit or b"")
        entry = self.entry(Kind.REVOKED, current, why=self.options.command)
        with self.step("revoke the current configuration"):
            self.agent.call(commands.revoke(self.agent.unit, self.agent.run, change.unit.digest, to_line(entry)))

    def _stage(self, change: Change) -> None:
        agent, unit = self.agent, change.unit
        fence = units.fence(self.config, change.observed.addresses)
        entry = self.entry(Kind.ATTEMPT, unit.digest, settings=change.settings.to_dict(), why=self.options.command)
        with self.step("stage the trial"):
            agent.call(commands.stage(agent.unit, agent.run, unit.digest, unit.text, fence, to_line(entry)))
        if not self.config.fence.enabled:
            self.warn("the fence is off in the inventory: users may reach the engine before it is proven")
        elif not change.observed.fence_works:
            self.warn("this host cannot fence a unit (no BPF): users may reach the engine before it is proven")

    def _started(self) -> Trial:
        """Wait for the switch, which runs on the host by itself: the old engine gone, the new one started."""
        give_up = time.monotonic() + self.room.wait_seconds + SETTLE_SECONDS
        while time.monotonic() < give_up:
            self.check_taken()
            state, _ = self.agent.trial()
            if state is None or not state.open or state.token:
                raise Taken("the trial was settled by the other side")
            if state.step == "started" or state.step.startswith("fault"):
                return state
            time.sleep(0.1)
        raise RemoteFailed(f"{self.name}: the switch did not end in time", status=0)

    def _died(self, death: readiness.Died) -> Undo:
        self.journal.emit("died", host=self.name, why=death.why, lines=list(death.lines))
        facts = {"log": list(death.lines), "environment": death.environment}
        return Undo(death.why, known_bad=not death.environment and not death.hung, facts=facts)

    def _judge(self, found: Proof) -> Undo | Proof:
        verdict = found.verdict
        if verdict.kind == "pass" or (verdict.kind == "degraded" and self.config.prove.confirm_degraded):
            return found
        result = Result.INCONCLUSIVE if verdict.kind == "inconclusive" else Result.ROLLED_BACK
        bad = verdict.kind in ("corrupt", "crashed")
        return Undo(f"{verdict.kind}: {verdict.why}", result, found, bad)

    # ================================================================ confirm
    def _confirm(self, change: Change, found: Proof) -> Trial:
        """Ask for the confirmation and wait for its end; the host may still find that something differs."""
        agent, unit = self.agent, change.unit
        proven = self.proof_entry(Kind.PROVEN, unit.digest, found, why=self.options.command)
        confirmed = replace(proven, kind=Kind.CONFIRMED)
        with self.step("confirm"):
            self.keep_evidence(found)
            lines = to_line(proven), to_line(confirmed)
            agent.call(commands.confirm(agent.unit, agent.run, proven.invocation, unit.digest, *lines))
            return agent.settled(agent.run, SETTLE_SECONDS)

    def _confirmed(self, state: Trial, change: Change, found: Proof | None, stop: Exit | None = None) -> Outcome:
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

    # ================================================================ undo
    def _undo(self, end: Undo, change: Change) -> Outcome:
        agent = self.agent
        with self.step("undo"):
            try:
                agent.call(commands.undo(agent.unit, agent.run, self.by, self.room, end.why[:LONGEST_WHY]))
            except TooLate:
                self.warn("the other side was first; waiting for what it does")
            state = agent.settled(agent.run, SETTLE_SECONDS)
        if state.outcome != "undone":
            return self._confirmed(state, change, None, end.exit_override)
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
        if stands.verified:
            return self._back(end, change, stands.text, facts)
        before, settings = self.running(observed)
        self.taken.clear()  # from here on the guard has nothing more to take
        with self.step("prove the restored configuration"):
            broken, found = self.prove_current(before, settings, observed)
        if found is None or broken:
            return Outcome(
                self.name,
                Result.RESTORE_FAILED,
                f"{self.name}: not proven ({end.why}), and what was restored is not verified either: {broken}",
                means="the host needs a person; it was not tried a second time",
                hint=f"ddops status --host {self.name}; take it out of service",
                facts=facts,
            )
        try:
            self.record(Kind.VERIFIED, before.digest, found, why="restored after an undo")
        except (Refused, RemoteFailed) as problem:  # it is proven all the same; a full disk forgets it
            self.warn(f"that it is proven could not be recorded on the host: {problem.what}")
        facts["restored"] = found.verdict.to_dict(replay=False)
        return self._back(end, change, f"{settings.describe()}, proven again: {found.verdict.why}", facts)

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
        try:
            key = end.proof.key if end.proof else plan.key(self.config, change.settings, self.agent.look(), None)
            entry = self.entry(
                Kind.FAILED,
                change.unit.digest,
                verdict=end.proof.verdict if end.proof else None,
                settings=change.settings.to_dict(),
                key=key,
                why=end.why,
                extra={"known_bad": end.known_bad},
            )
            self.agent.record(entry)
            if end.proof is not None:
                self.keep_evidence(end.proof)
        except (Refused, RemoteFailed) as problem:
            self.warn(f"the failure could not be recorded on the host: {problem.what}")

    # ================================================================ ends that are not seen from here
    def _unknown(self, lost: DdopsError) -> Outcome:
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


def _refused(host: str, made: Plan) -> Outcome:
    first = made.refusals[0]
    others = "".join(f"; also: {refusal.what}" for refusal in made.refusals[1:])
    means = (first.means or "nothing was changed") + others
    facts = {"plan": made.to_dict()}
    what = first.what if first.what.startswith(host) else f"{host}: {first.what}"
    return Outcome(host, Result.REFUSED, what, means, first.hint, facts=facts)
