"""The main job on real hosts: every arrow of the transaction cut once, each story ending on a proven configuration."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from ddops import commands
from ddops.lab import Host
from tests.lab.fleet import UNIT, Operator, running_budget

pytestmark = [pytest.mark.lab, pytest.mark.timeout(900)]


@pytest.fixture
def host(operator: Operator) -> Host:
    """A host that is on budget 8, verified."""
    chosen = operator.lab.hosts[0]
    operator.at(chosen, 8)
    return chosen


def users_get_in(operator: Operator, host: Host, seconds: float = 2.0) -> bool:
    """Does the engine's port answer from outside the host? A filter is lifted just after systemctl returns."""
    give_up = time.monotonic() + seconds
    while time.monotonic() < give_up:
        with contextlib.suppress(OSError), operator.lab.connect(host, 30000, timeout=1.0):
            return True
        time.sleep(0.2)
    return False


@contextlib.contextmanager
def reading(descriptor: int) -> Iterator[None]:
    """Somebody watches this terminal, so that nobody who writes to it has to wait."""
    over = threading.Event()

    def watch() -> None:
        os.set_blocking(descriptor, False)
        while not over.wait(0.05):
            with contextlib.suppress(BlockingIOError):
                os.read(descriptor, 65536)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()


# ---------------------------------------------------------------- it works, and it is taken back when it does not
def test_a_good_change_is_proven_confirmed_and_opened_to_users(operator: Operator, host: Host) -> None:
    operator.write(probes=())  # the whole battery
    before = operator.status(host)["invocation"]
    started = operator.start("reconfig", "--budget", "12", "--host", host.name)
    started.wait_for("step.started", step="prove")
    fenced = host.ssh(f"systemctl show {UNIT} -p Restart --value").stdout.strip()
    assert not users_get_in(operator, host), "an unproven engine is fenced"
    invocation = host.ssh(f"systemctl show {UNIT} -p InvocationID --value").stdout.strip()
    run = started.end()
    assert run.code == 0, run.err
    assert fenced == "no"
    outcomes = {e["evidence"]["probe"]: e["evidence"]["outcome"] for e in started.read() if e["event"] == "probe"}
    assert outcomes["golden"] == "pass", "the first proof on this host recorded answers with speculation off"
    operator.assert_proven(host, 12)
    assert users_get_in(operator, host, seconds=15)
    after = operator.status(host)["invocation"]
    assert after == invocation != before, "promotion must not restart what was proven"


def test_second_run_changes_nothing(operator: Operator, host: Host) -> None:
    before = operator.status(host)["invocation"]
    run = operator.ddops("reconfig", "--budget", "8", "--host", host.name, "--json")
    assert run.code == 0, run.err
    assert run.json["hosts"][0]["result"] == "unchanged"
    assert operator.status(host)["invocation"] == before


def test_garbage_is_caught_and_the_host_goes_back_and_is_proven_again(operator: Operator, host: Host) -> None:
    operator.write(faults=("garbage,above-budget=16",), probes=())
    run = operator.ddops("reconfig", "--budget", "32", "--host", host.name)
    assert run.code == 4, run.err
    operator.assert_proven(host, 8)
    again = operator.ddops("reconfig", "--budget", "32", "--host", host.name)
    assert again.code == 3, "known-bad is refused with its evidence"
    assert running_budget(host) == 8


