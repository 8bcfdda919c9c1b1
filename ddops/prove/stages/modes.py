"""Stage: speculation off, chain and tree of the same prompts, interleaved in one batch."""

from __future__ import annotations

from ddops.prove.evidence import Evidence
from ddops.prove.judging import Bench
from ddops.prove.session import unsupported
from ddops.prove.stages.pairs import compare_pairs
from ddops.prove.stages.stage import not_scored, several


def modes_stage(bench: Bench) -> list[Evidence]:
    """Off, chain and tree of the same prompts, interleaved in one batch."""
    session = bench.session
    if not session.client.dialect.spec_switch:
        return [not_scored("modes", f"{session.client.dialect.kind} cannot switch speculation per request")]
    if not session.speculates:
        return [not_scored("modes", "speculation is off")]
    make, count = session.make, session.scale.modes
    items = several(count, make.nonce_code, lambda: make.copy(6), lambda: make.kin(1)[0])
    asks = [(item, session.ask_for(item, mode=mode)) for item in items for mode in ("off", "chain", "tree")]
    turns = session.send("modes", asks)
    refused = unsupported(turns)
    if refused:
        return [not_scored("modes", refused)]
    bench.check(turns)
    pairs = [(turns[i], turns[i + k]) for i in range(0, len(turns), 3) for k in (1, 2)]
    return [compare_pairs(bench, "modes", pairs, "off, chain and tree give the same tokens")]
