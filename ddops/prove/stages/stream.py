"""Stage: the text of a reply is what its own ids decode to, streamed or whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ddops.prove.evidence import Evidence, Fault, Outcome
from ddops.prove.judging import Bench, replay_of
from ddops.prove.rescore import text_agrees
from ddops.prove.session import Session, Turn
from ddops.prove.stages.stage import not_scored, several
from ddops.prove.wire import EngineError

_NEAR = 40  # tokens within which code has a line end


def stream_stage(bench: Bench) -> list[Evidence]:
    """The text of a reply is what its own ids decode to, streamed or whole: one request, not two runs."""
    session = bench.session
    usual = [t for t in session.turns if t.whole and "stop" not in t.ask.extra]  # a stop word has ids and no text
    streamed = [t for t in usual if t.ask.stream]
    if len(streamed) < session.scale.streams:
        make = session.make
        items = several(session.scale.streams, lambda: make.copy(8), make.nonce_code)
        fresh = session.send_items("stream", items, stream=True)
        bench.check(fresh)
        streamed += [t for t in fresh if t.whole]
    plain = [t for t in usual if not t.ask.stream][: 2 * session.scale.streams]
    ends = _cut_at_blanks(session, usual)
    streamed, plain = [*streamed, *(t for t in ends if t.ask.stream)], [*plain, *(t for t in ends if not t.ask.stream)]
    wrong: list[tuple[Turn, str]] = []
    checked = 0
    why = "no stream came back"
    for turn in [*streamed, *plain]:
        try:
            assert turn.reply is not None
            differs = text_agrees(session.client, turn.reply)
        except EngineError as exc:
            why = str(exc)
            continue
        checked += turn.ask.stream
        wrong += [(turn, differs)] if differs else []
    if not checked and not wrong:
        return [not_scored("stream", why)]
    base = Evidence(
        "stream",
        Outcome.PASS,
        expected="text = what its ids decode to",
        threshold="equal",
        sample=checked,
        got=f"{checked} streams, {len(plain)} whole replies, {len(wrong)} differ",
        replay=replay_of([t for t, _ in wrong] or streamed, 6),
    )
    if wrong:
        turn, what = wrong[0]
        detail = f"request {turn.index} ({'streamed' if turn.ask.stream else 'whole'}): {what}"
        return [replace(base, outcome=Outcome.FAIL, fault=Fault.OUTPUT, detail=detail)]
    return [base]


def _cut_at_blanks(session: Session, turns: Sequence[Turn]) -> list[Turn]:
    """A reply that is known, cut by its limit right behind a blank or a line end: the edge that is lost most easily.

    Only of engines that promise the whole text; others trim it, and that is no fault.
    """
    known = next((t for t in turns if t.item is not None and t.item.kind.is_code and t.reply and t.reply.ids), None)
    if known is None or known.reply is None or not session.client.dialect.exact:
        return []
    ids = known.reply.ids or ()
    try:
        limit = next((n for n in range(2, min(_NEAR, len(ids))) if session.client.detokenize(ids[:n])[-1:].isspace()), 0)
    except EngineError:
        return []
    asks = [(None, replace(known.ask, max_tokens=limit, stream=stream)) for stream in (True, False)] if limit else []
    return [t for t in session.send("stream: cut", asks) if t.whole]
