"""Stage: the standard coding problems, all at once; the replies' code is run in the sandbox."""

from __future__ import annotations

from dataclasses import replace

from ddops.prove.evidence import Evidence, Outcome
from ddops.prove.judging import Bench


def coding_stage(bench: Bench) -> list[Evidence]:
    """The five standard problems at once, and more of the kind at higher levels."""
    session = bench.session
    items = [*session.make.standard(), *session.make.kin(session.scale.kin)]
    turns = session.send_items("coding", items)
    bench.check(turns)
    rates = [t.reply.tokens / t.reply.seconds for t in turns if t.whole and t.reply and t.reply.tokens]
    average = f"{sum(rates) / len(rates):.1f} tok/s avg" if rates else "no tokens"
    found = bench.content("coding", turns, session.policy.gates.coding, expected=f"{len(items)}/{len(items)} passed")
    right = sum(bool(t.check and t.check.ok) for t in turns)
    if found.outcome is Outcome.NOT_SCORED:
        return [found]
    # A request without a reply solved nothing.
    got = f"{right}/{len(items)} passed, {average}"
    return [
        replace(
            found,
            got=got,
            sample=len(items),
            values={"coding_tokens_per_second": sum(rates) / len(rates)} if rates else {},
        )
    ]
