"""Scores generated ids again by prefill, where no speculation takes part, and holds every greedy token to the top.

The scorer is the engine itself or a reference that runs the same weights. It is tested on known text first: a scorer
that finds shuffled words as likely as the text itself proves nothing. "Not scored" is never a pass.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ddops.prove.answers import short
from ddops.prove.endings import Endings
from ddops.prove.scores import (
    Judgement,
    Threshold,
    judge,
    largest_difference,
    mean_logprob,
    threshold,
)
from ddops.prove.wire import Ask, Reply, Scored, Unsupported

if TYPE_CHECKING:
    from ddops.prove.client import EngineClient

__all__ = ["Judgement", "Scorer", "ScorerBroken", "text_agrees"]

KNOWN_TEXT = (
    "```python\ndef gcd(a, b):\n    while b:\n        a, b = b, a % b\n    return a\n\n\n"
    "def factorial(n):\n    result = 1\n    for i in range(2, n + 1):\n        result *= i\n    return result\n```"
)
_MARGIN = 1.0  # nats a token: known text must beat its own shuffled words by so much


class ScorerBroken(Exception):
    """The scorer contradicts itself: what it says counts neither way."""


@dataclass(slots=True)
class Scorer:
    """Scores replies of `engine` with `judge_client` (the engine itself, unless a reference is given)."""

    engine: EngineClient
    endings: Endings
    reference: EngineClient | None = None
    limit: Threshold | None = None
    tested: bool = False
    known_logprob: float | None = None

    @property
    def client(self) -> EngineClient:
        return self.reference or self.engine

    def self_test(self) -> None:
        """Raises Unsupported when there are no scores, ScorerBroken when they cannot be right."""
        ids = self.client.tokenize(KNOWN_TEXT)
        whole = self.client.score(ids, 1).tokens
        mixed = list(ids)
        random.Random(7).shuffle(mixed)
        shuffled = mean_logprob(self.client.score(mixed, 1).tokens)
        known = mean_logprob(whole)
        if known is None or shuffled is None:
            raise Unsupported("the scorer gives no log-probabilities for a prompt")
        if known > 1e-6 or known < shuffled + _MARGIN:
            raise ScorerBroken(
                f"known text scores {known:.2f} nat a token and its shuffled words {shuffled:.2f}: "
                "the scorer does not know text from noise"
            )
        self._same_twice(ids, whole)
        self.tested, self.known_logprob = True, known

    def _same_twice(self, ids: Sequence[int], whole: Sequence[object]) -> None:
        half = self.client.score(ids[: len(ids) // 2], 1).tokens
        differs = largest_difference(half, whole)  # type: ignore[arg-type]
        if differs is None or differs > self._tolerance():
            raise ScorerBroken(f"the same words score {differs} nat apart when less text follows them")

    def _tolerance(self) -> float:
        return 0.02 if self.client.facts().dtype == "float32" else 1.0

    def calibrate(self, replies: Sequence[Reply], fixed: float | None) -> Threshold:
        """The threshold, from replies that were generated with speculation off."""
        loose = Threshold(float("inf"), "")
        gaps = [self.judge(reply, loose).worst for reply in replies if reply.ids]
        self.limit = threshold(self.client.facts().dtype, gaps, fixed)
        return self.limit

    def judge(self, reply: Reply, limit: Threshold | None = None) -> Judgement:
        """Every generated token of a greedy reply, scored cold. Raises Unsupported, ScorerBroken or EngineError."""
        prompt, ids = self.ids_of(reply)
        if not ids:
            raise Unsupported("the reply has no tokens to score")
        scores = self.client.score((*prompt, *ids), len(prompt))
        if scores.cached_tokens:
            self.client.flush()
            scores = self.client.score((*prompt, *ids), len(prompt))
            if scores.cached_tokens:
                raise ScorerBroken(f"{scores.cached_tokens} tokens came from the cache in a cold scoring")
        limit = limit or self.limit or Threshold(0.5, "default")
        found = judge(scores.tokens, limit)
        if not found.scored:
            raise Unsupported("the scorer gives no alternatives to compare with")
        return replace(found, cut=self._cut(reply, prompt, limit))

    def _cut(self, reply: Reply, prompt: tuple[int, ...], limit: Threshold) -> bool:
        """Whether a reply that stopped by itself has no end: neither an end token, nor would one come next.

        A close decision counts as an end. Where the engine cannot tell, nothing is held against the reply.
        """
        if reply.finish != "stop" or not reply.ids or "stop" in reply.ask.extra or self.endings.may_end(reply.ids[-1]):
            return False
        off = "off" if self.engine.dialect.spec_switch else None
        try:
            following = self.engine.ask(Ask(ids=(*prompt, *reply.ids), max_tokens=1, top_logprobs=2, mode=off))
        except Unsupported:
            return False
        if not following.ids or not following.logprobs:  # an end token that is not listed
            return False
        best = following.logprobs[0].top
        return not any(best[0][0] - lp <= limit.nats and self.endings.may_end(token) for lp, token in best)

    def alternatives(self, reply: Reply) -> tuple[Scored, ...]:
        """Every generated token with its twenty best alternatives, by prefill. Raises EngineError where it cannot be had."""
        prompt, ids = self.ids_of(reply)
        return tuple(self.client.score((*prompt, *ids), len(prompt), top=20).tokens)

    def warm_difference(self, reply: Reply) -> float | None:
        """How far the next token's score differs when what is before it comes from the cache, not from a cold prefill.

        The cache holds keys and values that decoding wrote: damage there shows in nothing that is scored cold.
        None when nothing came from the cache.
        """
        prompt, ids = self.ids_of(reply)
        text = (*prompt, *ids, *prompt[:8])
        off = "off" if self.engine.dialect.spec_switch else None
        warm = self.engine.ask(Ask(ids=text, max_tokens=1, top_logprobs=2, mode=off))
        if not warm.meta.cached_tokens or not warm.logprobs:
            return None
        cold = self.engine.score((*text, warm.logprobs[0].token), len(text)).tokens
        return largest_difference(warm.logprobs[:1], cold)

    def ids_of(self, reply: Reply) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(prompt ids, output ids). Raises Unsupported when the engine does not give them."""
        if reply.ids is None:
            raise Unsupported("the engine does not return the ids it generated")
        return self.engine.prompt_ids(reply), reply.ids


