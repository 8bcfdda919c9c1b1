"""What a clean run rules out, in numbers. Pure arithmetic.

n clean replies rule out, at 95 %, a fault that shows in a share p of replies and that a probe sees with sensitivity s
when (1 - p*s)^n <= 0.05, i.e. n >= ln(0.05) / ln(1 - p*s). This assumes independent replies of one shape on one boot.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources

RISK = 0.05


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """The share of corrupt replies that a probe sees; `measured` says whether the detection table backs it."""

    probe: str
    share: float
    measured: bool


def replies_needed(share: float, sensitivity: float = 1.0) -> int:
    """Clean replies needed to rule out, at 95 %, a fault in this share of replies. Both in (0, 1]."""
    _check(share, "share")
    _check(sensitivity, "sensitivity")
    seen = share * sensitivity
    return 1 if seen >= 1 - RISK else math.ceil(math.log(RISK) / math.log1p(-seen) - 1e-9)


def chance(replies: int, share: float) -> float:
    """How likely `replies` of them show a fault at least once that shows in `share` of replies."""
    return -math.expm1(replies * math.log1p(-share)) if share < 1 else 1.0


def smallest_share(replies: int, sensitivity: float = 1.0) -> float:
    """The smallest share of corrupt replies that this many clean ones rule out at 95 %; 1.0 when none is."""
    _check(sensitivity, "sensitivity")
    if replies < 1:
        return 1.0
    return min(1.0, -math.expm1(math.log(RISK) / replies) / sensitivity)


def load_sensitivities() -> dict[str, Sensitivity]:
    """The packaged table (sensitivity.json). Values without a measurement are assumed ones, and say so."""
    raw = json.loads(resources.files("ddops.prove").joinpath("sensitivity.json").read_text("utf-8"))
    table = {}
    for probe, entry in raw["probes"].items():
        share = float(entry["sensitivity"])
        _check(share, probe)
        table[probe] = Sensitivity(probe, share, measured=bool(entry["measured"]))
    return table


def sentence(replies: int, by: Sensitivity | None, *, shortened: Sequence[str] = ()) -> str:
    """The printed word on what a clean run can and cannot rule out.

    `shortened`: what was asked less than the level means to.
    """
    return "; shortened: ".join(filter(None, (_ruled_out(replies, by), ", ".join(shortened))))


def _ruled_out(replies: int, by: Sensitivity | None) -> str:
    if replies < 1 or by is None:
        return "no reply was scored on this boot: nothing is ruled out"
    share = smallest_share(replies, by.share)
    how = "measured" if by.measured else "assumed"
    rest = f"({by.probe}, {how} sensitivity {percent(by.share)}; one boot is a sample of one)"
    clean = f"no divergence in {replies} replies on this boot"
    if percent(share) == percent(1):
        return f"{clean}: too few to rule anything out {rest}"
    return f"{clean}: rules out, at 95 %, faults that show in more than {percent(share)} of replies {rest}"


def percent(share: float) -> str:
    """Two significant digits, always rounded up: the claim never promises more than the arithmetic gives."""
    if share >= 1:
        return "100 %"
    hundred = share * 100
    digits = max(0, 1 - math.floor(math.log10(hundred))) if hundred > 0 else 2
    scale = 10**digits
    return f"{math.ceil(hundred * scale - 1e-9) / scale:.{digits}f} %"


def _check(value: float, name: str) -> None:
    if not 0 < value <= 1:
        raise ValueError(f"{name}: {value} is not in (0, 1]")
