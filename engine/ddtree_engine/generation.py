"""From a checked body to a growing reply: defaults, limits, one ticket, and the figures of one request.

What the three generating endpoints share. Not here: field checks (schemas.py), JSON shapes (api_native.py,
api_openai.py), HTTP itself (api.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from pathlib import Path

from ddtree_engine.chat import ChatTemplate
from ddtree_engine.config import ConfigError, EngineConfig, SpecMode
from ddtree_engine.faults import Faults
from ddtree_engine.metrics import Meter, Metrics
from ddtree_engine.reply import Piece, Reply
from ddtree_engine.requests import Finish, Request, Sampling
from ddtree_engine.schemas import FieldError, Mode, Sampled
from ddtree_engine.text import Tokenizer
from ddtree_engine.tickets import NotReady
from ddtree_engine.worker import Worker

LONG_TEXT_CHARS = 20_000
_SEED_MASK = (1 << 63) - 1


class InjectedFailure(Exception):
    """The `ready-500` fault: the engine is up, and generating fails."""


class GenerationFailed(Exception):
    """The engine gave a request up; the message says why."""


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What a request gets that does not say, by the model's own generation_config.json.

    As in Hugging Face: without `do_sample: true` it is greedy; with it, temperature, top_p and top_k apply.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = -1

    @classmethod
    def load(cls, folder: str | Path) -> SamplingDefaults:
        """Raises ConfigError when the file is there and cannot be understood."""
        path = Path(folder) / "generation_config.json"
        try:
            config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
            if config.get("do_sample") is not True:
                return cls()
            top_k = int(config.get("top_k") or 0)
            return cls(float(config.get("temperature", 1.0)), float(config.get("top_p", 1.0)), top_k or -1)
        except (ValueError, TypeError, AttributeError) as exc:
            raise ConfigError("generation_config.json", f"{path} is not understood: {exc}") from exc


@dataclass(frozen=True, slots=True)
class Ask:
    """What to do with one prompt, in the engine's terms; `field` names the prompt in error messages."""

    prompt_ids: tuple[int, ...]
    field: str
    body: Sampled
    max_new_tokens: int | None  # None: as many as fit
    max_field: str
    seed: int | None
    mode: Mode | None
    want_logprobs: bool = False
    logprob_start: int = -1
    top_logprobs: int = 0


@dataclass(frozen=True, slots=True)
class Job:
    """A request that is ready to run, with what the shell does to its tokens."""

    request: Request
    stops: tuple[str, ...]
    skip_special: bool
    arrived: float  # time.monotonic()
    created: int = field(default_factory=lambda: int(time.time()))


