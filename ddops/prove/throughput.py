"""Tokens per second and latencies under one fixed load, over several rounds, held against the last known-good.

A difference smaller than the rounds' own spread is a tie. A gate that fails is confirmed on fresh rounds before it is
called degraded. It says nothing about whether the text is right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median

from ddops.prove.evidence import Baseline, Evidence, Fault, Outcome
from ddops.prove.session import Turn
from ddops.prove.verdicts import Gates


@dataclass(frozen=True, slots=True)
class Round:
    """One round of the load."""

    tokens_per_second: float
    ttft: float | None  # median, seconds
    itl: tuple[float, ...]  # per-token gaps of all streams, seconds


@dataclass(frozen=True, slots=True)
class Speed:
    """Several rounds together. `spread` is a robust standard deviation of tok/s between rounds."""

    tokens_per_second: float
    spread: float
    ttft: float | None
    itl_p50: float | None
    itl_p99: float | None
    rounds: int

    def values(self) -> dict[str, float]:
        found = {
            "throughput": self.tokens_per_second,
            "throughput_spread": self.spread,
            "ttft": self.ttft,
            "itl_p50": self.itl_p50,
            "inter_token": self.itl_p99,
        }
        return {k: v for k, v in found.items() if v is not None}


def round_of(turns: Sequence[Turn]) -> Round | None:
    """Numbers of one round of streamed requests; None when nothing came back."""
    done = [t for t in turns if t.whole and t.reply is not None and t.reply.tokens]
    if not done:
        return None
    wall = max(t.ended for t in done) - min(t.started for t in done)
    tokens = sum(t.reply.tokens or 0 for t in done if t.reply)
    first = [t.reply.first_token_seconds for t in done if t.reply and t.reply.first_token_seconds is not None]
    gaps = tuple(g for t in done for g in token_gaps(t))
    return Round(tokens / wall if wall > 0 else 0.0, median(first) if first else None, gaps)


def token_gaps(turn: Turn) -> list[float]:
    """Seconds per token inside one stream: a chunk of n tokens counts n times its n-th part."""
    if turn.reply is None or len(turn.reply.chunks) < 2:
        return []
    chunks, total = turn.reply.chunks, turn.reply.tokens or 0
    counted = all(c.completion_tokens is not None for c in chunks)
    length = sum(len(c.text) for c in chunks) or 1
    gaps: list[float] = []
    for before, now in pairwise(chunks):
        n = (now.completion_tokens or 0) - (before.completion_tokens or 0) if counted else round(total * len(now.text) / length)
        n = max(1, n)
        gaps += [(now.at - before.at) / n] * n
    return gaps


def combine(rounds: Sequence[Round]) -> Speed | None:
    if not rounds:
        return None
    rates = [r.tokens_per_second for r in rounds]
    middle = median(rates)
    # 1.4826 x MAD estimates a standard deviation; three rounds deserve no finer statistics.
    spread = 1.4826 * median(abs(r - middle) for r in rates)
    first = [r.ttft for r in rounds if r.ttft is not None]
    gaps = sorted(g for r in rounds for g in r.itl)
    return Speed(middle, spread, median(first) if first else None, _quantile(gaps, 0.5), _quantile(gaps, 0.99), len(rounds))


def judge(speed: Speed | None, baseline: Baseline | None, gates: Gates) -> Evidence:
    """Hold a measurement against the last known-good, with both sides' noise."""
    if speed is None:
        return Evidence("throughput", Outcome.NOT_SCORED, detail="no round of the load came back")
    base = Evidence(
        "throughput",
        Outcome.PASS,
        got=_shown(speed),
        sample=speed.rounds,
        values=speed.values(),
        expected="no baseline to compare with",
        detail="measured, and held against nothing: there is no last known-good to compare with",
        threshold=f">= {gates.throughput:g} x last known-good",
    )
    known = baseline.get("throughput") if baseline else None
    if baseline is None or known is None:
        return base
    noise = 2 * (speed.spread**2 + (baseline.get("throughput_spread") or 0.0) ** 2) ** 0.5
    slower = _slower(speed, baseline, gates, known, noise)
    from_known = f"{known:.1f} tok/s (noise +- {noise:.1f})"
    if slower:
        got = f"{base.got}: {slower}"
        return replace(base, outcome=Outcome.DEGRADED, fault=Fault.SPEED, expected=from_known, got=got, detail=slower)
    return replace(base, expected=from_known, detail=f"{speed.tokens_per_second / known:.2f} x the last known-good")


def _slower(speed: Speed, baseline: Baseline, gates: Gates, known: float, noise: float) -> str:
    """What fell through a gate by more than noise; '' when nothing did."""
    if speed.tokens_per_second < gates.throughput * known and known - speed.tokens_per_second > noise:
        return f"{speed.tokens_per_second:.1f} tok/s is {speed.tokens_per_second / known:.2f} x the last known-good"
    for name, value, gate in (("ttft", speed.ttft, gates.ttft), ("inter_token", speed.itl_p99, gates.inter_token)):
        before = baseline.get(name)
        # 50 ms: what a shared machine adds to a tail by itself.
        if before and value and value > gate * before and value - before > 0.05:
            return f"{name} {value * 1000:.0f} ms, {value / before:.1f} x the last known-good"
    return ""


def _shown(speed: Speed) -> str:
    parts = [f"{speed.tokens_per_second:.1f} tok/s"]
    parts += [f"first token {speed.ttft * 1000:.0f} ms"] if speed.ttft is not None else []
    if speed.itl_p50 is not None and speed.itl_p99 is not None:
        parts.append(f"per token p50 {speed.itl_p50 * 1000:.1f} ms, p99 {speed.itl_p99 * 1000:.1f} ms")
    return ", ".join(parts)


def _quantile(ordered: Sequence[float], share: float) -> float | None:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None
