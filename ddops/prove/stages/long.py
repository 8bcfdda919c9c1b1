"""Stage: answers of many functions and copies of long prompts. Decay, loops and length blow-up need room to show."""

from __future__ import annotations

from dataclasses import replace

from ddops.prove.evidence import Evidence, Outcome
from ddops.prove.judging import Bench


def long_stage(bench: Bench) -> list[Evidence]:
    """Answers of many functions, and copies of long prompts: decay, loops and length blow-up need room to show."""
    session = bench.session
    items = [session.make.long(session.scale.long_functions) for _ in range(session.scale.long_answers)]
    items += [session.make.long_copy() for _ in range(session.scale.long_answers)]
    turns = session.send_items("long", items)
    bench.check(turns)
    found = bench.content("long", turns, 1.0, expected="every function works, every id is copied")
    lengths = [t.reply.tokens for t in turns if t.reply and t.reply.tokens]
    if found.outcome is Outcome.NOT_SCORED or not lengths:
        return [found]
    return [replace(found, got=f"{found.got}, {max(lengths)} tokens at most")]
