"""The state of one running request between rounds: what is computed, what was said, when it ends. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from ddtree_engine.cache import Lease
from ddtree_engine.corruption import RequestView
from ddtree_engine.forest import Proposal
from ddtree_engine.requests import Finish, InputLogprobs, Request, TopLogprobs


@dataclass(frozen=True, slots=True)
class Ending:
    finish: Finish
    matched_token: int | None = None


@dataclass(slots=True)
class Sequence:
    """Tokens 0 .. computed - 1 have keys and values in the slab; while decoding, exactly the last token has none."""

    request: Request
    lease: Lease
    base: int  # first slot of the slab
    seed: int
    stop_ids: frozenset[int]
    computed: int = 0
    featured: int = 0  # leading tokens with drafter features
    drafted: int = 0  # leading tokens with drafter keys and values
    output_ids: list[int] = field(default_factory=list)
    proposal: Proposal | None = None  # the tree to verify next
    verify_passes: int = 0
    accepted_drafts: int = 0
    proposed_drafts: int = 0
    scores: list[float | None] = field(default_factory=list)  # of prompt[logprob_start:]
    top_scores: list[TopLogprobs] = field(default_factory=list)
    reported: bool = False  # whether the first update was sent
    view: RequestView = field(init=False)
    drafts: bool = field(init=False)

    def __post_init__(self) -> None:
        r = self.request
        self.drafts = r.mode.drafts
        self.computed = self.lease.reused
        self.featured = self.lease.features
        self.drafted = self.lease.drafted
        self.view = RequestView(r.id, r.mode, r.prompt_ids, self.output_ids)
        if self.score_start == 0:  # nothing precedes the first token
            self.scores.append(None)
            if r.top_logprobs:
                self.top_scores.append(())

    @property
    def prompt_length(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def left_to_prefill(self) -> int:
        return max(0, self.prompt_length - self.computed)

    @property
    def root(self) -> int:
        """The last committed token, whose successor the next pass chooses; of the prompt, when nothing was said yet."""
        return self.output_ids[-1] if self.output_ids else self.request.prompt_ids[-1]

    @property
    def left_to_say(self) -> int:
        return self.request.sampling.max_new_tokens - len(self.output_ids)

    @property
    def score_start(self) -> int | None:
        return score_start(self.request)

    def say(self, token_ids: list[int]) -> tuple[list[int], Ending | None]:
        """Commit tokens up to and including the first that ends the request."""
        for count, token in enumerate(token_ids, start=1):
            if token in self.stop_ids:
                ending = Ending(Finish.STOP, token)
            elif count == self.left_to_say:
                ending = Ending(Finish.LENGTH)
            else:
                continue
            self.output_ids.extend(token_ids[:count])
            return token_ids[:count], ending
        self.output_ids.extend(token_ids)
        return token_ids, None

    def input_logprobs(self) -> InputLogprobs | None:
        start = self.score_start
        if start is None:
            return None
        ids = self.request.prompt_ids[start:]
        return InputLogprobs(start, ids, tuple(self.scores), tuple(self.top_scores))


def score_start(request: Request) -> int | None:
    """First prompt position whose log-probability is asked for."""
    if not request.want_logprobs:
        return None
    if request.logprob_start >= 0:
        return request.logprob_start
    return 0 if request.sampling.max_new_tokens == 0 else None


def reuse_limit(request: Request) -> int:
    """How many leading prompt tokens may come from the prefix cache.

    The last prompt token is always computed (its logits choose the first token), and so is every row whose logits
    score a token. Pure scoring takes nothing: its result must not depend on what decoding left in the cache.
    """
    start = score_start(request)
    if request.sampling.max_new_tokens == 0:
        return 0
    limit = len(request.prompt_ids) - 1
    return limit if start is None else min(limit, max(0, start - 1))
