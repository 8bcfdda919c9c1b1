"""What a stage of the battery is, and the small things stages share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from ddops.prove.evidence import Evidence, Fault, Outcome
from ddops.prove.judging import Bench
from ddops.prove.prompts import Item
from ddops.prove.session import Session, Turn
from ddops.prove.wire import Ask, EngineError


@dataclass(frozen=True, slots=True)
class Stage:
    """A piece of the battery: the probes it yields evidence for, and how it runs."""

    name: str
    probes: tuple[str, ...]
    run: Callable[[Bench], list[Evidence]]
    tells: bool = True  # False: another stage answers for its probes
    gross: bool = False  # quick to run and quick to show gross damage: after it the battery may end early


def not_scored(probe: str, why: str) -> Evidence:
    return Evidence(probe, Outcome.NOT_SCORED, detail=why)


def unready(bench: Bench, probe: str) -> Evidence:
    if bench.why_broken:
        return Evidence(probe, Outcome.ERROR, fault=Fault.DETECTOR, detail=bench.why_broken)
    return not_scored(probe, bench.why_unscored or "the engine gives no scores")


def other_way(session: Session, turn: Turn) -> Ask:
    """The same prompt as bare ids where they are known, by each endpoint in turn; else streamed if it was whole before."""
    stream = not turn.ask.stream
    try:
        assert turn.reply is not None
        ids = session.client.prompt_ids(turn.reply)
    except EngineError:
        return replace(turn.ask, stream=stream)
    return Ask(ids=ids, max_tokens=turn.ask.max_tokens, stream=stream, openai=turn.index % 2 == 0)


def ways_to(session: Session, turn: Turn) -> tuple[Ask, ...]:
    """The request as it was, and by ids through each endpoint that takes them."""
    try:
        assert turn.reply is not None
        ids = session.client.prompt_ids(turn.reply)
    except EngineError:
        return (turn.ask,)
    bare = Ask(ids=ids, max_tokens=turn.ask.max_tokens)
    return (turn.ask, bare, replace(bare, openai=True)) if session.client.dialect.native else (turn.ask, bare)


def several(count: int, *makers: Callable[[], Item]) -> list[Item]:
    """`count` items, from each maker in turn."""
    return [makers[i % len(makers)]() for i in range(count)]
