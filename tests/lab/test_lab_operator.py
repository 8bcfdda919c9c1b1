"""The operator's side of a lab: commands of this machine in its network, ssh as a user sets it up, the command line."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ddops.lab import Host, Lab, LabError, python_mounts
from ddops.lab.janitor import leftovers


def test_hosts_answer_by_ssh_with_known_keys_only(hosts: list[Host], tmp_path: Path) -> None:
    lab = hosts[0].lab
    ssh = ["ssh", "-F", lab.ssh_config, "-o", "StrictHostKeyChecking=yes"]
    assert lab.run([*ssh, "lab-02", "hostname"]).stdout == "lab-02\n"
    swapped = tmp_path / "known_hosts"
    swapped.write_text(lab.known_hosts.read_text().replace("lab-01,10.231.0.11", "lab-02,10.231.0.12", 1))
    refused = lab.run([*ssh, "-o", f"UserKnownHostsFile={swapped}", "lab-01", "hostname"])
    assert refused.returncode == 255
    assert "Host key verification failed" in refused.stderr


def test_plain_ssh_with_identity_and_known_hosts_files_works_by_address(hosts: list[Host]) -> None:
    lab = hosts[0].lab
    options = ["-F", "/dev/null", "-i", lab.identity_file, "-o", f"UserKnownHostsFile={lab.known_hosts}"]
    assert lab.run(["ssh", *options, f"root@{hosts[2].address}", "hostname"]).stdout == "lab-03\n"


def test_deploy_user_may_run_the_one_command_as_root_and_no_other(hosts: list[Host]) -> None:
    host = hosts[0]
    host.write("/usr/local/lib/ddops/ddops-host", "#!/bin/sh\nid -un\n", 0o755)
    allowed = host.ssh("id -un; sudo -n /usr/local/lib/ddops/ddops-host", user="deploy")
    assert allowed.stdout.split() == ["deploy", "root"], allowed.stderr
    assert host.ssh("sudo -n /usr/bin/id", user="deploy").returncode != 0


def test_command_keeps_files_folder_environment_input_and_exit_status(lab: Lab, tmp_path: Path) -> None:
    (tmp_path / "here").write_text("file\n")
    script = 'cat here; cat; echo "$WORD"; exit 7'
    result = lab.run(["sh", "-c", script], input="input\n", cwd=tmp_path, env={"PATH": os.environ["PATH"], "WORD": "word"})
    assert (result.returncode, result.stdout) == (7, "file\ninput\nword\n")
    with pytest.raises(subprocess.TimeoutExpired):
        lab.run(["sleep", "1000"], timeout=0.2)


def test_python_of_this_machine_runs_torch_in_a_host(hosts: list[Host]) -> None:
    pytest.importorskip("torch")
    import torch

    program = "import sys, torch; print(torch.__version__, sys.prefix)"
    assert hosts[0].sh([sys.executable, "-c", program], timeout=120) == f"{torch.__version__} {sys.prefix}"


def test_service_without_root_can_run_the_mounted_python(hosts: list[Host]) -> None:
    # Not DynamicUser=: that implies PrivateTmp=, which hides a checkout that lies below /tmp.
    run = f"systemd-run --wait --pipe --collect --quiet -p User=nobody {sys.executable} -c 'print(6 * 7)'"
    assert hosts[0].sh(run) == "42"


def test_command_line_starts_uses_and_ends_a_lab(lab_machine: None, lab_id: str) -> None:
    mine = f"{lab_id}-c"

    def cli(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "ddops.lab", *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)

    foreground = subprocess.Popen([sys.executable, "-m", "ddops.lab", "up", "2", "--id", mine], start_new_session=True)
    try:
        assert cli("wait", "--id", mine).returncode == 0
        assert cli("ssh", "--id", mine, "lab-02", "hostname").stdout == "lab-02\n"
        assert "10.231.0.1" in cli("exec", "--id", mine, "--", "ip", "-br", "addr").stdout
        left = cli("leftovers", "--id", mine)
        assert (left.returncode, left.stdout) == (0, f"running: {mine}\n"), "what runs is not left over"
        for more in ([], ["--detach"]):
            again = cli("up", "1", "--id", mine, *more)
            assert again.returncode == 1
            assert f"lab {mine} is running" in again.stderr
            assert "Warning" not in again.stderr
            assert again.stderr.count("\n") == 1
        assert cli("down", "--id", mine).returncode == 0
        assert foreground.wait(30) == 0
        assert cli("leftovers", "--id", mine).returncode == 0
        gone = cli("exec", "--id", mine, "--", "true")
        assert gone.returncode == 1
        assert f"no lab {mine} is running" in gone.stderr
    finally:
        foreground.kill()
        foreground.wait(30)


def test_detached_lab_outlives_its_command_and_ends_with_down(lab_machine: None, lab_id: str) -> None:
    mine = f"{lab_id}-d"
    command = [sys.executable, "-m", "ddops.lab"]
    up = subprocess.run([*command, "up", "1", "--detach", "--id", mine], capture_output=True, text=True, check=True)
    said = up.stdout.splitlines()
    assert said[0] == "lab-01 10.231.0.11"
    assert [line.split()[0] for line in said[1:]] == ["identity_file", "known_hosts", "python"]
    assert Lab.attach(mine).hosts[0].sh("hostname") == "lab-01"
    subprocess.run([*command, "down", "--id", mine], check=True, timeout=60)
    assert leftovers(mine) == []


@pytest.mark.parametrize(
    ("wish", "reason"),
    [
        ({"id": "../etc"}, "lab id"),
        ({"names": ["a", "a"]}, "differ"),
        ({"names": []}, "1 to 200"),
        ({"names": ["-x"]}, "host name"),
        ({"mounts": ["relative"]}, "absolute path"),
        ({"mounts": ["/no/such/path"]}, "exists"),
        ({"tmpfs_size": "much"}, "tmpfs size"),
    ],
)
def test_impossible_wishes_are_refused_before_anything_starts(wish: dict[str, object], reason: str) -> None:
    with pytest.raises(LabError, match=reason):
        Lab(**wish)  # type: ignore[arg-type]


def test_mount_of_a_single_file_is_read_only_at_the_same_path(lab_machine: None, lab_id: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("content")
    with Lab(1, id=f"{lab_id}-m", mounts=[str(tmp_path / "file")]) as lab:
        host = lab.hosts[0]
        assert host.read(str(tmp_path / "file")) == "content"
        assert "Read-only" in host.ssh(f"echo x > {tmp_path}/file").stderr


def test_mounts_below_a_folder_that_hosts_have_for_themselves_are_refused(tmp_path: Path) -> None:
    for path in ("/proc/sys", "/run", "/usr", "/etc/ssh", "/"):
        with pytest.raises(LabError, match="what hosts have"):
            Lab(mounts=[path])


def test_interpreters_are_found_through_their_prefixes() -> None:
    assert python_mounts("/usr/bin/python3") == []
    own = python_mounts(sys.executable)
    assert any(Path(sys.executable).is_relative_to(root) for root in own)
    assert any(Path(sys.base_prefix).is_relative_to(root) for root in own) or sys.base_prefix.startswith("/usr")
