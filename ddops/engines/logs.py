"""Log lines that mean an engine can't go on, in one sentence each. Pure.

`environment` marks faults of the host (memory, port, disk, driver), which say nothing about the
configuration: they never make one known-bad. A `consequence` is reported only when no cause was found.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FatalLine:
    pattern: re.Pattern[str]
    meaning: str
    environment: bool = False
    consequence: bool = False


@dataclass(frozen=True, slots=True)
class Finding:
    """One fatal line: its text, its number in what was given (from 0) and what it means."""

    line: str
    number: int
    meaning: str
    environment: bool


def fatal(pattern: str, meaning: str, *, environment: bool = False, consequence: bool = False) -> FatalLine:
    return FatalLine(re.compile(pattern, re.IGNORECASE), meaning, environment, consequence)


def classify(lines: Sequence[str], table: Iterable[FatalLine]) -> list[Finding]:
    """Findings in the order of the lines, at most one a line; causes only, if there are any."""
    rules = list(table)
    found: list[tuple[Finding, bool]] = []
    for number, line in enumerate(lines):
        text = line[:4000]  # a log line may hold a whole request
        rule = next((r for r in rules if r.pattern.search(text)), None)
        if rule is not None:
            found.append((Finding(line, number, rule.meaning, rule.environment), rule.consequence))
    causes = [finding for finding, consequence in found if not consequence]
    return causes or [finding for finding, _ in found]


_GONE = r"(No such file or directory|FileNotFoundError|does not exist|not found)"
_WEIGHTS = r"(safetensors|config\.json|tokenizer|model|drafter|weights)"

# Order matters: the first pattern that fits a line explains it.
COMMON: tuple[FatalLine, ...] = (
    fatal(
        r"CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED",
        "a GPU library found no memory for its workspace",
        environment=True,
    ),
    fatal(
        r"CUBLAS_STATUS_EXECUTION_FAILED",
        "a batched matrix product failed on the GPU; max-running x (budget + 1) rows may be too many for this architecture",
    ),
    fatal(r"CUBLAS_STATUS_\w+", "a matrix product failed on the GPU"),
    fatal(
        r"cudaErrorIllegalAddress|illegal memory access|CUDA_ERROR_ILLEGAL_ADDRESS",
        "a GPU kernel read or wrote outside its memory",
    ),
    fatal(r"device-side assert|cudaErrorAssert", "a GPU kernel stopped on an index out of range"),
    fatal(r"misaligned address|cudaErrorMisalignedAddress", "a GPU kernel used a misaligned address"),
    fatal(
        r"CUDA out of memory|OutOfMemoryError|cudaErrorMemoryAllocation|HIP out of memory|hipErrorOutOfMemory",
        "the GPU ran out of memory",
        environment=True,
    ),
    fatal(
        r"oom-kill|Out of memory: Killed|Killed process \d+|MemoryError\b|Cannot allocate memory|std::bad_alloc",
        "the host ran out of memory",
        environment=True,
    ),
    fatal(
        r"address already in use|EADDRINUSE|\[Errno 98\]|error while attempting to bind",
        "the port is taken by another process",
        environment=True,
    ),
    fatal(r"No space left on device|\[Errno 28\]|ENOSPC", "a disk is full", environment=True),
    fatal(r"Too many open files|\[Errno 24\]", "the limit of open files is reached", environment=True),
    # These Xids are what a program's own bad access looks like to the driver; all others are its or the hardware's.
    fatal(r"\bXid\b[^\n]{0,60}?: (13|31|43|45)\b", "a GPU kernel was stopped by the driver (Xid)"),
    fatal(r"NVRM: Xid|\bXid\b.{0,40}\b\d+", "the GPU driver reported a hardware or driver fault (Xid)", environment=True),
    fatal(
        r"uncorrectable ECC|cudaErrorECCUncorrectable|CUDA_ERROR_ECC|cudaErrorHardwareStackError",
        "the GPU's memory has an uncorrectable error",
        environment=True,
    ),
    fatal(
        r"GPU has fallen off the bus|cudaErrorDevicesUnavailable|no CUDA-capable device"
        r"|CUDA driver version is insufficient"
        r"|cudaErrorNoDevice|Found no NVIDIA driver|CUDA unknown error|cudaErrorInitializationError"
        r"|cudaErrorSystemNotReady|fabric manager",
        "the GPU or its driver can't be used",
        environment=True,
    ),
    fatal(r"no kernel image is available|cudaErrorNoKernelImageForDevice", "the build has no kernels for this GPU"),
    fatal(
        r"NCCL (error|WARN.*timeout)|ncclSystemError|ncclUnhandledCudaError|ncclInternalError|ncclRemoteError"
        r"|Watchdog caught collective operation timeout",
        "communication between GPUs failed",
    ),
    fatal(
        r"Capture cuda graph failed|cuda graph capture (failed|error)|graph capture failed|cudaErrorStreamCapture\w+"
        r"|operation (not permitted|failed).{0,40}stream is capturing|failed due to a previous error during capture",
        "capturing a CUDA graph failed",
    ),
    fatal(
        r"unrecognized arguments?:|no such option|unknown (flag|option|argument)",
        "the engine does not know a flag of this unit",
    ),
    fatal(
        r"argument --?[\w-]+(/--?[\w-]+)*: |invalid choice:|error: the following arguments are required",
        "the engine refuses a flag's value",
    ),
    fatal(
        r"SafetensorError|incomplete metadata|MetadataIncompleteBuffer|HeaderTooLarge|invalid header",
        "a weights file is damaged or cut short",
        environment=True,
    ),
    fatal(
        rf"{_GONE}.{{0,120}}{_WEIGHTS}|{_WEIGHTS}.{{0,120}}{_GONE}"
        r"|HFValidationError|LocalEntryNotFoundError|RepositoryNotFoundError"
        r"|Can't load (the )?(config|tokenizer|model)",
        "weights or their configuration are not where the unit says",
        environment=True,
    ),
    fatal(r"Permission denied|\[Errno 13\]", "a file or device may not be used by the engine's user", environment=True),
    fatal(
        r"ModuleNotFoundError|ImportError|cannot open shared object file",
        "a Python package or library is missing or broken",
    ),
    fatal(r"undefined symbol|version `\w+' not found", "a library does not fit this build"),
    fatal(
        r"size mismatch for|shape mismatch|Missing key\(s\) in state_dict",
        "the weights do not fit the model's configuration",
    ),
    fatal(
        r"\bnan\b.{0,40}(logits|detected|probabilit)|probability tensor contains either",
        "the model computed NaN or infinite values",
    ),
    fatal(r"Segmentation fault|SIGSEGV|signal 11|Fatal Python error", "the process crashed in native code"),
    fatal(r"Watchdog timeout|watchdog.{0,30}(timeout|expired)", "the engine stopped making progress"),
    fatal(r"core[- ]dump(ed)?\b|SIGABRT|Aborted \(core", "the process aborted", consequence=True),
)
