"""The engine's front: load the models once, then submit requests and step rounds from one thread.

Not here: HTTP, text, queues between threads (`worker.py`), and the round itself (`decode.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ddtree_engine.config import EngineConfig, SpecMode
from ddtree_engine.corruption import CorruptionPoints
from ddtree_engine.requests import Finish, Request, Sampling, Stats, Update


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
    """One target, at most one drafter, one device. Not thread safe: one thread calls everything."""

    config: EngineConfig  # every None resolved
    info: EngineInfo

    @classmethod
    def load(
        cls,
        config: EngineConfig,
        *,
        progress: Callable[[str, float], None] = lambda stage, share: None,
        faults: CorruptionPoints | None = None,
    ) -> Engine:
        """Load and check the checkpoints, allocate the cache, warm up. Raises ConfigError.

        `progress(stage, share)` is called with "loading weights", "allocating cache", "capturing graphs",
        "warming up" and a share from 0 to 1 of that stage.
        """

    def check(self, request: Request) -> None:
        """Raise RequestError when the request can never run here (thread safe, reads only constants)."""

    def submit(self, request: Request) -> None:
        """Queue a request. Raises RequestError as `check` does, or when the id is in use."""

    def cancel(self, request_id: str) -> None:
        """Stop a request at the next step, which reports it with Finish.ABORT. Unknown ids are ignored."""

    def step(self) -> list[Update]:
        """One round over the batch: admit, prefill chunks and draft trees verified in one pass, accept, commit."""

    @property
    def busy(self) -> bool:
        """Whether a step would do something."""

    def flush(self) -> bool:
        """Forget every cached prefix. Running requests go on; returns True."""

    def stats(self) -> Stats: ...

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, mode: SpecMode
    ) -> list[Generated]:
        """Answer several prompts as one batch (tests and benchmarks)."""