@pytest.mark.parametrize("fault", ["crash-start,above-budget=16", "hang-start,above-budget=16"])
def test_an_engine_that_dies_or_hangs_at_start_is_taken_back(operator: Operator, host: Host, fault: str) -> None:
    operator.write(faults=(fault,), ready=20)
    begun = time.monotonic()
    run = operator.ddops("reconfig", "--budget", "24", "--host", host.name, "--retry-known-bad")
    assert run.code == 4, run.err
    if fault.startswith("crash"):
        assert time.monotonic() - begun < 60, "a death ends the wait at once"
    operator.assert_proven(host, 8)


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        ("crash-load,above-budget=16,min-batch=2", "signal 11"),
        ("illegal-address,above-budget=16,min-batch=2", "outside its memory"),
    ],
)
def test_an_engine_that_dies_in_its_proof_leaves_why_and_its_last_words(
    operator: Operator, host: Host, fault: str, cause: str
) -> None:
    operator.write(faults=(fault,))
    started = operator.start("reconfig", "--budget", "24", "--host", host.name, "--retry-known-bad")
    run = started.end()
    assert run.code == 4, run.err
    [death] = [event for event in started.read() if event["event"] == "died"]
    assert cause in death["why"]
    assert death["why"] in run.err, "and the outcome says it as well"
    whole = host.ssh(f"journalctl -o cat -q --no-pager -u {UNIT} -n 400").stdout.splitlines()
    said, first = death["lines"], death["lines"][0]
    starts = [at for at, line in enumerate(whole) if line == first]
    assert any(whole[at : at + len(said)] == said for at in starts), "oldest first, none missing between"
    assert said[-1].endswith(("'core-dump'.", "'signal'.", "'exit-code'.")), "as far as systemd's own last word"
    told = run.err.splitlines()
    shown = [line for line in told if " | " in line]
    assert len(shown) == len(said)
    failed = next(at for at, line in enumerate(told) if "FAIL  the engine ended" in line)
    assert told[failed + 1 : failed + 1 + len(shown)] == shown, "why first, then the log"
    operator.assert_proven(host, 8)


@pytest.mark.parametrize(
    ("act", "blames_host"),
    [(f"systemctl kill -s SEGV {UNIT}", False), (f"systemctl restart {UNIT}", True), (f"systemctl stop {UNIT}", True)],
)
def test_what_ended_the_engine_while_it_was_verified_is_told_and_held_against_it_only_if_it_was_its_own(
    operator: Operator, host: Host, act: str, blames_host: bool
) -> None:
    started = operator.start("verify", "--host", host.name)
    started.wait_for("probe")  # the first compares what runs; the battery's requests come after it
    host.ssh(act, timeout=60)
    run = started.end()
    assert run.code == 5, run.err
    [death] = [event for event in started.read() if event["event"] == "died"]
    assert death["why"] in run.err
    assert death["lines"]
    last = operator.ddops("history", "--host", host.name, "--json").json["hosts"][0]["entries"][-1]
    assert (last["kind"], last["verdict"]["kind"]) == ("failed", "crashed")
    assert last["extra"].get("environment", False) is blames_host
    host.ssh(f"systemctl start {UNIT}", timeout=60)
    assert operator.ddops("wait", "--host", host.name).code == 0
    assert operator.ddops("verify", "--host", host.name).code == 0
    operator.assert_proven(host, 8)


# ---------------------------------------------------------------- the controller dies, at every boundary
STEPS = ["arm the guard", "stage the trial", "switch", "ready", "prove", "confirm"]


@pytest.mark.parametrize("step", STEPS)
def test_controller_killed_at_any_step_the_host_settles_by_itself(operator: Operator, host: Host, step: str) -> None:
    started = operator.start("reconfig", "--budget", "12", "--host", host.name)
    started.wait_for("step.started", step=step)
    started.kill()
    run = operator.ddops("resume", "--host", host.name)
    assert run.code in (0, 4), run.err
    budget = running_budget(host)
    assert budget in (8, 12)
    assert budget == 8 or step == "confirm", "only a confirmation that was claimed is completed forward"
    operator.assert_proven(host, budget)


# ---------------------------------------------------------------- the host and the network
def test_a_reboot_in_mid_trial_undoes_it(operator: Operator, host: Host) -> None:
    started = operator.start("reconfig", "--budget", "12", "--host", host.name)
    started.wait_for("step.started", step="prove")
    host.reboot()
    run = started.end()
    assert run.code in (4, 6), run.err
    host.wait_ssh(60)
    operator.ddops("resume", "--host", host.name)
    operator.assert_proven(host, 8)


def test_a_power_cut_in_mid_trial_undoes_it(operator: Operator, host: Host) -> None:
    started = operator.start("reconfig", "--budget", "12", "--host", host.name)
    started.wait_for("step.started", step="ready")
    host.power_cut()
    host.power_on()
    host.wait_ssh(60)
    run = started.end()
    assert run.code in (4, 6), run.err
    operator.ddops("resume", "--host", host.name)
    operator.assert_proven(host, 8)


