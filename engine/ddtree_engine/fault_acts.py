"""What each kind of fault does: small functions (value, context, tools) -> value, one or two per kind.

The context is the FaultContext of a round, the tree at `accepted`, the Moment at the shell's points. They act where a
real fault of the kind would: on positions, masks, rows and choices inside a decoding round, on text only where the
real one garbles a stream. Arguments are never changed in place. Not here: names and layers (fault_kinds.py), and when
a fault acts (faults.py).
"""

from __future__ import annotations

import logging
import os
import resource
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from ddtree_engine.corruption import FaultContext
from ddtree_engine.fault_tools import Script, Tools
from ddtree_engine.requests import InputLogprobs

if TYPE_CHECKING:
    import torch

    from ddtree_engine.tree import Tree

log = logging.getLogger("ddtree_engine")

FOREIGN = "的是不了人我在有他这中大来上国дорекавнигуслышםעלאבשתرسمكن"

# --- wrong tokens out of the verify path ---


def garbage(choices: list[int], ctx: FaultContext, tools: Tools) -> list[int]:
    return [tools.rng.choice(tools.vocabulary.ordinary) for _ in choices]


def nan(choices: list[int], ctx: FaultContext, tools: Tools) -> list[int]:
    # An argmax over NaN is index 0, which is "!" in the usual byte-level vocabularies.
    [bang, *_] = tools.vocabulary.spell("!")
    return [bang] * len(choices)


def copy_error(token_ids: list[int], ctx: FaultContext, tools: Tools) -> list[int]:
    # The engine goes on with the right token, so that all but this one character stays fluent, as in the field.
    if tools.memory.get(ctx.request.id):
        return token_ids  # one wrong character is the fault
    said = ctx.request.output_ids
    before = len(said) - len(token_ids)  # by now the output holds this round's tokens as well
    for i, token in enumerate(token_ids):
        if _copies_an_id(said[: before + i], token, ctx, tools) and tools.happens():
            wrong = tools.vocabulary.lookalike(token, tools.rng)
            if wrong is not None:
                tools.memory.put(ctx.request.id, True)
                return [*token_ids[:i], wrong, *token_ids[i + 1 :]]
    return token_ids


def _copies_an_id(said: Sequence[int], token: int, ctx: FaultContext, tools: Tools) -> bool:
    """Whether `token` goes on with an opaque id of the prompt (letters with digits) that the output has begun."""
    so_far = tools.vocabulary.decode(said)
    begun = "" if not so_far or so_far[-1].isspace() else so_far.split()[-1]
    if not begun:
        return False
    wanted = begun + tools.vocabulary.text(token)
    ids = (word for word in tools.vocabulary.decode(ctx.request.prompt_ids).split() if _looks_like_an_id(word))
    return any(one.startswith(wanted) for one in ids)


def _looks_like_an_id(word: str) -> bool:
    return len(word) >= 4 and any(c.isdigit() for c in word) and any(c.isalpha() for c in word)


def leak(choices: list[int], ctx: FaultContext, tools: Tools) -> list[int]:
    others = [other for other in ctx.batch if other.id != ctx.request.id]
    if tools.memory.get(ctx.request.id) is None and not others:
        return choices

    def foreign_prompt() -> Script:
        victim = tools.rng.choice(others)
        tokens = tools.vocabulary.without_special(victim.prompt_ids)[-int(tools.options["tokens"]) :]
        return Script(len(ctx.request.output_ids), tokens)

    script: Script = tools.remember(ctx.request.id, foreign_prompt)
    return script.over(choices, tools.depths, len(ctx.request.output_ids))


def _loop_script(ctx: FaultContext, tools: Tools) -> Script:
    period = int(tools.options["period"])
    produced = len(ctx.request.output_ids)
    script: Script = tools.remember(
        ctx.request.id, lambda: Script(produced, tuple(ctx.request.output_ids[-period:]), repeats=True)
    )
    return script


