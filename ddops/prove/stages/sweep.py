"""Stage: many short replies over a staircase of concurrency, to meet faults that touch only few of them.

Blocks climb from one request to the full batch and down again, unequal prompts arriving as others end, some hanging up.
Every reply is checked, decoded from its own ids, and scored by prefill; some prompts come back in the next block by
another way into the engine and at another batch size, and must be answered the same. It ends at the first suspicion.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ddops.prove.evidence import Evidence, Fault, Outcome
from ddops.prove.judging import Bench, Confirmation, cleared, replay_of, wrong
from ddops.prove.prompts import Item
from ddops.prove.rescore import text_agrees
from ddops.prove.session import OutOfTime, Session, Turn, most_in_flight, unsupported
from ddops.prove.stages.pairs import compare_pairs
from ddops.prove.stages.rescore import confirm_over
from ddops.prove.stages.stage import not_scored, other_way
from ddops.prove.wire import Ask, EngineError

SWEEP = "sweep"
_BLOCK = 40
_AGAIN = 6  # prompts of a block that come back in the next
_HANG_UP_EVERY = 12


@dataclass(slots=True)
class _Swept:
    """What the blocks brought."""

    turns: list[Turn] = field(default_factory=list)  # whole replies
    sent: list[Turn] = field(default_factory=list)
    pairs: list[tuple[Turn, Turn]] = field(default_factory=list)
    other_text: dict[int, str] = field(default_factory=dict)  # turn index -> how its text differs from its ids

    @property
    def bad(self) -> list[Turn]:
        """Wrong by their content, by prefill, or in their text."""
        return [t for t in self.turns if wrong([t]) or (t.judged and t.judged.wrong) or t.index in self.other_text]

    @property
    def suspicious(self) -> bool:
        """Something is bad that prefill does not clear: the model itself may answer wrongly, which is no fault."""
        return any(t.index in self.other_text or not (t.judged and t.judged.clean) for t in self.bad)


def sweep_stage(bench: Bench) -> list[Evidence]:
    """Blocks until the level's count is reached, something is wrong, or the time is used up."""
    swept = _Swept()
    before: list[Turn] = []
    try:
        while len(swept.turns) < bench.session.scale.sweep and not swept.suspicious:
            before = _block(bench, swept, before, bench.session.scale.sweep - len(swept.turns))
            if not before or bench.session.late:
                break
    except OutOfTime:
        if not swept.turns:
            raise
    return [_evidence(bench, swept)]


def staircase(count: int, top: int) -> list[int]:
    """Requests in flight while each of `count` is sent: from 1 up to `top` and down to 1 again."""
    half = max(1, (count - 1) // 2)
    return [1 + (top - 1) * min(i, count - 1 - i) // half for i in range(count)]


def _block(bench: Bench, swept: _Swept, before: Sequence[Turn], left: int) -> list[Turn]:
    """One staircase. Returns the turns whose prompts shall come back, none when nothing was answered."""
    session = bench.session
    asks = _asks(session, min(_BLOCK, left))
    again = [(turn, other_way(session, turn)) for turn in before]
    spaced = max(1, len(asks) // (len(again) + 1))
    for i, (turn, ask) in enumerate(again):
        asks.insert((i + 1) * spaced + i, (turn.item, ask))
    top = min(session.max_running, session.scale.wave_cap)
    turns = session.climb(SWEEP, asks, staircase(len(asks), top))
    whole = [t for t in turns if t.whole]
    swept.sent += turns
    swept.turns += [t for t in whole if t.item is not None]
    by_ask = {id(t.ask): t for t in whole}
    swept.pairs += [(turn, by_ask[id(ask)]) for turn, ask in again if id(ask) in by_ask]
    bench.check(whole)
    bench.judge(whole)
    _decode(session, whole, swept)
    fresh = [t for t in whole if t.item is not None and not t.ask.ids]
    return fresh[-_AGAIN:]


def _asks(session: Session, count: int) -> list[tuple[Item | None, Ask]]:
    asks: list[tuple[Item | None, Ask]] = []
    for i, item in enumerate(session.make.short(count)):
        asks.append((item, session.ask_for(item, stream=i % 3 == 0)))
        if i % _HANG_UP_EVERY == _HANG_UP_EVERY - 1:
            asks.append((None, session.ask_for(session.make.open(), cancel_after_chunks=2)))
    return asks


def _decode(session: Session, turns: Sequence[Turn], swept: _Swept) -> None:
    def one(turn: Turn) -> None:
        try:
            assert turn.reply is not None
            if differs := text_agrees(session.client, turn.reply):
                swept.other_text[turn.index] = differs
        except EngineError:
            return  # the stream probe says why

    session.parallel(one, turns)


def _evidence(bench: Bench, swept: _Swept) -> Evidence:
    if not swept.turns:
        return not_scored(SWEEP, unsupported(swept.sent) or "no reply came back")
    bad, turns = swept.bad, swept.turns
    judged = sum(t.judged is not None for t in turns)
    short = _short(bench.session, swept)
    bench.session.shorten(SWEEP, short)
    counts = f"{len(turns) - len(bad)}/{len(turns)} right, {judged} scored, up to {most_in_flight(swept.sent)} in flight"
    base = Evidence(
        SWEEP,
        Outcome.PASS,
        expected="every reply right, the model's own, and the same by another way",
        got=", ".join(filter(None, (short, counts))),
        threshold="none wrong",
        sample=len(turns),
        replay=replay_of(bad or turns),
    )
    if any(t.judged and t.judged.wrong for t in bad):
        return confirm_over(bench, [t for t in bad if t.judged and t.judged.wrong], base)
    if swept.other_text:
        at, differs = next(iter(swept.other_text.items()))
        return replace(base, outcome=Outcome.FAIL, fault=Fault.OUTPUT, detail=f"request {at}: {differs}")
    if bad:
        return _wrong_content(bench, swept, base)
    return _same_again(bench, swept, base)


def _short(session: Session, swept: _Swept) -> str:
    """How far it fell behind the level's count, unless a finding ended it."""
    meant = session.scale.sweep
    return f"{len(swept.turns)} of the level's {meant} replies" if len(swept.turns) < meant and not swept.suspicious else ""


def _wrong_content(bench: Bench, swept: _Swept, base: Evidence) -> Evidence:
    bad = wrong(swept.turns)
    how = bench.confirm(bad, swept.turns[-2 * _BLOCK :])
    what = "; ".join(
        filter(None, (f"{bad[0].item.kind}: {bad[0].check.got}" if bad[0].item and bad[0].check else "", how.means))
    )
    if how.corrupt:
        return replace(base, outcome=Outcome.FAIL, fault=Fault.OUTPUT, detail=what)
    if how is Confirmation.CLEARED:
        return cleared(base, len(swept.turns) - len(bad), len(bad), what)
    return replace(base, outcome=Outcome.ERROR, detail=what)


def _same_again(bench: Bench, swept: _Swept, base: Evidence) -> Evidence:
    if not swept.pairs:
        return base
    pairs = compare_pairs(bench, SWEEP, swept.pairs, base.expected)
    if pairs.outcome is Outcome.FAIL:
        return replace(pairs, got=f"{base.got}; {pairs.got}")
    return replace(base, got=f"{base.got}; {pairs.got}", detail=pairs.detail)