def test_a_change_that_a_power_cut_took_back_is_never_reported_as_a_success(operator: Operator, host: Host) -> None:
    started = operator.start("reconfig", "--budget", "12", "--host", host.name)
    started.wait_for("step.started", step="prove")
    started.kill()
    host.power_cut()
    host.power_on()
    run = operator.ddops("resume", "--host", host.name)
    assert run.code == 4, run.err
    operator.assert_proven(host, 8)
    assert operator.ddops("resume", "--host", host.name).code == 0, "said once, it is done with"


def test_a_power_cut_right_after_the_promotion_keeps_the_change_and_proves_its_new_start(
    operator: Operator, host: Host
) -> None:
    started = operator.start("reconfig", "--budget", "12", "--host", host.name)
    started.wait_for("step.started", step="prove")
    after = '    : | put "$LIVE/trial/promoted"'
    stuck = commands.script().decode().replace(after, f"    sleep 60\n{after}")
    host.write(f"/run/ddops/{UNIT}/ddops-host", stuck)  # the copy that this trial's workers run
    started.wait_for("step.started", step="confirm")
    give_up = time.monotonic() + 20
    while "budget 12" not in host.read(f"/etc/systemd/system/{UNIT}") and time.monotonic() < give_up:
        time.sleep(0.1)
    host.power_cut()
    host.power_on()
    run = started.end()
    assert run.code == 0, run.err
    operator.assert_proven(host, 12)


def test_a_network_cut_longer_than_the_guard_undoes_the_trial(operator: Operator, host: Host) -> None:
    started = operator.start("reconfig", "--budget", "12", "--host", host.name)
    started.wait_for("step.started", step="prove")
    host.cut()
    run = started.end()
    host.restore()
    assert run.code == 6, run.err
    assert operator.ddops("resume", "--host", host.name).code in (0, 4)
    operator.assert_proven(host, 8)


@pytest.mark.parametrize("step", ["switch", "ready", "prove"])
def test_a_network_cut_shorter_than_the_guard_is_ridden_out(operator: Operator, host: Host, step: str) -> None:
    operator.write(guard=60)
    started = operator.start("reconfig", "--budget", "12", "--host", host.name)
    started.wait_for("step.started", step=step)
    host.cut()
    time.sleep(8)
    host.restore()
    run = started.end()
    assert run.code == 0, run.err
    operator.assert_proven(host, 12)


# ---------------------------------------------------------------- the operator
def test_ctrl_c_once_goes_back_to_a_proven_state(operator: Operator, host: Host) -> None:
    started = operator.start("reconfig", "--budget", "12", "--host", host.name)
    started.wait_for("step.started", step="prove")
    started.interrupt()
    run = started.end()
    assert run.code == 130, run.err
    operator.assert_proven(host, 8)


def test_ctrl_c_twice_leaves_and_says_when_the_host_undoes(operator: Operator, host: Host) -> None:
    started = operator.start("reconfig", "--budget", "12", "--host", host.name)
    started.wait_for("step.started", step="prove")
    started.interrupt()
    started.wait_for("step.started", step="undo")
    started.interrupt()
    run = started.end()
    assert run.code == 130, run.err
    assert "by itself" in run.err + run.out
    assert operator.ddops("resume", "--host", host.name).code in (0, 4)
    operator.assert_proven(host, 8)


@contextlib.contextmanager
def hang_ups(action: signal.Handlers) -> Iterator[None]:
    """What is started meanwhile takes SIGHUP so, whatever these tests were started under."""
    before = signal.signal(signal.SIGHUP, action)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_closed_terminal_goes_back_to_a_proven_state(operator: Operator, host: Host) -> None:
    keyboard, terminal = pty.openpty()
    with hang_ups(signal.SIG_DFL):
        started = operator.start("reconfig", "--budget", "12", "--host", host.name, "--yes", terminal=terminal)
    os.close(terminal)
    with reading(keyboard):
        started.wait_for("step.started", step="prove")
    os.close(keyboard)  # from here on there is nothing to write to, and the kernel sends SIGHUP
    run = started.end()
    assert run.code == 129
    assert started.read()[-1]["exit"] == 129
    operator.assert_proven(host, 8)


