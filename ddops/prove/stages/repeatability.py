"""Stage: the same prompts again, and again after the cache was emptied."""

from __future__ import annotations

from ddops.prove.evidence import Evidence
from ddops.prove.judging import Bench
from ddops.prove.stages.pairs import compare_pairs
from ddops.prove.stages.stage import several
from ddops.prove.wire import Unsupported


def repeat_stage(bench: Bench) -> list[Evidence]:
    """The same prompts again, and again after the cache was emptied."""
    session = bench.session
    make, count = session.make, session.scale.repeats
    items = several(count, lambda: make.copy(6), make.nonce_code, make.fact)
    first = session.send_items("repeat 1", items)
    second = session.send_items("repeat 2", items)
    flushed = True
    try:
        session.client.flush()
    except Unsupported:
        flushed = False
    third = session.send_items("after flush", items) if flushed else []
    bench.check([*first, *second, *third])
    pairs = [*zip(first, second, strict=True), *(zip(first, third, strict=True) if flushed else [])]
    expected = "the same answer again" + (" and after a flush" if flushed else "")
    return [compare_pairs(bench, "repeatability", pairs, expected)]
