"""Commands over SSH, against a real sshd: what comes back, and what happens when things break."""

from __future__ import annotations

import hashlib
import io
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ddops.errors import ConnectionLost, Exit, Refused, RemoteFailed, RemoteTimeout, Unreachable
from ddops.hosts import OutputTooLarge, Remote, Script, connect

NOTICED_SECONDS = 9.0  # 5 s as stated, and what a busy test machine adds


@pytest.fixture(scope="module")
def remote(shared_sshd: Any) -> Iterator[Remote]:
    with connect(shared_sshd.host()) as made:
        yield made


# ---------------------------------------------------------------- commands and what comes back
words = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=40)


@given(st.lists(words, min_size=1, max_size=20))
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_argument_arrives_as_it_was_given(remote: Remote, args: list[str]) -> None:
    result = remote.run(["printf", "%s\\0", *args], deadline=30)
    assert result.stdout == b"".join(arg.encode() + b"\0" for arg in args)


def test_a_script_gets_its_arguments_and_keeps_stdin_for_data(remote: Remote) -> None:
    result = remote.run(Script('cat; echo "$1|$2" >&2; exit 3', ("a b", "$(id)")), stdin=b"data\xff", deadline=30)
    assert (result.status, result.stdout, result.error_text) == (3, b"data\xff", "a b|$(id)\n")


def test_the_locale_is_c(remote: Remote) -> None:
    assert remote.run(Script('echo "$LC_ALL"'), deadline=30).text == "C\n"


def test_a_command_that_fails_is_a_result_and_require_names_it(remote: Remote) -> None:
    result = remote.run(Script("echo first >&2; echo last words >&2; exit 7"), deadline=30)
    assert result.status == 7
    with pytest.raises(RemoteFailed, match="reading the unit failed with status 7: last words"):
        result.require("reading the unit")


def test_a_command_killed_by_a_signal_is_a_result_too(remote: Remote) -> None:
    assert remote.run(Script("kill -9 $$"), deadline=30).status == 137
    assert remote.run(Script("kill -15 $$"), deadline=30).status == 143
    assert remote.alive()


def test_large_input_and_output_on_both_streams_do_not_block_each_other(remote: Remote) -> None:
    data = os.urandom(1 << 20) * 6
    result = remote.run(Script("tee /dev/stderr"), stdin=data, deadline=120)
    assert hashlib.sha256(result.stdout).digest() == hashlib.sha256(data).digest()
    assert result.stderr == result.stdout


def test_input_nobody_reads_does_not_hang(remote: Remote) -> None:
    assert remote.run(["true"], stdin=b"x" * 10_000_000, deadline=60).status == 0


def test_bytes_that_are_not_text_come_back_unchanged(remote: Remote) -> None:
    data = bytes(range(256)) * 10
    result = remote.run(["cat"], stdin=data, deadline=30)
    assert result.stdout == data
    assert "\ufffd" in result.text


def test_output_without_end_is_cut_off(remote: Remote) -> None:
    with pytest.raises(OutputTooLarge, match="wrote more than"):
        remote.run(["yes"], deadline=60)
    with pytest.raises(OutputTooLarge, match="more than 1000 bytes"):
        remote.run(Script("yes >&2"), deadline=60, output_limit=1000)
    assert remote.run(["echo", "still here"], deadline=30).text == "still here\n"


@pytest.mark.parametrize("script", ["sleep 60", "while :; do echo x; sleep 0.05; done", "exec >&- 2>&-; sleep 60"])
def test_a_command_that_does_not_end_is_given_up_in_time(remote: Remote, script: str) -> None:
    begun = time.monotonic()
    with pytest.raises(RemoteTimeout, match="did not end in time") as caught:
        remote.run(Script(script), deadline=1.0)
    assert time.monotonic() - begun < 5
    assert "may still be running" in str(caught.value)
    assert caught.value.exit is Exit.UNKNOWN


