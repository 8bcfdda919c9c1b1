"""The front: run the battery against an engine and come to a verdict.

It orders the stages so that gross damage shows within seconds and ends the run, hands every piece of evidence out as it
comes, and turns a dead engine or a spent clock into evidence. It does not restart, undo or record anything.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from ddops.prove import power
from ddops.prove.client import EngineClient, Limits
from ddops.prove.evidence import Baseline, Evidence, Fault, Level, Outcome, Verdict, VerdictKind
from ddops.prove.golden import Golden
from ddops.prove.judging import Bench, served
from ddops.prove.session import EngineDied, OutOfTime, Session, named
from ddops.prove.stages import CLOSING, STAGES, Stage, note_metrics
from ddops.prove.verdicts import Policy, decide
from ddops.prove.wire import EngineError, Failure

DEFAULT_POLICY = Policy()
_DIED = "the engine stopped answering"
OnEvent = Callable[[Evidence], None]
PROBES = ("applied", *dict.fromkeys(p for s in (*STAGES, *CLOSING) for p in s.probes), "served")


def run(
    client: EngineClient,
    *,
    level: Level = Level.QUICK,
    policy: Policy = DEFAULT_POLICY,
    baseline: Baseline | None = None,
    applied: Evidence | None = None,
    reference: EngineClient | None = None,
    golden: Golden | None = None,
    only: Collection[str] | None = None,
    log: Sequence[str] = (),
    on_event: OnEvent = lambda _: None,
    digest: str = "",
    invocation: str = "",
) -> Verdict:
    """Prove the engine behind `client`.

    Args:
        baseline: numbers of the last known-good for the relative gates.
        applied: evidence on whether what runs is what was meant to (applied.compare).
        reference: an engine with the same weights that can score, for engines that refuse to.
        golden: answers recorded on this host with speculation off (golden.record).
        only: names of probes to run; the verdict then rests on these.
        log: log lines of this start, the last source for acceptance.
        on_event: gets each piece of evidence as it comes; what it raises ends the run.
        digest, invocation: what the verdict is bound to.

    Raises:
        ValueError: `only` names an unknown probe. What the HTTP transport raises for a lost connection to the
        host (a DdopsError) passes through: it is not the engine's fault.
    """
    unknown = sorted(set(only or ()) - set(PROBES))
    if unknown:
        raise ValueError(f"no probe is called {unknown[0]!r}; there are {', '.join(PROBES)}")
    client.limits = Limits(policy.request_seconds, policy.stall_seconds)
    session = Session(client, Level(level), policy, baseline, reference)
    session.notes |= {"log": tuple(log), "golden": golden}
    note_metrics(session)
    found = _Collected(on_event)
    if applied is not None and _wanted("applied", only):
        found.add(applied)
    _stages(Bench(session), only, found)
    return _verdict(session, found.evidence, policy, only, digest, invocation)


class _Collected:
    """Evidence so far, handed out as it comes."""

    def __init__(self, on_event: OnEvent) -> None:
        self.evidence: list[Evidence] = []
        self._on_event = on_event

    def add(self, evidence: Evidence) -> None:
        self.evidence.append(evidence)
        self._on_event(evidence)


def _wanted(probe: str, only: Collection[str] | None) -> bool:
    return not only or probe in only


def _stages(bench: Bench, only: Collection[str] | None, found: _Collected) -> None:
    """Stages in order until one ends the run; then the evidence that every run has."""
    ended = ""
    for stage in STAGES:
        if any(_wanted(p, only) for p in stage.probes):
            ended = _skip(stage, ended, found, only) if ended else _one(bench, stage, found, only)
    bench.session.notes["ended"] = ended
    for stage in CLOSING:
        if not ended.startswith(_DIED) and any(_wanted(p, only) for p in stage.probes):
            ended = _guarded(bench, stage, found, only) or ended
    if not ended.startswith(_DIED) and bench.session.turns:
        found.add(served(bench.session.turns))


def _skip(stage: Stage, why: str, found: _Collected, only: Collection[str] | None) -> str:
    for probe in stage.probes if stage.tells else ():
        if _wanted(probe, only):
            found.add(Evidence(probe, Outcome.NOT_SCORED, detail=why))
    return why


def _one(bench: Bench, stage: Stage, found: _Collected, only: Collection[str] | None) -> str:
    """Run one stage. Returns why the run ends here, or ''."""
    ended = _guarded(bench, stage, found, only)
    if ended:
        return ended
    convicted = [e for e in found.evidence if e.outcome is Outcome.FAIL and e.fault is Fault.OUTPUT]
    if convicted:
        return f"not run: {convicted[0].probe} has failed already"
    if stage.gross and _all_failed(bench.session):
        return "not run: no request is answered"
    return ""


def _guarded(bench: Bench, stage: Stage, found: _Collected, only: Collection[str] | None) -> str:
    """Run a stage; a dead engine, a spent clock or a failing call becomes evidence. Returns why the run ends."""
    started = time.monotonic()
    try:
        evidence = stage.run(bench)
    except OutOfTime as exc:
        for probe in stage.probes if stage.tells else ():
            if _wanted(probe, only):
                found.add(Evidence(probe, Outcome.ERROR, detail=str(exc)))
        return ""
    except EngineDied as exc:
        found.add(_died(bench, stage, str(exc)))
        return f"{_DIED} during {stage.name}"
    except EngineError as exc:
        if isinstance(exc, Failure) and not bench.session.engine_answers():
            found.add(_died(bench, stage, str(exc)))
            return f"{_DIED} during {stage.name}"
        fault = Fault.CRASH if isinstance(exc, Failure) else Fault.NONE
        found.add(Evidence(stage.probes[0], Outcome.ERROR, detail=named(exc), fault=fault))
        return ""
    seconds = time.monotonic() - started
    for item in evidence:
        if _wanted(item.probe, only):
            found.add(replace(item, seconds=item.seconds or seconds))
    return ""


def _died(bench: Bench, stage: Stage, why: str) -> Evidence:
    return Evidence(
        "served",
        Outcome.FAIL,
        expected="the engine stays up",
        got=f"{_DIED} during {stage.name}",
        detail=why,
        sample=len(bench.session.turns),
        fault=Fault.CRASH,
    )


def _all_failed(session: Session) -> bool:
    return bool(session.turns) and all(isinstance(t.error, Failure) for t in session.turns)


def _verdict(
    session: Session,
    evidence: list[Evidence],
    policy: Policy,
    only: Collection[str] | None,
    digest: str,
    invocation: str,
) -> Verdict:
    judged_by = replace(policy, require=tuple(p for p in policy.require if p in only)) if only else policy
    kind, why = decide(evidence, judged_by)
    if (
        kind in (VerdictKind.PASS, VerdictKind.DEGRADED)
        and only
        and not any(e.probe in only and e.outcome.executed for e in evidence)
    ):
        kind, why = VerdictKind.INCONCLUSIVE, f"no probe that was asked for came to a result: {', '.join(sorted(only))}"
    return Verdict(
        kind=kind,
        evidence=tuple(evidence),
        level=session.level,
        seconds=session.seconds,
        why=why,
        digest=digest,
        invocation=invocation,
        power=_power(session, evidence) if kind in (VerdictKind.PASS, VerdictKind.DEGRADED) else "",
        policy=judged_by.to_dict() | {"seed": session.seed},
    )


def _power(session: Session, evidence: Sequence[Evidence]) -> str:
    """By the probe that rules out most: replies scored token by token, else answers checked by running them."""
    passed = {e.probe: e for e in evidence if e.outcome is Outcome.PASS}
    counted = {name: e.sample for name, e in passed.items()}
    scored = sum(bool(t.judged and t.judged.clean) for t in session.turns)
    for name in ("rescore", "sweep"):  # their sensitivities are those of scored replies
        if name in passed:
            counted[name] = min(scored, counted[name]) if name == "sweep" else scored
    table = power.load_sensitivities()
    known = [(counted[name], entry) for name, entry in table.items() if counted.get(name)]
    by = min(known, key=lambda pair: power.smallest_share(pair[0], pair[1].share), default=(0, None))
    return power.sentence(*by, shortened=[f"{probe}: {how}" for probe, how in session.shortened.items()])
