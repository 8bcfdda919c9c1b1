"""One change on one host, from the first look to a proven end. The order of the steps is the safety.

    observe, plan -> lease -> fresh baseline -> arm the guard -> stage (fenced, under /run) -> switch -> ready
        -> applied and proven -> confirm (compare and swap)
        -> anything else      -> undo -> ready -> proven again

It takes no decision that plan.py, the battery or the host script can take, and it never repeats a step
without asking the host where it stands.
"""

from __future__ import annotations

import getpass
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from ddops import commands, plan, proof, readiness, units
from ddops.agent import Agent, TooLate
from ddops.engines import Settings
from ddops.errors import DdopsError, Exit, Interrupted, Refused, RemoteFailed, Unreachable
from ddops.ledger import to_line
from ddops.outcome import Outcome, Result
from ddops.plan import Action, Plan, Request
from ddops.state import Entry, Kind, Observed, Trial
from ddops.units import Unit

if TYPE_CHECKING:
    from ddops.journal import Journal
    from ddops.proof import Proof
    from ddops.prove.evidence import Baseline, Verdict

SETTLE_SECONDS = 180.0  # a confirm or an undo on the host, its wait for port and memory included
PROVE_SECONDS = {"quick": 300, "standard": 900, "deep": 7200}  # what the guard's cap allows for the battery


class Taken(DdopsError):
    """The trial is no longer ours to decide: the guard, or another operator, has settled it."""


@dataclass(frozen=True, slots=True)
class Options:
    """How a change is carried out; what is changed is the Request."""

    command: str  # as typed, for the lease and the ledger
    level: str | None = None  # None: the inventory's
    dry_run: bool = False


@dataclass(slots=True)
class Undo:
    """Why a trial is taken back, and what that makes of the run."""

    why: str
    result: Result = Result.ROLLED_BACK
    verdict: Verdict | None = None
    known_bad: bool = False
    exit_override: Exit | None = None
    facts: dict[str, Any] = field(default_factory=dict)


