"""The detection table: which fault was caught by which probe, in how many of how many boots, how fast. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean, median
from typing import Any

from ddops.prove import power
from ddops.prove.evidence import Outcome, Verdict
from ddops.prove.session import SCALES

HEALTHY = "healthy"
SWEEP = "sweep"  # in place of a level: the sweep alone, to measure how much of a fault it sees
SMALL = {"quick": 0.05, "standard": 0.01}  # share of requests that a rare fault touches, by the level that must catch it
# Faults whose damage is in the text: with share= they touch only some requests.
TEXT = (
    "garbage", "copy-error", "leak", "loop", "rope", "mask", "stale-mask", "accept-extra", "no-compaction",
    "doubled-syllables", "special-token", "wrong-language", "early-stop", "decay", "nan",
)  # fmt: skip
OTHER = (
    "accept-one", "drafter-rows", "stream-drop", "scorer", "cache-poison", "ready-500", "crash-start", "hang-start",
    "crash-load", "illegal-address", "cublas,above-product=100", "hang-load", "slow,ms=60",
)  # fmt: skip
CASES = (*TEXT, *OTHER)


def rare(level: str) -> tuple[str, ...]:
    """The text faults, each in the share of requests that this level must catch."""
    return tuple(f"{kind},share={SMALL[level]}" for kind in TEXT)


@dataclass(frozen=True, slots=True)
class Boot:
    """One start of the engine and the battery's word on it.

    `by`: probes that found something. `flagged`: probe -> (replies it called wrong, replies it looked at).
    """

    fault: str
    level: str
    verdict: str
    seconds: float
    by: tuple[str, ...] = ()
    why: str = ""
    flagged: dict[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def caught(self) -> bool:
        """Anything but a pass: the change would not have been confirmed."""
        return self.verdict != "pass"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Boot:
        flagged = {probe: (int(bad), int(all_)) for probe, (bad, all_) in raw["flagged"].items()}
        return cls(**{**raw, "by": tuple(raw["by"]), "flagged": flagged})


def boot_of(fault: str, level: str, verdict: Verdict, seconds: float) -> Boot:
    bad = (Outcome.FAIL, Outcome.DEGRADED, Outcome.ERROR)
    by = tuple(dict.fromkeys(item.probe for item in verdict.evidence if item.outcome in bad))
    flagged = {item.probe: counts for item in verdict.evidence if (counts := counted(item.got)) is not None}
    return Boot(fault, level, str(verdict.kind), seconds, by, verdict.why, flagged)


def counted(got: str) -> tuple[int, int] | None:
    """(wrong, looked at) from a probe's own words: `3/5 passed`, `1135 tokens of 14 replies, ..., 10 over`."""
    if found := re.search(r"of (\d+) replies,.* (\d+) over", got):
        return int(found[2]), int(found[1])
    if found := re.match(r"(\d+)/(\d+) (?:passed|right)", got):
        return int(found[2]) - int(found[1]), int(found[2])
    return None


def page(boots: Sequence[Boot], machine: str) -> str:
    """docs/detection.md."""
    healthy = [boot for boot in boots if boot.fault == HEALTHY]
    faulty = [boot for boot in boots if boot.fault != HEALTHY]
    parts = [_head(machine), _false_alarms(healthy)]
    for level in ("quick", "standard"):
        rows = [boot for boot in faulty if boot.level == level]
        if rows:
            parts.append(_table(level, rows))
    parts.append(_power([boot for boot in faulty if boot.level == SWEEP]))
    parts.append(_sensitivities(faulty))
    parts.append(_missed(faulty))
    return "\n".join(parts)


def _head(machine: str) -> str:
    return f"""# What the battery catches

Made by `make detect`, which starts the bundled engine once for every row and boot, switches one fault on, and lets the
battery look. Machine: {machine}. A fault without `share=` touches every reply it can; with `share=0.05` it touches
5% of requests. Caught means: the verdict was not a pass, so the change would not have been confirmed.
"""


def _false_alarms(healthy: Sequence[Boot]) -> str:
    if not healthy:
        return "## Healthy boots\n\nNone were measured.\n"
    alarms = [boot for boot in healthy if boot.caught]
    upper = upper_bound(len(alarms), len(healthy))
    lines = "".join(f"- {boot.verdict}: {boot.why}\n" for boot in alarms)
    seconds = [boot.seconds for boot in healthy]
    return (
        f"## Healthy boots\n\n{len(alarms)} of {len(healthy)} healthy boots were not passed: with 95 % confidence the rate is "
        f"below {upper:.1%}. Seconds to the verdict: {min(seconds):.0f} to {max(seconds):.0f}, median {median(seconds):.0f}.\n"
        f"{lines}"
    )


