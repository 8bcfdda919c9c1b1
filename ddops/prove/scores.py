"""What prefill scores say about generated tokens. Pure arithmetic on log-probabilities.

At T=0 a lossless verify path gives, at every position, a token that the target itself puts at the top, or within
rounding of it. Rounding differs between shapes, so a small gap is a near tie, counted apart; a large one is wrong.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ddops.prove.wire import Scored

FLOOR = {"float32": 1e-3, "float16": 0.1, "bfloat16": 0.5}
UNKNOWN_FLOOR = 0.5
_EDGE = 0.1  # probability mass by which rounding in bfloat16 may move the edge of a nucleus
CEILING = {"float32": 0.05}
UNKNOWN_CEILING = 1.5  # nats: a gap beyond it is never called rounding, whatever the off answers show


@dataclass(frozen=True, slots=True)
class Threshold:
    """The gap (nats below the top token) from which a greedy token counts as wrong, and where the figure comes from."""

    nats: float
    source: str
    tie: float = 1e-4  # below this a token simply is the top one

    def __str__(self) -> str:
        return f"gap <= {self.nats:.3g} nat ({self.source})"


@dataclass(frozen=True, slots=True)
class Contest:
    """A close decision: how far the best two lie apart (nats), and whether the second was said."""

    lead: float
    lost: bool


@dataclass(frozen=True, slots=True)
class Judgement:
    """One reply's tokens against the target. `over` are (position, token id, gap) beyond the threshold, first first."""

    tokens: int
    scored: int
    worst: float
    near: int
    over: tuple[tuple[int, int, float], ...]
    contested: tuple[Contest, ...] = ()  # positions whose best two lie within the threshold
    cut: bool = False  # it says that it stopped by itself, and the target would have gone on

    @property
    def clean(self) -> bool:
        return self.scored > 0 and not self.wrong

    @property
    def wrong(self) -> bool:
        return bool(self.over) or self.cut


def threshold(dtype: str | None, off_gaps: Sequence[float], fixed: float | None = None) -> Threshold:
    """From the operator, else the dtype's usual rounding, widened by what this host's own off answers show.

    `off_gaps`: the worst gap of each reply that was generated without speculation. They are honest by
    construction, unless the fault is not in speculation at all: hence the ceiling.
    """
    if fixed is not None:
        return Threshold(fixed, "set in the inventory")
    kind = (dtype or "").removeprefix("torch.")
    floor = FLOOR.get(kind, UNKNOWN_FLOOR)
    ceiling = CEILING.get(kind, UNKNOWN_CEILING)
    tie = 1e-4 if kind == "float32" else floor / 5
    seen = max(off_gaps, default=0.0)
    if not off_gaps:
        return Threshold(floor, f"usual for {kind or 'an unknown dtype'}", tie)
    widened = min(ceiling, max(floor, 2 * seen))
    return Threshold(widened, f"{kind or 'dtype unknown'}, {len(off_gaps)} answers with speculation off", tie)


def judge(scored: Sequence[Scored], limit: Threshold) -> Judgement:
    """Hold every token of one greedy reply against the target's own best."""
    gaps = [(i, s.token, s.gap) for i, s in enumerate(scored) if s.gap is not None]
    over = tuple((i, token, gap) for i, token, gap in gaps if gap is not None and gap > limit.nats)
    near = sum(limit.tie < gap <= limit.nats for _, _, gap in gaps if gap is not None)
    worst = max((gap for _, _, gap in gaps if gap is not None), default=0.0)
    return Judgement(len(scored), len(gaps), worst, near, over, tuple(_contests(scored, limit)))


def _contests(scored: Sequence[Scored], limit: Threshold) -> Iterator[Contest]:
    for s in scored:
        lead = s.top[0][0] - s.top[1][0] if len(s.top) > 1 else math.inf
        if lead <= limit.nats:
            yield Contest(lead, s.token == s.top[1][1])


def second_best(judged: Sequence[Judgement], limit: Threshold) -> str:
    """Whether the second of two close tokens is said more often than the first: what they find, or "".

    Each is within the threshold, so rounding might explain it; but rounding never prefers the less likely one. Looked at
    in bands: a fault may turn the closest decisions only, and one that speculation off shares has widened the threshold.
    """
    contests = [c for j in judged for c in j.contested]
    for most in (limit.nats, limit.nats / 2, limit.nats / 4):
        band = [c for c in contests if most / 4 <= c.lead <= most]
        lost = sum(c.lost for c in band)
        # Were it a coin's toss, which is the worst that noise can do, this would come once in some ten thousand runs.
        if len(band) >= 12 and lost >= len(band) / 2 + 2 * math.sqrt(len(band)):
            return f"of {len(band)} close decisions (up to {most:.2g} nat) {lost} went to the less likely token"
    return ""


