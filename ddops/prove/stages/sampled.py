"""Stage: above T=0. Equal to speculation off where noise is keyed by seed, and fitting the target's distribution."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ddops.prove.evidence import Evidence, Fault, Outcome
from ddops.prove.judging import Bench, replay_of
from ddops.prove.prompts import Item, Kind
from ddops.prove.scores import surprise
from ddops.prove.session import Turn, unsupported
from ddops.prove.stages.pairs import differ
from ddops.prove.stages.stage import not_scored, several
from ddops.prove.wire import EngineError


def sampled_stage(bench: Bench) -> list[Evidence]:
    """Above T=0: equal to speculation off where noise is keyed by seed, and fitting the target's distribution."""
    session = bench.session
    policy = session.policy
    temperature = 0.7 if policy.temperature is None else policy.temperature
    if temperature == 0:
        return [not_scored("sampled", "production samples at T=0")]
    top_p = 1.0 if policy.top_p is None else policy.top_p
    options: dict[str, Any] = {"temperature": temperature, "top_p": top_p}
    if policy.top_k and policy.top_k > 0:
        options["extra"] = {"top_k": policy.top_k, **session.ask_for(Item(Kind.CODE, "")).extra}
    make, count = session.make, session.scale.sampled
    items = several(count, make.open, lambda: make.kin(1)[0], make.open)
    seeds = [session.rng.getrandbits(31) for _ in items]
    on = [(item, session.ask_for(item, seed=seed, **options)) for item, seed in zip(items, seeds, strict=True)]
    paired = session.client.dialect.spec_switch and session.client.dialect.keyed_noise and session.speculates
    off = [(item, replace(ask, mode="off")) for item, ask in on] if paired else []
    turns = session.send("sampled", [*on, *off])
    if refused := unsupported(turns):
        return [not_scored("sampled", refused)]
    bench.check(turns)
    return [_sampled(bench, turns[: len(on)], turns[len(on) :], temperature, top_p, policy.top_k or -1)]


def _sampled(bench: Bench, on: Sequence[Turn], off: Sequence[Turn], temperature: float, top_p: float, top_k: int) -> Evidence:
    pairs = [(a, b) for a, b in zip(on, off, strict=False) if a.whole and b.whole]
    parted = [p for p in pairs if differ(*p)]
    scored = _scored_tokens(bench, on) if bench.ready() else []
    fit = surprise(scored, temperature, top_p, top_k)
    parts = [f"{len(pairs) - len(parted)} of {len(pairs)} equal to speculation off"] if pairs else []
    parts += [f"z {fit.z:+.2f} over {fit.tokens} tokens, {fit.outside} impossible"] if fit.tokens >= 50 else []
    if not parts:
        return not_scored("sampled", "no keyed noise to compare by, and no scores to fit")
    exact = bench.session.client.facts().dtype == "float32"
    # bfloat16 rounding moves a sampled choice about once in a hundred tokens: equality is then no test, the fit is.
    base = Evidence(
        "sampled",
        Outcome.PASS,
        expected=f"the target's distribution at T={temperature:g}, top_p={top_p:g}",
        got=", ".join(parts),
        threshold="|z| < 5, nothing impossible" + (", equal by seed" if exact and pairs else ""),
        sample=len(on),
        replay=replay_of([*on, *off]),
        values={"sampled_z": fit.z} if fit.tokens >= 50 else {},
    )
    unlikely = fit.tokens >= 50 and (abs(fit.z) > 5 or fit.outside > max(0, 0.002 * fit.tokens))
    if unlikely:
        return replace(base, outcome=Outcome.FAIL, fault=Fault.OUTPUT, detail="the tokens do not fit the target's distribution")
    if exact and parted and _differs_again(bench, parted):
        return replace(
            base,
            outcome=Outcome.FAIL,
            fault=Fault.OUTPUT,
            detail=f"{len(parted)} seeds give other tokens than speculation off, and again when repeated",
        )
    if not exact and _never_agrees(bench, pairs):
        detail = "prose never comes out as with speculation off and the same seed: seeds or the distribution are not kept"
        return replace(base, outcome=Outcome.FAIL, fault=Fault.OUTPUT, detail=detail)
    if not exact and fit.tokens < 50 and parted:
        return replace(base, outcome=Outcome.NOT_SCORED, detail="differences may be rounding, and there are no scores to tell")
    return base


def _differs_again(bench: Bench, parted: Sequence[tuple[Turn, Turn]]) -> bool:
    """Other seeds of the same prompts parted as well. A single near tie does not come back with new noise."""
    fresh = [(a.item, replace(a.ask, seed=bench.session.rng.getrandbits(31))) for a, _ in parted for _ in range(3)]
    fresh = fresh[:12]
    turns = bench.session.send("sampled again", [*fresh, *((i, replace(ask, mode="off")) for i, ask in fresh)], overtime=True)
    bench.check(turns)
    half = len(fresh)
    return any(a.whole and b.whole and differ(a, b) for a, b in zip(turns[:half], turns[half:], strict=True))


def _never_agrees(bench: Bench, pairs: Sequence[tuple[Turn, Turn]]) -> bool:
    """No prose comes out as with speculation off and the same seed, nor does any of many fresh ones.

    Rounding parts some of them, never all.
    """
    prose = [(a, b) for a, b in pairs if a.item is not None and a.item.kind is Kind.OPEN]
    if len(prose) < 3 or any(not differ(a, b) for a, b in prose):
        return False
    asked = [(a.item, replace(a.ask, seed=bench.session.rng.getrandbits(31))) for a, _ in prose for _ in range(4)][:12]
    off = [(item, replace(ask, mode="off")) for item, ask in asked]
    turns = bench.session.send("sampled again", [*asked, *off], overtime=True)
    again = [(a, b) for a, b in zip(turns[: len(asked)], turns[len(asked) :], strict=True) if a.whole and b.whole]
    return len(again) >= 6 and all(differ(a, b) for a, b in again)


def _scored_tokens(bench: Bench, turns: Sequence[Turn]) -> list[Any]:
    scorer = bench.scorer
    assert scorer is not None
    found: list[Any] = []
    for turn in turns:
        try:
            if turn.whole and turn.reply is not None:
                found += scorer.alternatives(turn.reply)
        except EngineError:
            continue
    return found
