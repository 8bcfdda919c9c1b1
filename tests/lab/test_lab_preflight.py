"""A machine that can't run a lab is told in one line what is missing and which command helps."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ddops.lab import Lab, LabError, preflight
from ddops.lab.preflight import install_command, packages

preflight_module = sys.modules["ddops.lab.preflight"]


@pytest.fixture
def only_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with links to all programs a lab runs; it is all that preflight sees."""
    for name in preflight_module._PACKAGE_OF:
        found = shutil.which(name, path="/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")
        if found and not name.startswith("/"):
            (tmp_path / name).symlink_to(found)
    monkeypatch.setattr(preflight_module, "_PATH", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    ("missing", "package"),
    [("sshd", "openssh-server"), ("ip", "iproute2"), ("setpriv", "util-linux"), ("ssh-keygen", "openssh-client")],
)
def test_missing_program_is_named_with_the_package_that_has_it(
    lab_machine: None, only_programs: Path, missing: str, package: str
) -> None:
    assert shutil.which(missing, path=str(only_programs))
    (only_programs / missing).unlink()
    said = str(preflight())
    assert said.count("\n") == 0
    assert f"{missing} not found" in said
    assert f"apt-get install -y --no-install-recommends {package}" in said


def test_lab_that_cannot_run_raises_the_line_and_starts_nothing(lab_machine: None, only_programs: Path, lab_id: str) -> None:
    (only_programs / "sshd").unlink()
    with pytest.raises(LabError, match="openssh-server"):
        Lab(1, id=f"{lab_id}-p").start()


def test_sudo_is_needed_only_by_labs_that_ask_for_it(lab_machine: None, only_programs: Path) -> None:
    said = preflight(sudo=True)
    assert said is not None
    assert said.fix.endswith(" sudo")


def test_old_util_linux_is_refused(lab_machine: None, only_programs: Path) -> None:
    (only_programs / "unshare").unlink()
    (only_programs / "unshare").write_text("#!/bin/sh\necho unshare from util-linux 2.36.1\n")
    (only_programs / "unshare").chmod(0o755)
    assert "older than 2.38" in str(preflight())


def test_command_line_prints_what_to_install() -> None:
    def cli(*words: str) -> str:
        command = [sys.executable, "-m", "ddops.lab", "preflight", *words]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.strip()

    assert cli("--packages").split() == packages()
    assert cli("--fix-command") == install_command(packages())
    assert {"openssh-server", "iproute2", "systemd", "sudo"} <= set(packages())


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become somebody else")
def test_user_who_may_not_is_told_what_to_run(lab_machine: None, tmp_path: Path) -> None:
    """Without a delegated cgroup or ranges of ids, a plain user gets one line and exit status 1, no traceback."""
    package = Path(preflight_module.__file__).parents[2]
    script = f"import sys; sys.path.insert(0, {str(package)!r}); from ddops.lab.__main__ import main; sys.exit(main())"
    user = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "env", "-i", "PATH=/usr/bin"]
    command = [*user, "/usr/bin/python3", "-c", script, "preflight"]
    said = subprocess.run(command, capture_output=True, text=True, cwd="/", timeout=60, check=False)
    assert said.returncode == 1, said.stderr
    assert said.stdout.startswith("the lab can't run here: ")
    assert said.stdout.count("\n") == 1
