"""Stage: one fixed load in rounds (throughput) and one long stream (acceptance)."""

from __future__ import annotations

from dataclasses import replace

from ddops.prove import acceptance, throughput
from ddops.prove.evidence import Evidence, Outcome
from ddops.prove.judging import Bench
from ddops.prove.prompts import Kind
from ddops.prove.session import Session, Turn
from ddops.prove.wire import Ask, EngineError


def speed_stage(bench: Bench) -> list[Evidence]:
    """One fixed load in rounds (throughput), one long stream (acceptance). Everything before it was warm-up."""
    session = bench.session
    before = _metrics(session)
    rounds = _rounds(session, session.scale.rounds)
    gates, baseline = session.policy.gates, session.baseline
    found = throughput.judge(throughput.combine(rounds), baseline, gates)
    if found.outcome is Outcome.DEGRADED:
        again = [*rounds, *_rounds(session, 2 * session.scale.rounds)]
        confirmed = throughput.judge(throughput.combine(again[len(rounds) :]), baseline, gates)
        found = (
            confirmed
            if confirmed.outcome is Outcome.DEGRADED
            else throughput.judge(throughput.combine(again), baseline, gates)
        )
    return [_acceptance(bench, before), found]


def _rounds(session: Session, count: int) -> list[throughput.Round]:
    items = session.make.standard()[: session.scale.round_requests]
    items = [items[i % len(items)] for i in range(session.scale.round_requests)]
    found = []
    for _ in range(count):
        turns = session.send_items("load", items, stream=True)
        measured = throughput.round_of(turns)
        found += [measured] if measured is not None else []
    return found


def _acceptance(bench: Bench, before: dict[str, float] | None) -> Evidence:
    session = bench.session
    facts = session.client.facts(again=True)
    spec = [
        t for t in session.turns if t.ask.mode is None and t.whole and (t.item is None or t.item.kind is not Kind.COPY)
    ]
    stream = _steady(session)
    reading = acceptance.read(
        [*stream, *([] if stream and acceptance.read(stream) else spec)],
        before,
        _metrics(session),
        session.notes.get("log", ()),
        facts.accept_length,
    )
    whole = acceptance.read(spec)
    found = acceptance.judge(
        reading,
        spec,
        speculates=session.speculates,
        cap=facts.depth_cap,
        baseline=session.baseline,
        gates=session.policy.gates,
    )
    if whole is not None and whole.per_request and found.outcome is not Outcome.NOT_SCORED:
        low, high = min(whole.per_request), max(whole.per_request)
        found = replace(found, detail=f"{found.detail}; {whole.sample} requests {low:.2f} to {high:.2f}")
    return found


def _steady(session: Session) -> list[Turn]:
    """One long request, alone and streamed with its counters, so that warm-up and tail can be left out."""
    known = next((t for t in session.turns if t.label == "long" and t.whole), None)
    if known is None or known.reply is None or not session.client.dialect.native:
        return []
    try:
        ids = session.client.prompt_ids(known.reply)
    except EngineError:
        return []
    turns = session.send("steady", [(None, Ask(ids=ids, max_tokens=known.ask.max_tokens, stream=True))])
    return [t for t in turns if t.whole]


def _metrics(session: Session) -> dict[str, float] | None:
    try:
        return session.client.metrics()
    except EngineError:
        return None
