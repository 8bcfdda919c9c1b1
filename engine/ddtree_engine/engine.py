"""The engine's front: load the models once, then submit requests and step rounds from one thread.

Not here: HTTP, text, queues between threads (`worker.py`), and the round itself (`decode.py`).
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ddtree_engine import scheduler, starting
from ddtree_engine.budget import Policy
from ddtree_engine.cache import Lease, Resident, Slabs
from ddtree_engine.config import EngineConfig, SpecMode
from ddtree_engine.corruption import CorruptionPoints
from ddtree_engine.decode import Chunk, Decoder, DecodeSettings
from ddtree_engine.loading import Checked, Loaded, check, device_facts, load
from ddtree_engine.requests import Finish, Request, RequestError, Sampling, Stats, Update
from ddtree_engine.runner import Runner
from ddtree_engine.sampling import request_seed
from ddtree_engine.sequence import Sequence as Running
from ddtree_engine.sequence import reuse_limit

log = logging.getLogger("ddtree_engine")

MAX_TOP_LOGPROBS = 64


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What was loaded and where it runs: the facts that /server_info reports."""

    target_digest: str  # "sha256:..." over the target's safetensors files
    drafter_digest: str | None
    device_name: str
    device_arch: str  # "sm_90" on CUDA, the machine's architecture on CPU
    driver: str | None
    dtype: str
    kv_capacity_tokens: int
    context_length: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    block_size: int | None  # tokens drafted a round + 1; None without a drafter
    max_rows: int  # most rows that one verify pass can have


@dataclass(frozen=True, slots=True)
class Generated:
    """A whole answer, as `Engine.generate` returns it."""

    token_ids: tuple[int, ...]
    finish: Finish
    verify_passes: int
    cached_tokens: int
    updates: tuple[Update, ...]