def upper_bound(hits: int, trials: int, confidence: float = 0.95) -> float:
    """One-sided Clopper-Pearson upper bound of a rate, by bisection; 0 of n gives 1 - 0.05^(1/n), about 3/n."""
    if trials == 0 or hits >= trials:
        return 1.0
    low, high = hits / trials, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _at_most(hits, trials, middle) > 1 - confidence else (low, middle)
    return high


def _at_most(hits: int, trials: int, rate: float) -> float:
    """P(X <= hits) of a binomial."""
    term = (1 - rate) ** trials
    total = term
    for k in range(1, hits + 1):
        term *= (trials - k + 1) / k * rate / (1 - rate) if rate < 1 else 0.0
        total += term
    return total


def _table(level: str, boots: Sequence[Boot]) -> str:
    rows = [f"## Faults, {level} level\n", "| fault | caught | verdicts | by | seconds |", "| --- | --- | --- | --- | --- |"]
    for fault in dict.fromkeys(boot.fault for boot in boots):
        mine = [boot for boot in boots if boot.fault == fault]
        caught = sum(boot.caught for boot in mine)
        verdicts = _counts(boot.verdict for boot in mine)
        by = _counts(probe for boot in mine for probe in boot.by)
        seconds = median(boot.seconds for boot in mine)
        rows.append(f"| {fault} | {caught} of {len(mine)} | {verdicts} | {by} | {seconds:.0f} |")
    return "\n".join(rows) + "\n"


def _counts(words: Iterable[str]) -> str:
    return ", ".join(f"{word} {count}" for word, count in Counter(words).most_common())


def _power(boots: Sequence[Boot]) -> str:
    """What the sweep's size and its sensitivity to each kind come to."""
    if not boots:
        return ""
    sizes = {str(level): scale.sweep for level, scale in SCALES.items()}
    rows = [
        "## Power of the sweep\n",
        "The sweep alone, with the fault in every request: how many replies were wrong, and so how often it meets a fault that",
        f"touches 5% of requests at the quick level ({sizes['quick']} replies), 1% at the standard level ({sizes['standard']})",
        f"and 0.2% at the deep level ({sizes['deep']}). The other probes come on top.\n",
        "| fault | replies wrong | quick, 5% | standard, 1% | deep, 0.2% |",
        "| --- | --- | --- | --- | --- |",
    ]
    for fault in dict.fromkeys(boot.fault for boot in boots):
        counts = [boot.flagged[SWEEP] for boot in boots if boot.fault == fault and SWEEP in boot.flagged]
        bad, looked = sum(c[0] for c in counts), sum(c[1] for c in counts)
        seen = bad / looked if looked else 0.0
        chances = (
            power.chance(sizes[level], share * seen) for level, share in (("quick", 0.05), ("standard", 0.01), ("deep", 0.002))
        )
        cells = [f"{chance:.1%}" if chance < 0.999 else "> 99.9%" for chance in chances]
        rows.append(f"| {fault} | {bad} of {looked} | {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def sensitivities(boots: Iterable[Boot]) -> dict[str, tuple[float, int]]:
    """Probe -> (share of replies it flagged where a text fault touched every request, boots it rests on)."""
    shares: dict[str, list[float]] = {}
    for boot in boots:
        if boot.fault in TEXT:
            for probe, (bad, looked) in boot.flagged.items():
                if looked and (probe == SWEEP) == (boot.level == SWEEP):
                    shares.setdefault(probe, []).append(bad / looked)
    return {probe: (fmean(found), len(found)) for probe, found in sorted(shares.items())}


def measured(boots: Iterable[Boot], assumed: Mapping[str, Any]) -> dict[str, Any]:
    """The sensitivity table with what was measured put in; a probe that saw nothing keeps its assumed value."""
    probes = {probe: dict(entry) for probe, entry in assumed["probes"].items()}
    for probe, (share, count) in sensitivities(boots).items():
        if share > 0 and probe in probes:
            probes[probe] = {"sensitivity": round(share, 3), "measured": True, "boots": count}
    return {**assumed, "probes": probes}


def _sensitivities(boots: Sequence[Boot]) -> str:
    rows = ["## Sensitivity\n", "Share of replies a probe called wrong, mean over boots in which a text fault touched every",
            "request (a fault may leave a reply whole, so this is a lower bound).\n",
            "| probe | share | boots |", "| --- | --- | --- |"]  # fmt: skip
    rows += [f"| {probe} | {share:.0%} | {count} |" for probe, (share, count) in sensitivities(boots).items()]
    return "\n".join(rows) + "\n"


def _missed(boots: Sequence[Boot]) -> str:
    missed = Counter((boot.fault, boot.level) for boot in boots if not boot.caught)
    if not missed:
        return "## Missed\n\nNothing, in these boots.\n"
    total = Counter((boot.fault, boot.level) for boot in boots)
    lines = [f"- {fault} ({level}): {count} of {total[fault, level]}" for (fault, level), count in missed.most_common()]
    return "## Missed\n\n" + "\n".join(lines) + "\n"
