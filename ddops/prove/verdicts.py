"""From evidence and a policy to one verdict. Pure: same evidence, same verdict.

What it never does: call a run that measured nothing good, or let a detector that contradicts itself count.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ddops.prove.evidence import Baseline, Evidence, Fault, Level, Outcome, Verdict, VerdictKind, plain

__all__ = ["Baseline", "Evidence", "Fault", "Gates", "Level", "Outcome", "Policy", "Verdict", "VerdictKind", "decide"]


@dataclass(frozen=True, slots=True)
class Gates:
    """Limits of the probes. Absolute shares, or shares of the last known-good where the name says `relative`."""

    coding: float = 1.0  # share of standard problems solved
    copy: float = 1.0  # share of ids repeated exactly
    answers: float = 1.0  # share of curated questions answered right
    throughput: float = 0.9  # relative: tok/s, at least
    acceptance: float = 0.8  # relative: mean tokens per verify pass, at least
    ttft: float = 2.0  # relative: time to first token, at most
    inter_token: float = 2.0  # relative: inter-token latency p99, at most
    gap: float | None = None  # nats below the top a T=0 token may lie; None: from dtype and this host's own off answers


@dataclass(frozen=True, slots=True)
class Policy:
    """How the battery asks and judges. Everything here is printed with the verdict."""

    gates: Gates = field(default_factory=Gates)
    require: tuple[str, ...] = ("coding",)  # probes without which nothing is proven
    temperature: float | None = None  # production sampling, for `sampled`; None: 0.7
    top_p: float | None = None  # None: 1
    top_k: int | None = None  # None: no limit
    request_seconds: float = 120.0  # deadline of one request
    stall_seconds: float = 30.0  # longest silence inside one reply
    battery_seconds: float | None = None  # None: by level
    max_running: int | None = None  # None: what the engine reports
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    thinking_tokens: int = 0  # added to every max_tokens of a reasoning model
    seed: int | None = None  # of prompts and nonces; None: new ones every run

    def to_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = plain(asdict(self))
        return found


def decide(evidence: Sequence[Evidence], policy: Policy) -> tuple[VerdictKind, str]:
    """The verdict and why, in one line.

    Order matters: a crash explains whatever else went wrong; wrong output outweighs slowness; and a good word needs
    every required probe, nothing that failed to come to a result, and at least one measurement.
    """
    crash = [e for e in evidence if e.fault is Fault.CRASH and e.outcome in (Outcome.FAIL, Outcome.ERROR)]
    if crash:
        return VerdictKind.CRASHED, _why(crash)
    wrong = [e for e in evidence if e.outcome is Outcome.FAIL and e.fault in (Fault.NONE, Fault.OUTPUT)]
    if wrong:
        return VerdictKind.CORRUPT, _why(wrong)
    if not _measured(evidence):
        return VerdictKind.INCONCLUSIVE, "no probe came to a result"
    open_questions = [
        e
        for e in evidence
        if e.outcome is Outcome.ERROR or e.fault is Fault.DETECTOR or (e.outcome is Outcome.FAIL and e.fault is Fault.IDENTITY)
    ]
    if open_questions:
        return VerdictKind.INCONCLUSIVE, _why(open_questions)
    missing = _missing(evidence, policy.require)
    if missing:
        return VerdictKind.INCONCLUSIVE, f"required and not scored: {', '.join(missing)}"
    slow = [e for e in evidence if e.outcome is Outcome.DEGRADED or e.outcome is Outcome.FAIL]
    if slow:
        return VerdictKind.DEGRADED, _why(slow)
    return VerdictKind.PASS, _passed(evidence)


def _measured(evidence: Sequence[Evidence]) -> bool:
    """Whether any probe came to a result. That requests were answered is none when others were tried and told nothing."""
    executed = {e.probe for e in evidence if e.outcome.executed and e.fault is not Fault.DETECTOR}
    return bool(executed - {"served"}) or (bool(executed) and len(evidence) == 1)


def _missing(evidence: Iterable[Evidence], required: Iterable[str]) -> list[str]:
    executed = {e.probe for e in evidence if e.outcome.executed}
    return [name for name in required if name not in executed]


def _why(items: Sequence[Evidence]) -> str:
    first = items[0]
    line = f"{first.probe}: {first.got or first.detail or first.outcome}"
    return line if len(items) == 1 else f"{line} (and {', '.join(e.probe for e in items[1:])})"


def _passed(evidence: Sequence[Evidence]) -> str:
    done = sum(e.outcome is Outcome.PASS for e in evidence)
    skipped = [e.probe for e in evidence if e.outcome is Outcome.NOT_SCORED]
    return f"{done} {'probe' if done == 1 else 'probes'} passed" + (f"; not scored: {', '.join(skipped)}" if skipped else "")