def test_a_fast_endless_writer_is_given_up_in_time_as_well(remote: Remote) -> None:
    begun = time.monotonic()
    with pytest.raises(RemoteTimeout):
        remote.run(["yes"], deadline=0.5, output_limit=1 << 40)
    assert time.monotonic() - begun < 5


def test_a_command_may_close_its_output_before_it_ends(remote: Remote) -> None:
    assert remote.run(Script("exec >&- 2>&-; sleep 0.3; exit 4"), deadline=30).status == 4


def test_output_held_open_by_a_child_is_not_taken_as_complete(remote: Remote) -> None:
    with pytest.raises(RemoteTimeout):
        remote.run(Script("echo early; sleep 5 & exit 0"), deadline=1.5)


def test_what_the_login_shell_prints_by_itself_is_not_the_command_s_output(
    make_sshd: Callable[..., Any], tmp_path: Path
) -> None:
    """bash reads ~/.bashrc under sshd, whoever the command is for."""
    (tmp_path / ".bashrc").write_text("echo Welcome; printf 'no newline'\n")
    with connect(make_sshd(f"SetEnv HOME={tmp_path}").host()) as remote:
        assert remote.run(["echo", "mine"], deadline=30).stdout == b"mine\n"
        assert list(remote.stream_lines(["seq", "2"], deadline=30)) == ["1", "2"]


def test_a_login_that_runs_no_commands_is_told_from_a_failed_command(make_sshd: Callable[..., Any]) -> None:
    server = make_sshd("ForceCommand echo This account is currently not available.; exit 1")
    with connect(server.host()) as remote:
        with pytest.raises(RemoteFailed, match=r"does not run commands: .*not available") as caught:
            remote.run(["true"], deadline=30)
        assert "was not started" in caught.value.means


@pytest.mark.parametrize("command", [[], [""], ["echo", "a\0b"], ["echo", "x" * 140_000]])
def test_a_command_that_cannot_travel_is_refused_here(remote: Remote, command: list[str]) -> None:
    with pytest.raises(ValueError, match="command"):
        remote.run(command, deadline=5)


def test_a_string_is_no_command(remote: Remote) -> None:
    with pytest.raises(TypeError, match="list of words"):
        remote.run("rm -rf x", deadline=5)


# ---------------------------------------------------------------- uploads and watches
def test_a_large_upload_reports_progress_and_arrives_whole(remote: Remote) -> None:
    data = os.urandom(1 << 20) * 40
    seen: list[int] = []
    result = remote.put_stream(["sha256sum"], io.BytesIO(data), deadline=120, progress=seen.append)
    assert result.text.split()[0] == hashlib.sha256(data).hexdigest()
    assert seen == sorted(seen)
    assert seen[-1] == len(data)


def test_a_source_that_cannot_be_read_raises_its_own_error(remote: Remote) -> None:
    class Broken(io.RawIOBase):
        def read(self, size: int = -1) -> bytes:
            raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        remote.put_stream(["cat"], Broken(), deadline=30)  # type: ignore[arg-type]


def test_lines_come_while_the_command_runs(remote: Remote) -> None:
    begun = time.monotonic()
    lines = remote.stream_lines(Script("echo one; sleep 3; echo two; printf three"), deadline=30)
    assert next(lines) == "one"
    assert time.monotonic() - begun < 2.5
    assert list(lines) == ["two", "three"]


def test_a_watch_can_be_left_early(remote: Remote) -> None:
    lines = remote.stream_lines(Script("while :; do echo tick; sleep 0.05; done"), deadline=30)
    assert next(lines) == "tick"
    begun = time.monotonic()
    lines.close()  # type: ignore[attr-defined]
    assert time.monotonic() - begun < 2


def test_a_watch_ends_with_an_error_when_its_command_does(remote: Remote) -> None:
    lines = remote.stream_lines(Script("echo one; echo no such unit >&2; exit 5"), deadline=30)
    assert next(lines) == "one"
    with pytest.raises(RemoteFailed, match="status 5: no such unit"):
        next(lines)