def test_a_hang_up_counts_once_and_under_nohup_not_at_all(operator: Operator, host: Host) -> None:
    with hang_ups(signal.SIG_DFL):
        started = operator.start("reconfig", "--budget", "12", "--host", host.name)
    started.wait_for("step.started", step="prove")
    for _ in range(3):
        started.child.send_signal(signal.SIGHUP)
        time.sleep(0.15)
    run = started.end()
    assert run.code == 129, run.err
    operator.assert_proven(host, 8)
    with hang_ups(signal.SIG_IGN):
        started = operator.start("reconfig", "--budget", "12", "--host", host.name)
    started.wait_for("step.started", step="prove")
    started.child.send_signal(signal.SIGHUP)
    run = started.end()
    assert run.code == 0, run.err
    operator.assert_proven(host, 12)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_that_keep_coming_end_in_one_object_and_never_in_a_traceback(
    operator: Operator, host: Host, number: signal.Signals
) -> None:
    started = operator.start("reconfig", "--budget", "12", "--host", host.name, "--json")
    started.wait_for("step.started", step="prove")
    for _ in range(3):
        started.child.send_signal(number)
        time.sleep(0.15)
    run = started.end()
    assert run.code == 128 + number
    assert "Traceback" not in run.err
    assert json.loads(run.out)["hosts"][0]["result"] == "interrupted"
    assert operator.ddops("resume", "--host", host.name).code == 4
    operator.assert_proven(host, 8)


def test_a_frozen_controller_finds_out_and_confirms_nothing(operator: Operator, host: Host) -> None:
    operator.write(guard=6)
    started = operator.start("reconfig", "--budget", "12", "--host", host.name)
    started.wait_for("step.started", step="prove")
    started.child.send_signal(signal.SIGSTOP)
    time.sleep(9)
    started.child.send_signal(signal.SIGCONT)
    run = started.end()
    assert run.code == 4, run.err
    operator.assert_proven(host, 8)


def test_a_frozen_controller_that_another_run_has_overtaken_leaves_it_alone(operator: Operator, host: Host) -> None:
    operator.write(guard=6)
    first = operator.start("reconfig", "--budget", "12", "--host", host.name)
    first.wait_for("step.started", step="prove")
    first.child.send_signal(signal.SIGSTOP)
    time.sleep(9)
    second = operator.start("reconfig", "--budget", "10", "--host", host.name)
    second.wait_for("step.started", step="switch")
    first.child.send_signal(signal.SIGCONT)
    run = first.end()
    assert run.code == 6, run.err
    assert "taken back by the host" in run.err
    assert second.end().code == 0
    operator.assert_proven(host, 10)


# ---------------------------------------------------------------- logins of all kinds
def test_a_plain_login_with_one_sudo_line_does_the_whole_job(operator: Operator, host: Host) -> None:
    operator.write(user="deploy")
    assert operator.ddops("reconfig", "--budget", "12", "--host", host.name).code == 0
    run = operator.ddops("rollback", "--host", host.name)
    assert run.code == 0, run.err
    operator.write()
    operator.assert_proven(host, 8)


@contextlib.contextmanager
def sshd(host: Host, *lines: str):  # type: ignore[no-untyped-def]
    """These lines stand first in sshd_config, and so win."""
    kept = host.read("/etc/ssh/sshd_config")
    host.write("/etc/ssh/sshd_config", "".join(f"{line}\n" for line in lines) + kept)
    host.console("systemctl restart ssh")
    host.wait_ssh()
    yield
    host.write("/etc/ssh/sshd_config", kept)
    host.console("systemctl restart ssh")
    host.wait_ssh()


@pytest.mark.parametrize("lines", [("AllowTcpForwarding no",), ("MaxSessions 1",)])
def test_a_narrow_sshd_does_the_whole_job(operator: Operator, host: Host, lines: tuple[str, ...]) -> None:
    with sshd(host, *lines):
        run = operator.ddops("reconfig", "--budget", "12", "--host", host.name)
    assert run.code == 0, run.err
    operator.assert_proven(host, 12)


def test_a_host_without_python_of_its_own_does_the_whole_job_with_the_engines(operator: Operator, host: Host) -> None:
    host.sh("mkdir /root/away && mv /usr/bin/python3* /root/away/")
    with sshd(host, "AllowTcpForwarding no"):  # HTTP then goes through a program on the host
        run = operator.ddops("reconfig", "--budget", "12", "--host", host.name)
    host.sh("mv /root/away/* /usr/bin/ && rmdir /root/away")
    assert run.code == 0, run.err
    operator.assert_proven(host, 12)


