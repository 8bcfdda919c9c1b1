"""Tokens committed per verify pass: is the drafter alive, and is the figure too good to be true?

Read per request, mid-stream where the engine counts along (warm-up and tail left out), else from whole requests, else
from server counters by difference, else from log lines of this start. About 1.0 means the drafter is dead: the text is
right and the speed is gone. At the cap on ordinary text it means, more likely than not, a loop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from ddops.prove import alarms, dialects
from ddops.prove.evidence import Baseline, Evidence, Fault, Outcome
from ddops.prove.session import Turn
from ddops.prove.verdicts import Gates
from ddops.prove.wire import Chunk

DEAD = 1.05
_WARM_PASSES = 2
_FEW_PASSES = 6  # requests with fewer passes are all warm-up and tail


@dataclass(frozen=True, slots=True)
class Reading:
    """A mean acceptance length, where it comes from, and the single requests behind it."""

    mean: float
    source: str
    sample: int
    per_request: tuple[float, ...] = ()

    @property
    def key(self) -> str:
        """Under which a baseline keeps it: one long stream and many short requests never read the same."""
        return f"acceptance, {self.source}"


def mid_stream(chunks: Sequence[Chunk]) -> float | None:
    """Committed tokens over passes between two points inside one stream; None when the stream carries no counters."""
    points = [(c.verify_passes, c.completion_tokens) for c in chunks if c.verify_passes is not None and c.completion_tokens]
    inner = [(p, n) for p, n in points if p is not None and p >= _WARM_PASSES][:-1]  # the last pass is cut short
    if len(inner) < 2:
        return None
    passes = inner[-1][0] - inner[0][0]
    tokens = (inner[-1][1] or 0) - (inner[0][1] or 0)
    return tokens / passes if passes >= _FEW_PASSES else None


def read(
    turns: Sequence[Turn],
    before: Mapping[str, float] | None = None,
    after: Mapping[str, float] | None = None,
    log: Sequence[str] = (),
    reported: float | None = None,
) -> Reading | None:
    """The best reading there is. Turns whose speculation was switched off must not be among them."""
    streams = [m for t in turns if t.reply and (m := mid_stream(t.reply.chunks)) is not None]
    if streams:
        return Reading(fmean(streams), "mid-stream counters", len(streams), tuple(streams))
    numbers = [n for t in turns if t.whole and t.reply and (n := dialects.speculation(t.reply.meta)) is not None]
    long = [n for n in numbers if n.verify_passes >= _FEW_PASSES] or numbers
    if long:
        mean = sum(n.committed for n in long) / sum(n.verify_passes for n in long)
        return Reading(mean, "per-request counters", len(long), tuple(n.length or 0.0 for n in long))
    if before is not None and after is not None:
        between = dialects.speculation_between(before, after)
        if between is not None and between.length is not None:
            return Reading(between.length, "server counters by difference", len(turns))
    logged = dialects.acceptance_from_log(log)
    if logged is not None:
        return Reading(logged, "log lines of this start", len(log))
    if reported is not None:
        return Reading(reported, "the engine's mean since its start", 0)
    return None


def judge(
    reading: Reading | None,
    turns: Sequence[Turn],
    *,
    speculates: bool,
    cap: int | None,
    baseline: Baseline | None,
    gates: Gates,
) -> Evidence:
    """Hold a reading against 1.0, the cap and the last known-good."""
    if not speculates:
        return Evidence("acceptance", Outcome.NOT_SCORED, detail="speculation is off")
    if reading is None:
        return Evidence("acceptance", Outcome.NOT_SCORED, detail="the engine reports no verify passes anywhere")
    known = _known(reading, baseline)
    if known and cap:
        known = min(known, float(cap))  # a smaller tree is not held to what only a larger one can reach
    limits = [f"> {DEAD}"] + ([f"< {cap}"] if cap else [])
    limits += [f">= {gates.acceptance:g} x {known:.2f} (last known-good)"] if known else []
    outcome, detail = _held(reading, turns, cap, known, gates)
    spread = f", {min(reading.per_request):.2f} to {max(reading.per_request):.2f}" if len(reading.per_request) > 1 else ""
    return Evidence(
        "acceptance",
        outcome,
        expected=f"{known:.2f}" if known else "more than one token a pass",
        got=f"{reading.mean:.2f} tokens a pass{spread}",
        threshold=", ".join(limits),
        sample=reading.sample,
        detail=f"{detail + '; ' if detail else ''}source: {reading.source}",
        fault=Fault.NONE if outcome is Outcome.PASS else Fault.SPEED,
        values={"acceptance": reading.mean, reading.key: reading.mean},
    )


def _known(reading: Reading, baseline: Baseline | None) -> float | None:
    """The last known-good's figure from the same source; from a record of before sources were kept, whatever it has."""
    if baseline is None:
        return None
    sources = [name for name in baseline.values if name.startswith("acceptance, ")]
    return baseline.get(reading.key if sources else "acceptance")


def _held(reading: Reading, turns: Sequence[Turn], cap: int | None, known: float | None, gates: Gates) -> tuple[Outcome, str]:
    if reading.mean <= DEAD:
        return Outcome.DEGRADED, "the drafter does not help: about one token a pass"
    at_cap = bool(cap and cap > 2 and reading.mean >= 0.98 * cap)
    looping = [t for t in turns if alarms.loop(t.text, t.item.said if t.item else "")] if at_cap else []
    if looping:
        return Outcome.DEGRADED, f"at the cap of {cap}, and {len(looping)} of {len(turns)} replies go round in a loop"
    if known and reading.mean < gates.acceptance * known:
        return Outcome.DEGRADED, f"{reading.mean / known:.0%} of the last known-good"
    # A small tree over predictable text, or a copy, is honestly accepted whole: without a loop the cap is no finding.
    return Outcome.PASS, f"at the cap of {cap}, with no loop in the text" if at_cap else ""