def test_a_watch_has_a_deadline(remote: Remote) -> None:
    with pytest.raises(RemoteTimeout):
        list(remote.stream_lines(["sleep", "60"], deadline=0.5))


def test_a_line_without_end_does_not_fill_the_memory(remote: Remote) -> None:
    pieces = list(remote.stream_lines(Script("head -c 1000000 /dev/zero | tr '\\0' x"), deadline=60))
    assert sum(map(len, pieces)) == 1_000_000
    assert max(map(len, pieces)) < 200_000


# ---------------------------------------------------------------- many at once
def test_more_commands_than_sessions_allowed_all_run(remote: Remote) -> None:
    with ThreadPoolExecutor(30) as pool:
        results = list(pool.map(lambda n: remote.run(["echo", str(n)], deadline=120).text, range(30)))
    assert results == [f"{n}\n" for n in range(30)]


def test_no_free_session_is_said_and_nothing_was_started(make_sshd: Callable[..., Any]) -> None:
    server = make_sshd("MaxSessions 1")
    with connect(server.host()) as remote:
        watch = remote.stream_lines(Script("echo up; sleep 60"), deadline=60)
        assert next(watch) == "up"
        with pytest.raises(RemoteTimeout, match="opens no further session") as caught:
            remote.run(["touch", str(server.folder / "ran")], deadline=1.0)
        assert "was not started" in caught.value.means
        assert not (server.folder / "ran").exists()


# ---------------------------------------------------------------- a host that goes away
def test_a_host_frozen_under_a_command_is_noticed_and_a_new_connection_works(sshd: Any) -> None:
    with connect(sshd.host()) as remote:
        threading.Timer(0.5, sshd.freeze).start()
        begun = time.monotonic()
        with pytest.raises(ConnectionLost, match="answered nothing for 5 s"):
            remote.run(["sleep", "300"], deadline=300)
        assert time.monotonic() - begun < 0.5 + NOTICED_SECONDS
        assert not remote.alive(1.0)
        sshd.thaw()
        remote.reconnect(deadline=30)
        assert remote.run(["echo", "back"], deadline=30).text == "back\n"


def test_a_host_frozen_before_a_command_costs_no_more_than_the_deadline(sshd: Any) -> None:
    with connect(sshd.host()) as remote:
        sshd.freeze()
        begun = time.monotonic()
        with pytest.raises(Unreachable):
            remote.run(["true"], deadline=2.0)
        assert time.monotonic() - begun < 4
        assert not remote.alive(0.5)


def test_a_host_frozen_during_an_upload_is_noticed(sshd: Any) -> None:
    class Endless(io.RawIOBase):
        def read(self, size: int = -1) -> bytes:
            return b"x" * size

    with connect(sshd.host()) as remote:
        threading.Timer(1.0, sshd.freeze).start()
        begun = time.monotonic()
        with pytest.raises(ConnectionLost):
            remote.put_stream(Script("cat >/dev/null"), Endless(), deadline=300)  # type: ignore[arg-type]
        assert time.monotonic() - begun < 1 + 2 * NOTICED_SECONDS
        begun = time.monotonic()
    assert time.monotonic() - begun < 5  # close does not wait for a dead peer


def test_a_quiet_command_on_a_healthy_host_is_left_alone(remote: Remote) -> None:
    assert remote.run(["sleep", "8"], deadline=60).status == 0


def test_a_lost_connection_is_never_a_result_and_nothing_is_repeated(sshd: Any) -> None:
    ran = sshd.folder / "ran"
    with connect(sshd.host()) as remote:
        threading.Timer(1.0, sshd.kill_sessions).start()
        with pytest.raises(ConnectionLost) as caught:
            remote.run(Script('echo x >> "$1"; sleep 60', (str(ran),)), deadline=60)
        assert caught.value.exit is Exit.UNKNOWN
        assert "may have finished" in caught.value.means
        assert not remote.alive(1.0)
        with pytest.raises(ConnectionLost):
            remote.run(["true"], deadline=5)
        remote.reconnect(deadline=30)
        assert remote.run(["cat", str(ran)], deadline=30).text == "x\n"