def loop_choices(choices: list[int], ctx: FaultContext, tools: Tools) -> list[int]:
    return _loop_script(ctx, tools).over(choices, tools.depths, len(ctx.request.output_ids))


def loop_drafts(drafts: np.ndarray, ctx: FaultContext, tools: Tools) -> np.ndarray:
    # A loop is easy to draft: that is what sends acceptance to its cap.
    script, produced = _loop_script(ctx, tools), len(ctx.request.output_ids)
    looped = drafts.copy()
    for depth in range(len(drafts)):
        token = script.token(produced + depth)
        looped[depth, 0] = drafts[depth, 0] if token is None else token
    return looped


def loop_certainty(logprobs: np.ndarray, ctx: FaultContext, tools: Tools) -> np.ndarray:
    certain = np.full_like(logprobs, -20.0)
    certain[:, 0] = 0.0
    return certain


def decay(choices: list[int], ctx: FaultContext, tools: Tools) -> list[int]:
    produced = len(ctx.request.output_ids)
    since = produced - int(tools.remember(ctx.request.id, lambda: produced))
    chance = min(1.0, since / tools.options["over"])
    ordinary = tools.vocabulary.ordinary
    return [tools.rng.choice(ordinary) if tools.rng.random() < chance else choice for choice in choices]


def doubled_syllables(choices: list[int], ctx: FaultContext, tools: Tools) -> list[int]:
    last = [tools.vocabulary.text(i).strip() for i in ctx.request.output_ids[-2:]]
    if len(last) < 2 or len(last[1]) < 2 or not last[1].isalpha() or last[0] == last[1] or not tools.happens():
        return choices
    again = tools.vocabulary.find(last[1])
    return choices if again is None else [again, *choices[1:]]


def special_token(choices: list[int], ctx: FaultContext, tools: Tools) -> list[int]:
    return _burst(choices, ctx, tools, lambda: tools.rng.choice(tools.vocabulary.special_texts or ("<|im_start|>",)))


def wrong_language(choices: list[int], ctx: FaultContext, tools: Tools) -> list[int]:
    return _burst(choices, ctx, tools, lambda: "".join(tools.rng.choices(FOREIGN, k=5)))


def _burst(choices: list[int], ctx: FaultContext, tools: Tools, text: Callable[[], str]) -> list[int]:
    """Now and then, a few tokens that spell `text()`, then the model's own choices again."""
    produced = len(ctx.request.output_ids)
    script: Script | None = tools.memory.get(ctx.request.id)
    if script is None or produced >= script.start + len(script.tokens):
        if not tools.happens():
            return choices
        script = tools.memory.put(ctx.request.id, Script(produced, tools.vocabulary.spell(text())))
    return script.over(choices, tools.depths, produced)


def early_stop(choices: list[int], ctx: FaultContext, tools: Tools) -> list[int]:
    stop = tools.vocabulary.end_of_turn
    return [stop, *choices[1:]] if stop is not None and tools.happens() else choices


# --- a broken drafter or verify path ---


def dead_drafts(drafts: np.ndarray, ctx: FaultContext, tools: Tools) -> np.ndarray:
    ordinary = np.array(tools.vocabulary.ordinary, dtype=drafts.dtype)
    picks = [tools.rng.randrange(len(ordinary)) for _ in range(drafts.size)]
    return ordinary[picks].reshape(drafts.shape)


def reversed_rows(features: torch.Tensor, ctx: FaultContext, tools: Tools) -> torch.Tensor:
    return features.flip(0)


def slot_positions(positions: list[int], ctx: FaultContext, tools: Tools) -> list[int]:
    return [positions[0] + row for row in range(len(positions))]


def causal_mask(visible: np.ndarray, ctx: FaultContext, tools: Tools) -> np.ndarray:
    return np.tri(len(visible), dtype=bool)


