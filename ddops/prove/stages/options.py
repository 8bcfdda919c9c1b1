"""Stage: what a request asks for is what it gets: its limit, its stop words, noise of its own.

Each of these can break without one wrong token: a stop word inside an accepted path that is not noticed, one noise for
all requests, an answer from a cache that forgets how it was asked.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

from ddops.prove.answers import short
from ddops.prove.evidence import Evidence, Fault, Outcome
from ddops.prove.judging import Bench, replay_of
from ddops.prove.prompts import Item
from ddops.prove.rescore import Scorer
from ddops.prove.scores import largest_difference, outside_nucleus, repeat_chance
from ddops.prove.session import Session, Turn, unsupported
from ddops.prove.stages.stage import not_scored, ways_to
from ddops.prove.wire import Ask, EngineError, Scored

OPTIONS = "options"
_LIMIT = 7  # tokens at most: inside what a drafter proposes at once
_NEVER = math.log(1e-6)  # two draws that agree with less chance than this did not draw
_TOP_P = 0.5
_ENOUGH = 40  # tokens to judge top_p by
_WORD = re.compile(r"[A-Za-z]{3,}")


def options_stage(bench: Bench) -> list[Evidence]:
    """A few prose prompts, each asked whole, cut short, with a stop word, and several times above T=0."""
    session = bench.session
    count = 3 if session.level == "quick" else 8
    items = [session.make.open() for _ in range(count)]
    whole = session.send_items(OPTIONS, items)
    parts = {
        "limits": _limits(session, whole),
        "stop words": _stops(session, whole),
        "draws": _draws(bench, whole),
        "top_p": _nucleus(bench, whole),
        "scores": _scores(bench, whole),
    }
    told = [found for found in parts.values() if found is not None]
    if not told:
        return [not_scored(OPTIONS, unsupported(whole) or "no reply came back, or what was asked for is not taken")]
    untried = ", ".join(name for name, found in parts.items() if found is None)
    session.shorten(OPTIONS, f"{untried} not tried" if untried else "")
    wrong = [what for _, what in told if what]
    base = Evidence(
        OPTIONS,
        Outcome.PASS,
        expected="limits and stop words kept, every request its own noise",
        got=", ".join(name for name, _ in told)
        + (" tried" if wrong else " kept")
        + (f"; not tried: {untried}" if untried else ""),
        threshold="none broken",
        sample=len(whole),
        replay=replay_of([t for t in session.turns if t.label.startswith(OPTIONS)]),
    )
    if wrong:
        return [replace(base, outcome=Outcome.FAIL, fault=Fault.OUTPUT, detail="; ".join(wrong))]
    return [base]


Found = tuple[str, str] | None  # (what was tried, what is wrong or ""); None: it could not be tried


def _limits(session: Session, whole: Sequence[Turn]) -> Found:
    """Limits below what the whole answer needs, by every way into the engine."""
    asked: list[tuple[Item | None, Ask]] = []
    for turn in whole:
        limit = max(1, min(_LIMIT, (turn.reply.tokens or 0) // 2 if turn.reply else 0))
        ways = ways_to(session, turn) if turn.whole else (turn.ask,)
        asked += [(turn.item, replace(ask, max_tokens=limit, stream=i % 2 == 0)) for i, ask in enumerate(ways)]
    turns = [t for t in session.send(f"{OPTIONS}: limit", asked) if t.whole and t.reply and t.reply.tokens is not None]
    over = [t for t in turns if t.reply and (t.reply.tokens or 0) > t.ask.max_tokens]
    if not turns:
        return None
    what = f"{over[0].reply.tokens} tokens where {over[0].ask.max_tokens} were the limit" if over and over[0].reply else ""
    return f"{len(turns)} limits", what


def _stops(session: Session, whole: Sequence[Turn]) -> Found:
    """A word of the whole answer as stop word, streamed and not: the answer must end right before it."""
    words = {t.index: word for t in whole if (word := _inner_word(t.text))}
    asked = [t for t in whole if t.index in words for _ in range(2)]
    again = [
        (t.item, replace(t.ask, stream=i % 2 == 1, extra=t.ask.extra | {"stop": [words[t.index]]})) for i, t in enumerate(asked)
    ]
    turns = session.send(f"{OPTIONS}: stop", again)
    pairs = [(old, new) for old, new in zip(asked, turns, strict=True) if new.whole]
    if not pairs:
        return None
    bad = [(old, new) for old, new in pairs if _stopped_badly(session, old, new, words[old.index])]
    # A reply may end early at a close decision, once: what is broken is broken again.
    more = session.send(f"{OPTIONS}: stop again", [(new.item, new.ask) for _, new in bad], overtime=True) if bad else []
    still = [_stopped_badly(session, old, new, words[old.index]) for (old, _), new in zip(bad, more, strict=True)]
    return f"{len(pairs)} stop words", next(filter(None, still), "")


def _stopped_badly(session: Session, old: Turn, new: Turn, word: str) -> str:
    """How a reply with a stop word is not what was said up to that word; '' where that cannot be known."""
    if new.reply is None or not new.whole:
        return ""
    if word in new.text:
        return f"the stop word {word!r} stands in the reply"
    own = _up_to(_own_words(session, new), word)
    # Without its ids it is held against the answer before, from which it may have parted at a close decision.
    meant, said = (own or _up_to(old.text, word)).strip(), new.text.strip()
    if said == meant:
        finish = new.reply.finish
        return f"it ended at its stop word {word!r} and says {finish!r}" if finish not in ("", "stop") else ""
    if own or meant.startswith(said) or said.startswith(meant):
        how = "streamed" if new.ask.stream else "whole"
        return f"before the stop word {word!r} stands {short(meant[-24:])!r}, the {how} reply ends in {short(said[-24:])!r}"
    return ""


def _own_words(session: Session, turn: Turn) -> str:
    """What a reply's ids decode to; '' where they are not known, or where thinking stands among them."""
    if turn.reply is None or not turn.reply.ids or turn.reply.reasoning:
        return ""
    try:
        return session.client.detokenize(turn.reply.ids)
    except EngineError:
        return ""