class Engine:
    """One target, at most one drafter, one device. Not thread safe: one thread calls everything except `check`."""

    def __init__(
        self, checked: Checked, loaded: Loaded, runner: Runner, policy: Policy, faults: CorruptionPoints | None
    ) -> None:
        self.config = checked.config  # every None resolved
        self.info = _info(checked, loaded)
        self._limits = scheduler.Limits(self.config.max_running_requests, self.config.chunked_prefill_size)
        self._cache = loaded.cache
        self._slabs = Slabs(self.config.max_running_requests, reuse=not self.config.disable_radix_cache)
        sizes = checked.sizes
        settings = DecodeSettings(
            budget=sizes.budget,
            topk_cap=min(self.config.speculative_ddtree_topk_cap, self.info.vocab_size),
            block_size=sizes.block,
            max_running=self.config.max_running_requests,
        )
        self._decoder = Decoder(runner, policy, settings, faults)
        self._waiting: deque[Request] = deque()
        self._running: dict[str, Running] = {}  # in order of admission
        self._cancelled: set[str] = set()
        self._flushed: set[str] = set()  # running ones that were there when the cache was flushed
        self._served = 0
        self._spec_requests = self._prompt_tokens = self._cached_tokens = 0

    @classmethod
    def load(
        cls,
        config: EngineConfig,
        *,
        progress: Callable[[str, float], None] = lambda stage, share: None,
        faults: CorruptionPoints | None = None,
    ) -> Engine:
        """Load and check the checkpoints, allocate the cache, warm up. Raises ConfigError.

        `progress(stage, share)` is called with "loading weights", "allocating cache", "capturing graphs" (CUDA),
        "measuring costs" (budget `auto`) and "warming up", and a share from 0 to 1 of that stage.
        """
        checked = check(config)
        torch.set_num_threads(checked.config.num_threads or 1)
        with torch.inference_mode():
            loaded = load(checked, progress)
            runner = starting.runner(checked, loaded, progress, faults)
            policy = starting.policy(checked, runner, progress)
        engine = cls(checked, loaded, runner, policy, faults)
        engine._rehearse(progress)
        return engine

    # Requests -----------------------------------------------------------------------------------------------------

    def check(self, request: Request) -> None:
        """Raise RequestError when the request can never run here (thread safe: reads only constants)."""
        _check_prompt(request, self.info)
        _check_sampling(request.sampling, self.info)
        if request.mode.drafts and self.info.block_size is None:
            raise RequestError("speculative", f"{request.mode} needs a drafter, and this server was started without one")
        if not -1 <= request.logprob_start <= len(request.prompt_ids):
            raise RequestError("logprob_start_len", f"{request.logprob_start} lies outside the prompt")
        if not 0 <= request.top_logprobs <= MAX_TOP_LOGPROBS:
            raise RequestError("top_logprobs", f"{request.top_logprobs} is not within 0..{MAX_TOP_LOGPROBS}")

    def submit(self, request: Request) -> None:
        """Queue a request. Raises RequestError as `check` does, or when the id is in use."""
        self.check(request)
        if request.id in self._running or any(w.id == request.id for w in self._waiting):
            raise RequestError("rid", f"{request.id!r} is already in use")
        self._waiting.append(request)

    def cancel(self, request_id: str) -> None:
        """Stop a request at the next step, which reports it with Finish.ABORT. Unknown ids are ignored."""
        if request_id in self._running or any(w.id == request_id for w in self._waiting):
            self._cancelled.add(request_id)

    @property
    def busy(self) -> bool:
        """Whether a step would do something."""
        return bool(self._waiting or self._running)

    # Rounds -------------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def step(self) -> list[Update]:
        """One round over the batch: cancel, admit, then prefill chunks and draft trees in one pass, accept, commit."""
        updates = self._drop_cancelled()
        self._admit()
        plan = scheduler.plan([scheduler.Running(i, s.left_to_prefill) for i, s in self._running.items()], self._limits)
        if plan.empty:
            return updates
        chunks = [Chunk(self._running[c.id], c.tokens) for c in plan.chunks]
        news = self._decoder.round(chunks, [self._running[i] for i in plan.decode])
        for chunk in chunks:
            self._hold(chunk.sequence)
        for update in news:
            if update.finish:
                self._release(self._running.pop(update.request_id))
        return updates + news

    def _drop_cancelled(self) -> list[Update]:
        dropped = []
        for request_id in sorted(self._cancelled):
            if sequence := self._running.pop(request_id, None):
                self._release(sequence)
                dropped.append(_aborted(request_id, sequence))
            elif any(w.id == request_id for w in self._waiting):
                self._waiting = deque(w for w in self._waiting if w.id != request_id)
                dropped.append(_aborted(request_id, None))
        self._cancelled.clear()
        return dropped

    def _admit(self) -> None:
        waiting = [scheduler.Waiting(w.id) for w in self._waiting]
        for _ in scheduler.admit(waiting, len(self._running), self._limits):
            request = self._waiting.popleft()
            lease = self._slabs.acquire(request.prompt_ids, reuse_limit(request), features=request.mode.drafts)
            self._cache.copy_prefix(lease)
            self._running[request.id] = self._sequence(request, lease)
            self._spec_requests += request.mode.drafts
            self._prompt_tokens += len(request.prompt_ids)
            self._cached_tokens += lease.reused

    def _sequence(self, request: Request, lease: Lease) -> Running:
        s = request.sampling
        stops = s.stop_token_ids + (() if s.ignore_eos else self.info.eos_token_ids)
        seed = s.seed if s.seed is not None else request_seed(self.config.random_seed or 0, self._served)
        self._served += 1
        return Running(request, lease, self._cache.shape.base(lease.slab), seed, frozenset(stops))

    def _hold(self, s: Running) -> None:
        """Let others reuse what this slab holds."""
        if s.request.id in self._flushed:
            return
        tokens = (*s.request.prompt_ids, *s.output_ids)[: s.computed]
        resident = Resident(np.array(tokens, dtype=np.int64), min(s.featured, s.computed), s.drafted)
        self._slabs.hold(s.lease.slab, resident)

    def _release(self, s: Running) -> None:
        self._hold(s)
        self._flushed.discard(s.request.id)
        self._slabs.release(s.lease.slab)

    def flush(self) -> None:
        """Forget every cached prefix. Running requests go on, and nothing that they compute is reused."""
        self._slabs.forget()
        self._flushed = set(self._running)

    # Facts --------------------------------------------------------------------------------------------------------

    def measure_stages(self, on: bool) -> None:
        """Switch stage timers on or off (on CUDA they synchronise)."""
        self._decoder.timed = on

    def stats(self) -> Stats:
        c = self._decoder.counters
        return Stats(
            running=len(self._running),
            queued=len(self._waiting),
            tokens_in_use=sum(s.computed for s in self._running.values()),
            capacity_tokens=self.info.kv_capacity_tokens,
            rounds=c.rounds,
            verify_passes=c.verify_passes,
            committed_tokens=c.committed_tokens,
            accepted_drafts=c.accepted_drafts,
            proposed_drafts=c.proposed_drafts,
            spec_requests=self._spec_requests,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            cuda_graph=self._decoder.runner.used_graph,
            stage_seconds=dict(c.stage_seconds),
        )

    # Convenience --------------------------------------------------------------------------------------------------

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling, mode: SpecMode) -> list[Generated]:
        """Answer several prompts as one batch (tests and benchmarks)."""
        ids = [f"generate-{self._served}-{i}" for i in range(len(prompts))]
        for request_id, prompt in zip(ids, prompts, strict=True):
            self.submit(Request(request_id, tuple(prompt), sampling, mode))
        return [collect(updates) for updates in self.drain(ids).values()]

    def drain(self, ids: Sequence[str]) -> dict[str, list[Update]]:
        """Step until these requests have ended; their updates by id."""
        seen: dict[str, list[Update]] = {request_id: [] for request_id in ids}
        left = set(ids)
        while left and self.busy:
            for update in self.step():
                if update.request_id in seen:
                    seen[update.request_id].append(update)
                    if update.finish:
                        left.discard(update.request_id)
        return seen

    # Before the first request -------------------------------------------------------------------------------------

    @property
    def policy(self) -> Policy:
        """What decides on the next rounds."""
        return self._decoder.policy

    @policy.setter
    def policy(self, policy: Policy) -> None:
        self._decoder.policy = policy

    @property
    def tree_budget(self) -> int:
        """Nodes of the largest tree that there is room for."""
        return self._decoder.settings.budget

    @property
    def prefilling(self) -> bool:
        """Whether a prompt is still to be read."""
        return bool(self._waiting) or any(s.left_to_prefill for s in self._running.values())

    def _rehearse(self, progress: Callable[[str, float], None]) -> None:
        """Short answers and trial rounds, so that the first request does not pay for first calls; they leave no trace."""
        faults, self._decoder.faults = self._decoder.faults, None
        starting.warm_up(self, progress)
        self._decoder.faults = faults
        self._decoder.counters = type(self._decoder.counters)()
        self.policy = self.policy.anew()
        self._served = self._spec_requests = self._prompt_tokens = self._cached_tokens = 0
        self.flush()


