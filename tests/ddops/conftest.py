"""A real sshd on loopback, started by the test, for everything that talks SSH."""

from __future__ import annotations

import contextlib
import os
import pwd
import shlex
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

ME = pwd.getpwuid(os.getuid()).pw_name
SSHD = shutil.which("sshd", path=os.environ.get("PATH", "") + os.pathsep + "/usr/sbin")


def keygen(path: Path, kind: str = "ed25519", passphrase: str = "") -> Path:
    command = ["ssh-keygen", "-q", "-t", kind, "-N", passphrase, "-C", "test", "-f", str(path)]
    subprocess.run(command, check=True, timeout=30, stdin=subprocess.DEVNULL)
    return path


def public(path: Path) -> str:
    """`type base64` of a key file's public half."""
    return " ".join(Path(f"{path}.pub").read_text().split()[:2])


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@dataclass
class Sshd:
    """A running sshd, its keys, and the faults it can be given."""

    folder: Path
    port: int
    process: subprocess.Popen[bytes]
    host_keys: list[Path]
    identity: Path
    known_hosts: Path
    user: str = ME
    _frozen: list[psutil.Process] = field(default_factory=list)

    def host(self, name: str = "gpu-01", address: str = "127.0.0.1", **ssh: Any) -> Any:
        """A host as the inventory would describe it."""
        section: dict[str, Any] = {
            "user": self.user,
            "port": self.port,
            "identity_file": str(self.identity),
            "known_hosts": (str(self.known_hosts),),
            "config": "none",
            "connect_timeout_seconds": 10,
            "sudo": "auto",
        }
        return SimpleNamespace(name=name, address=address, ssh=SimpleNamespace(**(section | ssh)))

    def sessions(self) -> list[psutil.Process]:
        """Every process below the listener: logins and what they run."""
        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(self.process.pid).children(recursive=True)
        return []

    def _sshd_sessions(self) -> list[psutil.Process]:
        found = []
        for process in self.sessions():
            with contextlib.suppress(psutil.NoSuchProcess):
                if "sshd" in process.name():
                    found.append(process)
        return found

    def freeze(self) -> None:
        """Nothing answers any more; connections stay open."""
        self._frozen = [psutil.Process(self.process.pid), *self._sshd_sessions()]
        for process in self._frozen:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        for process in self._frozen:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGCONT)
        self._frozen = []

    def kill_sessions(self) -> None:
        """Every login is gone at once; new ones are possible."""
        for process in self._sshd_sessions():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def stop(self) -> None:
        self.thaw()
        for process in [*self.sessions(), psutil.Process(self.process.pid)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait(10)


def _with_user(folder: Path, user: str) -> tuple[list[str], list[str]]:
    """A command prefix and sshd options that give one sshd, and nothing else, a further plain user.

    The user lives in a passwd file that only this sshd's own mount namespace sees.
    """
    passwd = folder / "passwd"
    passwd.write_text(Path("/etc/passwd").read_text() + f"{user}:*NP*:4242:4242::/:/bin/sh\n")
    mount = f'mount --bind {shlex.quote(str(passwd))} /etc/passwd && exec "$@"'
    keys = folder / "authorized_keys"  # in a folder that only root may enter
    options = ["AuthorizedKeysFile none", f"AuthorizedKeysCommand /bin/cat {keys}", "AuthorizedKeysCommandUser root"]
    return ["unshare", "--mount", "sh", "-c", mount, "sh"], options


def start_sshd(folder: Path, *options: str, kinds: tuple[str, ...] = ("ed25519",), user: str = ME) -> Sshd:
    assert SSHD is not None
    folder.mkdir(parents=True, exist_ok=True)
    if os.getuid() == 0:
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    host_keys = [keygen(folder / f"host_{kind}", kind) for kind in kinds]
    identity = keygen(folder / "id")
    shutil.copy(f"{identity}.pub", folder / "authorized_keys")
    prefix: list[str] = []
    if user != ME:
        prefix, more = _with_user(folder, user)
        options = (*options, *more)
    port = free_port()
    config = folder / "sshd_config"
    lines = [
        *options,  # the first value of an option counts
        f"Port {port}",
        "ListenAddress 127.0.0.1",
        *(f"HostKey {key}" for key in host_keys),
        f"AuthorizedKeysFile {folder / 'authorized_keys'}",
        "PidFile none",
        "UsePAM no",
        "StrictModes no",
        "PermitRootLogin prohibit-password",
        "PasswordAuthentication no",
        "KbdInteractiveAuthentication no",
        "MaxStartups 100",
    ]
    config.write_text("\n".join(lines) + "\n")
    log = (folder / "sshd.log").open("wb")
    process = subprocess.Popen([*prefix, SSHD, "-D", "-e", "-f", str(config)], stderr=log, stdin=subprocess.DEVNULL)
    log.close()
    known_hosts = folder / "known_hosts"
    known_hosts.write_text("".join(f"[127.0.0.1]:{port} {public(key)}\n" for key in host_keys))
    until = time.monotonic() + 20
    while time.monotonic() < until and process.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return Sshd(folder, port, process, host_keys, identity, known_hosts, user)
        time.sleep(0.02)
    process.kill()
    raise AssertionError(f"sshd did not start: {(folder / 'sshd.log').read_text()}")


@pytest.fixture(scope="session")
def needs_sshd() -> None:
    """Skip on a machine without sshd, but never in CI: a green run there must have run these tests."""
    if SSHD is not None:
        return
    said = "sshd is missing: apt-get install -y --no-install-recommends openssh-server"
    if os.environ.get("CI"):
        pytest.fail(said)
    pytest.skip(said)


@pytest.fixture(scope="session")
def shared_sshd(needs_sshd: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    """One sshd for the tests that do it no harm."""
    server = start_sshd(tmp_path_factory.mktemp("sshd"))
    yield server
    server.stop()


@pytest.fixture
def make_sshd(needs_sshd: None, tmp_path: Path) -> Iterator[Callable[..., Sshd]]:
    """An sshd of the test's own, with options of its own."""
    made: list[Sshd] = []

    def make(*options: str, **more: Any) -> Sshd:
        made.append(start_sshd(tmp_path / f"sshd{len(made)}", *options, **more))
        return made[-1]

    yield make
    for server in made:
        server.stop()


@pytest.fixture
def sshd(make_sshd: Callable[..., Sshd]) -> Sshd:
    """An sshd that may be frozen and killed."""
    return make_sshd()
