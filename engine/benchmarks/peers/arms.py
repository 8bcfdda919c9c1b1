"""Which arms there are, how each is started, and which of them cannot run with what was given. Pure."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.peers.process import WORKERS

OFF = "ours off"


@dataclass(frozen=True, slots=True)
class Given:
    """What the command line named. None: that peer is not run."""

    hf_python: Path | None = None
    vllm_python: Path | None = None
    ddtree_checkout: Path | None = None
    ddtree_python: Path | None = None  # needs the transformers version that their code was written for
    vllm_eager: bool = False
    vllm_as_released: bool = False  # leave its context keys as they are; see workers/vllm_cpu.py


@dataclass(frozen=True, slots=True)
class Job:
    """What is the same for every arm of a run."""

    target: Path
    drafter: Path
    dtype: str
    threads: int
    context: int
    stops: tuple[int, ...]
    block_size: int
    max_running: int = 4


@dataclass(frozen=True, slots=True)
class Arm:
    name: str
    execution: str  # how it runs, so that eager is never compared unlabelled
    python: Path
    worker: str
    settings: Mapping[str, Any]
    env: Mapping[str, str] = field(default_factory=dict)

    @property
    def ours(self) -> bool:
        return self.worker == "ours.py"

    def command(self, job: Job) -> list[str]:
        shared = {
            "target": str(job.target),
            "drafter": str(job.drafter),
            "dtype": job.dtype,
            "threads": job.threads,
            "context": job.context,
            "stops": list(job.stops),
            "draft_tokens": job.block_size - 1,
            "max_running": job.max_running,
        }
        return [str(self.python), str(WORKERS / self.worker), json.dumps(shared | dict(self.settings))]


@dataclass(frozen=True, slots=True)
class NotRun:
    name: str
    why: str


def plan(given: Given, threads: int) -> tuple[list[Arm], list[NotRun]]:
    """Every arm that can be run, and every one that cannot with the reason: nothing is dropped silently."""
    found: list[Arm] = []
    missing: list[NotRun] = []
    for arms in (_ours(), _hf(given), _reference(given), _vllm(given, threads)):
        for arm in arms:
            (found if isinstance(arm, Arm) else missing).append(arm)  # type: ignore[arg-type]
    return found, missing


def _ours() -> list[Arm | NotRun]:
    python, how = Path(sys.executable), "eager PyTorch"
    modes: list[tuple[str, dict[str, Any]]] = [
        (OFF, {"mode": "off"}),
        ("ours chain", {"mode": "chain"}),
        ("ours tree 16", {"mode": "tree", "budget": 16}),
        ("ours tree 32", {"mode": "tree", "budget": 32}),
        ("ours tree auto", {"mode": "tree", "budget": "auto"}),
    ]
    return [Arm(name, how, python, "ours.py", settings) for name, settings in modes]


def _hf(given: Given) -> list[Arm | NotRun]:
    if given.hf_python is None:
        return [NotRun("transformers generate", "--hf-python was not given")]
    return [Arm("transformers generate", "eager PyTorch", given.hf_python, "hf.py", {}, {"HF_HUB_OFFLINE": "1"})]


def _reference(given: Given) -> list[Arm | NotRun]:
    names = [("DDTree authors' code 16", 16), ("DDTree authors' code 32", 32)]
    python = given.ddtree_python or given.hf_python
    if given.ddtree_checkout is None or python is None:
        why = "--ddtree-checkout was not given" if given.ddtree_checkout is None else "--ddtree-python was not given"
        return [NotRun(name, why) for name, _ in names]
    checkout, env = str(given.ddtree_checkout), {"HF_HUB_OFFLINE": "1"}
    return [
        Arm(name, "eager PyTorch", python, "reference.py", {"checkout": checkout, "budget": budget}, env)
        for name, budget in names
    ]


def _vllm(given: Given, threads: int) -> list[Arm | NotRun]:
    modes = [("vLLM off", "off"), ("vLLM dflash", "dflash")]
    python = given.vllm_python
    if python is None:
        return [NotRun(name, "--vllm-python was not given") for name, _ in modes]
    correct = not given.vllm_as_released
    how = "eager PyTorch" if given.vllm_eager else "torch.compile"
    return [
        Arm(
            name,
            how + ", context keys corrected" * (correct and mode == "dflash"),
            python,
            "vllm_cpu.py",
            {"mode": mode, "eager": given.vllm_eager, "correct_keys": correct},
            _vllm_env(python, threads),
        )
        for name, mode in modes
    ]


def _vllm_env(python: Path, threads: int) -> dict[str, str]:
    """The settings that were fastest here: in one process, both cores, Intel's OpenMP where it was installed."""
    openmp = python.parent.parent / "lib" / "libiomp5.so"
    return {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "OMP_NUM_THREADS": str(threads),
        "LD_PRELOAD": str(openmp) if openmp.is_file() else "",
    }
