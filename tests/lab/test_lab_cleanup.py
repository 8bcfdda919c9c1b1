"""Whatever of a lab is killed, nothing of it is left: no process, interface, mount, cgroup or file."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ddops.lab import Lab, LabError
from ddops.lab.janitor import leftovers, sweep


def _gone(lab_id: str) -> None:
    deadline = time.monotonic() + 30
    while left := leftovers(lab_id):
        assert time.monotonic() < deadline, left
        time.sleep(0.02)


def _children(pid: int) -> list[int]:
    found = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True, check=False).stdout
    return [int(line) for line in found.split()]


def _launcher(lab: Lab) -> int:
    return lab.launcher_pid()


def _unshare(lab: Lab) -> int:
    return next(p for p in _children(lab.launcher_pid()) if "unshare" in Path(f"/proc/{p}/comm").read_text())


def _supervisor(lab: Lab) -> int:
    return lab.supervisor_pid()


def _janitor(lab: Lab) -> int:
    return next(p for p in _children(lab.launcher_pid()) if p != _unshare(lab))


@pytest.fixture
def one_host(lab_machine: None, lab_id: str) -> Iterator[Lab]:
    with Lab(1, id=f"{lab_id}-x") as lab:
        yield lab


@pytest.mark.parametrize("process", [_launcher, _unshare, _supervisor], ids=["launcher", "unshare", "supervisor"])
def test_lab_killed_at_any_process_leaves_nothing(one_host: Lab, process: Callable[[Lab], int]) -> None:
    assert len(leftovers(one_host.id)) > 3  # it sees what is there
    os.kill(process(one_host), signal.SIGKILL)
    _gone(one_host.id)


def test_lab_frozen_and_cut_off_and_killed_leaves_nothing(one_host: Lab) -> None:
    host = one_host.hosts[0]
    host.write("/run/systemd/system/busy.service", "[Service]\nExecStart=sleep 1000\n")
    host.console("systemctl daemon-reload; systemctl start busy")
    host.delay(10)
    host.cut()
    host.freeze()
    os.kill(one_host.supervisor_pid(), signal.SIGKILL)
    _gone(one_host.id)


def test_sweep_cleans_up_after_a_janitor_that_was_killed_too(one_host: Lab) -> None:
    os.kill(_janitor(one_host), signal.SIGKILL)
    os.kill(_launcher(one_host), signal.SIGKILL)
    deadline = time.monotonic() + 30
    while any(left.startswith("process") for left in leftovers(one_host.id)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert leftovers(one_host.id)
    assert one_host.id in sweep()
    _gone(one_host.id)


def test_sweep_leaves_a_running_lab_alone(one_host: Lab) -> None:
    assert one_host.id not in sweep()
    assert one_host.hosts[0].console("hostname") == "lab-01"


def test_lab_ends_with_the_process_that_started_it(lab_machine: None, lab_id: str) -> None:
    mine = f"{lab_id}-y"
    script = f"from ddops.lab import Lab; Lab(1, id='{mine}').start(); print('ready', flush=True); input()"
    caller = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert caller.stdout is not None
    assert caller.stdout.readline() == "ready\n"
    caller.kill()
    caller.communicate(timeout=30)
    _gone(mine)


def test_labs_run_side_by_side_and_end_apart(lab_machine: None, lab_id: str) -> None:
    with Lab(1, id=f"{lab_id}-1", names=["left"]) as left, Lab(1, id=f"{lab_id}-2", names=["right"]) as right:
        assert [lab.hosts[0].sh("hostname") for lab in (left, right)] == ["left", "right"]
        assert left.hosts[0].address == right.hosts[0].address
        left.stop()
        assert leftovers(left.id) == []
        assert right.hosts[0].sh("hostname") == "right"


def test_second_lab_of_the_same_id_is_refused_and_the_first_lives(one_host: Lab) -> None:
    with pytest.raises(LabError, match=f"lab {one_host.id} is running"):
        Lab(1, id=one_host.id).start()
    assert one_host.hosts[0].console("hostname") == "lab-01"


def test_lab_that_fails_to_start_says_why_and_leaves_nothing(lab_machine: None, lab_id: str) -> None:
    broken = Lab(1, id=f"{lab_id}-z", sudoers="deploy MAY DO ANYTHING !!")
    with pytest.raises(LabError, match="sudoers"):
        broken.start()
    _gone(broken.id)


def test_nothing_of_a_lab_is_on_the_machine_while_it_runs_but_processes_cgroups_and_files(one_host: Lab) -> None:
    interfaces = subprocess.run(["ip", "-br", "link"], capture_output=True, text=True, check=True).stdout
    assert not re.search(r"^(br0|h1)\b", interfaces, re.MULTILINE)
    assert one_host.id not in Path("/proc/self/mounts").read_text()
    routes = subprocess.run(["ip", "route"], capture_output=True, text=True, check=True).stdout
    assert "10.231.0" not in routes


def test_command_left_running_in_the_labs_network_does_not_outlive_it(one_host: Lab) -> None:
    child = one_host.popen(["sleep", "1000"])
    one_host.stop()
    assert child.poll() == -signal.SIGKILL
    assert leftovers(one_host.id) == []
