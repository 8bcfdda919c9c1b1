"""ddops as an operator of the lab uses it: an inventory, real commands, and questions about where a host stands."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddops import __version__
from ddops.lab import Host, Lab

UNIT = "ddtree-engine.service"
COMMAND_SECONDS = 300.0
# Most stories are about who wins when something is cut; a few probes that catch garbage are enough for them.
FEW = ("applied", "coding", "rescore", "served")


@dataclass(frozen=True)
class Run:
    """One finished ddops command."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        return json.loads(self.out)  # type: ignore[no-any-return]


class Operator:
    """A person at a terminal with one inventory. `faults` are switched on openly, as engine flags."""

    def __init__(self, lab: Lab, folder: Path) -> None:
        self.lab = lab
        self.folder = folder
        self.inventory = folder / "inventory.yaml"
        self.write()

    def write(
        self,
        *,
        faults: tuple[str, ...] = (),
        guard: int = 15,
        ready: int = 90,
        budget: int = 8,
        probes: tuple[str, ...] = FEW,
        extra: str = "",
        known_hosts: Path | None = None,
        identity: Path | None = None,
        user: str = "root",
        hosts: dict[str, str] | None = None,
    ) -> None:
        """Write the inventory anew. `extra` is YAML below `defaults:`."""
        args = ["--num-threads", "2"]
        if faults:
            args.append("--enable-fault-injection")
        for fault in faults:
            args += ["--fault", fault]
        named = hosts or {host.name: host.address for host in self.lab.hosts}
        lines = "".join(f"  {name}: {{address: {address}}}\n" for name, address in named.items())
        self.inventory.write_text(
            f"""\
version: 1
defaults:
  ssh:
    user: {user}
    identity_file: "{identity or self.lab.identity_file}"
    known_hosts: ["{known_hosts or self.lab.known_hosts}"]
    connect_timeout_seconds: 5
  engine:
    kind: ddtree
    release: "{__version__}"
    python: "{sys.executable}"
    model: models/target
    drafter: models/drafter-b16
    device: cpu
    extra_args: {json.dumps(args)}
  spec: {{budget: {budget}, topk_cap: 4, max_running_requests: 4}}
  ready: {{timeout_seconds: {ready}}}
  guard: {{seconds: {guard}}}
  limits: {{disk_free_mib: 64}}
  # Speed is compared by benchmarks, not by tests on a machine that does other things at the same time.
  prove: {{probes: {json.dumps(probes)}, gates: {{throughput: 0.1, acceptance: 0.3, ttft: 50, inter_token: 50}}}}
{extra}hosts:
{lines}"""
        )

    # ------------------------------------------------------------ commands
    def ddops(self, *words: str, timeout: float = COMMAND_SECONDS) -> Run:
        done = self.lab.run(self._argv(words), timeout=timeout, env=self._environment())
        return Run(done.returncode, done.stdout, done.stderr)

    def start(self, *words: str, terminal: int | None = None) -> Started:
        """A command under way. `terminal`: a terminal's descriptor, which it then runs in as its own."""
        events = self.folder / f"events-{time.monotonic_ns()}.ndjson"
        argv = [*self._argv(words), "--events", str(events)]
        environment = self._environment() | {"TERM": "xterm"}
        if terminal is None:
            pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
            return Started(self.lab.popen(argv, env=environment, text=True, **pipes), events)
        ends = dict.fromkeys(("stdin", "stdout", "stderr"), terminal)
        argv = ["setsid", "--ctty", "--wait", *argv]
        return Started(self.lab.popen(argv, env=environment, text=True, **ends), events)

    def _argv(self, words: tuple[str, ...]) -> list[str]:
        return [sys.executable, "-m", "ddops", *words]

    def _environment(self) -> dict[str, str]:
        return os.environ | {"DDOPS_INVENTORY": str(self.inventory), "NO_COLOR": "1"}

    # ------------------------------------------------------------ where a host stands
    def status(self, host: Host) -> dict[str, Any]:
        run = self.ddops("status", "--host", host.name, "--json")
        assert run.code == 0, run.err
        return run.json["hosts"][0]  # type: ignore[no-any-return]

    def at(self, host: Host, budget: int) -> None:
        """The host is on this budget, verified; installed first where it is not."""
        self.write()
        if host.ssh(f"test -e /etc/systemd/system/{UNIT}").returncode != 0:
            run = self.ddops("install", "--host", host.name)
            assert run.code == 0, run.err
        run = self.ddops("reconfig", "--budget", str(budget), "--host", host.name, "--retry-known-bad", "--from-broken")
        assert run.code == 0, run.err
        self.assert_proven(host, budget)

    def assert_proven(self, host: Host, budget: int) -> None:
        """The only good end of any story: what runs is on disk, loaded, verified, open to users, and free."""
        row = self.status(host)
        assert row["verified"], row
        assert running_budget(host) == budget
        assert f"--speculative-ddtree-budget {budget}" in host.read(f"/etc/systemd/system/{UNIT}")
        assert not row["drift"], row
        assert row["lease"] is None
        assert row["trial"] is None
        assert host.ssh(f"ls /run/systemd/system.control/ | grep -c {UNIT}").stdout.strip() == "0"
        shown = host.ssh(f"systemctl show {UNIT} -p Restart -p IPAddressDeny --value").stdout.split()
        assert shown == ["always"], shown
        assert host.ssh("systemctl list-units --all --no-legend 'ddops-*'").stdout.strip() == ""


def running_budget(host: Host) -> int:
    """From the running process' own argument list, not from any file."""
    words = host.ssh(f"tr '\\0' ' ' < /proc/$(systemctl show {UNIT} -p MainPID --value)/cmdline").stdout.split()
    return int(words[words.index("--speculative-ddtree-budget") + 1])


@dataclass
class Started:
    """A ddops command under way, and its events as they come."""

    child: subprocess.Popen[str]
    events: Path

    def wait_for(self, event: str, seconds: float = COMMAND_SECONDS, **fields: Any) -> dict[str, Any]:
        """Until an event with these fields was written; fails when the command ended without it."""
        give_up = time.monotonic() + seconds
        while time.monotonic() < give_up:
            ended = self.child.poll() is not None
            for found in self.read():
                if found.get("event") == event and all(found.get(k) == v for k, v in fields.items()):
                    return found
            if ended:
                raise AssertionError(f"ended with {self.child.returncode} before {event} {fields}: {self.text()}")
            time.sleep(0.02)
        raise AssertionError(f"no {event} {fields} in {seconds} s")

    def read(self) -> list[dict[str, Any]]:
        if not self.events.exists():
            return []
        whole = self.events.read_text().rpartition("\n")[0]
        return [json.loads(line) for line in whole.splitlines()]

    def kill(self) -> None:
        """-9: no handler runs, nothing is cleaned up from here."""
        self.child.kill()
        assert self.child.wait(30) == -signal.SIGKILL

    def interrupt(self) -> None:
        self.child.send_signal(signal.SIGINT)

    def end(self, seconds: float = COMMAND_SECONDS) -> Run:
        out, err = self.child.communicate(timeout=seconds)
        return Run(self.child.returncode, out or "", err or "")

    def text(self) -> str:
        out, err = self.child.communicate(timeout=30)
        return out + err
