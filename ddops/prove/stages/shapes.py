"""Stage: waves of unequal requests up to the largest batch, and what they tell about copying, answers and isolation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from ddops.prove import isolation
from ddops.prove.evidence import Evidence, Fault, Outcome
from ddops.prove.judging import Bench, Confirmation, cleared, replay_of
from ddops.prove.prompts import Item, Kind, marks_of
from ddops.prove.session import Session, Turn, most_in_flight, unsupported
from ddops.prove.stages.stage import not_scored
from ddops.prove.wire import Ask

_KINDS = 10  # questions of a mixed batch until they come round again


def shapes_stage(bench: Bench) -> list[Evidence]:
    """Waves of unequal requests up to the largest batch, arriving apart, some hanging up, every reply checked."""
    session = bench.session
    turns: list[Turn] = []
    sizes = wave_sizes(session.max_running, session.scale.wave_cap, session.scale.waves)
    # Small batches are asked again until every kind of question had its turn.
    for size in [*sizes, *[sizes[0]] * math.ceil(max(0, _KINDS - sum(sizes)) / sizes[0])]:
        turns += _wave(session, size)
    bench.check(turns)
    gates = session.policy.gates
    return [
        _isolation(bench, turns),
        bench.content("copy", turns, gates.copy, expected="every id exactly as given"),
        bench.content("answers", turns, gates.answers),
        _shapes(bench, turns),
    ]


def wave_sizes(max_running: int, cap: int, waves: int) -> list[int]:
    """The full batch first, then odd sizes and small ones: faults hide in padding and at product thresholds."""
    full = min(max_running, cap)
    others = [3, max(1, full - 1), 2, full // 2 + 1, 7, 13, 5, full // 4 + 1, *range(1, full + 1)]
    picked = [n for n in dict.fromkeys(others) if 1 <= n < full]
    return [full, *([full // 2 + 1] if waves == 1 and full > 3 else picked[: waves - 1])]


def _wave(session: Session, size: int) -> list[Turn]:
    """One wave; every sixth request hangs up in the middle, and another takes its place in the batch."""
    items = session.make.mixed(size)
    asks: list[tuple[Item | None, Ask]] = []
    for i, item in enumerate(items):
        asks.append((item, session.ask_for(item, stream=i % 2 == 0)))
        if i % 6 == 5:
            asks.append((None, session.ask_for(session.make.kin(1)[0], cancel_after_chunks=2)))
    return session.send(f"wave of {size}", asks, stagger_seconds=0.004)


def _shapes(bench: Bench, turns: Sequence[Turn]) -> Evidence:
    """All waves together, told by their shape. Code that came along is checked here."""
    done = [t for t in turns if t.whole and t.check is not None]
    bad = [t for t in done if t.check is not None and not t.check.ok]
    sizes = f"batches up to {most_in_flight(turns)} in flight of {bench.session.max_running}"
    cut = sum(bool(t.reply and t.reply.cancelled) for t in turns)
    base = Evidence(
        "shapes",
        Outcome.PASS,
        expected="every reply right at every batch size",
        threshold="no confirmed wrong reply",
        got=f"{len(done) - len(bad)}/{len(done)} right, {sizes}, {cut} cancelled",
        sample=len(done),
        replay=replay_of(turns),
    )
    if not done:
        return not_scored("shapes", unsupported(turns) or "no reply came back")
    if not bad:
        return base
    how = bench.confirm(bad, done)
    what = bad[0].check.got if bad[0].check else ""
    if how.corrupt:
        return replace(base, outcome=Outcome.FAIL, fault=Fault.OUTPUT, detail=f"{how}: {what}")
    if how is Confirmation.CLEARED:
        told = cleared(base, len(done) - len(bad), len(bad), f"{how}: {what}")
        return replace(told, got=f"{told.got}, {sizes}, {cut} cancelled") if told.got else told
    return replace(base, outcome=Outcome.ERROR, detail=f"{how}: {what}")


def _isolation(bench: Bench, turns: Sequence[Turn]) -> Evidence:
    """Own mark present, nobody else's. A foreign random mark has no innocent explanation: no confirmation is needed."""
    texts = {i: t.text + (t.reply.reasoning if t.reply else "") for i, t in enumerate(turns) if t.reply is not None}
    items = [t.item or Item(Kind.CODE, "") for t in turns]
    found = isolation.leaks(marks_of(items), texts)
    marked = [t for t in turns if t.whole and t.item is not None and t.item.marks]
    if found:
        reader, owner = turns[found[0].reader], turns[found[0].owner]
        return Evidence(
            "isolation",
            Outcome.FAIL,
            expected="no foreign mark",
            got=f"{len(found)} foreign marks in {len(texts)} replies",
            threshold="none",
            sample=len(texts),
            fault=Fault.OUTPUT,
            replay=(reader.to_dict(), owner.to_dict()),
            detail=f"{found[0].mark} of request {owner.index} stands in the reply of request {reader.index}",
        )
    own = bench.content("isolation", turns, 1.0, expected="own code word in every reply")
    lacking = [t for t in marked if _lacks_its_mark(t)]
    if own.outcome is Outcome.NOT_SCORED and marked:
        # Own code words are no test for this model; that nobody else's turned up was measured all the same.
        own = replace(own, outcome=Outcome.PASS, expected="no foreign mark", threshold="none")
    if own.outcome is not Outcome.PASS or not lacking:
        told = [own.got, f"no foreign mark in {len(texts)} replies"]
        got = ", ".join(part for part in told if part)
        return replace(own, got=got, sample=max(own.sample, len(marked)))
    how = bench.confirm(lacking, marked)
    if how is Confirmation.ONCE:  # the code itself is right, so what was asked again is looked at here
        again = bench.session.send("own mark again", [(t.item, t.ask) for t in lacking], overtime=True)
        how = Confirmation.AGAIN if any(_lacks_its_mark(t) for t in again) else how
    detail = f"{how}: the code of request {lacking[0].index} lacks its code word"
    if how.corrupt:
        return replace(own, outcome=Outcome.FAIL, fault=Fault.OUTPUT, detail=detail, replay=replay_of(lacking))
    if how is Confirmation.CLEARED:
        return cleared(replace(own, replay=replay_of(lacking)), len(marked) - len(lacking), len(lacking), detail)
    return replace(own, outcome=Outcome.ERROR, detail=detail, replay=replay_of(lacking))


def _lacks_its_mark(turn: Turn) -> bool:
    return turn.whole and turn.item is not None and turn.item.kind is Kind.NONCE_CODE and turn.item.marks[0] not in turn.text
