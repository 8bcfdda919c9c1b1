"""From launch settings to models and a cache on the device: what `Engine.load` does, step by step.

Everything that can be refused is refused before the first weight is read.
"""

from __future__ import annotations

import logging
import os
import platform
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ddtree_engine import pages
from ddtree_engine.cache import Cache, CacheShape, bytes_per_slot
from ddtree_engine.checkpoint import (
    DrafterConfig,
    TargetConfig,
    Weights,
    drafter_tensors,
    read_drafter,
    read_target,
    target_tensors,
)
from ddtree_engine.config import AUTO, ConfigError, EngineConfig
from ddtree_engine.drafter import Drafter
from ddtree_engine.model import Target

log = logging.getLogger("ddtree_engine")

Progress = Callable[[str, float], None]

DEFAULT_CONTEXT = 4096
AUTO_BUDGET_LIMIT = 64  # nodes of one tree under `auto`: one 64-bit mask
MEMORY_SHARE = 0.9  # of what is free; the rest is for activations


@dataclass(frozen=True, slots=True)
class Sizes:
    """What a round can be at most."""

    context: int
    budget: int  # nodes
    block: int  # tokens of a drafted block, the root included; 1 without a drafter

    @property
    def window(self) -> int:
        """Slots that one pass may write beyond the committed ones."""
        return max(self.budget + 1, self.block)


@dataclass(frozen=True, slots=True)
class Checked:
    """Settings and checkpoints that fit together; nothing is loaded yet."""

    config: EngineConfig  # every None resolved
    device: torch.device
    dtype: torch.dtype
    target: TargetConfig
    drafter: DrafterConfig | None
    target_weights: Weights
    drafter_weights: Weights | None
    sizes: Sizes


def check(config: EngineConfig) -> Checked:
    """Raises ConfigError naming the flag, the key or the tensor."""
    device, target = _device(config), read_target(Path(config.model_path))
    ignored = ("lm_head.weight",) if target.tied else ()
    target_weights = Weights(Path(config.model_path), "model_path", target_tensors(target), ignored)
    drafter, drafter_weights = None, None
    if config.speculative_draft_model_path:
        folder = Path(config.speculative_draft_model_path)
        drafter = read_drafter(folder, target)
        drafter_weights = Weights(folder, "speculative_draft_model_path", drafter_tensors(drafter))
    sizes = Sizes(_context(config, target), *_draft_sizes(config, drafter))
    dtype = _dtype(config, device)
    resolved = replace(
        config,
        device=device.type,
        dtype=str(dtype).removeprefix("torch."),
        context_length=sizes.context,
        served_model_name=config.served_model_name or Path(config.model_path).resolve().name,
        speculative_ddtree_budget=config.speculative_ddtree_budget or (sizes.budget if drafter else None),
        speculative_dflash_block_size=sizes.block if drafter else None,
        cuda_graph_max_bs=config.cuda_graph_max_bs or config.max_running_requests,
        num_threads=config.num_threads or _threads(),
        random_seed=config.random_seed if config.random_seed is not None else int.from_bytes(os.urandom(4)),
    )
    return Checked(resolved, device, dtype, target, drafter, target_weights, drafter_weights, sizes)


def _device(config: EngineConfig) -> torch.device:
    cuda = torch.cuda.is_available()
    if config.device == "cuda" and not cuda:
        raise ConfigError("device", "no CUDA device is visible to this process; use --device cpu")
    return torch.device("cuda" if cuda and config.device != "cpu" else "cpu")


def _dtype(config: EngineConfig, device: torch.device) -> torch.dtype:
    if config.dtype != "auto":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16}[config.dtype]
    if device.type == "cuda" or cpu_has_bf16():
        return torch.bfloat16
    return torch.float32


def cpu_has_bf16() -> bool:
    """Whether the processor multiplies bfloat16 natively (otherwise float32 is faster)."""
    try:
        flags = set(Path("/proc/cpuinfo").read_text(encoding="utf-8").split())
    except OSError:
        return False
    return bool(flags & {"avx512_bf16", "amx_bf16", "bf16"})


