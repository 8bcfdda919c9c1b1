"""Evidence from text alarms over every reply of the run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ddops.prove import alarms
from ddops.prove.counts import Account, contradictions
from ddops.prove.evidence import Evidence, Fault, Outcome
from ddops.prove.judging import Bench, replay_of
from ddops.prove.prompts import Kind
from ddops.prove.session import Turn
from ddops.prove.stages.stage import not_scored
from ddops.prove.wire import EngineError, Reply


def alarms_stage(bench: Bench) -> list[Evidence]:
    """Every reply so far: signs in its text, whether it went on after its own end, and whether its numbers can be."""
    turns = bench.session.turns
    found = _evidence(bench, turns)
    if late := went_on(bench, turns):
        got = f"{len(late)} replies go on after their end; {found.got}"
        return [_failed(found, got, f"request {late[0].index} goes on after its end token", late)]
    if wrong := miscounted(bench, turns):
        at, what = wrong[0]
        got = f"{len(wrong)} replies miscount; {found.got}"
        indices = {index for index, _ in wrong}
        return [_failed(found, got, f"request {at}: {what}", [t for t in turns if t.index in indices])]
    return [found]


def _failed(found: Evidence, got: str, detail: str, turns: Sequence[Turn]) -> Evidence:
    return replace(found, outcome=Outcome.FAIL, fault=Fault.OUTPUT, got=got, detail=detail, replay=replay_of(turns))


def miscounted(bench: Bench, turns: Sequence[Turn]) -> list[tuple[int, str]]:
    """(index, what is wrong) of replies whose own numbers contradict each other or what was asked."""
    client = bench.session.client
    accounts = [_account(t, t.reply) for t in turns if t.whole and t.reply is not None and "stop" not in t.ask.extra]
    return contradictions(accounts, client.facts().context_length, exact=client.dialect.exact)


def _account(turn: Turn, reply: Reply) -> Account:
    ask, meta = turn.ask, reply.meta
    prompt = (ask.messages, ask.ids, ask.text)
    ids = None if reply.ids is None else len(reply.ids)
    return Account(
        turn.index, prompt, ask.max_tokens, reply.finish, meta.completion_tokens, ids, meta.prompt_tokens, meta.cached_tokens
    )


def went_on(bench: Bench, turns: Sequence[Turn]) -> list[Turn]:
    """Replies with an end token inside: one that ends other replies and leaves no text of its own."""
    whole = [t for t in turns if t.whole and t.reply is not None and t.reply.ids]
    ends = {t.reply.ids[-1] for t in whole if t.reply and t.reply.ids and t.reply.finish == "stop"}
    inner = {i for t in whole if t.reply and t.reply.ids for i in t.reply.ids[:-1]} & ends
    try:
        unseen = {i for i in inner if bench.endings.unseen(i)}
    except EngineError:
        return []
    return [t for t in whole if t.reply and t.reply.ids and unseen & set(t.reply.ids[:-1])]


def _evidence(bench: Bench, turns: Sequence[Turn]) -> Evidence:
    """Every reply so far. An alarm that prefill clears is the model's own way of writing; two or more others count."""
    whole = [t for t in turns if t.whole and t.reply is not None]
    if not whole:
        return not_scored("alarms", "no reply came back")
    raised = [(t, found) for t in whole if (found := _alarms(t))]
    base = Evidence(
        "alarms",
        Outcome.PASS,
        expected="ordinary text",
        got=f"{len(raised)} of {len(whole)} replies",
        threshold="none confirmed",
        sample=len(whole),
    )
    if not raised:
        return base
    bench.judge([t for t, _ in raised])
    uncleared = [(t, f) for t, f in raised if not (t.judged and t.judged.clean)]
    if not uncleared:
        return replace(base, detail=f"{len(raised)} alarms that the model itself gives (prefill agrees)")
    turn, found = uncleared[0]
    base = replace(base, detail=f"request {turn.index}: {found[0].what}", replay=replay_of([t for t, _ in uncleared]))
    if len(uncleared) >= 2 or (turn.judged and turn.judged.wrong):
        return replace(base, outcome=Outcome.FAIL, fault=Fault.OUTPUT)
    again = bench.session.send("alarm again", [(turn.item, turn.ask)] * 4, overtime=True)
    if any(_alarms(t) for t in again):
        return replace(base, outcome=Outcome.FAIL, fault=Fault.OUTPUT)
    return replace(base, outcome=Outcome.ERROR, detail=f"{base.detail}; not seen again: open")


def _alarms(turn: Turn) -> list[alarms.Alarm]:
    reply: Reply | None = turn.reply
    if reply is None:
        return []
    if turn.item is not None and turn.item.kind is Kind.OPEN and turn.judged is None:
        return []  # prose may ramble by itself, and nothing here can tell
    prompt = turn.item.said if turn.item else ""
    found = alarms.check(reply.text, prompt=prompt, finish=reply.finish, allow_empty=bool(reply.reasoning) or turn.item is None)
    if _ran_out(turn, reply):
        found.append(alarms.Alarm("length", f"ran into its limit of {turn.ask.max_tokens} tokens"))
    return found


def _ran_out(turn: Turn, reply: Reply) -> bool:
    """A curated reply that did not end by itself although it had room enough to."""
    item = turn.item
    if item is None or reply.finish != "length" or reply.reasoning or item.kind in (Kind.LONG, Kind.OPEN):
        return False
    return turn.ask.max_tokens >= item.max_tokens
