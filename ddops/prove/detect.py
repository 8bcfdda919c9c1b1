"""`make detect`: switch every fault on in a real engine, let the battery find it, and write down what it found.

It starts engines of this machine on loopback, one after the other, and ends only those. Results are kept as
they come, so that an interrupted run goes on where it stopped. The table itself is made in detection_table.py.
"""

from __future__ import annotations

import argparse
import json
import platform
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ddops.prove import detection_table
from ddops.prove.detection_table import HEALTHY, Boot

if TYPE_CHECKING:
    from ddops.prove.evidence import Baseline
    from ddops.prove.golden import Golden

START_SECONDS = 60.0
STOP_SECONDS = 15.0


@dataclass(frozen=True, slots=True)
class Engine:
    """What is started: the bundled engine with these settings; only the faults differ from boot to boot."""

    models: Path
    budget: int
    max_running: int
    device: str = "cpu"

    def argv(self, port: int, faults: Sequence[str]) -> list[str]:
        words = [sys.executable, "-m", "ddtree_engine", "--host", "127.0.0.1", "--port", str(port)]
        words += ["--model-path", str(self.models / "target"), "--device", self.device, "--num-threads", "2"]
        words += ["--speculative-algorithm", "DDTREE", "--speculative-ddtree-topk-cap", "8"]
        words += ["--speculative-draft-model-path", str(self.models / "drafter-b16")]
        words += ["--speculative-ddtree-budget", str(self.budget), "--max-running-requests", str(self.max_running)]
        for fault in faults:
            words += ["--fault", fault]
        return [*words, "--enable-fault-injection"] if faults else words


@contextmanager
def started(engine: Engine, faults: Sequence[str]) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """One engine on a free port of loopback; it is ended with the block, whatever state it is in."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    child = subprocess.Popen(engine.argv(port, faults), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield child, f"http://127.0.0.1:{port}"
    finally:
        child.terminate()
        try:
            child.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait(STOP_SECONDS)


def ready(child: subprocess.Popen[bytes], url: str) -> str:
    """Wait for a real answer; "" when it came, else what is wrong with the start."""
    import httpx

    from ddops.prove.client import EngineClient

    give_up = time.monotonic() + START_SECONDS
    with httpx.Client(base_url=url) as http:
        client = EngineClient(http, "ddtree")
        while time.monotonic() < give_up:
            if child.poll() is not None:
                return f"died at start with status {child.returncode}"
            if client.healthy(timeout=5.0) and client.answers(timeout=10.0):
                return ""
            time.sleep(0.1)
    return f"not ready in {START_SECONDS:.0f} s"


def boot(engine: Engine, fault: str, level: str, baseline: Baseline | None, golden: Golden | None) -> Boot:
    """Start an engine with one fault (or healthy) and prove it."""
    import httpx

    from ddops.prove import battery
    from ddops.prove.client import EngineClient
    from ddops.prove.evidence import Level

    begun = time.monotonic()
    with started(engine, () if fault == HEALTHY else (fault,)) as (child, url):
        wrong = ready(child, url)
        if wrong:
            return Boot(fault, level, "crashed", time.monotonic() - begun, ("start",), wrong)
        begun = time.monotonic()
        with httpx.Client(base_url=url) as http:
            client = EngineClient(http, "ddtree")
            if level == detection_table.SWEEP:
                verdict = battery.run(client, only=(level,))
            else:
                verdict = battery.run(client, level=Level(level), baseline=baseline, golden=golden)
    return detection_table.boot_of(fault, level, verdict, time.monotonic() - begun)


def reference(engine: Engine) -> tuple[Baseline, Golden]:
    """A healthy boot's numbers and answers, which every other boot is held against, as on a host."""
    import httpx

    from ddops.prove import battery, golden
    from ddops.prove.client import EngineClient
    from ddops.prove.evidence import Baseline, Level
    from ddops.prove.session import Session
    from ddops.prove.verdicts import Policy

    with started(engine, ()) as (child, url):
        wrong = ready(child, url)
        if wrong:
            raise SystemExit(f"error: a healthy engine does not start: {wrong}")
        with httpx.Client(base_url=url) as http:
            client = EngineClient(http, "ddtree")
            verdict = battery.run(client, level=Level.QUICK)
            session = Session(client, Level.QUICK, Policy())
            recorded = golden.record(session, golden.reference_prompts(session, 5), source="this engine", mode="off")
    return Baseline.of(verdict), recorded


