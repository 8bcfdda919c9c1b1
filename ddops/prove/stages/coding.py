"""Stage: the standard coding problems, all at once; the replies' code is run in the sandbox."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean

from ddops.prove.evidence import Evidence, Outcome
from ddops.prove.judging import Bench
from ddops.prove.stages.glance import GROSS

_GROSS_TOKENS = 96  # enough to show what comes in place of code, and soon over at one token a pass


def coding_stage(bench: Bench) -> list[Evidence]:
    """The five standard problems at once, and more of the kind at higher levels. Every other reply is streamed."""
    session = bench.session
    gross = bool(session.notes.get(GROSS))
    items = [*session.make.standard(), *([] if gross else session.make.kin(session.scale.kin))]
    limit = {"max_tokens": _GROSS_TOKENS} if gross else {}
    asks = [(item, session.ask_for(item, stream=i % 2 == 1, **limit)) for i, item in enumerate(items)]
    turns = session.send("coding", asks)
    bench.check(turns)
    found = bench.content("coding", turns, session.policy.gates.coding, expected=f"{len(items)}/{len(items)} passed")
    if found.outcome is Outcome.NOT_SCORED:
        return [found]
    rates = [t.reply.tokens / t.reply.seconds for t in turns if t.whole and t.reply and t.reply.tokens]
    average = f"{fmean(rates):.1f} tok/s avg" if rates else "no tokens"
    right = sum(bool(t.check and t.check.ok) for t in turns)
    # Out of all that were asked: a request without a reply solved nothing.
    got = f"{right}/{len(items)} passed, {average}"
    values = {"coding_tokens_per_second": fmean(rates)} if rates else {}
    return [replace(found, got=got, sample=len(items), values=values)]