def test_an_sshd_too_narrow_for_a_proof_is_refused_before_the_switch(operator: Operator, host: Host) -> None:
    before = operator.status(host)["invocation"]
    with sshd(host, "AllowTcpForwarding no", "MaxSessions 1"):
        run = operator.ddops("reconfig", "--budget", "12", "--host", host.name)
    assert run.code == 3, run.err
    assert "MaxSessions" in run.err
    assert operator.status(host)["invocation"] == before


# ---------------------------------------------------------------- the other commands
def test_rollback_goes_to_the_previous_verified_and_never_back_to_the_revoked(operator: Operator, host: Host) -> None:
    assert operator.ddops("reconfig", "--budget", "12", "--host", host.name).code == 0
    run = operator.ddops("rollback", "--host", host.name)
    assert run.code == 0, run.err
    operator.assert_proven(host, 8)
    kinds = [entry["kind"] for entry in operator.ddops("history", "--host", host.name, "--json").json["hosts"][0]["entries"]]
    assert "revoked" in kinds


def test_rollback_to_a_digest_twice_changes_nothing_the_second_time_and_proves_what_is_not_proven(
    operator: Operator, host: Host
) -> None:
    digest = operator.status(host)["digest"]
    assert operator.ddops("reconfig", "--budget", "12", "--host", host.name).code == 0
    words = ("rollback", "--to", digest[:12], "--host", host.name, "--json")
    first, second = operator.ddops(*words), operator.ddops(*words)
    assert [run.json["hosts"][0]["result"] for run in (first, second)] == ["applied", "unchanged"]
    assert (first.code, second.code) == (0, 0)
    host.ssh(f"systemctl restart {UNIT}", timeout=60)
    invocation = operator.status(host)["invocation"]
    third = operator.ddops(*words)
    assert third.json["hosts"][0]["result"] == "verified", third.err
    operator.assert_proven(host, 8)
    assert operator.status(host)["invocation"] == invocation


def test_a_restart_voids_the_verdict_and_verify_renews_it(operator: Operator, host: Host) -> None:
    host.ssh(f"systemctl restart {UNIT}", timeout=60)
    assert not operator.status(host)["verified"]
    invocation = operator.status(host)["invocation"]
    run = operator.ddops("verify", "--host", host.name)
    assert run.code == 0, run.err
    operator.assert_proven(host, 8)
    assert operator.status(host)["invocation"] == invocation, "verify never restarts"


def test_with_nowhere_to_go_back_to_a_dead_engine_is_started_again_as_the_hint_says(operator: Operator, host: Host) -> None:
    host.sh(f"rm -rf /var/lib/ddops/{UNIT}")
    assert operator.ddops("verify", "--host", host.name).code == 0
    host.sh(f"systemctl stop {UNIT}", timeout=60)
    refused = operator.ddops("rollback", "--host", host.name)
    assert refused.code == 3, refused.err
    hint = refused.err.partition("hint:")[2]
    words = hint[hint.index("ddops reconfig") :].split()[1:6]
    run = operator.ddops(*words)
    assert run.code == 0, run.err
    operator.assert_proven(host, 8)


def test_what_was_restored_and_is_dead_needs_a_person_and_resume_tells_of_no_interruption(
    operator: Operator, host: Host
) -> None:
    operator.write(faults=("garbage,above-budget=16",))
    started = operator.start("reconfig", "--budget", "24", "--host", host.name, "--retry-known-bad")
    started.wait_for("step.started", step="prove the restored configuration")
    host.sh(f"systemctl stop {UNIT}", timeout=60)
    run = started.end()
    assert run.code == 5, run.err
    operator.write()
    host.sh(f"systemctl start {UNIT}", timeout=60)
    resumed = operator.ddops("resume", "--host", host.name)
    assert resumed.code == 0, resumed.err
    assert "did not survive" not in resumed.err + resumed.out
    operator.assert_proven(host, 8)


def test_a_change_undone_before_the_engine_was_touched_leaves_nothing_to_resume(operator: Operator, host: Host) -> None:
    started = operator.start("reconfig", "--budget", "12", "--host", host.name)
    started.wait_for("step.started", step="stage the trial")
    started.interrupt()
    run = started.end()
    assert run.code == 130, run.err
    resumed = operator.ddops("resume", "--host", host.name)
    assert resumed.code == 0, resumed.err
    operator.assert_proven(host, 8)
