"""One change on one host, from the first look to a proven end. The order of the steps is the safety.

    observe, plan -> lease -> fresh baseline -> arm the guard -> stage (fenced, under /run) -> switch -> ready
        -> applied and proven -> confirm (compare and swap)
        -> anything else      -> undo, in ending.py -> ready -> proven again

It takes no decision that plan.py, the battery or the host script can take, and it never repeats a step
without asking the host where it stands.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ddops import commands, plan, proof, pythons, readiness, standing, units
from ddops.agent import RECONNECT_SECONDS, SETTLE_SECONDS, Agent, TooLate, locked
from ddops.ending import Change, Ending, Undo
from ddops.errors import DdopsError, Interrupted, Refused, RemoteFailed, RemoteTimeout, Unreachable
from ddops.ground import Options, Taken
from ddops.ledger import to_line
from ddops.outcome import Outcome, Result
from ddops.plan import Action, Plan, Request
from ddops.state import Kind, Observed, Trial
from ddops.units import Unit

if TYPE_CHECKING:
    from ddops.journal import Journal
    from ddops.proof import Proof

PROVE_SECONDS = {"quick": 300, "standard": 900, "deep": 7200}  # what the guard's cap allows for the battery


class Transaction(Ending):
    """See the module. One instance carries out one command."""

    def __init__(self, agent: Agent, journal: Journal, options: Options) -> None:
        super().__init__(agent, journal, options)
        self._told: dict[str, Any] = {}

    # ================================================================ the commands
    def reconfigure(self, request: Request) -> Outcome:
        """Change the configuration, prove it, and otherwise put the host back and prove that."""
        with self.step("observe"):
            observed = self.agent.look()
        made = self._plan(request, observed)
        if isinstance(made, Outcome):
            return made
        with self.leased():
            with self.step("observe again"):  # nobody else changes the host from here on
                observed = self.agent.look()
            made = self._plan(request, observed)
            if isinstance(made, Outcome):
                return made
            if made.action is Action.VERIFY:
                return standing.in_place(self, made.unit, made.settings, observed)
            self._check_python(made.unit, observed)
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
            if unit.text == observed.etc_unit:
                return self._back_already(unit, observed)
            self._check_unit(unit)
            return self._trial(Change(unit, units.settings(unit, self.config), observed, revoke=True))

    def _back_already(self, unit: Unit, observed: Observed) -> Outcome:
        """Asked for by its digest, and there: a second run changes nothing, and what runs is proven after it too."""
        stands, settings = plan.verification(observed), units.settings(unit, self.config)
        if stands.verified:
            what = f"{self.name} is on {settings.describe()} already: {stands.text}"
            return Outcome(self.name, Result.UNCHANGED, what, means="the engine was not restarted")
        return standing.in_place(self, unit, settings, observed)

    # ================================================================ before anything is touched
    def _plan(self, request: Request, observed: Observed) -> Outcome | Plan:
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
        return made

    def _tell(self, made: Plan, observed: Observed) -> None:
        """Show the plan; the second look, under the lease, says only what is new."""
        if (shown := made.to_dict()) == self._told:
            return
        self._told = shown
        self.journal.emit("plan", host=self.name, **shown)
        for note in (*observed.notes, *made.warnings):
            self.warn(note)

    def _check_python(self, unit: Unit, observed: Observed) -> None:
        """What starts with another Python or release than what is there is asked first whether it can.

        Raises:
            Refused: it can't.
        """
        engine = self.config.engine
        here = observed.etc_unit
        same = here is not None and units.parse(here).argv[:1] == unit.argv[:1] and engine.release_folder.encode() in here
        if engine.kind == "ddtree" and not same:
            with self.step("host's Python"):
                pythons.check(self.agent, self.journal)

    def _check_unit(self, unit: Unit) -> None:
        with self.step("verify the unit on the host"):
            self.agent.call(commands.check_unit(unit.name, unit.text))

    def _check_connection(self) -> None:
        """The one connection must carry HTTP and commands at the same time; where sshd forbids forwarding, HTTP
        takes a session, and MaxSessions 1 leaves none for commands. One that breaks meanwhile is made anew.

        Raises:
            Refused: it can't; better known before the switch than after it.
        """
        if narrow := self.agent.patiently(self._too_narrow):
            self.agent.remote.reconnect(RECONNECT_SECONDS)  # HTTP lets go of its session, and the lease can be given back
            raise Refused(narrow.what, means="nothing was changed", hint=narrow.hint) from narrow

    def _too_narrow(self) -> RemoteTimeout | None:
        """Why no command gets through beside HTTP. Raises what a broken connection raises."""
        command = commands.trial(self.agent.unit)
        with proof.client(self.agent) as engine:
            engine.healthy(timeout=5.0)
            try:
                self.agent.remote.run(command.argv, deadline=command.deadline_seconds, sudo=True)
            except RemoteTimeout as problem:
                if self.agent.remote.alive(timeout=5.0):
                    return problem
                raise
        return None

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
            return self.took_back(self.stopped(stop), change)
        state: Trial | None = None
        try:
            with agent.heartbeat(self.taken.set):
                end = self._steps(change)
                if not isinstance(end, Undo):
                    state = self._confirm(change, end)
        except Interrupted as stop:
            end = self.stopped(stop)
        except (Taken, TooLate):
            end = Undo("the host's guard was faster: no heartbeat reached it in time")
        except Unreachable as lost:
            return self.unknown(lost)
        except DdopsError as problem:
            end = Undo(problem.what, facts={"error": str(problem)})
        if not isinstance(end, Undo):
            if state is not None and state.outcome != "undone":
                return self.confirmed(state, change, end)
            end = Undo("the engine was not the proven one any more when it was to be confirmed")
        return self.took_back(end, change)

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
            self.check()
            state, _ = self.agent.trial()
            if state is None or not state.open or state.token:
                raise Taken("the trial was settled by the other side")
            if state.step == "started" or state.step.startswith("fault"):
                return state
            time.sleep(0.1)
        raise RemoteFailed(f"{self.name}: the switch did not end in time", status=0)

    def _died(self, death: readiness.Died) -> Undo:
        facts = {"log": list(death.lines), "environment": death.environment}
        return Undo(death.why, known_bad=not death.environment and not death.hung, facts=facts)

    def _judge(self, found: Proof) -> Undo | Proof:
        verdict = found.verdict
        if verdict.kind == "pass" or (verdict.kind == "degraded" and self.config.prove.confirm_degraded):
            return found
        result = Result.INCONCLUSIVE if verdict.kind == "inconclusive" else Result.ROLLED_BACK
        bad = verdict.kind in ("corrupt", "crashed") and not found.blames_host
        facts = {"log": list(found.death.lines), "environment": found.blames_host} if found.death else {}
        return Undo(f"{verdict.kind}: {found.why}", result, found, bad, facts=facts)

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


def _refused(host: str, made: Plan) -> Outcome:
    first = made.refusals[0]
    others = "".join(f"; also: {refusal.what}" for refusal in made.refusals[1:])
    means = (first.means or "nothing was changed") + others
    facts = {"plan": made.to_dict()}
    what = first.what if first.what.startswith(host) else f"{host}: {first.what}"
    return Outcome(host, Result.REFUSED, what, means, first.hint, facts=facts)
