"""What is proven without a change: the baseline before one, `verify`, `adopt`, and what `resume` finds.

Nothing here restarts an engine or touches a unit.
"""

from __future__ import annotations

import time
from dataclasses import replace

from ddops import commands, plan
from ddops.agent import SETTLE_SECONDS
from ddops.engines import Settings
from ddops.errors import Exit, Refused
from ddops.ground import Ground
from ddops.outcome import Outcome, Result
from ddops.plan import Request
from ddops.prove.evidence import Baseline, Verdict
from ddops.state import Entry, Kind, Observed
from ddops.units import Unit


def verify(ground: Ground) -> Outcome:
    """Prove the running engine again, without a restart; its verdict is renewed or void."""
    with ground.leased():
        observed = ground.agent.look()
        unit, settings = ground.running(observed)
        return in_place(ground, unit, settings, observed)


def adopt(ground: Ground) -> Outcome:
    """Take a hand-written unit as it is, byte for byte, once what it runs is proven.

    Raises:
        Refused: it is no unit ddops can stand for (drop-ins, a container client, several commands).
    """
    with ground.leased():
        observed = ground.agent.look()
        plan.adoptable(ground.config, observed)
        unit, settings = ground.running(observed)
        ground.agent.call(commands.keep(ground.agent.unit, ground.agent.run))
        return in_place(ground, unit, settings, observed, kind=Kind.ADOPTED)


def resume(ground: Ground) -> Outcome:
    """Finish what an interrupted run left: wait until the host has settled, then prove what runs."""
    name = ground.name
    state, _ = ground.agent.trial()
    if state is not None and state.open:
        ground.warn(f"run {state.run} left a trial; its guard decides in {max(0.0, state.guard_in_seconds):.0f} s")
        with ground.step("wait for the host to settle"):
            state = ground.agent.settled(state.run, max(0.0, state.guard_in_seconds) + SETTLE_SECONDS)
    _outlast(ground)
    if ground.agent.look().etc_unit is None:
        return Outcome(name, Result.UNCHANGED, f"{name} has no unit and no open trial: nothing to finish")
    with ground.leased():
        return _finish(ground)


def _finish(ground: Ground) -> Outcome:
    """Nothing is open any more: say what became of the interrupted change, and prove what runs.

    A change that did not survive is never 0: a pipeline would take that for its success.
    """
    name = ground.name
    observed = ground.agent.look()
    lost = ground.note_lost(observed) or _taken_back(observed)
    standing = plan.verification(observed)
    if standing.entry is not None and standing.verified and lost:
        ground.reaffirm(standing.entry, why="untouched by a change that was interrupted")
        what = f"{name}: the interrupted change did not survive; what ran before runs on"
        return Outcome(name, Result.ROLLED_BACK, what, means=standing.text)
    if standing.verified:
        return Outcome(name, Result.UNCHANGED, f"{name} has nothing left to finish: {standing.text}")
    unit, settings = ground.running(observed)
    outcome = in_place(ground, unit, settings, observed)
    if not lost or outcome.result is not Result.VERIFIED:
        return outcome
    what = f"{name}: the interrupted change did not survive; the host took it back by itself"
    means = f"what it went back to is proven again: {outcome.what}"
    return replace(outcome, result=Result.ROLLED_BACK, what=what, means=means)


def _taken_back(observed: Observed) -> bool:
    """The last change was undone, and no run has said since what it went back to."""
    said = (Kind.UNDONE, Kind.CONFIRMED, Kind.VERIFIED, Kind.ADOPTED)
    last = [entry for entry in observed.ledger if entry.kind in said or entry.extra.get("restored")]
    return bool(last) and last[-1].kind is Kind.UNDONE


def _outlast(ground: Ground) -> None:
    """Wait until the lease of a run whose controller is gone has expired, and sweep it away.

    Raises:
        Locked: its controller lives; it beats.
    """
    lease = ground.agent.look().lease
    if lease is None:
        return
    if lease.expires_in_seconds > 0:
        ground.warn(f"held by {lease.holder}; waiting {lease.expires_in_seconds:.0f} s for a sign of life")
        with ground.step("wait for the lease to expire"):
            time.sleep(lease.expires_in_seconds + 1)
    with ground.leased():
        pass  # taking an expired lease and giving it back clears it; a live one is refused


def baseline(ground: Ground, observed: Observed, request: Request) -> Baseline | None:
    """The running configuration is known to be good before it is touched, or that is said first.

    Returns:
        the numbers that relative gates compare with; None when there is nothing to compare with.

    Raises:
        Refused: what runs is not proven, and `--from-broken` was not given.
    """
    if observed.etc_unit is None:
        return None
    standing = plan.verification(observed)
    if standing.verified and standing.entry is not None:
        return _recorded(standing.entry)
    unit, settings = ground.running(observed)
    with ground.step("fresh baseline"):
        broken, found = ground.prove_current(unit, settings, observed)
    if found is not None and not broken:
        ground.record(Kind.VERIFIED, unit.digest, found, why="fresh baseline before a change")
        return Baseline.of(found.verdict)
    if request.from_broken:
        ground.warn(f"what runs is not proven ({broken}); going on, since --from-broken was given")
        return None
    raise Refused(
        f"{ground.name} is broken or unproven before the change: {broken}",
        means="nothing was changed; an undo would have nothing good to go back to",
        hint=", or ".join([*_rollback(ground, observed), "repeat with --from-broken"]),
    )


def _rollback(ground: Ground, observed: Observed) -> list[str]:
    """The way back, where there is one."""
    return [f"ddops rollback --host {ground.name}"] if plan.previous_verified(observed) else []


def _recorded(entry: Entry) -> Baseline | None:
    try:
        return Baseline.of(Verdict.from_dict(entry.verdict))
    except (ValueError, KeyError, TypeError):
        return None  # recorded by another version: relative gates are then not scored, and say so


def in_place(
    ground: Ground,
    unit: Unit,
    settings: Settings,
    observed: Observed,
    *,
    kind: Kind = Kind.VERIFIED,
    result: Result = Result.VERIFIED,
) -> Outcome:
    """Prove what runs and put the verdict on record, whatever it is."""
    name = ground.name
    with ground.step("prove"):
        broken, found = ground.prove_current(unit, settings, observed)
    if found is not None and not broken:
        ground.record(kind, unit.digest, found, why=ground.options.command)
        what = f"{name} runs {settings.describe()}: {found.verdict.why}"
        return Outcome(name, result, what, facts=ground.facts(found, unit))
    if found is not None:
        ground.record(Kind.FAILED, unit.digest, found, why=broken)
    unsure = found is not None and found.verdict.kind == "inconclusive"
    again = f"then ddops {'adopt' if kind is Kind.ADOPTED else 'verify'} --host {name}"
    hint = ", or ".join([*_rollback(ground, observed), "take it out of service"])
    if not observed.unit.running:
        hint = f"on the host: systemctl start {ground.agent.unit}; {again}"
    elif plan.stale(observed):
        hint = f"on the host: systemctl daemon-reload && systemctl restart {ground.agent.unit}; {again}"
    return Outcome(
        name,
        Result.NOT_PROVEN,
        f"{name}: what runs is not proven: {broken}",
        means="nothing was restarted and nothing was restored",
        hint=hint,
        facts=ground.facts(found, unit) if found else {},
        exit_override=Exit.INCONCLUSIVE if unsure else None,
    )