def too_many_near(near: int, tokens: int, off_near: int, off_tokens: int) -> bool:
    """Whether near ties are far commoner than with speculation off, on this host.

    Each is innocent by itself. The off rate is taken at its upper 95 % bound (the rule of three), and four standard
    deviations beyond it are allowed.
    """
    if tokens == 0 or off_tokens < 50:
        return False
    expected = tokens * (off_near + 3) / off_tokens
    return near > expected + 4 * math.sqrt(expected) + 3


def mean_logprob(scored: Sequence[Scored]) -> float | None:
    known = [s.logprob for s in scored if s.logprob is not None]
    return sum(known) / len(known) if known else None


def largest_difference(a: Sequence[Scored], b: Sequence[Scored]) -> float | None:
    """How far two scorings of the same tokens differ at most, in nats. None when they share no scored position."""
    pairs = [(x.logprob, y.logprob) for x, y in zip(a, b, strict=False) if x.token == y.token]
    differences = [abs(x - y) for x, y in pairs if x is not None and y is not None]
    return max(differences, default=None)


@dataclass(frozen=True, slots=True)
class Surprise:
    """Sampled tokens against the target's distribution: a sum that is near 0, in standard deviations, if they fit."""

    tokens: int
    z: float
    outside: int  # tokens that the sampling could not have chosen at all
    top_expected: float  # tokens that should have been the most probable one
    top_seen: int


def surprise(scored: Sequence[Scored], temperature: float, top_p: float = 1.0, top_k: int = -1) -> Surprise:
    """sum(surprisal - entropy) / sqrt(sum of variance) over positions whose whole distribution is (nearly) given.

    `scored` carries log-probabilities at temperature 1 and the best alternatives. A position counts where these
    hold at least 99.9 % of the mass at `temperature`; elsewhere its tail is unknown and it is left out.
    """
    total = variance = expected = 0.0
    seen = outside = tokens = 0
    for position in scored:
        support = _support(position, temperature, top_p, top_k)
        if support is None:
            continue
        tokens += 1
        expected += max(support.values())
        seen += position.token == position.top[0][1]
        p = support.get(position.token, 0.0)
        if p <= 0:
            outside += 1
            continue
        entropy = -sum(q * math.log(q) for q in support.values() if q > 0)
        total += -math.log(p) - entropy
        variance += sum(q * math.log(q) ** 2 for q in support.values() if q > 0) - entropy**2
    z = total / math.sqrt(variance) if variance > 1e-9 else 0.0
    return Surprise(tokens, z, outside, expected, seen)


def repeat_chance(scored: Sequence[Scored], temperature: float, top_p: float = 1.0) -> float | None:
    """At most how likely (natural log) another draw says the same tokens: every one had been the likeliest.

    None without alternatives. Sharper sampling than is known of (top_k, say) makes repeats likelier: not used there.
    """
    if temperature <= 0 or not scored or any(not s.top for s in scored):
        return None
    total = 0.0
    for position in scored:
        weights = [math.exp((lp - position.top[0][0]) / temperature) for lp, _ in position.top]
        total += math.log(min(1.0, 1 / (sum(weights) * top_p)))
    return total


def outside_nucleus(scored: Sequence[Scored], top_p: float) -> tuple[int, int]:
    """(tokens that sampling at T=1 within the `top_p` nucleus could not have chosen, tokens looked at)."""
    outside = looked = 0
    for position in scored:
        before, inside = 0.0, False
        for logprob, token in position.top:
            if before > top_p + _EDGE:
                break
            inside = inside or token == position.token
            before += math.exp(logprob)
        if before > top_p + _EDGE:  # else the nucleus reaches beyond what is known
            looked += 1
            outside += not inside
    return outside, looked


def _support(position: Scored, temperature: float, top_p: float, top_k: int) -> dict[int, float] | None:
    """Token -> probability as it is sampled, or None when the given alternatives do not hold the mass."""
    if not position.top or temperature <= 0:
        return None
    held = sum(math.exp(lp) for lp, _ in position.top)
    lowest = position.top[-1][0]
    # What is missing at temperature 1 lies on tokens no likelier than the last one given: this bounds its weight.
    if temperature > 1 and held < 1 - 1e-6:
        return None
    weights = {token: math.exp(lp / temperature) for lp, token in position.top}
    missing = max(0.0, 1 - held) * math.exp(lowest * (1 / temperature - 1))
    whole = sum(weights.values())
    if missing > 1e-3 * (whole + missing):
        return None
    ranked = sorted(weights.items(), key=lambda kv: -kv[1])
    kept = ranked[: top_k if top_k > 0 else None]
    nucleus, mass = {}, 0.0
    limit = top_p * sum(w for _, w in kept)
    for token, weight in kept:
        nucleus[token] = weight
        mass += weight
        # A token at the edge may fall on either side by rounding: keep anything within a hair of the limit.
        if mass >= limit * (1 + 1e-4) and top_p < 1:
            break
    return {token: weight / mass for token, weight in nucleus.items()}