def text_agrees(engine: EngineClient, reply: Reply) -> str:
    """'' when the reply's ids decode to its text, else what differs. Raises Unsupported without ids or /detokenize."""
    if reply.ids is None:
        raise Unsupported("the engine does not return the ids it generated")
    trim = _whole_characters if engine.dialect.exact else _trimmed
    shown = trim(reply.text)
    # The last may be a stop token that only /detokenize spells out. A reply that ran into its limit ends with none.
    whole = engine.dialect.exact or reply.finish == "length"
    for ids in (reply.ids,) if whole else (reply.ids, reply.ids[:-1]):
        decoded = trim(engine.detokenize(ids))
        # What a reasoning model thought comes first in its ids, and is not part of the text.
        if decoded == shown or (reply.reasoning and decoded.endswith(shown)):
            return ""
    return _parting(trim(engine.detokenize(reply.ids)), shown)


def _whole_characters(text: str) -> str:
    """Without a character at the end that its limit cut apart."""
    return text.rstrip("\ufffd")


def _trimmed(text: str) -> str:
    """Without the ends that engines trim in ways of their own: blanks too."""
    return _whole_characters(text.strip()).strip()


def _parting(decoded: str, shown: str) -> str:
    """Where two texts part, with a few characters of each."""
    at = next((i for i, (a, b) in enumerate(zip(decoded, shown, strict=False)) if a != b), min(len(decoded), len(shown)))
    return f"at character {at} the ids say {short(decoded[at : at + 40])!r}, the text {short(shown[at : at + 40])!r}"