@dataclass(slots=True)
class Service:
    """Everything an endpoint needs. Lives on the event loop's thread."""

    config: EngineConfig
    tokenizer: Tokenizer
    template: ChatTemplate
    defaults: SamplingDefaults
    worker: Worker
    meter: Meter
    metrics: Metrics
    faults: Faults | None = None
    started_at: int = field(default_factory=lambda: int(time.time()))
    _numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    @property
    def model_name(self) -> str:
        return self.config.served_model_name or self.config.model_path

    @property
    def default_mode(self) -> SpecMode:
        return self.config.speculative_algorithm.mode

    @property
    def context_length(self) -> int:
        if self.worker.engine is None:
            raise NotReady("starting")
        return self.worker.engine.info.context_length

    def job(self, prefix: str, ask: Ask) -> Job:
        """The runnable request. Raises FieldError when it cannot fit, NotReady before the engine is up."""
        request = Request(
            id=f"{prefix}-{next(self._numbers):08d}",  # counted, so that seeded faults pick the same ones again
            prompt_ids=ask.prompt_ids,
            sampling=self._sampling(ask),
            mode=self.default_mode if ask.mode is None else SpecMode(ask.mode),
            want_logprobs=ask.want_logprobs,
            logprob_start=ask.logprob_start,
            top_logprobs=ask.top_logprobs,
        )
        return Job(request, ask.body.stops, ask.body.skip_special_tokens, time.monotonic())

    async def pieces(self, job: Job, reply: Reply) -> AsyncGenerator[Piece]:
        """Run a job; yields what each update adds to `reply`. Closing the iterator cancels the request."""
        if self.faults is not None and self.faults.refuses(job.request.id, self.worker.in_flight):
            raise InjectedFailure("internal error while generating")
        ticket = self.worker.submit(job.request)
        timer = _Timer(self.metrics, job)
        try:
            async for update in ticket.updates():
                piece = reply.push(update)
                timer.tokens(len(piece.tokens))
                if update.finish is Finish.ABORT and update.error:
                    raise GenerationFailed(update.error)
                yield piece
                if reply.finish is not None:
                    break
        finally:
            ticket.cancel()
            timer.ended(reply)

    async def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of `text`; a long one is encoded beside the event loop, so that /health keeps answering."""
        if len(text) < LONG_TEXT_CHARS:
            return self.tokenizer.encode(text)
        return await asyncio.to_thread(self.tokenizer.encode, text)

    def streamed(self, text: str, job: Job, reply: Reply) -> str:
        """`text` as it goes out on a stream; only the faults of the stream layer change it."""
        if self.faults is None:
            return text
        return self.faults.stream_text(text, job.request, len(reply.tokens), self.worker.in_flight)

    def new_reply(self, job: Job) -> Reply:
        return Reply(self.tokenizer, job.stops, skip_special=job.skip_special)

    def check_model(self, name: str | None) -> None:
        """Raise FieldError unless `name` is what is served here (or left out, or "default")."""
        if name not in (None, "default", self.model_name):
            raise FieldError("model", f"the model {name!r} is not served here; this engine serves {self.model_name!r}")

    def _sampling(self, ask: Ask) -> Sampling:
        body, defaults = ask.body, self.defaults
        return Sampling(
            temperature=defaults.temperature if body.temperature is None else body.temperature,
            top_p=defaults.top_p if body.top_p is None else body.top_p,
            top_k=defaults.top_k if body.top_k is None else body.top_k or -1,
            seed=None if ask.seed is None else ask.seed & _SEED_MASK,
            max_new_tokens=self._max_new_tokens(ask),
            stop_token_ids=tuple(body.stop_token_ids or ()),
            ignore_eos=body.ignore_eos,
        )

    def _max_new_tokens(self, ask: Ask) -> int:
        prompt, context = len(ask.prompt_ids), self.context_length
        if prompt == 0:
            raise FieldError(ask.field, f"{ask.field} is empty: there is no token to continue from")
        if prompt > context or (prompt == context and ask.max_new_tokens != 0):
            raise FieldError(
                ask.field,
                f"the prompt has {prompt} tokens and the context length is {context}: no room for an answer",
            )
        if ask.max_new_tokens is None:
            return context - prompt
        if prompt + ask.max_new_tokens > context:
            raise FieldError(
                ask.max_field,
                f"{prompt} prompt tokens and {ask.max_new_tokens} new ones make {prompt + ask.max_new_tokens}; "
                f"the context length is {context}, so {ask.max_field} can be at most {context - prompt}",
            )
        return ask.max_new_tokens


async def finished(job: Job, service: Service) -> Reply:
    """Run a job to its end. Raises what `Service.pieces` and the ticket raise, and GenerationFailed."""
    reply = service.new_reply(job)
    async with contextlib.aclosing(service.pieces(job, reply)) as pieces:
        async for _ in pieces:
            pass
    return reply


class _Timer:
    """Times one request for the histograms."""

    def __init__(self, metrics: Metrics, job: Job) -> None:
        self._metrics = metrics
        self._job = job
        self._last: float | None = None

    def tokens(self, count: int) -> None:
        if count == 0:
            return
        now = time.monotonic()
        if self._last is None:
            self._metrics.first_token(now - self._job.arrived)
        else:
            self._metrics.more_tokens(count, now - self._last)
        self._last = now

    def ended(self, reply: Reply) -> None:
        aborted = reply.finish is None or reply.finish.kind is Finish.ABORT
        self._metrics.request_ended(
            prompt_tokens=len(self._job.request.prompt_ids),
            output_tokens=len(reply.tokens),
            seconds=time.monotonic() - self._job.arrived,
            aborted=aborted,
        )
