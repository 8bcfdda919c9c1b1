"""What goes into the engine and what comes out of it: requests, their sampling, and the updates of a round.

Plain frozen values; no text (token ids only), no queues, no device.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, TypeAlias

from ddtree_engine.config import SpecMode

TopLogprobs: TypeAlias = tuple[tuple[float, int], ...]
"""The most probable tokens of one position, best first: ((logprob, token id), ...)."""


class RequestError(Exception):
    """A request that can never run on this engine; `field` names what to change."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message


class Finish(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen. temperature 0 is greedy; otherwise the noise is keyed by (seed, position)."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = -1  # -1: no limit
    seed: int | None = None  # None: the engine draws one for the request
    max_new_tokens: int = 128  # 0: score the prompt only
    stop_token_ids: tuple[int, ...] = ()  # besides the model's own EOS ids
    ignore_eos: bool = False

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0 or self.top_k == 1


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt to continue.

    Log-probabilities are log_softmax of the model's own logits (temperature 1, before top-p and top-k).
    `logprob_start` >= 0 asks for those of the prompt from that position on, and these positions are then
    always computed afresh (never from the prefix cache); -1 asks for output tokens only, except when
    `max_new_tokens` is 0, where it means 0. `top_logprobs` alternatives are added at each asked position.
    """

    id: str
    prompt_ids: tuple[int, ...]
    sampling: Sampling
    mode: SpecMode
    want_logprobs: bool = False
    logprob_start: int = -1
    top_logprobs: int = 0


@dataclass(frozen=True, slots=True)
class InputLogprobs:
    """Scores of prompt[start:]. The first token of a prompt has none: its entry is None (and empty)."""

    start: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float | None, ...]
    top: tuple[TopLogprobs, ...]  # () unless top_logprobs > 0


class Update(NamedTuple):
    """What one round did for one request. The last update of a request is the one with `finish`.

    A named tuple, as `rounds.Step` and `rounds.Accepted`: a frozen dataclass takes four times as long to make, and every
    request gets one of each a round.
    """

    request_id: str
    token_ids: tuple[int, ...]  # newly committed; includes the matched stop token, which callers usually hide
    finish: Finish | None
    matched_token: int | None  # the EOS or stop id that ended it
    verify_passes: int  # target passes that committed tokens for this request so far (prefill not counted)
    cached_tokens: int  # prompt tokens taken from the prefix cache
    accepted_drafts: int = 0  # drafted tokens accepted so far
    proposed_drafts: int = 0  # drafted tokens verified so far (nodes of all trees)
    logprobs: tuple[float, ...] = ()  # one per token in token_ids when asked for
    top_logprobs: tuple[TopLogprobs, ...] = ()
    input_logprobs: InputLogprobs | None = None  # once, with the first update
    error: str | None = None  # why, when finish is ABORT and nobody cancelled


@dataclass(frozen=True, slots=True)
class Stats:
    """A snapshot for metrics and logs. Counters only grow; the others are of now."""

    running: int
    queued: int
    tokens_in_use: int
    capacity_tokens: int
    rounds: int
    verify_passes: int  # (request, round) pairs that committed tokens after prefill
    committed_tokens: int  # tokens committed by those passes
    accepted_drafts: int
    proposed_drafts: int
    spec_requests: int  # requests admitted with chain or tree
    prompt_tokens: int  # of admitted requests
    cached_tokens: int  # of those, taken from the prefix cache
    cuda_graph: bool  # whether the last round replayed one
    stage_seconds: dict[str, float]  # draft, tree_build, tree_compile, verify, commit; empty unless asked for
