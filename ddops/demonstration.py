"""`ddops demo`: the main job on three real hosts of this machine, as a transcript of real commands.

Nothing is simulated: systemd, sshd and journald run in the lab's hosts, and the bundled engine serves its
bundled model. Where this machine cannot run a lab, it says why and what to do, and stops.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ddops.errors import Exit, Refused

if TYPE_CHECKING:
    import subprocess

    from ddops.lab import Lab

COMMAND_SECONDS = 300.0
GUARD_SECONDS = 12
FAULT = "garbage,above-budget=16"

INVENTORY = """\
version: 1
defaults:
  ssh: {{user: root, identity_file: "{identity}", known_hosts: ["{known_hosts}"]}}
  engine:
    kind: ddtree
    release: "{release}"
    python: "{python}"
    model: models/target
    drafter: models/drafter-b16
    device: cpu
    # The fault is switched on openly: it is in the unit, in the log and in the engine's own report.
    extra_args: [--enable-fault-injection, --fault, "{fault}"]
  spec: {{budget: 8, topk_cap: 4, max_running_requests: 4}}
  ready: {{timeout_seconds: 120}}
  guard: {{seconds: {guard}}}
  limits: {{disk_free_mib: 64}} # a lab host has half a gibibyte in all
  # Budget 8 and 16 differ in speed, and this machine may be busy: the demo is about right and wrong output.
  prove: {{gates: {{throughput: 0.2, acceptance: 0.3, ttft: 20, inter_token: 20}}}}
hosts:
{hosts}"""


def run(*, keep: bool = False) -> int:
    """Run the demo; the exit code is 0 only when every command ended as it should.

    Raises:
        Refused: this machine cannot run a lab, or the engine's packages are missing.
    """
    from ddops.lab import Lab, LabError, python_mounts

    if find_spec("torch") is None or find_spec("ddtree_engine") is None:
        raise Refused(
            "the engine is not installed beside ddops",
            means="the demo runs the real engine",
            hint="make demo does all the set-up",
        )
    begun = time.monotonic()
    try:
        with Lab(3, mounts=python_mounts(sys.executable)) as lab, tempfile.TemporaryDirectory() as folder:
            click.echo(f"# three hosts with real systemd and sshd, up in {time.monotonic() - begun:.1f} s")
            story = Story(lab, Path(folder))
            story.tell()
            if keep:
                story.stay()
    except LabError as problem:
        raise Refused(str(problem), means="the demo needs real hosts; nothing was simulated instead") from problem
    return _end(lab, story, time.monotonic() - begun)


def _end(lab: Lab, story: Story, seconds: float) -> int:
    from ddops.lab import janitor

    left = janitor.leftovers(lab.id)
    click.echo("\n# nothing is left behind" if not left else f"\n# LEFT BEHIND: {left}")
    click.echo(f"# {story.told} commands in {seconds:.0f} s, {story.surprises} ended otherwise than they should")
    return int(Exit.OK if not (left or story.surprises) else Exit.INTERNAL)


class Story:
    """The commands, one after the other, as a person would type them."""

    def __init__(self, lab: Lab, folder: Path) -> None:
        from ddops import __version__

        self.lab = lab
        self.folder = folder
        self.told = 0
        self.surprises = 0
        hosts = "".join(f"  {host.name}: {{address: {host.address}}}\n" for host in lab.hosts)
        text = INVENTORY.format(
            identity=lab.identity_file,
            known_hosts=lab.known_hosts,
            release=__version__,
            python=sys.executable,
            fault=FAULT,
            guard=GUARD_SECONDS,
            hosts=hosts,
        )
        self.inventory = folder / "inventory.yaml"
        self.inventory.write_text(text)
        self.environment = os.environ | {"DDOPS_INVENTORY": str(self.inventory)}

    def tell(self) -> None:
        self.say("install the engine and its first unit; it counts only once it is proven")
        self.command("install --host lab-01", 0)
        self.say("a bigger tree: proven, so it becomes the last known good")
        self.command("reconfig --budget 16 --host lab-01", 0)
        self.say("budget 32 comes up, answers, looks alive, and lies (the engine's garbage fault, above 16)")
        self.command("reconfig --budget 32 --host lab-01", Exit.ROLLED_BACK)
        self.say("the controller is killed with -9 in the middle of a trial: the host goes back by itself")
        self.killed("reconfig --budget 12 --host lab-01")
        self.command("resume --host lab-01", Exit.ROLLED_BACK)
        self.say("back to what was verified before the current configuration")
        self.command("rollback --host lab-01", 0)
        self.say("the three hosts")
        self.command("status", 0)
        self.command("history --host lab-01", 0)

    def say(self, text: str) -> None:
        click.echo(f"\n# {text}")

    def command(self, words: str, expected: int) -> None:
        click.echo(f"$ ddops {words}")
        child = self.start(words)
        code = child.wait(COMMAND_SECONDS)
        self.told += 1
        self.surprises += code != expected
        click.echo(f"# exit {code}" + ("" if code == expected else f", EXPECTED {int(expected)}"))

    def start(self, words: str, *extra: str) -> subprocess.Popen[bytes]:
        sys.stdout.flush()
        argv = [sys.executable, "-m", "ddops", *shlex.split(words), *extra]
        return self.lab.popen(argv, env=self.environment)

    def killed(self, words: str) -> None:
        """Start a change, kill its controller with -9 once the new engine is being proven, wait for the guard."""
        click.echo(f"$ ddops {words}")
        events = self.folder / "events.ndjson"
        child = self.start(words, "--events", str(events))
        give_up = time.monotonic() + COMMAND_SECONDS
        while not _proving(events) and child.poll() is None and time.monotonic() < give_up:
            time.sleep(0.05)
        child.kill()
        code = child.wait(COMMAND_SECONDS)
        self.told += 1
        self.surprises += code != -9
        click.echo("# kill -9: the controller is gone, the trial is open, the guard's clock runs")

    def stay(self) -> None:
        enter = shlex.join(self.lab.enter())
        click.echo(f"\n# the lab stays; in another terminal: DDOPS_INVENTORY={self.inventory} {enter} ddops status")
        click.pause("# press any key to end it")


def _proving(events: Path) -> bool:
    """Has the run begun to prove the trial?"""
    if not events.exists():
        return False
    for line in events.read_text(errors="replace").splitlines():
        try:
            event = json.loads(line)
        except ValueError:
            continue  # the last line is being written
        if event.get("event") == "step.started" and event.get("step") == "prove":
            return True
    return False