def test_every_waiting_thread_is_told_of_the_loss(sshd: Any) -> None:
    def wait(_: int) -> type[BaseException]:
        try:
            remote.run(["sleep", "60"], deadline=60)
        except Unreachable as exc:
            return type(exc)
        return AssertionError

    with connect(sshd.host()) as remote, ThreadPoolExecutor(5) as pool:
        waits = pool.map(wait, range(5))
        time.sleep(1.5)
        sshd.kill_sessions()
        assert set(waits) == {ConnectionLost}


def test_reconnecting_waits_for_the_host_and_gives_up_in_time(sshd: Any, make_sshd: Callable[..., Any]) -> None:
    with connect(sshd.host(connect_timeout_seconds=2)) as remote:
        sshd.freeze()
        begun = time.monotonic()
        with pytest.raises(Unreachable):
            remote.reconnect(deadline=3.0)
        assert time.monotonic() - begun < 8
        with pytest.raises(ConnectionLost):
            remote.run(["true"], deadline=5)
        threading.Timer(1.0, sshd.thaw).start()
        remote.reconnect(deadline=30)
        assert remote.alive()


def test_a_closed_remote_says_so(shared_sshd: Any) -> None:
    remote = connect(shared_sshd.host())
    remote.close()
    remote.close()
    assert not remote.alive()
    for use in (lambda: remote.run(["true"], deadline=5), lambda: remote.reconnect(5)):
        with pytest.raises(ConnectionLost):
            use()


def test_nothing_is_left_behind_after_close(shared_sshd: Any) -> None:
    me = psutil.Process()
    with connect(shared_sshd.host()) as remote:
        remote.run(["true"], deadline=30)
    threads, files = set(threading.enumerate()), me.num_fds()
    for _ in range(3):
        with connect(shared_sshd.host()) as remote:
            remote.run(["cat"], stdin=b"x", deadline=30)
            with pytest.raises(RemoteTimeout):
                remote.run(["sleep", "5"], deadline=0.2)
            next(remote.stream_lines(Script("echo x; sleep 5"), deadline=10))
    assert set(threading.enumerate()) <= threads
    assert me.num_fds() <= files


# ---------------------------------------------------------------- the operator
def test_ctrl_c_comes_through_at_once_and_the_connection_stays_usable(remote: Remote) -> None:
    threading.Timer(0.7, os.kill, (os.getpid(), signal.SIGINT)).start()
    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        remote.run(["sleep", "30"], deadline=60)
    assert time.monotonic() - begun < 3
    assert remote.run(["echo", "on"], deadline=30).text == "on\n"


