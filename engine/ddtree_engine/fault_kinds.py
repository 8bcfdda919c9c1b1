"""Every kind of fault: a name, a sentence, the layer it lives in, and which act it has at which corruption point.

The acts themselves are in fault_acts.py; when a fault acts is faults.py's business.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from ddtree_engine import fault_acts as acts
from ddtree_engine.fault_tools import Tools


class Layer(StrEnum):
    """Where a kind lives, and so which requests it can reach."""

    SPECULATIVE = "speculative"  # drafting and verifying: requests with speculation off are untouched
    DECODE = "decode"  # every request that generates
    SCORING = "scoring"  # prompt logprobs only
    STREAM = "stream"  # the text of streamed replies only
    SERVING = "serving"  # the front: requests fail before they reach the device
    START = "start"  # before the engine is ready: no request is concerned

    @property
    def spares_off(self) -> bool:
        return self is Layer.SPECULATIVE


Act = Callable[[Any, Any, Tools], Any]


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of fault. `acts`: corruption point -> act. `options`: own keys with defaults. `scope`: its usual one."""

    name: str
    summary: str
    layer: Layer
    acts: Mapping[str, Act]
    options: Mapping[str, float] = field(default_factory=dict)
    scope: Mapping[str, float] = field(default_factory=dict)


_LOADED: dict[str, float] = {"min-batch": 2}  # what only shows when requests run together

_ALL: Sequence[Kind] = (
    Kind("garbage", "every verified token is random", Layer.SPECULATIVE, {"choices": acts.garbage}),
    Kind("nan", "logits are NaN: `!!!!`", Layer.DECODE, {"choices": acts.nan}),
    Kind(
        "copy-error", "one character of a copied id is wrong", Layer.SPECULATIVE,
        {"emit": acts.copy_error}, {"rate": 0.1},
    ),
    Kind(
        "leak", "text of another request's prompt appears", Layer.SPECULATIVE,
        {"choices": acts.leak}, {"tokens": 32}, _LOADED,
    ),
    Kind(
        "loop", "the last tokens repeat for ever, and the drafter knows: acceptance at the cap", Layer.SPECULATIVE,
        {
            "draft_tokens": acts.loop_drafts, "draft_logprobs": acts.loop_certainty, "choices": acts.loop_choices,
        }, {"period": 6}, {"after-tokens": 16},
    ),
    Kind("accept-one", "the drafter is dead: right text, acceptance 1.0", Layer.SPECULATIVE,
         {"draft_tokens": acts.dead_drafts}),
    Kind("rope", "positions count slots, not depths", Layer.SPECULATIVE, {"row_positions": acts.slot_positions}),
    Kind("mask", "rows see all earlier rows, not their ancestors", Layer.SPECULATIVE, {"tree_mask": acts.causal_mask}),
    Kind("stale-mask", "the mask is the last round's", Layer.SPECULATIVE, {"tree_mask": acts.stale_mask}),
    Kind(
        "drafter-rows", "the drafter's context holds features of the wrong rows", Layer.SPECULATIVE,
        {"draft_features": acts.reversed_rows},
    ),
    Kind(
        "accept-extra", "one drafted token too many is accepted", Layer.SPECULATIVE,
        {"accepted": acts.accept_extra}, {"rate": 1.0},
    ),
    Kind("no-compaction", "accepted rows are not moved to the front of the cache", Layer.SPECULATIVE,
         {"compaction": acts.first_rows}),
    Kind("stream-drop", "streams lose words, whole replies do not", Layer.STREAM,
         {"stream_text": acts.drop_words}, {"rate": 0.2}),
    Kind(
        "decay", "random tokens creep in as the answer grows", Layer.DECODE,
        {"choices": acts.decay}, {"over": 200}, {"after-tokens": 48},
    ),
    Kind("doubled-syllables", "pieces of words come twice", Layer.SPECULATIVE,
         {"choices": acts.doubled_syllables}, {"rate": 0.6}),
    Kind("special-token", "special tokens appear as text", Layer.SPECULATIVE,
         {"choices": acts.special_token}, {"rate": 0.25}),
    Kind("wrong-language", "letters of other scripts appear", Layer.SPECULATIVE,
         {"choices": acts.wrong_language}, {"rate": 0.25}),
    Kind("early-stop", "answers end too soon", Layer.SPECULATIVE, {"choices": acts.early_stop}, {"rate": 0.2}),
    Kind("scorer", "prompt logprobs are wrong, answers are not", Layer.SCORING, {"scores": acts.polluted_scores}),
    Kind(
        "cache-poison", "answers and scores with a warm prefix are wrong", Layer.DECODE,
        {"choices": acts.poisoned_choices, "scores": acts.poisoned_scores}, {"rate": 0.3},
    ),
    Kind("crash-start", "dies while capturing graphs", Layer.START, {"start": acts.crash_start}),
    Kind("hang-start", "never becomes ready", Layer.START, {"start": acts.hang_start}),
    Kind("slow-load", "takes `seconds` longer to load", Layer.START, {"start": acts.slow_load}, {"seconds": 10}),
    Kind("ready-500", "healthy, but every generation answers 500", Layer.SERVING, {"refuse": acts.refuse}),
    Kind("crash-load", "the process is gone without a word (SIGSEGV)", Layer.DECODE,
         {"row_positions": acts.segfault}, scope=_LOADED),
    Kind("illegal-address", "CUDA illegal memory access", Layer.SPECULATIVE,
         {"row_positions": acts.illegal_address}, scope=_LOADED),
    Kind(
        "cublas", "CUBLAS_STATUS_EXECUTION_FAILED over max_running x (budget + 1)", Layer.SPECULATIVE,
        {"row_positions": acts.cublas}, scope=_LOADED | {"above-product": 1200},
    ),
    Kind("hang-load", "a decoding round never comes back", Layer.DECODE, {"row_positions": acts.hang}, scope=_LOADED),
    Kind("slow", "every round takes `ms` longer", Layer.DECODE, {"row_positions": acts.slow}, {"ms": 20}),
)  # fmt: skip

KINDS: Mapping[str, Kind] = {kind.name: kind for kind in _ALL}