def _up_to(text: str, word: str) -> str:
    """The text before the word; '' where it does not stand there."""
    return text[: max(0, text.find(word))]


def _inner_word(text: str) -> str:
    """The first word of the second half that stands nowhere before."""
    half = len(text) // 2
    found = (m.group() for m in _WORD.finditer(text, half))
    return next((word for word in found if text.find(word) >= half), "")


def _draws(bench: Bench, whole: Sequence[Turn]) -> Found:
    """Twice without a seed, twice with seeds of their own, all above T=0: no two may agree that hardly could."""
    session, policy = bench.session, bench.session.policy
    temperature = 0.7 if policy.temperature is None else policy.temperature
    if temperature == 0 or policy.top_k or not whole or not bench.ready():
        return None
    seeds = (None, None, session.rng.getrandbits(31), session.rng.getrandbits(31))
    top_p = 1.0 if policy.top_p is None else policy.top_p
    asked = [(t.item, replace(t.ask, seed=seed, temperature=temperature, top_p=top_p)) for t in whole for seed in seeds]
    turns = session.send(f"{OPTIONS}: draws", asked)
    groups = [[t, *turns[4 * i : 4 * i + 4]] for i, t in enumerate(whole)]
    looked = 0
    for group in groups:
        drawn = [t for t in group if t.whole]
        looked += max(0, len(drawn) - 1)
        for one, other in combinations(drawn, 2):
            if one.text == other.text and _hardly(bench, other, temperature, top_p):
                return (
                    f"{looked} draws",
                    f"{_how(one)} and {_how(other)} got the same {other.reply.tokens if other.reply else 0} tokens",
                )
    return (f"{looked} draws", "") if looked else None


def _nucleus(bench: Bench, whole: Sequence[Turn]) -> Found:
    """At T=1 within half of the probability mass: a token beyond it means that top_p is not looked at."""
    if not bench.ready() or bench.scorer is None:
        return None
    session, scorer = bench.session, bench.scorer
    asked = [
        (t.item, replace(t.ask, temperature=1.0, top_p=_TOP_P, seed=session.rng.getrandbits(31))) for t in (*whole, *whole)
    ]
    outside = looked = 0
    for turn in session.send(f"{OPTIONS}: top_p", asked):
        if turn.whole and turn.reply is not None:
            counts = outside_nucleus(_scored(scorer, turn), _TOP_P)
            outside, looked = outside + counts[0], looked + counts[1]
    if looked < _ENOUGH:
        return None
    wrong = outside > max(2, 0.05 * looked)
    return f"{looked} tokens at top_p {_TOP_P:g}", f"{outside} of {looked} tokens lie outside top_p {_TOP_P:g}" if wrong else ""


def _scores(bench: Bench, whole: Sequence[Turn]) -> Found:
    """Log-probabilities that come with a reply are those of its tokens, as prefill gives them."""
    if not bench.ready() or bench.scorer is None or bench.scorer.limit is None:
        return None
    asked = [(t.item, replace(ask, top_logprobs=2, stream=False)) for t in whole[:1] for ask in ways_to(bench.session, t)]
    differences = []
    for turn in bench.session.send(f"{OPTIONS}: scores", asked):
        if turn.whole and turn.reply is not None and turn.reply.logprobs:
            differences.append(largest_difference(turn.reply.logprobs, _scored(bench.scorer, turn)))
    known = [d for d in differences if d is not None]
    if not known:
        return None
    # Both sides round, as where the cache is held against a cold prefill.
    limit = 2 * max(bench.scorer.limit.nats, 0.01)
    what = f"its tokens' log-probabilities lie up to {max(known):.2g} nat from those of prefill (limit {limit:.2g})"
    return f"scores of {len(known)} replies", what if max(known) > limit else ""


def _scored(scorer: Scorer, turn: Turn) -> Sequence[Scored]:
    """A reply's tokens with their twenty best alternatives; () where that cannot be had."""
    assert turn.reply is not None
    try:
        return scorer.alternatives(turn.reply)
    except EngineError:
        return ()


def _hardly(bench: Bench, turn: Turn, temperature: float, top_p: float) -> bool:
    """Whether nobody else would have drawn this by chance."""
    assert bench.scorer is not None
    chance = repeat_chance(_scored(bench.scorer, turn), temperature, top_p)
    return chance is not None and chance < _NEVER


def _how(turn: Turn) -> str:
    if turn.ask.temperature == 0:
        return "a request at T=0"
    return "one without a seed" if turn.ask.seed is None else "one with a seed of its own"
