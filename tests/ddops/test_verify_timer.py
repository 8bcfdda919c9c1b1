"""The timer that proves engines again is accepted by systemd and runs a command that exists."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from ddops import cli
from ddops.units import templates_dir

UNITS = ("ddops-verify@.service", "ddops-verify@.timer")


@pytest.mark.parametrize("name", UNITS)
def test_systemd_accepts_it_without_a_word(name: str, tmp_path: Path) -> None:
    assert shutil.which("systemd-analyze"), "systemd's own check is needed: apt-get install systemd"
    for unit in UNITS:
        (tmp_path / unit.replace("@", "@gpu-01")).write_text((templates_dir() / unit).read_text())
    path = tmp_path / name.replace("@", "@gpu-01")
    done = subprocess.run(
        ["systemd-analyze", "verify", "--recursive-errors=no", str(path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert name.split("@")[0] not in done.stderr


def test_its_command_is_one_that_ddops_has() -> None:
    lines = (templates_dir() / UNITS[0]).read_text().splitlines()
    words = shlex.split(next(line for line in lines if line.startswith("ExecStart=")).replace("%i", "gpu-01"))
    assert words[1] == "ddops"
    context = cli.main.make_context("ddops", words[2:], resilient_parsing=True)
    command = cli.main.commands[words[4]]
    command.make_context("verify", words[5:])
    assert context.params["inventory"] == "/etc/ddops/inventory.yaml"