def _threads() -> int:
    return max(1, len(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _context(config: EngineConfig, target: TargetConfig) -> int:
    limit = target.stack.max_positions
    if config.context_length is None:
        return min(limit, DEFAULT_CONTEXT)
    if config.context_length > limit:
        raise ConfigError("context_length", f"{config.context_length} is above the model's {limit}")
    return config.context_length


def _draft_sizes(config: EngineConfig, drafter: DrafterConfig | None) -> tuple[int, int]:
    """(most nodes of a tree, block size)."""
    if drafter is None:
        return 0, 1
    block = config.speculative_dflash_block_size or drafter.block_size
    if block > drafter.block_size:
        raise ConfigError(
            "speculative_dflash_block_size", f"{block} is above the {drafter.block_size} the drafter was trained for"
        )
    if config.speculative_ddtree_budget == AUTO:
        return AUTO_BUDGET_LIMIT, block
    budget = config.speculative_ddtree_budget or block
    assert isinstance(budget, int)
    if budget < block - 1:
        log.warning(
            "--speculative-ddtree-budget %d is below block size - 1 = %d: a tree cannot reach the depth of the chain "
            "and loses to it; use %d or more, or --speculative-algorithm DFLASH",
            budget,
            block - 1,
            block,
        )
    return budget, block


@dataclass(frozen=True, slots=True)
class Loaded:
    target: Target
    drafter: Drafter | None
    cache: Cache
    target_digest: str
    drafter_digest: str | None


def load(checked: Checked, progress: Progress) -> Loaded:
    """Read the weights (hashing the files beside it), build the models, allocate the cache."""
    digests = _Digests(checked)
    positions = checked.sizes.context + checked.sizes.window
    shape = _cache_shape(checked)
    tensors = _read(checked.target_weights, checked, lambda share: progress("loading weights", share * 0.9))
    target = Target(tensors, checked.target, positions, checked.device)
    drafter = None
    if checked.drafter and checked.drafter_weights:
        tensors = _read(checked.drafter_weights, checked, lambda s: progress("loading weights", 0.9 + s * 0.1))
        drafter = Drafter(
            tensors,
            checked.drafter,
            target,
            block_size=checked.sizes.block,
            positions=positions,
            device=checked.device,
        )
    progress("allocating cache", 0.0)
    cache = Cache(shape, checked.target.stack, checked.drafter, checked.dtype, checked.device)
    if checked.device.type == "cpu":
        pages.gather()
    progress("allocating cache", 1.0)
    return Loaded(target, drafter, cache, *digests.wait())


def _read(weights: Weights, checked: Checked, progress: Callable[[float], None]) -> dict[str, torch.Tensor]:
    return {name: t.to(checked.device, checked.dtype) for name, t in weights.read(progress)}


class _Digests:
    """Hashes the weight files in the background; hashlib releases the interpreter lock."""

    def __init__(self, checked: Checked) -> None:
        self._result: list[str | None] = [None, None]
        self._error: OSError | None = None
        self._thread = threading.Thread(target=self._run, args=(checked,), name="weight-digests", daemon=True)
        self._thread.start()

    def _run(self, checked: Checked) -> None:
        try:
            self._result[0] = checked.target_weights.digest()
            if checked.drafter_weights:
                self._result[1] = checked.drafter_weights.digest()
        except OSError as exc:
            self._error = exc

    def wait(self) -> tuple[str, str | None]:
        self._thread.join()
        if self._error or self._result[0] is None:
            raise ConfigError("model_path", f"the weight files cannot be read: {self._error}")
        return self._result[0], self._result[1]


def _cache_shape(checked: Checked) -> CacheShape:
    shape = CacheShape(checked.config.max_running_requests, checked.sizes.context + checked.sizes.window)
    need = shape.slots * bytes_per_slot(checked.target.stack, checked.drafter, checked.dtype)
    need += _weight_bytes(checked)
    free = free_bytes(checked.device)
    if free and need > free * MEMORY_SHARE:
        raise ConfigError(
            "max_running_requests",
            f"{checked.config.max_running_requests} requests of {checked.sizes.context} tokens and the weights need "
            f"{need / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free; lower it or --context-length",
        )
    return shape


def _weight_bytes(checked: Checked) -> int:
    shapes: list[Mapping[str, tuple[int, ...]]] = [checked.target_weights.needed]
    if checked.drafter_weights:
        shapes.append(checked.drafter_weights.needed)
    numbers = sum(_product(shape) for needed in shapes for shape in needed.values())
    return numbers * checked.dtype.itemsize


def _product(shape: tuple[int, ...]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total


def free_bytes(device: torch.device) -> int:
    """Memory that the device can still give; 0 when it cannot be told."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    name: str
    arch: str
    driver: str | None


def device_facts(device: torch.device) -> DeviceFacts:
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return DeviceFacts(torch.cuda.get_device_name(device), f"sm_{major}{minor}", _cuda_driver())
    return DeviceFacts(_cpu_name(), platform.machine(), None)


def _cuda_driver() -> str | None:
    """The kernel module's version, as nvidia-smi reports it."""
    try:
        words = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8").split()
    except OSError:
        return None
    return next((w for w in words if w[0].isdigit() and w.count(".") >= 1), None)


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.lower().startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
