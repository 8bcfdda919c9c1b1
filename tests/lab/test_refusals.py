"""What is refused is refused before anything is touched, in one line, with its own exit code."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddops.lab import Host
from tests.lab.fleet import UNIT, Operator, running_budget

pytestmark = [pytest.mark.lab, pytest.mark.timeout(600)]


@pytest.fixture
def host(operator: Operator) -> Host:
    chosen = operator.lab.hosts[0]
    operator.at(chosen, 8)
    return chosen


@pytest.fixture
def untouched(host: Host) -> object:
    """Nothing on the host changes over the test: unit, process, ledger, trial."""

    def snapshot() -> str:
        return host.ssh(
            f"sha256sum /etc/systemd/system/{UNIT} /var/lib/ddops/{UNIT}/ledger.ndjson; "
            f"systemctl show {UNIT} -p MainPID -p InvocationID; ls -A /run/systemd/system.control /run/ddops/{UNIT}"
        ).stdout

    before = snapshot()
    yield
    assert snapshot() == before


def _one_line(text: str) -> str:
    errors = [line for line in text.splitlines() if line.startswith("error:")]
    assert len(errors) == 1, text
    assert "Traceback" not in text
    return errors[0]


def test_a_variable_changed_in_the_unit_is_drift_until_the_engine_is_restarted(operator: Operator, host: Host) -> None:
    unit = f"/etc/systemd/system/{UNIT}"
    # What systemd escapes on its way out must come back as the same value.
    odd = r'Environment="ODD=two  words \"quoted\" $HOME \\ 100%% é" COLOUR=red'
    host.ssh(f"cp {unit} /root/kept; sed -i '/^\\[Service\\]/r /dev/stdin' {unit}; systemctl daemon-reload", input=f"{odd}\n")
    try:
        row = operator.status(host)
        [line] = [line for line in row["drift"] if "variable" in line or "values of" in line]
        assert "COLOUR, ODD" in line
        assert "red" not in line
        run = operator.ddops("verify", "--host", host.name)
        assert run.code not in (0, 11), run.err
        assert "COLOUR, ODD" in run.err
        assert f"systemctl restart {UNIT}" in run.err
        host.ssh(f"systemctl restart {UNIT}")
        operator.ddops("wait", "--host", host.name)
        assert not [line for line in operator.status(host)["drift"] if "values of" in line]
    finally:
        host.ssh(f"mv /root/kept {unit}; systemctl daemon-reload; systemctl restart {UNIT}")
        assert operator.ddops("verify", "--host", host.name).code == 0


def test_a_probe_of_a_host_compares_what_runs_with_its_unit(operator: Operator, host: Host, untouched: object) -> None:
    run = operator.ddops("probe", "--host", host.name, "--only", "applied")
    assert run.code == 0, run.err
    assert "unit, arguments and report agree" in run.err
    run = operator.ddops("probe", "--host", host.name, "--only", "golden", "--only", "rescore", "--json")
    assert run.code == 0, run.err
    assert {"golden", "rescore"} <= {item["probe"] for item in run.json["verdict"]["evidence"] if item["outcome"] == "pass"}


def test_a_probe_with_the_host_itself_as_reference_is_refused(operator: Operator, host: Host, untouched: object) -> None:
    run = operator.ddops("probe", "--host", host.name, "--only", "coding", "--reference", f"http://{host.address}:30000")
    assert run.code == 3, run.err
    assert "is the engine that is probed" in _one_line(run.err)


def test_an_unknown_host_is_a_usage_error(operator: Operator) -> None:
    run = operator.ddops("reconfig", "--budget", "16", "--host", "lab-99")
    assert run.code == 2
    assert "lab-99" in _one_line(run.err)


@pytest.mark.parametrize("budget", ["0", "-3", "many", "1.5", ""])
def test_a_budget_that_is_no_positive_integer_is_a_usage_error(operator: Operator, budget: str) -> None:
    run = operator.ddops("reconfig", f"--budget={budget}", "--host", "lab-01")
    assert run.code == 2
    assert "Traceback" not in run.err


@pytest.mark.usefixtures("untouched")
def test_a_held_host_is_left_alone(operator: Operator, host: Host) -> None:
    host.ssh(f"printf 'somebody, run other\\nddops reconfig\\n' | /usr/local/lib/ddops/ddops-host lease take {UNIT} other 60")
    run = operator.ddops("reconfig", "--budget", "12", "--host", host.name)
    assert run.code == 7
    assert "somebody" in _one_line(run.err)
    assert operator.ddops("unlock", "--host", host.name).code == 0, "and a dead run's lease can be taken away"


@pytest.mark.usefixtures("untouched")
def test_a_wrong_host_key_is_never_accepted(operator: Operator, host: Host, tmp_path: Path) -> None:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / "k")], check=True)
    kind, key, *_ = (tmp_path / "k.pub").read_text().split()
    (tmp_path / "known").write_text(f"{host.address} {kind} {key}\n")
    operator.write(known_hosts=tmp_path / "known")
    run = operator.ddops("reconfig", "--budget", "12", "--host", host.name)
    assert run.code == 8
    assert "SHA256:" in run.err
    operator.write()


@pytest.mark.usefixtures("untouched")
def test_an_unreachable_host_is_unknown_not_failed(operator: Operator, host: Host) -> None:
    operator.write(hosts={"lab-01": "10.231.0.77"})
    run = operator.ddops("reconfig", "--budget", "12", "--host", "lab-01")
    assert run.code == 6
    _one_line(run.err)
    operator.write()


@pytest.mark.usefixtures("untouched")
def test_a_product_over_the_limit_is_refused_with_the_largest_value_that_fits(operator: Operator, host: Host) -> None:
    operator.write(extra="  limits: {verify_rows: {cpu: 60}, disk_free_mib: 64}\n".replace("  limits", "  limits"))
    text = operator.inventory.read_text().replace("  limits: {disk_free_mib: 64}\n", "", 1)
    operator.inventory.write_text(text)
    run = operator.ddops("reconfig", "--budget", "16", "--host", host.name)
    assert run.code == 3
    assert "3" in run.err
    operator.write()


@pytest.mark.usefixtures("untouched")
def test_a_full_disk_is_refused(operator: Operator, host: Host) -> None:
    host.fill("/")
    try:
        run = operator.ddops("reconfig", "--budget", "12", "--host", host.name)
    finally:
        host.unfill("/")
    assert run.code in (3, 4), run.err
    assert "space" in run.err or "disk" in run.err


def test_a_unit_that_is_not_ours_is_refused_and_can_be_adopted(operator: Operator) -> None:
    host = operator.lab.hosts[1]
    operator.at(host, 8)
    text = host.read(f"/etc/systemd/system/{UNIT}")
    by_hand = "".join(f"{line}\n" for line in text.splitlines() if not line.startswith("#"))
    host.ssh(f"systemctl stop {UNIT}; rm -rf /var/lib/ddops/{UNIT}")
    host.write(f"/etc/systemd/system/{UNIT}", by_hand)
    host.ssh(f"systemctl daemon-reload; systemctl start {UNIT}", timeout=60)
    refused = operator.ddops("reconfig", "--budget", "12", "--host", host.name)
    assert refused.code == 3
    assert "adopt" in refused.err
    by_hand = by_hand.replace("--speculative-ddtree-budget 8", "--speculative-ddtree-budget 9")
    host.write(f"/etc/systemd/system/{UNIT}", by_hand)
    edited = operator.ddops("adopt", "--host", host.name)
    assert edited.code == 3
    assert "edited and not restarted" in _one_line(edited.err)
    looked = operator.ddops("verify", "--host", host.name)
    assert looked.code == 5, "what runs is not what the unit says"
    assert f"systemctl restart {UNIT}; then ddops verify" in looked.err
    hint = next(line for line in edited.err.splitlines() if line.startswith("hint:"))
    host.sh(hint.partition("on the host: ")[2].partition(";")[0], timeout=60)
    adopted = operator.ddops("adopt", "--host", host.name)
    assert adopted.code == 0, adopted.err
    assert host.read(f"/etc/systemd/system/{UNIT}") == by_hand
    changed = operator.ddops("reconfig", "--budget", "12", "--host", host.name)
    assert changed.code == 0, changed.err
    assert running_budget(host) == 12
    back = operator.ddops("rollback", "--host", host.name)
    assert back.code == 0, back.err
    assert host.read(f"/etc/systemd/system/{UNIT}") == by_hand


LINE = "deploy ALL=(root) NOPASSWD: /usr/local/lib/ddops/ddops-host"


@contextlib.contextmanager
def changed(host: Host, path: str, text: str) -> Iterator[None]:
    """A file on the host is another one meanwhile."""
    kept, mode = host.read(path), int(host.sh(f"stat -c %a {path}"), 8)
    host.write(path, text, mode)
    yield
    host.write(path, kept, mode)


@pytest.mark.usefixtures("untouched")
@pytest.mark.parametrize(
    ("sudoers", "line"),
    [
        ("deploy ALL=(root) PASSWD: ALL\n", LINE),
        (f"Defaults requiretty\n{LINE}\n", "Defaults:deploy !requiretty"),
        ("deploy ALL=(root) NOPASSWD: /usr/bin/id\n", LINE),
        ("nobody ALL=(root) NOPASSWD: ALL\n", LINE),
    ],
    ids=["password", "requiretty", "another command", "not in sudoers"],
)
def test_a_sudo_that_wants_more_is_refused_with_the_line_that_is_missing(
    operator: Operator, host: Host, sudoers: str, line: str
) -> None:
    operator.write(user="deploy")
    with changed(host, "/etc/sudoers", f"{sudoers}root ALL=(ALL) ALL\n"):
        for words in (["reconfig", "--budget", "12"], ["rollback"], ["verify"], ["status"], ["doctor"]):
            run = operator.ddops(*words, "--host", host.name)
            text = run.err + run.out
            assert run.code == 3, text
            assert "sudo on lab-01 does not let deploy run" in text
            assert words == ["doctor"] or line in text
            assert "Traceback" not in text


def test_a_python_that_cannot_run_the_engine_is_refused_by_install_and_by_reconfig_alike(operator: Operator) -> None:
    host = operator.lab.hosts[2]
    operator.lab.reset([host])
    operator.inventory.write_text(operator.inventory.read_text().replace(sys.executable, "/usr/bin/python3"))
    for words in (["install"], ["reconfig", "--budget", "8"]):
        run = operator.ddops(*words, "--host", host.name)
        assert run.code == 3, run.err
        assert "/usr/bin/python3 cannot run the engine" in _one_line(run.err)
        assert "torch" in run.err
    assert host.ssh(f"ls /etc/systemd/system/{UNIT}").returncode != 0
    assert host.ssh("ls -A /run/systemd/system.control").stdout == ""


def test_a_dry_run_touches_nothing_and_says_so_in_its_exit_code(operator: Operator, host: Host) -> None:
    run = operator.ddops("reconfig", "--budget", "12", "--host", host.name, "--dry-run", "--detailed-exitcode")
    assert run.code == 10, run.err
    assert "budget" in run.out + run.err
    assert running_budget(host) == 8
    same = operator.ddops("reconfig", "--budget", "8", "--host", host.name, "--dry-run", "--detailed-exitcode")
    assert same.code == 0
