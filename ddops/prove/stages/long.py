"""Stage: long answers and long contexts. Decay, loops, lost beginnings and length blow-up need room to show."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

from ddops.prove import copying
from ddops.prove.evidence import Evidence, Outcome
from ddops.prove.judging import Bench
from ddops.prove.lengths import lengths
from ddops.prove.prompts import Item
from ddops.prove.session import Session, Turn
from ddops.prove.wire import EngineError

_SAMPLE = 40  # ids to learn the tokenizer's rate from
_CHARACTERS = 9.5  # of an id and its line end, at least: prompts come out longer than they are
_TURN = 12  # tokens of a template around one message


def long_stage(bench: Bench) -> list[Evidence]:
    """Answers of many functions, copies of long prompts, and questions after a long conversation."""
    session = bench.session
    asked = lengths(session.level, session.client.facts().context_length)
    session.shorten("long", asked.short)
    rate = _tokens_per_id(session)
    talks = [session.make.conversation(max(1, round(n / rate / 2))) for n in asked.contexts]  # an id is asked for and copied
    fit = partial(_fitting, context=session.client.facts().context_length, rate=rate)
    asked_first = [*_answers(session, asked.answers, rate), *(first for first, _ in talks)]
    turns = session.send_items("long", [fit(item) for item in asked_first])
    turns += session.send_items("long, again", [fit(second) for _, second in talks])  # what went before may come from the cache
    bench.check(turns)
    found = bench.content("long", turns, 1.0, expected="every function works, every id is copied, the beginning is known")
    if found.outcome is Outcome.NOT_SCORED:
        return [found]
    return [replace(found, got=", ".join([found.got, *_extent(turns)]))]


def _answers(session: Session, tokens: tuple[int, ...], rate: float) -> list[Item]:
    make = session.make
    code = [make.long(session.scale.long_functions) for _ in range(session.scale.long_answers)]
    return [*code, *(make.long_copy(max(1, round(n / rate))) for n in tokens)]


def _fitting(item: Item, *, context: int | None, rate: float) -> Item:
    """The item with a limit that the context has room for, since engines refuse what could go beyond it."""
    if context is None:
        return item
    prompt = len(item.said) * rate / _CHARACTERS + _TURN * len(item.messages)
    return replace(item, max_tokens=max(1, min(item.max_tokens, context - math.ceil(prompt))))


def _tokens_per_id(session: Session) -> float:
    """By the engine's own tokenizer; where it does not say, by a usual one."""
    text = "\n".join(copying.make_ids(session.rng, _SAMPLE))
    try:
        return max(1.0, len(session.client.tokenize(text)) / _SAMPLE)
    except EngineError:
        return len(text) / _SAMPLE / 1.5


def _extent(turns: list[Turn]) -> list[str]:
    answers = [t.reply.tokens for t in turns if t.reply and t.reply.tokens]
    prompts = [t.reply.meta.prompt_tokens for t in turns if t.reply and t.reply.meta.prompt_tokens]
    told = [f"answers up to {max(answers)} tokens"] if answers else []
    return [*told, f"prompts up to {max(prompts)}"] if prompts else told