class Transaction:
    """A run on one host.

    Args:
        agent: the host, over an open connection.
        journal: every step is an event there.
        options: how.
    """

    def __init__(self, agent: Agent, journal: Journal, options: Options) -> None:
        self.agent = agent
        self.config = agent.config
        self.journal = journal
        self.options = options
        self.level = options.level or self.config.prove.level
        self.by = f"{getpass.getuser()}@{socket.gethostname()}"
        self._taken = threading.Event()
        engine = self.config.engine
        self.room = commands.Room(engine.port, self.config.limits.gpu_memory_free_mib or 0)

    # ================================================================ the commands
    def reconfigure(self, request: Request) -> Outcome:
        """Change the configuration, prove it, and otherwise put the host back and prove that."""
        planned = self._plan(request)
        if isinstance(planned, Outcome):
            return planned
        with self._leased():
            planned = self._plan(request)  # under the lease: nobody else changes the host from here on
            if isinstance(planned, Outcome):
                return planned
            made, observed = planned
            if made.action is Action.VERIFY:
                return self._verified_in_place(made.unit, made.settings, observed)
            baseline = self._baseline(observed, request)
            self._check_unit(made.unit)
            return self._trial(made.unit, made.settings, observed, baseline)

    def rollback(self, to: str | None = None) -> Outcome:
        """Revoke what is there and go back to a configuration that was verified before.

        Args:
            to: the start of a verified digest; None takes the previous verified one.
        """
        with self._leased():
            observed = self.agent.look()
            target = plan.rollback_target(observed, to)
            text = self.agent.call(commands.stored(self.agent.unit, target.digest)).stdout
            unit = units.from_text(self.agent.unit, text)
            settings = units.settings(unit, self.config)
            self._check_unit(unit)
            return self._trial(unit, settings, observed, None, revoke=True)

    def verify(self) -> Outcome:
        """Prove the running engine again, without a restart."""
        with self._leased():
            observed = self.agent.look()
            unit, settings = self._running(observed)
            return self._verified_in_place(unit, settings, observed)

    def adopt(self) -> Outcome:
        """Take a hand-written unit as it is, byte for byte, once what it runs is proven."""
        with self._leased():
            observed = self.agent.look()
            plan.adoptable(self.config, observed)
            unit, settings = self._running(observed)
            self.agent.call(commands.keep(self.agent.unit, self.agent.run))
            return self._verified_in_place(unit, settings, observed, kind=Kind.ADOPTED)

    def resume(self) -> Outcome:
        """Finish what an interrupted run left: wait until the host has settled, then prove what runs."""
        state, _ = self.agent.trial()
        if state is not None and state.open:
            self._settled(state.run, state.guard_in_seconds + SETTLE_SECONDS)
        observed = self.agent.look()
        standing = plan.verification(observed)
        if standing.verified:
            what = f"{self.config.name} has nothing left to finish: {standing.text}"
            return Outcome(self.config.name, Result.UNCHANGED, what)
        if observed.etc_unit is None:
            what = f"{self.config.name} has no unit and no open trial: nothing to finish"
            return Outcome(self.config.name, Result.UNCHANGED, what)
        outcome = self.verify()
        undone = any(
            entry.kind is Kind.UNDONE and state and entry.run == state.run for entry in observed.ledger
        )
        if outcome.result is Result.VERIFIED and undone:
            # The interrupted change did not survive; saying 0 here would call it a success.
            return replace(outcome, result=Result.ROLLED_BACK, means="the interrupted change was undone")
        return outcome

    # ================================================================ before anything is touched
    def _plan(self, request: Request) -> Outcome | tuple[Plan, Observed]:
        with self._step("observe"):
            observed = self.agent.look()
        made = plan.make(self.config, request, observed)
        self.journal.emit("plan", host=self.config.name, **made.to_dict())
        for note in (*observed.notes, *made.warnings):
            self.journal.emit("warning", host=self.config.name, text=note)
        if made.refusals:
            first = made.refusals[0]
            others = "; ".join(refusal.what for refusal in made.refusals[1:])
            means = first.means or "nothing was changed"
            return Outcome(
                self.config.name,
                Result.REFUSED,
                f"{self.config.name}: {first.what}",
                means=f"{means}{'; also: ' + others if others else ''}",
                hint=first.hint,
                facts={"plan": made.to_dict()},
            )
        if self.options.dry_run:
            changes = made.action is not Action.UNCHANGED
            what = "would change" if changes else "would change nothing on"
            return Outcome(
                self.config.name,
                Result.PLANNED,
                f"dry run: {what} {self.config.name}",
                facts={"plan": made.to_dict(), "changes": changes},
            )
        if made.action is Action.UNCHANGED:
            return Outcome(
                self.config.name,
                Result.UNCHANGED,
                f"{self.config.name} runs this already: {plan.verification(observed).text}",
                means="the engine was not restarted",
            )
        return made, observed

    def _baseline(self, observed: Observed, request: Request) -> Baseline | None:
        """The running configuration is known to be good before it is touched, or that is said first."""
        from ddops.prove.evidence import Baseline

        if observed.etc_unit is None:
            return None
        standing = plan.verification(observed)
        if standing.verified and standing.entry is not None:
            return self._recorded(standing.entry)
        unit, settings = self._running(observed)
        with self._step("fresh baseline"):
            broken, found = self._prove_current(unit, settings, observed)
        if found is not None and not broken:
            self._record(Kind.VERIFIED, unit.digest, found, why="fresh baseline before a change")
            return Baseline.of(found.verdict)
        if request.from_broken:
            text = (
                f"the running configuration is not proven ({broken}); going on, since --from-broken was given"
            )
            self.journal.emit("warning", host=self.config.name, text=text)
            return None
        raise Refused(
            f"{self.config.name} is broken or unproven before the change: {broken}",
            means="nothing was changed; an undo would have nothing good to go back to",
            hint=f"ddops rollback --host {self.config.name}, or repeat with --from-broken",
        )

    def _recorded(self, entry: Entry) -> Baseline | None:
        from ddops.prove.evidence import Baseline, Verdict

        try:
            return Baseline.of(Verdict.from_dict(entry.verdict))
        except (ValueError, KeyError, TypeError):
            return None  # recorded by another version: relative gates are then not scored, and say so

    def _prove_current(self, unit: Unit, settings: Settings, observed: Observed) -> tuple[str, Proof | None]:
        """Wait for what runs now and prove it; the first value says what is wrong, "" when nothing is."""
        if not observed.unit.running and observed.unit.active_state != "activating":
            return f"the unit is {observed.unit.active_state} ({observed.unit.result})", None
        state = self._ready(observed.unit.invocation_id, trial=False)
        if not isinstance(state, readiness.Ready):
            return getattr(state, "why", "the unit was taken by another run"), None
        found = self._prove(unit, settings, state.invocation, None)
        return ("" if found.verdict.kind in ("pass", "degraded") else found.verdict.why), found

    def _check_unit(self, unit: Unit) -> None:
        with self._step("verify the unit on the host"):
            self.agent.call(commands.check_unit(unit.name, unit.text))

    # ================================================================ the trial
    def _trial(
        self,
        unit: Unit,
        settings: Settings,
        observed: Observed,
        baseline: Baseline | None,
        *,
        revoke: bool = False,
    ) -> Outcome:
        guard = self.config.guard
        longest = self.config.ready.timeout_seconds + PROVE_SECONDS[self.level] + 2 * SETTLE_SECONDS
        agent = self.agent
        with self._step("arm the guard"):
            cap = max(guard.cap_seconds, int(longest))
            agent.call(commands.arm(agent.unit, agent.run, guard.seconds, cap))
        armed = time.monotonic()
        try:
            with agent.heartbeat(self._taken.set):
                if revoke:
                    self._revoke(unit, observed)
                self._stage(unit, settings, observed)
                end = self._run_trial(unit, settings, baseline)
                if not isinstance(end, Undo):
                    return self._confirm(unit, settings, end, revoke)
        except Interrupted as stop:
            end = Undo(f"stopped by {self.by}", Result.INTERRUPTED, exit_override=stop.exit)
        except (Taken, TooLate):
            return self._after_the_guard(unit)
        except Unreachable as lost:
            return self._unknown(lost, armed)
        except DdopsError as problem:
            end = Undo(problem.what, facts={"error": problem.what})
        try:
            return self._undo(end, unit, settings, revoke)
        except Interrupted as stop:
            return self._left(stop)

    def _revoke(self, unit: Unit, observed: Observed) -> None:
        current = units.digest(observed.etc_unit or b"")
        entry = self._entry(Kind.REVOKED, current, why=self.options.command)
        with self._step("revoke the current configuration"):
            self.agent.call(commands.revoke(self.agent.unit, self.agent.run, unit.digest, to_line(entry)))

    def _stage(self, unit: Unit, settings: Settings, observed: Observed) -> None:
        fence = units.fence(self.config, observed.addresses) if self.config.fence.enabled else b""
        entry = self._entry(Kind.ATTEMPT, unit.digest, settings=settings.to_dict(), why=self.options.command)
        with self._step("stage the trial"):
            self.agent.call(
                commands.stage(self.agent.unit, self.agent.run, unit.digest, unit.text, fence, to_line(entry))
            )
        if self.config.fence.enabled and not observed.fence_works:
            text = (
                "this host's kernel or systemd cannot fence: users may reach the engine before it is proven"
            )
            self.journal.emit("warning", host=self.config.name, text=text)

    def _run_trial(self, unit: Unit, settings: Settings, baseline: Baseline | None) -> Undo | Proof:
        with self._step("switch"):
            self.agent.call(commands.switch(self.agent.unit, self.agent.run, self.room))
            state = self._started()
        if state.step.startswith("fault"):
            return Undo(state.step.removeprefix("fault ").strip(), facts={"environment": True})
        with self._step("ready"):
            ready = self._ready(state.invocation, trial=True)
        if isinstance(ready, readiness.Taken):
            raise Taken("the trial was settled by the other side")
        if isinstance(ready, readiness.Died):
            return self._died(ready, settings)
        with self._step("prove"):
            found = self._prove(unit, settings, ready.invocation, baseline)
        return self._judge(found)

    def _started(self) -> Trial:
        """Wait for the switch, which runs on the host by itself: the old engine gone, the new one started."""
        give_up = time.monotonic() + self.room.wait_seconds + SETTLE_SECONDS
        while time.monotonic() < give_up:
            self._check_taken()
            state, _ = self.agent.trial()
            if state is None or not state.open or state.token:
                raise Taken("the trial was settled by the other side")
            if state.step == "started" or state.step.startswith("fault"):
                return state
            time.sleep(0.1)
        raise RemoteFailed(f"{self.config.name}: the switch did not end in time", status=0)

    def _ready(self, invocation: str, *, trial: bool) -> readiness.Ready | readiness.Died | readiness.Taken:
        with proof.client(self.agent) as engine:
            return readiness.wait(
                self.agent,
                engine,
                self.journal,
                invocation=invocation,
                budget_seconds=self.config.ready.timeout_seconds,
                trial=trial,
            )

    def _prove(self, unit: Unit, settings: Settings, invocation: str, baseline: Baseline | None) -> Proof:
        return proof.prove(
            self.agent,
            unit,
            settings,
            invocation,
            self.journal,
            level=self.level,
            baseline=baseline,
            check=self._check_taken,
        )

    def _died(self, death: readiness.Died, settings: Settings) -> Undo:
        facts = {"log": list(death.lines), "environment": death.environment}
        self.journal.emit("died", host=self.config.name, why=death.why, lines=list(death.lines))
        known_bad = not death.environment and not death.hung
        return Undo(death.why, known_bad=known_bad, facts=facts | {"settings": settings.to_dict()})

    def _judge(self, found: Proof) -> Undo | Proof:
        verdict = found.verdict
        if verdict.kind == "pass" or (verdict.kind == "degraded" and self.config.prove.confirm_degraded):
            return found
        result = Result.INCONCLUSIVE if verdict.kind == "inconclusive" else Result.ROLLED_BACK
        bad = verdict.kind in ("corrupt", "crashed")
        return Undo(f"{verdict.kind}: {verdict.why}", result, verdict, bad, facts={"key": found.key})

    # ================================================================ confirm
    def _confirm(self, unit: Unit, settings: Settings, found: Proof, revoke: bool) -> Outcome:
        agent = self.agent
        invocation = found.verdict.invocation
        fields = {"settings": settings.to_dict(), "key": found.key, "invocation": invocation}
        proven = self._entry(
            Kind.PROVEN, unit.digest, verdict=found.verdict, boot=found.observed.boot, **fields
        )
        confirmed = replace(proven, kind=Kind.CONFIRMED)
        with self._step("confirm"):
            self._keep_evidence(found.verdict)
            agent.call(
                commands.confirm(
                    agent.unit, agent.run, invocation, unit.digest, to_line(proven), to_line(confirmed)
                )
            )
            state = self._settled(agent.run, SETTLE_SECONDS)
        if state.outcome == "undone":
            why = "the engine was not the proven one any more when it was to be confirmed"
            return self._restored(Undo(why), unit, settings, revoke)
        if state.outcome == "confirmed-restarted":
            observed = agent.look()
            return self._verified_in_place(unit, settings, observed, result=Result.APPLIED)
        verb = "rolled back to" if revoke else "runs"
        return Outcome(
            self.config.name,
            Result.APPLIED,
            f"{self.config.name} {verb} {settings.describe()}: proven, and now the last known good",
            facts=self._facts(found, unit),
        )

    def _settled(self, run: str, seconds: float) -> Trial:
        """Wait until the host has finished a confirm or an undo; both run there by themselves."""
        give_up = time.monotonic() + seconds
        while True:
            state, _ = self.agent.trial()
            if state is None or (state.run == run and not state.open):
                return state or Trial(run, "", "", "", 0.0, outcome="undone")
            if time.monotonic() >= give_up:
                raise RemoteFailed(
                    f"{self.config.name}: the host did not finish to {state.token or 'decide'} in {seconds:.0f} s",
                    status=0,
                    means="it goes on by itself",
                    hint=f"ddops resume --host {self.config.name}",
                )
            time.sleep(0.1)

    # ================================================================ undo
    def _undo(self, end: Undo, unit: Unit, settings: Settings, revoke: bool) -> Outcome:
        agent = self.agent
        try:
            with self._step("undo"):
                agent.call(commands.undo(agent.unit, agent.run, self.by, self.room, end.why))
                self._settled(agent.run, SETTLE_SECONDS)
        except TooLate:
            self._settled(agent.run, SETTLE_SECONDS)
        except Unreachable as lost:
            return self._unknown(lost, time.monotonic())
        return self._restored(end, unit, settings, revoke)

    def _restored(self, end: Undo, unit: Unit, settings: Settings, revoke: bool) -> Outcome:
        """After an undo: prove what the host went back to. One undo a run; there is no second try."""
        self._remember_failure(end, unit, settings)
        name = self.config.name
        observed = self.agent.look()
        facts = dict(end.facts) | ({"verdict": end.verdict.to_dict(replay=False)} if end.verdict else {})
        if observed.etc_unit is None:
            what = f"{name}: not proven ({end.why}); the unit was taken away again, there was none before"
            return Outcome(name, end.result, what, facts=facts, exit_override=end.exit_override)
        standing = plan.verification(observed)
        if standing.verified:
            return self._back(end, standing.text, facts, revoke)
        before, before_settings = self._running(observed)
        with self._step("prove the restored configuration"):
            broken, found = self._prove_current(before, before_settings, observed)
        if found is None or broken:
            return Outcome(
                name,
                Result.RESTORE_FAILED,
                f"{name}: not proven ({end.why}), and what was restored is not verified either: {broken}",
                means="the host needs a person; it was not tried a second time",
                hint=f"ddops status --host {name}; take it out of service",
                facts=facts,
            )
        self._record(Kind.VERIFIED, before.digest, found, why="restored after an undo")
        facts["restored"] = found.verdict.to_dict(replay=False)
        return self._back(end, f"{before_settings.describe()}, proven again: {found.verdict.why}", facts, revoke)

    def _back(self, end: Undo, restored: str, facts: dict[str, Any], revoke: bool) -> Outcome:
        name = self.config.name
        if revoke:
            # The previous configuration itself failed its proof, and a restart of it happened to pass.
            end = replace(end, result=Result.RESTORE_FAILED, exit_override=None)
        return Outcome(
            name,
            end.result,
            f"{name}: not proven ({end.why})",
            means=f"{name} is back on its last verified configuration ({restored})",
            hint=f"ddops history --host {name}",
            facts=facts,
            exit_override=end.exit_override,
        )

    def _remember_failure(self, end: Undo, unit: Unit, settings: Settings) -> None:
        """Known-bad only what a verdict or a death says of the configuration, never a fault of the host."""
        if end.verdict is None and not end.known_bad:
            return
        extra = {"known_bad": end.known_bad}
        entry = self._entry(
            Kind.FAILED,
            unit.digest,
            verdict=end.verdict,
            settings=settings.to_dict(),
            key=end.facts.get("key") or plan.key(self.config, settings, self.agent.look(), None),
            why=end.why,
            extra=extra,
        )
        try:
            self.agent.record(entry)
            if end.verdict is not None:
                self._keep_evidence(end.verdict)
        except DdopsError as problem:
            text = f"the failure could not be recorded on the host: {problem.what}"
            self.journal.emit("warning", host=self.config.name, text=text)

    def _after_the_guard(self, unit: Unit) -> Outcome:
        """The guard was faster (a controller that stalled past its deadline): prove what it restored."""
        state = self._settled(self.agent.run, SETTLE_SECONDS)
        end = Undo(f"the host's guard took the trial back ({state.outcome or 'deadline passed'})")
        return self._restored(end, unit, units.settings(unit, self.config), revoke=False)

    def _unknown(self, lost: DdopsError, since: float) -> Outcome:
        left = max(0.0, self.config.guard.seconds - (time.monotonic() - since))
        when = (datetime.now() + timedelta(seconds=left + self.config.guard.seconds)).strftime("%H:%M:%S")
        return Outcome(
            self.config.name,
            Result.UNKNOWN,
            lost.what,
            means=f"the state is not known from here; the host's guard undoes the trial by {when} at the latest",
            hint=f"ddops resume --host {self.config.name}",
        )

    def _left(self, stop: Interrupted) -> Outcome:
        """The operator would not wait for the undo: the host finishes it, or its guard starts it."""
        latest = datetime.now() + timedelta(seconds=self.config.guard.seconds)
        return Outcome(
            self.config.name,
            Result.INTERRUPTED,
            f"{self.config.name}: left before the host was back on its last verified configuration",
            means=f"the host undoes the trial by itself, at {latest:%H:%M:%S} at the latest; it is then not proven",
            hint=f"ddops resume --host {self.config.name}",
            exit_override=stop.exit,
        )

    # ================================================================ proving without a change
    def _running(self, observed: Observed) -> tuple[Unit, Settings]:
        if observed.etc_unit is None:
            raise Refused(
                f"{self.config.name} has no {self.agent.unit}",
                means="there is nothing to prove",
                hint=f"ddops install --host {self.config.name}",
            )
        unit = units.from_text(self.agent.unit, observed.etc_unit)
        return unit, units.settings(unit, self.config)

    def _verified_in_place(
        self,
        unit: Unit,
        settings: Settings,
        observed: Observed,
        *,
        kind: Kind = Kind.VERIFIED,
        result: Result = Result.VERIFIED,
    ) -> Outcome:
        name = self.config.name
        with self._step("prove"):
            broken, found = self._prove_current(unit, settings, observed)
        if found is not None and not broken:
            self._record(kind, unit.digest, found, why=self.options.command)
            what = f"{name} runs {settings.describe()}: {found.verdict.why}"
            return Outcome(name, result, what, facts=self._facts(found, unit))
        if found is not None:
            self._record(Kind.FAILED, unit.digest, found, why=broken)
        unsure = found is not None and found.verdict.kind == "inconclusive"
        return Outcome(
            name,
            Result.NOT_PROVEN,
            f"{name}: what runs is not proven: {broken}",
            means="nothing was restarted and nothing was restored",
            hint=f"ddops rollback --host {name}, or take it out of service",
            facts=self._facts(found, unit) if found else {},
            exit_override=Exit.INCONCLUSIVE if unsure else None,
        )

    # ================================================================ records
    def _record(self, kind: Kind, digest: str, found: Proof, *, why: str) -> None:
        entry = self._entry(
            kind,
            digest,
            verdict=found.verdict,
            settings=found.settings.to_dict(),
            key=found.key,
            invocation=found.verdict.invocation,
            boot=found.observed.boot,
            why=why,
        )
        self.agent.record(entry)
        self._keep_evidence(found.verdict)

    def _entry(self, kind: Kind, digest: str, *, verdict: Verdict | None = None, **fields: Any) -> Entry:
        return Entry(
            kind=kind,
            run=self.agent.run,
            time=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            digest=digest,
            by=self.by,
            verdict=verdict.to_dict(replay=False) if verdict else {},
            **fields,
        )

    def _keep_evidence(self, verdict: Verdict) -> None:
        document = json.dumps(verdict.to_dict(), ensure_ascii=False).encode()
        self.agent.call(commands.evidence(self.agent.unit, self.agent.run, document))

    def _facts(self, found: Proof, unit: Unit) -> dict[str, Any]:
        return {
            "verdict": found.verdict.to_dict(replay=False),
            "digest": unit.digest,
            "settings": found.settings.to_dict(),
        }

    # ================================================================ small things
    @contextmanager
    def _leased(self) -> Iterator[None]:
        with self.agent.lease(f"{self.by}, run {self.agent.run}\n{self.options.command}\n"):
            yield

    def _check_taken(self) -> None:
        if self._taken.is_set():
            raise Taken("the trial was settled by the other side")

    @contextmanager
    def _step(self, name: str) -> Iterator[None]:
        begun = time.monotonic()
        self.journal.emit("step.started", host=self.config.name, step=name)
        try:
            yield
        except BaseException:
            self._finished(name, begun, ok=False)
            raise
        self._finished(name, begun, ok=True)

    def _finished(self, name: str, begun: float, *, ok: bool) -> None:
        seconds = time.monotonic() - begun
        self.journal.emit("step.finished", host=self.config.name, step=name, ok=ok, seconds=seconds)

