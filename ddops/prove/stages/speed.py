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
    """One fixed load in rounds. Everything before it was warm-up."""
    session = bench.session
    gates, baseline = session.policy.gates, session.baseline
    rounds = _rounds(session, session.scale.rounds)
    found = throughput.judge(throughput.combine(rounds), baseline, gates)
    if found.outcome is not Outcome.DEGRADED:
        return [found]
    fresh = _rounds(session, 2 * session.scale.rounds, overtime=True)
    confirmed = throughput.judge(throughput.combine(fresh), baseline, gates)
    if confirmed.outcome is Outcome.DEGRADED:
        return [replace(confirmed, detail=f"{confirmed.detail}; confirmed on fresh rounds")]
    return [throughput.judge(throughput.combine([*rounds, *fresh]), baseline, gates)]


def _rounds(session: Session, count: int, *, overtime: bool = False) -> list[throughput.Round]:
    items = session.make.standard()[: session.scale.round_requests]
    items = [items[i % len(items)] for i in range(session.scale.round_requests)]
    found = []
    for _ in range(count):
        asks = [(item, session.ask_for(item, stream=True)) for item in items]
        turns = session.send("load", asks, overtime=overtime)
        measured = throughput.round_of(turns)
        found += [measured] if measured is not None else []
    return found


def acceptance_stage(bench: Bench) -> list[Evidence]:
    """From one long stream where there is time for it, else from the replies of the run: it is never left out."""
    session = bench.session
    facts = session.client.facts(again=True)
    spec = [t for t in session.turns if t.ask.mode is None and t.whole and not _unusual(t)]
    whole = acceptance.read(spec)
    reading = acceptance.read(_steady(session)) or acceptance.read(
        spec, session.notes.get("metrics"), _metrics(session), session.notes.get("log", ()), facts.accept_length
    )
    found = acceptance.judge(
        reading,
        spec,
        speculates=session.speculates,
        cap=facts.depth_cap,
        baseline=session.baseline,
        gates=session.policy.gates,
    )
    if whole is None or not whole.per_request or found.outcome is Outcome.NOT_SCORED:
        return [found]
    low, high = min(whole.per_request), max(whole.per_request)
    return [replace(found, detail=f"{found.detail}; {whole.sample} requests {low:.2f} to {high:.2f}")]


def note_metrics(session: Session) -> None:
    """Counters before the first request, to take differences from."""
    session.notes["metrics"] = _metrics(session)


def _unusual(turn: Turn) -> bool:
    """Copies are accepted whole and prose hardly at all: neither tells how the drafter does."""
    return turn.item is not None and turn.item.kind in (Kind.COPY, Kind.LONG_COPY, Kind.OPEN)


def _steady(session: Session) -> list[Turn]:
    """One long request, alone and streamed with its counters, so that warm-up and tail can be left out."""
    known = max((t for t in session.turns if t.item and t.item.kind.is_code and t.whole), key=_length, default=None)
    if known is None or known.reply is None or not session.client.dialect.native or session.closing:
        return []
    try:
        ids = session.client.prompt_ids(known.reply)
    except EngineError:
        return []
    turns = session.send("steady", [(None, Ask(ids=ids, max_tokens=max(1, _length(known)), stream=True))])
    return [t for t in turns if t.whole]


def _length(turn: Turn) -> int:
    return (turn.reply.tokens or 0) if turn.reply else 0


def _metrics(session: Session) -> dict[str, float] | None:
    try:
        return session.client.metrics()
    except EngineError:
        return None
