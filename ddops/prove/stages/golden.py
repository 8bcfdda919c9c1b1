"""Stage: today's answers against those recorded with speculation off."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ddops.prove.divergence import first_difference
from ddops.prove.evidence import Evidence, Fault, Outcome
from ddops.prove.golden import NEAR_TIE, Golden, Take, asks_for
from ddops.prove.judging import Bench, replay_of
from ddops.prove.session import Turn


def golden_stage(bench: Bench) -> list[Evidence]:
    """Today's answers against the recording, all at once, as traffic would come."""
    golden: Golden | None = bench.session.notes.get("golden")
    if golden is None or not golden.takes:
        return [Evidence("golden", Outcome.NOT_SCORED, detail="nothing was recorded on this host with speculation off")]
    session = bench.session
    turns = session.send("golden", asks_for(session, [(t.prompt, t.max_tokens) for t in golden.takes], None))
    pairs = [(take, turn) for take, turn in zip(golden.takes, turns, strict=True) if turn.whole]
    if not pairs:
        return [Evidence("golden", Outcome.NOT_SCORED, detail="no reply came back")]
    found = [(take, turn, _parting(take, turn)) for take, turn in pairs]
    wrong = [(take, turn, p) for take, turn, p in found if p == "fault"]
    unknown = sum(p == "unknown" for *_, p in found)
    ties = sum(p == "tie" for *_, p in found)
    base = Evidence(
        "golden",
        Outcome.PASS,
        expected=f"the answers recorded on {golden.source or 'this host'}",
        sample=len(pairs),
        threshold=f"equal, or parted at a near tie (<= {NEAR_TIE} nat)",
        got=f"{len(pairs) - len(wrong) - ties - unknown} equal, {ties} near ties, {len(wrong)} wrong, {unknown} open",
        replay=replay_of([t for _, t, _ in wrong] or [t for _, t in pairs]),
    )
    if wrong and _again(bench, [(take, turn) for take, turn, _ in wrong]):
        return [replace(base, outcome=Outcome.FAIL, fault=Fault.OUTPUT, detail=f"first: {wrong[0][0].prompt[:60]!r}")]
    if wrong:
        return [replace(base, outcome=Outcome.ERROR, detail="seen once and not again: open")]
    if unknown:
        return [replace(base, outcome=Outcome.NOT_SCORED, detail=f"{unknown} differ, and the recording holds no gaps")]
    return [base]


def _parting(take: Take, turn: Turn) -> str:
    """same, tie, fault or unknown (the recording cannot tell)."""
    assert turn.reply is not None
    if turn.reply.text == take.text:
        return "same"
    if not take.ids or not turn.reply.ids:
        return "unknown"
    at = first_difference(take.ids, turn.reply.ids)
    if at < 0:
        return "fault"  # the same ids, another text
    if at >= len(take.gaps) or take.gaps[at] < 0:
        return "unknown"
    return "tie" if take.gaps[at] <= NEAR_TIE else "fault"


def _again(bench: Bench, wrong: Sequence[tuple[Take, Turn]]) -> bool:
    turns = bench.session.send("golden again", [(None, turn.ask) for _, turn in wrong], overtime=True)
    return any(t.whole and _parting(take, t) == "fault" for (take, _), t in zip(wrong, turns, strict=True))
