"""What replies say of themselves: how many tokens, why they ended, how long the prompt was. Pure.

Numbers that contradict each other are no matter of the model: an account that is wrong here is wrong on a bill.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

_UNSEEN_END = 1  # engines differ in whether the end token is counted, and listed


@dataclass(frozen=True, slots=True)
class Account:
    """One reply's own numbers; None where the engine does not say."""

    index: int
    prompt: Any  # hashable; equal for equal prompts
    limit: int
    finish: str
    tokens: int | None
    ids: int | None
    prompt_tokens: int | None
    cached_tokens: int | None


def contradictions(accounts: Sequence[Account], context: int | None, *, exact: bool) -> list[tuple[int, str]]:
    """(index, what is wrong) of replies whose numbers cannot be. `exact`: the end token is always counted and listed."""
    slack = 0 if exact else _UNSEEN_END
    found = [(a.index, what) for a in accounts if (what := _alone(a, context, slack))]
    return [*found, *_prompts(accounts)]


def _alone(a: Account, context: int | None, slack: int) -> str:
    tokens = a.ids if a.tokens is None else a.tokens
    if tokens is None:
        return ""
    if max(tokens, a.ids or 0) > a.limit:
        return f"{max(tokens, a.ids or 0)} tokens where {a.limit} were the limit"
    if a.ids is not None and abs(tokens - a.ids) > slack:
        return f"it counts {tokens} tokens and lists {a.ids}"
    full = context is not None and a.prompt_tokens is not None and a.prompt_tokens + tokens >= context - slack - 1
    if a.finish == "length" and tokens < a.limit - slack and not full and context is not None:
        return f"it says that its limit ended it, with {tokens} of {a.limit} tokens"
    if a.cached_tokens is not None and a.prompt_tokens is not None and a.cached_tokens > a.prompt_tokens:
        return f"{a.cached_tokens} tokens of a prompt of {a.prompt_tokens} came from the cache"
    return ""


def _prompts(accounts: Iterable[Account]) -> list[tuple[int, str]]:
    """Equal prompts have equal lengths, cached or not."""
    first: dict[Any, int] = {}
    found = []
    for a in accounts:
        if a.prompt_tokens is None:
            continue
        told = first.setdefault(a.prompt, a.prompt_tokens)
        if told != a.prompt_tokens:
            found.append((a.index, f"the same prompt has {told} tokens, and then {a.prompt_tokens}"))
    return found