def test_a_program_stopped_by_ctrl_c_ends_without_hanging_or_chatter(shared_sshd: Any, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        textwrap.dedent(f"""
        from types import SimpleNamespace as N
        from ddops.hosts import connect
        host = N(name="h", address="127.0.0.1", ssh=N(**{vars(shared_sshd.host().ssh)!r}))
        try:
            with connect(host) as remote:
                print("up", flush=True)
                remote.run(["sleep", "60"], deadline=60)
        except KeyboardInterrupt:
            print("stopped", flush=True)
        """)
    )
    running = subprocess.Popen([sys.executable, str(program)], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert running.stdout is not None
    assert running.stdout.readline() == b"up\n"
    time.sleep(0.7)
    running.send_signal(signal.SIGINT)
    out, err = running.communicate(timeout=10)
    assert (out, err, running.returncode) == (b"stopped\n", b"", 0)


# ---------------------------------------------------------------- sudo
SUDO = """#!/bin/sh
[ "$1" = -n ] && [ "$2" = -- ] || exit 99
shift 2
case "$1" in
  */allowed) shift; echo "as root: $*"; exit 0;;
  */failing) echo "sudo: cannot be the reason" >&2; exit 1;;
esac
%s
"""


@pytest.fixture
def with_sudo(make_sshd: Callable[..., Any], tmp_path: Path) -> Iterator[Callable[[str], Remote]]:
    """A login that is not root, on a host whose sudo behaves as told."""
    opened: list[Remote] = []

    def make(behaviour: str) -> Remote:
        tools = tmp_path / "tools"
        tools.mkdir()
        (tools / "sudo").write_text(SUDO % behaviour)
        (tools / "sudo").chmod(0o755)
        remote = connect(make_sshd(f"SetEnv PATH={tools}:/usr/bin:/bin").host())
        remote.target = replace(remote.target, user="ops")
        opened.append(remote)
        return remote

    yield make
    for remote in opened:
        remote.close()


@pytest.mark.parametrize(
    "behaviour",
    [
        'echo "sudo: a password is required" >&2; exit 1',
        'echo "sudo: a terminal is required to read the password; use -S" >&2; exit 1',
        'echo "Sorry, user ops is not allowed to execute this as root on gpu-01." >&2; exit 1',
        'echo "ops is not in the sudoers file." >&2; exit 1',
    ],
)
def test_a_sudo_that_wants_more_is_refused_with_the_line_that_is_needed(
    with_sudo: Callable[[str], Remote], behaviour: str
) -> None:
    with pytest.raises(Refused) as caught:
        with_sudo(behaviour).run(["/usr/local/lib/ddops/ddops-host", "status"], deadline=30, sudo=True)
    assert caught.value.exit is Exit.REFUSED
    assert "ops ALL=(root) NOPASSWD: /usr/local/lib/ddops/ddops-host" in caught.value.hint


def test_a_sudo_that_wants_a_terminal_is_refused_with_the_line_that_lets_it_be(
    with_sudo: Callable[[str], Remote],
) -> None:
    remote = with_sudo('echo "sudo: sorry, you must have a tty to run sudo" >&2; exit 1')
    with pytest.raises(Refused, match="without a terminal") as caught:
        remote.run(["/usr/local/lib/ddops/ddops-host", "status"], deadline=30, sudo=True)
    assert "Defaults:ops !requiretty" in caught.value.hint


def test_sudo_runs_the_command_and_its_own_failure_stays_its_own(with_sudo: Callable[[str], Remote]) -> None:
    remote = with_sudo("exit 98")
    assert remote.run(["/x/allowed", "a b"], deadline=30, sudo=True).text == "as root: a b\n"
    assert remote.run(["/x/failing"], deadline=30, sudo=True).status == 1


@pytest.mark.skipif(os.getuid() != 0, reason="as a plain user, every other test here logs in as one")
def test_a_plain_user_logs_in_and_a_host_without_sudo_says_so(make_sshd: Callable[..., Any]) -> None:
    with connect(make_sshd(user="ops").host()) as remote:
        assert remote.run(["id", "-un"], deadline=30).text == "ops\n"
        assert remote.run(["cat", "/etc/shadow"], deadline=30).status != 0
        with pytest.raises(Refused, match="sudo"):  # the real one, or none
            remote.run(["/usr/local/lib/ddops/ddops-host"], deadline=30, sudo=True)
    with tempfile.TemporaryDirectory() as tools:
        Path(tools).chmod(0o755)
        (Path(tools) / "env").symlink_to("/usr/bin/env")
        bare = make_sshd(f"SetEnv PATH={tools}", user="ops").host()
        with connect(bare) as remote, pytest.raises(Refused, match="sudo is not installed"):
            remote.run(["/usr/local/lib/ddops/ddops-host"], deadline=30, sudo=True)


def test_root_needs_no_sudo(shared_sshd: Any) -> None:
    with connect(shared_sshd.host()) as remote:
        remote.target = replace(remote.target, user="root")
        assert remote.run(["echo", "direct"], deadline=30, sudo=True).text == "direct\n"