def collect(updates: Sequence[Update]) -> Generated:
    """Join the updates of one finished request."""
    last = updates[-1]
    assert last.finish is not None
    tokens = tuple(token for update in updates for token in update.token_ids)
    return Generated(tokens, last.finish, last.verify_passes, last.cached_tokens, tuple(updates))


def _aborted(request_id: str, s: Running | None) -> Update:
    if s is None:
        return Update(request_id, (), Finish.ABORT, None, 0, 0)
    return Update(
        request_id,
        (),
        Finish.ABORT,
        None,
        s.verify_passes,
        s.lease.reused,
        accepted_drafts=s.accepted_drafts,
        proposed_drafts=s.proposed_drafts,
    )


def _check_prompt(request: Request, info: EngineInfo) -> None:
    n, new = len(request.prompt_ids), request.sampling.max_new_tokens
    if n == 0:
        raise RequestError("input_ids", "the prompt is empty")
    if n > info.context_length or (new > 0 and n == info.context_length):
        raise RequestError("input_ids", f"the prompt has {n} tokens, which leaves no room in {info.context_length} of context")
    if new < 0:
        raise RequestError("max_new_tokens", f"{new} is negative")
    if n + new > info.context_length:
        raise RequestError(
            "max_new_tokens",
            f"{n} prompt tokens and {new} new ones exceed the context of {info.context_length}; "
            f"at most {info.context_length - n} fit",
        )
    for token in (min(request.prompt_ids), max(request.prompt_ids)):
        if not 0 <= token < info.vocab_size:
            raise RequestError("input_ids", f"token {token} lies outside the vocabulary of {info.vocab_size}")


def _check_sampling(s: Sampling, info: EngineInfo) -> None:
    if not (math.isfinite(s.temperature) and s.temperature >= 0):
        raise RequestError("temperature", f"{s.temperature} is not a number >= 0")
    if not 0 < s.top_p <= 1:
        raise RequestError("top_p", f"{s.top_p} is not within (0, 1]")
    if s.top_k < -1 or s.top_k == 0:
        raise RequestError("top_k", f"{s.top_k} is neither -1 (no limit) nor positive")
    for token in s.stop_token_ids:
        if not 0 <= token < info.vocab_size:
            raise RequestError("stop_token_ids", f"token {token} lies outside the vocabulary of {info.vocab_size}")


def _info(checked: Checked, loaded: Loaded) -> EngineInfo:
    facts, c = device_facts(checked.device), checked.config
    rows = c.max_running_requests * (checked.sizes.budget + 1) + c.chunked_prefill_size
    return EngineInfo(
        target_digest=loaded.target_digest,
        drafter_digest=loaded.drafter_digest,
        device_name=facts.name,
        device_arch=facts.arch,
        driver=facts.driver,
        dtype=c.dtype,
        kv_capacity_tokens=c.max_running_requests * checked.sizes.context,
        context_length=checked.sizes.context,
        vocab_size=checked.target.stack.vocab,
        eos_token_ids=checked.target.eos_ids,
        block_size=checked.sizes.block if checked.drafter else None,
        max_rows=rows,
    )
