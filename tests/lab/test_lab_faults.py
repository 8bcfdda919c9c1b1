"""Faults are real ones: what a host, or a connection to it, goes through in a reboot, power or network fault."""

import subprocess
import time

import pytest

from ddops.lab import Host, LabError

BOOT_ID = "cat /proc/sys/kernel/random/boot_id"


def _mark(host: Host) -> None:
    """A file on the disk, one in /run, one in /tmp, and a line in the journal."""
    host.sh("touch /var/lib/mark /run/mark /tmp/mark; sync; logger -t marker before; journalctl --sync")


def _marks(host: Host) -> str:
    return host.sh("ls /var/lib/mark /run/mark /tmp/mark 2>/dev/null; true")


def test_reboot_keeps_the_disk_empties_run_and_has_a_new_boot_id(hosts: list[Host]) -> None:
    host = hosts[0]
    _mark(host)
    before = host.sh(BOOT_ID)
    host.reboot()
    assert host.sh(BOOT_ID) != before
    assert _marks(host) == "/var/lib/mark"
    assert "before" in host.sh("journalctl -b -1 -t marker")


def test_power_cut_keeps_files_and_journal_and_empties_run(hosts: list[Host]) -> None:
    host = hosts[0]
    _mark(host)
    host.power_cut()
    assert "before" in host.journal()
    host.power_on()
    assert _marks(host) == "/var/lib/mark"
    assert "before" in host.sh("journalctl -b -1 -t marker")
    assert host.sh("systemctl is-system-running --wait") == "running"


def test_power_off_stops_units_in_order(hosts: list[Host]) -> None:
    host = hosts[0]
    host.write("/etc/systemd/system/a.service", "[Service]\nExecStart=sleep 1000\nExecStop=touch /var/lib/stopped\n")
    host.sh("systemctl daemon-reload; systemctl start a")
    host.power_off()
    assert host.status()["last_exit"] == "power off"
    assert "stopped" in host.console("ls /var/lib")  # its disk can be looked at while it is off
    host.power_on()
    assert host.sh("systemctl is-active a; true") == "inactive"


def test_host_that_is_off_answers_nothing_and_others_are_not_affected(hosts: list[Host]) -> None:
    host, other = hosts[:2]
    host.power_off()
    with pytest.raises((TimeoutError, OSError)) as failure:
        host.lab.connect(host, 22, timeout=1.0)
    assert not isinstance(failure.value, ConnectionRefusedError)
    assert other.sh("hostname") == other.name


def test_cut_cable_ends_sessions_by_timeout_and_the_host_works_on(hosts: list[Host]) -> None:
    host, lab = hosts[0], hosts[0].lab
    keepalive = ["-o", "ServerAliveInterval=1", "-o", "ServerAliveCountMax=1"]
    command = ["ssh", "-F", lab.ssh_config, *keepalive, host.name, "echo ready; sleep 1000"]
    session = lab.popen(command, stdout=subprocess.PIPE, text=True)
    assert session.stdout is not None
    assert session.stdout.readline() == "ready\n"
    host.cut()
    assert session.wait(30) == 255
    session.stdout.close()
    assert lab.run(["ssh", "-F", lab.ssh_config, "-o", "ConnectTimeout=1", host.name, "true"]).returncode == 255
    assert host.console("hostname; touch /var/lib/mark") == host.name
    assert host.status()["cut"]
    host.restore()
    assert host.sh("ls /var/lib/mark") == "/var/lib/mark"


def test_cut_cable_stays_cut_over_a_reboot(hosts: list[Host]) -> None:
    host = hosts[0]
    host.cut()
    host.reboot()
    with pytest.raises(OSError, match=r"timed out|No route"):
        host.lab.connect(host, 22, timeout=1.0)
    host.restore()
    host.wait_ssh()


def test_frozen_host_takes_connections_but_says_nothing_until_thawed(hosts: list[Host]) -> None:
    host = hosts[0]
    started = host.sh("systemctl show -p ActiveEnterTimestampMonotonic ssh")
    host.freeze()
    with host.lab.connect(host, 22, timeout=1.0) as connection, pytest.raises(TimeoutError):
        connection.recv(1)
    host.thaw()
    host.wait_ssh()
    assert host.sh("systemctl show -p ActiveEnterTimestampMonotonic ssh") == started


def test_delay_slows_one_host_only_and_ends(hosts: list[Host]) -> None:
    slow, other = hosts[:2]

    def round_trip(host: Host) -> float:
        start = time.monotonic()
        host.lab.connect(host, 22, timeout=10.0).close()
        return time.monotonic() - start

    slow.delay(150)
    assert min(round_trip(slow) for _ in range(3)) >= 0.3  # each way
    assert min(round_trip(other) for _ in range(3)) < 0.3
    assert slow.status()["delayed"]
    slow.undelay()
    assert min(round_trip(slow) for _ in range(3)) < 0.3


def test_delay_survives_a_reboot_and_lost_frames_are_sent_again(hosts: list[Host]) -> None:
    host = hosts[0]
    host.delay(20, loss=0.1)
    host.reboot()
    assert host.ssh("hostname", timeout=60).stdout.strip() == host.name


def test_total_loss_is_silence(hosts: list[Host]) -> None:
    host = hosts[0]
    host.delay(0, loss=1)
    with pytest.raises(OSError, match=r"timed out|No route"):
        host.lab.connect(host, 22, timeout=1.0)


@pytest.mark.parametrize(("milliseconds", "loss"), [(-1, 0), (10, 1.5), (10, -0.1)])
def test_impossible_delay_is_refused(hosts: list[Host], milliseconds: float, loss: float) -> None:
    with pytest.raises(LabError, match="loss from 0 to 1"):
        hosts[0].delay(milliseconds, loss)
    assert hosts[0].sh("hostname") == hosts[0].name


@pytest.mark.parametrize("path", ["/", "/var/lib/ddops"])
def test_full_disk_refuses_writes_and_keeps_what_is_there(hosts: list[Host], path: str) -> None:
    host = hosts[0]
    host.write("/var/lib/ddops/kept", "kept", 0o600)
    host.fill(path)
    full = host.ssh("head -c 100000 /dev/zero > /var/lib/ddops/more")
    assert full.returncode != 0
    assert "No space left on device" in full.stderr
    assert host.read("/var/lib/ddops/kept") == "kept"
    host.unfill(path)
    host.sh("head -c 100000 /dev/zero > /var/lib/ddops/more; test -s /var/lib/ddops/more")
    assert host.sh("cat /var/lib/ddops/kept; stat -c %a /var/lib/ddops/kept") == "kept600"


def test_full_path_leaves_room_elsewhere(hosts: list[Host]) -> None:
    host = hosts[0]
    host.fill("/opt")
    assert host.ssh("head -c 100000 /dev/zero > /opt/more").returncode != 0
    host.sh("head -c 100000 /dev/zero > /var/lib/more")


def test_request_for_an_unknown_host_is_refused_by_name(hosts: list[Host]) -> None:
    with pytest.raises(LabError, match=r"no host 'lab-99'.*lab-01"):
        hosts[0].lab.request("cut", host="lab-99")
    with pytest.raises(LabError, match="no such request"):
        hosts[0].lab.request("explode", host="lab-01")
