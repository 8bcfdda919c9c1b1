"""The engine's settings: one field per command-line flag, checked before anything is loaded.

Pure: no file is opened and torch is not imported here. What only the checkpoints can tell (block size, layer ids, sizes)
is checked in `checkpoint.py`, with the same error type.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

AUTO: Literal["auto"] = "auto"
MAX_BUDGET = 1024
LOG_LEVELS = ("debug", "info", "warning", "error", "critical")


class ConfigError(Exception):
    """A setting or a checkpoint that cannot be served; `field` names the flag, key or tensor to change."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message


class SpecMode(StrEnum):
    """How a request is decoded: one token a pass, the drafter's top-1 chain, or the best-first tree."""

    OFF = "off"
    CHAIN = "chain"
    TREE = "tree"

    @property
    def drafts(self) -> bool:
        return self is not SpecMode.OFF


class Algorithm(StrEnum):
    """What the server was started with; it is also the default mode of a request."""

    NONE = "NONE"
    DFLASH = "DFLASH"
    DDTREE = "DDTREE"

    @property
    def mode(self) -> SpecMode:
        return {"NONE": SpecMode.OFF, "DFLASH": SpecMode.CHAIN, "DDTREE": SpecMode.TREE}[self.value]


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Launch settings. Raises ConfigError for a value that can never be right.

    `None` means "not given": the engine then resolves it from the checkpoints or the machine, and
    `Engine.resolved` reports what it became.
    """

    model_path: str
    served_model_name: str | None = None
    host: str = "127.0.0.1"
    port: int = 30000
    dtype: str = "auto"  # auto | float32 | bfloat16
    device: str = "auto"  # auto | cpu | cuda
    speculative_algorithm: Algorithm = Algorithm.NONE
    speculative_draft_model_path: str | None = None
    speculative_ddtree_budget: int | Literal["auto"] | None = None  # nodes below the root; None: the block size
    speculative_ddtree_topk_cap: int = 8
    speculative_dflash_block_size: int | None = None  # None: the drafter's own
    max_running_requests: int = 16
    cuda_graph_max_bs: int | None = None  # None: max_running_requests
    context_length: int | None = None  # None: the smaller of the model's limit and 4096
    chunked_prefill_size: int = 512
    disable_radix_cache: bool = False
    disable_cuda_graph: bool = False
    random_seed: int | None = None
    num_threads: int | None = None
    enable_metrics: bool = False
    api_key_file: str | None = None
    decode_log_interval: int = 40
    log_level: str = "info"
    enable_fault_injection: bool = False
    faults: tuple[str, ...] = ()
    tp_size: int = 1

    def __post_init__(self) -> None:
        self._check_choices()
        self._check_numbers()
        self._check_speculation()

    def _check_choices(self) -> None:
        if not self.model_path:
            raise ConfigError("model_path", "give the folder of the target model")
        if self.dtype not in ("auto", "float32", "bfloat16"):
            raise ConfigError("dtype", f"{self.dtype!r} is not one of auto, float32, bfloat16")
        if self.device not in ("auto", "cpu", "cuda"):
            raise ConfigError("device", f"{self.device!r} is not one of auto, cpu, cuda")
        if self.log_level.lower() not in LOG_LEVELS:
            raise ConfigError("log_level", f"{self.log_level!r} is not one of {', '.join(LOG_LEVELS)}")
        if self.tp_size != 1:
            raise ConfigError("tp_size", "this engine runs on one device; use SGLang or vLLM for tensor parallelism")
        if self.faults and not self.enable_fault_injection:
            raise ConfigError("fault", "faults are refused without --enable-fault-injection")

    def _check_numbers(self) -> None:
        _at_least("port", self.port, 0)
        if self.port > 65535:
            raise ConfigError("port", f"{self.port} is above 65535")
        _at_least("max_running_requests", self.max_running_requests, 1)
        _at_least("cuda_graph_max_bs", self.cuda_graph_max_bs, 1)
        _at_least("context_length", self.context_length, 2)
        _at_least("chunked_prefill_size", self.chunked_prefill_size, 1)
        _at_least("num_threads", self.num_threads, 1)
        _at_least("decode_log_interval", self.decode_log_interval, 1)
        _at_least("random_seed", self.random_seed, 0)
        _at_least("speculative_ddtree_topk_cap", self.speculative_ddtree_topk_cap, 1)
        _at_least("speculative_dflash_block_size", self.speculative_dflash_block_size, 2)
        budget = self.speculative_ddtree_budget
        if isinstance(budget, str) and budget != AUTO:
            raise ConfigError("speculative_ddtree_budget", f"{budget!r} is neither a number nor 'auto'")
        if isinstance(budget, int):
            _at_least("speculative_ddtree_budget", budget, 1)
            if budget > MAX_BUDGET:
                raise ConfigError("speculative_ddtree_budget", f"{budget} is above {MAX_BUDGET}")

    def _check_speculation(self) -> None:
        drafts = self.speculative_algorithm.mode.drafts
        if drafts and not self.speculative_draft_model_path:
            raise ConfigError("speculative_draft_model_path", f"{self.speculative_algorithm} needs a drafter folder")
        if self.speculative_draft_model_path and not drafts:
            raise ConfigError("speculative_draft_model_path", "given without --speculative-algorithm DDTREE or DFLASH")
        if self.speculative_ddtree_budget is not None and not drafts:
            raise ConfigError(
                "speculative_ddtree_budget", "given without --speculative-algorithm DDTREE: nothing would be drafted"
            )


def _at_least(field: str, value: int | None, least: int) -> None:
    if value is not None and value < least:
        raise ConfigError(field, f"{value} is below {least}")