def kept(file: Path) -> list[Boot]:
    """Results of an earlier, interrupted run."""
    if not file.exists():
        return []
    return [Boot.from_dict(json.loads(line)) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]


def jobs(boots: int, rare: int, standard: int, sweep: int, healthy: int) -> list[tuple[str, str]]:
    """(fault, level) of every boot, healthy ones spread between the others so that drift of the machine shows."""
    wanted = [(fault, detection_table.SWEEP) for _ in range(sweep) for fault in detection_table.TEXT]
    wanted += [(fault, "quick") for _ in range(boots) for fault in detection_table.CASES]
    wanted += [(fault, "quick") for _ in range(rare) for fault in detection_table.rare("quick")]
    wanted += [(fault, "standard") for _ in range(standard) for fault in detection_table.rare("standard")]
    every = max(1, len(wanted) // max(1, healthy))
    for number in range(healthy):
        wanted.insert(number * (every + 1), (HEALTHY, "quick"))
    return wanted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--models", type=Path, default=Path("engine/models"))
    parser.add_argument("--out", type=Path, default=Path("docs/detection.md"))
    parser.add_argument("--results", type=Path, default=Path("build/detect.ndjson"))
    parser.add_argument("--sensitivity", type=Path, help="the battery's table to put the measured values into")
    parser.add_argument("--boots", type=int, default=2, help="boots of each fault at the quick level")
    parser.add_argument("--sweep", type=int, default=1, help="boots of each text fault for the sweep's sensitivity to it")
    parser.add_argument("--rare", type=int, default=2, help="boots of each text fault in 5 %% of requests at the quick level")
    parser.add_argument(
        "--standard", type=int, default=0, help="boots of each text fault in 1 %% of requests at the standard level"
    )
    parser.add_argument("--healthy", type=int, default=20, help="healthy boots at the quick level")
    parser.add_argument("--budget", type=int, default=16)
    parser.add_argument("--max-running", type=int, default=8)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--lane", default="1/1", help="do only this part of the boots, such as 2/8: several run side by side")
    parser.add_argument("--minutes", type=float, default=115.0, help="stop starting new boots after this")
    asked = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the engine under way ends too
    engine = Engine(asked.models, asked.budget, asked.max_running, asked.device)
    asked.results.parent.mkdir(parents=True, exist_ok=True)
    done = kept(asked.results)
    lane, lanes = (int(number) for number in asked.lane.split("/"))
    left = jobs(asked.boots, asked.rare, asked.standard, asked.sweep, asked.healthy)[lane - 1 :: lanes]
    for earlier in done:
        if (earlier.fault, earlier.level) in left:
            left.remove((earlier.fault, earlier.level))
    begun = time.monotonic()
    baseline, golden = reference(engine)
    for number, (fault, level) in enumerate(left, 1):
        if time.monotonic() - begun > 60 * asked.minutes:
            _say(f"out of time: {len(left) - number + 1} boots left")
            break
        found = boot(engine, fault, level, baseline, golden)
        done.append(found)
        with asked.results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(found.to_dict()) + "\n")
        _say(f"{number}/{len(left)} {fault} {level}: {found.verdict} by {', '.join(found.by) or 'nothing'}")
    machine = f"{platform.machine()}, {asked.device}, budget {asked.budget}, max-running {asked.max_running}"
    asked.out.write_text(detection_table.page(done, machine), encoding="utf-8")
    if asked.sensitivity is not None:
        table = detection_table.measured(done, json.loads(asked.sensitivity.read_text(encoding="utf-8")))
        asked.sensitivity.write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")


if __name__ == "__main__":
    main()