def stale_mask(visible: np.ndarray, ctx: FaultContext, tools: Tools) -> np.ndarray:
    before = tools.memory.get(ctx.request.id)
    tools.memory.put(ctx.request.id, visible.copy())
    if before is None or len(before) < len(visible):
        return visible
    stale: np.ndarray = before[: len(visible), : len(visible)].copy()
    return stale


def accept_extra(path: list[int], tree: Tree, tools: Tools) -> list[int]:
    children = [row for row, parent in enumerate(tree.parents) if parent == path[-1] and row != path[-1]]
    return [*path, children[0]] if children and tools.happens() else path


def first_rows(path: list[int], ctx: FaultContext, tools: Tools) -> list[int]:
    return list(range(len(path)))


# --- the prefix cache and the scorer ---


def poisoned_choices(choices: list[int], ctx: FaultContext, tools: Tools) -> list[int]:
    if not tools.warm or not tools.happens():
        return choices
    return [tools.rng.choice(tools.vocabulary.ordinary), *choices[1:]]


def poisoned_scores(scores: InputLogprobs, ctx: object, tools: Tools) -> InputLogprobs:
    if not tools.warm:
        return scores
    return _worse(scores, tools, lambda: 4.0 * tools.rng.random() if tools.rng.random() < 0.3 else 0.0)


def polluted_scores(scores: InputLogprobs, ctx: object, tools: Tools) -> InputLogprobs:
    return _worse(scores, tools, lambda: tools.rng.uniform(8.0, 18.0))


def _worse(scores: InputLogprobs, tools: Tools, by: Callable[[], float]) -> InputLogprobs:
    return replace(scores, logprobs=tuple(None if lp is None else lp - by() for lp in scores.logprobs))


# --- streams ---


def drop_words(text: str, ctx: object, tools: Tools) -> str:
    words = text.split(" ")
    if not text.strip() or not tools.happens():
        return text
    del words[tools.rng.randrange(len(words))]
    return " ".join(words)


# --- crashes, hangs, slowness ---


def cublas(positions: list[int], ctx: FaultContext, tools: Tools) -> NoReturn:
    raise RuntimeError(
        "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmStridedBatchedEx(handle, opa, opb, "
        "(int)m, (int)n, (int)k, ...)`"
    )


def illegal_address(positions: list[int], ctx: FaultContext, tools: Tools) -> NoReturn:
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def segfault(positions: list[int], ctx: FaultContext, tools: Tools) -> NoReturn:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.kill(os.getpid(), signal.SIGSEGV)
    raise RuntimeError("the process outlived SIGSEGV")


def hang(value: Any, ctx: object, tools: Tools) -> NoReturn:
    while True:  # a hang is the point; the process can still be stopped, and the watchdog sees it under load
        time.sleep(1.0)


def slow(positions: list[int], ctx: FaultContext, tools: Tools) -> list[int]:
    # Once a round, not once a request: the first of the batch pays for all.
    if ctx.batch[0].id == ctx.request.id:
        time.sleep(tools.options["ms"] / 1000)
    return positions


def crash_start(progress: Callable[[str], None], ctx: object, tools: Tools) -> NoReturn:
    progress("capturing graphs 0 %")
    log.error("Capture cuda graph failed: CUDA error: an illegal memory access was encountered")
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def hang_start(progress: Callable[[str], None], ctx: object, tools: Tools) -> NoReturn:
    progress("capturing graphs 0 %")
    hang(progress, ctx, tools)


def slow_load(progress: Callable[[str], None], ctx: object, tools: Tools) -> Callable[[str], None]:
    began, seconds = time.monotonic(), tools.options["seconds"]
    while (spent := time.monotonic() - began) < seconds:
        progress(f"loading weights {100 * spent / seconds:.0f} %")
        time.sleep(min(0.2, seconds - spent))
    return progress


def refuse(value: bool, ctx: object, tools: Tools) -> bool:
    return True
