"""Logging in: whose key is trusted, which keys are offered, what an ssh_config may say, how it fails."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddops.errors import Exit, HostKeyRejected, Refused, Unreachable
from ddops.hosts import LoginRejected, connect
from ddops.hosts.known_hosts import Trust, fingerprint, host_names, judge, parse


def make_key(path: Path, kind: str = "ed25519", passphrase: str = "") -> Path:
    command = ["ssh-keygen", "-q", "-t", kind, "-N", passphrase, "-f", str(path)]
    subprocess.run(command, check=True, timeout=30, stdin=subprocess.DEVNULL)
    return path


def public(path: Path) -> str:
    return " ".join(Path(f"{path}.pub").read_text().split()[:2])


def rejected(host: Any) -> HostKeyRejected:
    with pytest.raises(HostKeyRejected) as caught:
        connect(host)
    assert caught.value.exit is Exit.HOST_KEY
    return caught.value


# ---------------------------------------------------------------- host keys
def test_an_unknown_key_is_refused_with_its_fingerprint_and_the_commands(shared_sshd: Any, tmp_path: Path) -> None:
    missing = tmp_path / "none"
    problem = rejected(shared_sshd.host(known_hosts=(str(missing),)))
    shown = subprocess.run(
        ["ssh-keygen", "-lf", f"{shared_sshd.host_keys[0]}.pub"], capture_output=True, text=True, check=True
    ).stdout.split()[1]
    assert shown in problem.what
    assert f"ssh-keyscan -p {shared_sshd.port} -t ed25519 127.0.0.1 >> {missing}" in problem.hint
    assert not missing.exists()  # nothing is ever added


def test_the_command_in_the_hint_makes_the_host_known(shared_sshd: Any, tmp_path: Path) -> None:
    known = tmp_path / "known_hosts"
    host = shared_sshd.host(known_hosts=(str(known),))
    command = rejected(host).hint.split("then: ", 1)[1]
    subprocess.run(command, shell=True, check=True, timeout=30, stderr=subprocess.DEVNULL)
    connect(host).close()


def test_a_changed_key_is_refused_and_the_commands_in_the_hint_mend_it(shared_sshd: Any, tmp_path: Path) -> None:
    known = tmp_path / "known_hosts"
    known.write_text(f"# comment\n[127.0.0.1]:{shared_sshd.port} {public(make_key(tmp_path / 'other'))}\n")
    host = shared_sshd.host(known_hosts=(str(known),))
    problem = rejected(host)
    assert "changed" in problem.what
    assert f"{known}:2" in problem.what
    remove = problem.hint.split("anew: ", 1)[1].split(";", 1)[0]
    scan = problem.hint.split("then: ", 1)[1]
    for command in (remove, scan):
        subprocess.run(command, shell=True, check=True, timeout=30, capture_output=True)
    connect(host).close()


def test_a_changed_key_is_not_tried_again(sshd: Any, tmp_path: Path) -> None:
    with connect(sshd.host()) as remote:
        sshd.known_hosts.write_text(f"[127.0.0.1]:{sshd.port} {public(make_key(tmp_path / 'other'))}\n")
        begun = time.monotonic()
        with pytest.raises(HostKeyRejected):
            remote.reconnect(deadline=30)
        assert time.monotonic() - begun < 5


def test_a_revoked_key_is_refused_though_it_is_known_as_well(shared_sshd: Any, tmp_path: Path) -> None:
    known = tmp_path / "known_hosts"
    line = shared_sshd.known_hosts.read_text()
    known.write_text(line + f"@revoked * {public(shared_sshd.host_keys[0])}\n")
    assert "revoked host key" in rejected(shared_sshd.host(known_hosts=(str(known),))).what


def test_a_certificate_authority_is_said_to_be_unsupported(shared_sshd: Any, tmp_path: Path) -> None:
    known = tmp_path / "known_hosts"
    known.write_text(f"@cert-authority * {public(make_key(tmp_path / 'ca'))}\n")
    assert "@cert-authority" in rejected(shared_sshd.host(known_hosts=(str(known),))).what
    known.write_text(known.read_text() + shared_sshd.known_hosts.read_text())
    connect(shared_sshd.host(known_hosts=(str(known),))).close()


def test_hashed_names_and_several_files_are_read(shared_sshd: Any, tmp_path: Path) -> None:
    hashed = tmp_path / "hashed"
    shutil.copy(shared_sshd.known_hosts, hashed)
    subprocess.run(["ssh-keygen", "-H", "-f", str(hashed)], check=True, capture_output=True)
    assert "127.0.0.1" not in hashed.read_text()
    connect(shared_sshd.host(known_hosts=(str(tmp_path / "absent"), str(hashed)))).close()


def test_the_key_of_another_port_does_not_count_as_another_host_s(shared_sshd: Any, tmp_path: Path) -> None:
    known = tmp_path / "known_hosts"
    known.write_text(f"[127.0.0.1]:1 {public(shared_sshd.host_keys[0])}\n")
    assert "is not known" in rejected(shared_sshd.host(known_hosts=(str(known),))).what


def test_a_host_with_several_keys_is_asked_for_the_known_one(make_sshd: Callable[..., Any]) -> None:
    server = make_sshd(kinds=("ed25519", "ecdsa", "rsa"))
    for key in server.host_keys:
        server.known_hosts.write_text(f"[127.0.0.1]:{server.port} {public(key)}\n")
        connect(server.host()).close()


def test_a_key_of_a_type_that_is_not_on_file_is_refused(make_sshd: Callable[..., Any], tmp_path: Path) -> None:
    server = make_sshd()
    server.known_hosts.write_text(f"[127.0.0.1]:{server.port} {public(make_key(tmp_path / 'rsa', 'rsa'))}\n")
    assert "another key type only (ssh-rsa" in rejected(server.host()).what


def test_known_hosts_that_cannot_be_read_stops_before_the_login(shared_sshd: Any, tmp_path: Path) -> None:
    with pytest.raises(Refused, match="cannot be read"):
        connect(shared_sshd.host(known_hosts=(str(tmp_path),)))


def test_fingerprints_are_those_of_ssh_keygen(tmp_path: Path) -> None:
    for kind in ("ed25519", "ecdsa", "rsa"):
        key = make_key(tmp_path / kind, kind)
        (line,) = parse(f"h {public(key)}", "f")
        said = subprocess.run(["ssh-keygen", "-lf", f"{key}.pub"], capture_output=True, text=True, check=True)
        assert said.stdout.split()[1] == fingerprint(line.blob)


KEY = "AAAAC3NzaC1lZDI1NTE5AAAAIGQxBkNCqx3ObO5e9GFsvFjFqoqDLD8B0OYPYHnDLVdq"
name = st.text("abc.*?!-1", min_size=1, max_size=6)


@given(st.lists(name, min_size=1, max_size=3), st.text("abc.-1", min_size=1, max_size=6), st.booleans())
@settings(max_examples=60, deadline=None)
def test_names_match_as_they_do_for_ssh_keygen(
    tmp_path_factory: pytest.TempPathFactory, patterns: list[str], host: str, with_port: bool
) -> None:
    if any(pattern.strip("!") == "" or pattern.startswith("!!") for pattern in patterns):
        return  # not a name
    host = host.strip("-.") or "a"
    looked_up = host_names(host, 2222 if with_port else 22)[0]
    file = tmp_path_factory.mktemp("known") / "known_hosts"
    joined = ",".join(f"[{p}]:2222" if with_port and not p.startswith("!") else p for p in patterns)
    file.write_text(f"{joined} ssh-ed25519 {KEY}\n")
    found = subprocess.run(["ssh-keygen", "-F", looked_up, "-f", str(file)], capture_output=True, check=False)
    lines = parse(file.read_text(), "f")
    known = judge(lines, (looked_up,), "ssh-ed25519", lines[0].blob).trust is Trust.KNOWN
    assert known == (found.returncode == 0)


@given(st.text(max_size=200))
def test_any_text_is_a_known_hosts_file_that_trusts_nobody_by_accident(text: str) -> None:
    lines = parse(text, "f")
    assert judge(lines, ("host",), "ssh-ed25519", b"not in the text").trust is not Trust.KNOWN


# ---------------------------------------------------------------- keys offered
def test_bad_key_files_are_named_before_the_host_is_contacted(shared_sshd: Any, tmp_path: Path) -> None:
    locked = make_key(tmp_path / "locked", passphrase="open sesame")
    garbage = tmp_path / "garbage"
    garbage.write_text("not a key")
    cases = {
        tmp_path / "absent": "does not exist",
        locked: "protected by a passphrase",
        garbage: "not a private key",
        tmp_path: "cannot be read",
    }
    for path, said in cases.items():
        with pytest.raises(Refused, match=said) as caught:
            connect(shared_sshd.host(identity_file=str(path), port=1))
        assert str(path) in caught.value.what


@pytest.mark.parametrize("kind", ["rsa", "ecdsa", "ed25519"])
def test_every_common_kind_of_key_logs_in(make_sshd: Callable[..., Any], tmp_path: Path, kind: str) -> None:
    server = make_sshd()
    key = make_key(tmp_path / kind, kind)
    (server.folder / "authorized_keys").write_text(public(key))
    connect(server.host(identity_file=str(key))).close()


def test_a_rejected_login_says_what_was_offered_and_is_not_repeated(shared_sshd: Any, tmp_path: Path) -> None:
    stranger = make_key(tmp_path / "stranger")
    begun = time.monotonic()
    with pytest.raises(LoginRejected, match="accepted none of the keys") as caught:
        connect(shared_sshd.host(identity_file=str(stranger)))
    assert time.monotonic() - begun < 10
    assert str(stranger) in caught.value.means


def test_a_host_that_takes_no_keys_is_named_as_such(make_sshd: Callable[..., Any]) -> None:
    server = make_sshd("PubkeyAuthentication no", "PasswordAuthentication yes")
    with pytest.raises(LoginRejected, match="allows only password"):
        connect(server.host())


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Path], None]]:
    """A real ssh-agent; call it with a key to load."""
    address = tmp_path / "agent"
    running = subprocess.Popen(["ssh-agent", "-D", "-a", str(address)], stdout=subprocess.DEVNULL)
    while not address.exists():
        time.sleep(0.02)
    monkeypatch.setenv("SSH_AUTH_SOCK", str(address))

    def add(key: Path, passphrase: str = "") -> None:
        subprocess.run(["ssh-keygen", "-q", "-p", "-P", passphrase, "-N", "", "-f", str(key)], check=True)
        subprocess.run(["ssh-add", "-q", str(key)], check=True, stderr=subprocess.DEVNULL)
        if passphrase:
            subprocess.run(["ssh-keygen", "-q", "-p", "-P", "", "-N", passphrase, "-f", str(key)], check=True)

    yield add
    running.kill()
    running.wait(10)


def test_the_agent_is_asked_only_when_no_key_is_named(shared_sshd: Any, agent: Callable[..., None], tmp_path: Path) -> None:
    agent(shared_sshd.identity)
    connect(shared_sshd.host(identity_file=None)).close()
    with pytest.raises(LoginRejected) as caught:
        connect(shared_sshd.host(identity_file=str(make_key(tmp_path / "stranger"))))
    assert "agent key" not in caught.value.means


def test_a_protected_key_works_when_the_agent_holds_it(
    make_sshd: Callable[..., Any], agent: Callable[..., None], tmp_path: Path
) -> None:
    server = make_sshd()
    key = make_key(tmp_path / "locked", passphrase="open sesame")
    (server.folder / "authorized_keys").write_text(public(key))
    agent(key, "open sesame")
    connect(server.host(identity_file=str(key))).close()


# ---------------------------------------------------------------- ssh_config
def test_an_ssh_config_is_honoured_where_the_inventory_is_silent(shared_sshd: Any, tmp_path: Path) -> None:
    known = tmp_path / "known"
    known.write_text(f"the-alias {public(shared_sshd.host_keys[0])}\n")
    included = tmp_path / "included"
    included.write_text(f"Host gpu-*\n  HostKeyAlias the-alias\n  IdentityFile {shared_sshd.identity}\n")
    config = tmp_path / "config"
    config.write_text(
        f"Include {included}\n"
        f"Host gpu-01\n  HostName 127.0.0.1\n  Port {shared_sshd.port}\n"
        f"  UserKnownHostsFile {tmp_path / 'absent'} {known}\n"
        f"Host other\n  Port 1\n"
        f"Host *\n  User {shared_sshd.host().ssh.user}\n"
    )
    silent = {"port": 22, "identity_file": None, "known_hosts": ("~/.ssh/known_hosts",), "user": "root"}
    with connect(shared_sshd.host(address="gpu-01", config=str(config), **silent)) as remote:
        assert remote.target.alias == "the-alias"
        assert remote.target.port == shared_sshd.port


def test_what_the_inventory_says_wins_over_the_ssh_config(shared_sshd: Any, tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.write_text("Host *\n  Port 1\n  User nobody-else\n  IdentityFile /absent\n  UserKnownHostsFile /absent\n")
    host = shared_sshd.host(config=str(config))
    host.ssh.model_fields_set = {"user", "port", "identity_file", "known_hosts"}
    connect(host).close()


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("ProxyJump bastion", "ProxyJump"),
        ("ProxyCommand ssh -W %h:%p bastion", "ProxyCommand"),
        ("RevokedHostKeys /etc/ssh/revoked", "RevokedHostKeys"),
        ("Include other", "Include inside"),
    ],
)
def test_what_cannot_be_honoured_is_refused(shared_sshd: Any, tmp_path: Path, lines: str, said: str) -> None:
    config = tmp_path / "config"
    config.write_text(f"Host 127.0.0.1\n  {lines}\nHost elsewhere\n  ProxyJump other\n")
    with pytest.raises(Refused, match=said) as caught:
        connect(shared_sshd.host(config=str(config)))
    assert "ssh." in caught.value.hint


def test_a_jump_for_another_host_is_none_of_our_business(shared_sshd: Any, tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.write_text("Host elsewhere\n  ProxyJump bastion\nHost 127.0.0.1\n  ProxyJump none\n  ProxyCommand none\n")
    connect(shared_sshd.host(config=str(config))).close()


def test_match_exec_is_never_run(shared_sshd: Any, tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.write_text(f'Match exec "touch {tmp_path / "ran"}"\n  Port 1\n')
    with pytest.raises(Refused, match="Match exec"):
        connect(shared_sshd.host(config=str(config)))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("value", ["no", "accept-new", "off"])
def test_strict_checking_cannot_be_switched_off_and_that_is_said(shared_sshd: Any, tmp_path: Path, value: str) -> None:
    config = tmp_path / "config"
    config.write_text(f"Host *\n  StrictHostKeyChecking {value}\n  UserKnownHostsFile /dev/null\n")
    notes: list[str] = []
    with pytest.raises(HostKeyRejected):
        connect(shared_sshd.host(config=str(config), known_hosts=(str(tmp_path / "absent"),)), on_note=notes.append)
    assert len(notes) == 1
    assert "is not obeyed" in notes[0]


@pytest.mark.parametrize("text", [None, "\x00\x01garbage line", "Port notanumber"])
def test_a_broken_ssh_config_is_a_clear_refusal(shared_sshd: Any, tmp_path: Path, text: str | None) -> None:
    config = tmp_path / "config"
    if text is not None:
        config.write_text(f"Host *\n{text}\n")
    host = shared_sshd.host(config=str(config), port=22)
    with pytest.raises(Refused, match="ssh_config"):
        connect(host)


# ---------------------------------------------------------------- hosts that do not answer as they should
@pytest.fixture
def listener() -> Iterator[Callable[[Callable[[socket.socket, int], None]], int]]:
    """A TCP server that treats each connection as told: handler(connection, its number)."""
    servers: list[socket.socket] = []

    def start(handler: Callable[[socket.socket, int], None]) -> int:
        server = socket.create_server(("127.0.0.1", 0))
        servers.append(server)

        def serve() -> None:
            number = 0
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                threading.Thread(target=handler, args=(connection, number), daemon=True).start()
                number += 1

        threading.Thread(target=serve, daemon=True).start()
        return int(server.getsockname()[1])

    yield start
    for server in servers:
        server.close()


def unreachable(host: Any, seconds: float = 6.0, **options: Any) -> Unreachable:
    begun = time.monotonic()
    with pytest.raises(Unreachable) as caught:
        connect(host, **options)
    assert time.monotonic() - begun < seconds
    assert caught.value.exit is Exit.UNKNOWN
    assert host.name in caught.value.what
    return caught.value


def test_a_closed_port_is_said_at_once(shared_sshd: Any) -> None:
    assert "Connection refused" in unreachable(shared_sshd.host(port=1), 3.0).what


def test_a_name_that_does_not_exist_is_said(shared_sshd: Any) -> None:
    problem = unreachable(shared_sshd.host(address="no-such-host.invalid"), 15.0)
    assert "cannot be looked up" in problem.what or "looking up" in problem.what


def test_a_port_that_says_nothing_is_given_up_in_time(shared_sshd: Any, listener: Callable[..., int]) -> None:
    port = listener(lambda connection, _: time.sleep(30))
    assert "banner" in unreachable(shared_sshd.host(port=port, connect_timeout_seconds=1)).what


def test_something_else_on_the_port_is_named(shared_sshd: Any, listener: Callable[..., int]) -> None:
    def web(connection: socket.socket, _: int) -> None:
        with contextlib.suppress(OSError):
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n" * 100)
        connection.close()

    assert "banner" in unreachable(shared_sshd.host(port=listener(web), connect_timeout_seconds=2)).what


def test_a_host_that_stops_in_mid_handshake_is_given_up(shared_sshd: Any, listener: Callable[..., int]) -> None:
    def stall(connection: socket.socket, _: int) -> None:
        connection.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")
        time.sleep(30)

    problem = unreachable(shared_sshd.host(port=listener(stall), connect_timeout_seconds=1))
    assert "key exchange" in problem.what


def test_the_whole_login_has_one_deadline(shared_sshd: Any, listener: Callable[..., int]) -> None:
    def trickle(connection: socket.socket, _: int) -> None:
        with contextlib.suppress(OSError):
            for _ in range(60):
                connection.sendall(b"noise\r\n")
                time.sleep(0.5)

    port = listener(trickle)
    unreachable(shared_sshd.host(port=port, connect_timeout_seconds=60), 6.0, deadline_seconds=2)


def test_a_host_over_its_login_limit_is_asked_again(sshd: Any, listener: Callable[..., int]) -> None:
    """MaxStartups makes sshd close connections before the banner; the third one is let through."""

    def limited(connection: socket.socket, number: int) -> None:
        if number < 2:
            connection.close()
            return
        onward = socket.create_connection(("127.0.0.1", sshd.port))
        threading.Thread(target=_copy, args=(onward, connection), daemon=True).start()
        _copy(connection, onward)

    port = listener(limited)
    sshd.known_hosts.write_text(f"[127.0.0.1]:{port} {public(sshd.host_keys[0])}\n")
    with connect(sshd.host(port=port)) as remote:
        assert remote.alive()


def test_a_host_that_always_closes_is_given_up(shared_sshd: Any, listener: Callable[..., int]) -> None:
    port = listener(lambda connection, _: connection.close())
    problem = unreachable(shared_sshd.host(port=port), 10.0, deadline_seconds=3)
    assert "MaxStartups" in problem.hint


def _copy(source: socket.socket, sink: socket.socket) -> None:
    try:
        while data := source.recv(65536):
            sink.sendall(data)
    except OSError:
        return
    finally:
        sink.close()


def test_every_phase_of_the_login_is_timed(shared_sshd: Any, tmp_path: Path) -> None:
    known = tmp_path / "known_hosts"
    known.write_text(shared_sshd.known_hosts.read_text().replace("127.0.0.1", "localhost"))
    with connect(shared_sshd.host(address="localhost", known_hosts=(str(known),))) as remote:
        timings = remote.timings
    phases = (timings.dns, timings.tcp, timings.banner, timings.key_exchange, timings.auth)
    assert min(phases) >= 0
    assert timings.total == pytest.approx(sum(phases))


def test_small_packets_are_not_held_back(shared_sshd: Any) -> None:
    with connect(shared_sshd.host()) as remote:
        sock = remote.link.login.sock
        assert sock is not None
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_failed_logins_leave_nothing_open(shared_sshd: Any, tmp_path: Path) -> None:
    stranger = str(make_key(tmp_path / "stranger"))
    for change in ({"identity_file": stranger}, {"known_hosts": ("/absent",)}, {"port": 1}):
        with pytest.raises((Unreachable, HostKeyRejected)):
            connect(shared_sshd.host(**change))
    threads, files = set(threading.enumerate()), len(os.listdir("/proc/self/fd"))
    for change in ({"identity_file": stranger}, {"known_hosts": ("/absent",)}, {"port": 1}):
        with pytest.raises((Unreachable, HostKeyRejected)):
            connect(shared_sshd.host(**change))
    assert set(threading.enumerate()) <= threads
    assert len(os.listdir("/proc/self/fd")) <= files
