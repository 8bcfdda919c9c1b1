"""A lab as a test or the demo uses it: start it, run commands as its operator, get at its hosts."""

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from ddops.lab import janitor, launcher
from ddops.lab.host import Host
from ddops.lab.image import DEPLOY
from ddops.lab.preflight import preflight
from ddops.lab.spec import LabError, Spec, State, default_names
from ddops.lab.waiting import START_SECONDS, WAIT_SECONDS, until


class Lab:
    """N hosts with real systemd, sshd and journald, in namespaces of this machine; gone when the block ends.

    `mounts`: paths of this machine shown read-only at the same path in every host (see `python_mounts`).
    `tmpfs_size`: each host's disk, and each of its /tmp, /run and /dev/shm; only what is used takes memory.
    `sudoers`: one line for /etc/sudoers; with it hosts have a login user `deploy` (and sudo, which must be installed).
    Raises LabError, with the command that helps, where the machine can't run a lab.
    """

    def __init__(
        self,
        n: int = 3,
        *,
        id: str | None = None,  # noqa: A002
        names: Sequence[str] | None = None,
        mounts: Sequence[str] = (),
        tmpfs_size: str = "512M",
        sudoers: str = "",
    ) -> None:
        chosen = tuple(names) if names is not None else default_names(n)
        self.id = id or f"{os.getpid()}-{secrets.token_hex(3)}"
        self._spec = Spec(self.id, chosen, tuple(mounts), tmpfs_size, sudoers)
        self.state = State.of(self.id)
        self._launcher: subprocess.Popen[bytes] | None = None
        self._children: list[subprocess.Popen[Any]] = []
        self.touched: set[str] = set()  # names of hosts that somebody may have changed since they were clean
        self.hosts = [Host(self, h.name, h.address) for h in self._spec.hosts]

    @classmethod
    def attach(cls, lab_id: str, *, timeout: float = 1.0) -> "Lab":
        """A running lab that another process started. Raises LabError when there is none in `timeout` seconds."""
        state = State.of(lab_id)
        hint = f"no lab {lab_id} is running; start one with: python -m ddops.lab up 3 --id {lab_id}"
        for _ in until(timeout, hint):
            with contextlib.suppress(OSError, ValueError):
                spec = Spec.load(state.spec.read_text())
                lab = cls(id=spec.id, names=spec.names, mounts=spec.mounts, sudoers=spec.sudoers)
                lab.request("status")
                return lab
        raise AssertionError("until() raises")

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()

    def __getitem__(self, which: str | int) -> Host:
        if isinstance(which, int):
            return self.hosts[which]
        return next(host for host in self.hosts if host.name == which)

    # ---- life

    def start(self, *, tied: bool = True) -> None:
        """Start the lab and wait until every host answers on port 22. `tied`: it ends when this process does."""
        obstacle = preflight(sudo=bool(self._spec.sudoers))
        if obstacle is not None:
            raise LabError(str(obstacle))
        janitor.sweep()
        try:
            self._launch(tied=tied)
            for host in self.hosts:
                host.wait_ssh(START_SECONDS)
        except BaseException:
            self.stop()
            raise

    def _launch(self, *, tied: bool) -> None:
        with tempfile.TemporaryFile() as log:
            self._launcher = subprocess.Popen(
                launcher.command(self._spec, tied_to=os.getpid() if tied else None),
                env=launcher.environment(), stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
            for _ in until(START_SECONDS, f"lab {self.id} did not start"):
                if self._launcher.poll() is not None:
                    log.seek(0)
                    raise LabError(f"lab {self.id} did not start: {log.read().decode(errors='replace').strip()}")
                if launcher.running(self.state) == self._launcher.pid and self._answers():
                    return

    def _answers(self) -> bool:
        try:
            self.request("status")
        except OSError:
            return False
        return True

    def stop(self) -> None:
        """End the lab with all it consists of, and wait until nothing of it is left."""
        for child in self._children:  # a process in the lab's network would keep it alive
            if child.poll() is None:
                child.kill()
                child.wait(WAIT_SECONDS)
        ours = self._launcher.pid if self._launcher is not None else launcher.running(self.state)
        if self._launcher is not None:
            self._launcher.terminate()
            self._launcher.wait(WAIT_SECONDS)
        elif ours is not None:
            os.kill(ours, signal.SIGTERM)
        for _ in until(START_SECONDS, f"lab {self.id} has not ended"):
            janitor.clean_if_dead(self.state)
            if not self.state.directory.exists() or launcher.running(self.state) not in (None, ours):
                return

    def reset(self, hosts: Sequence[Host] | None = None) -> None:
        """Clean hosts (all, or these): faults undone, empty disks, booted again, all at the same time."""
        chosen = self.hosts if hosts is None else hosts
        before = {status["name"]: status["boots"] for status in self.request("status")["hosts"]}
        for host in chosen:
            self.request("reset", host=host.name)
        for host in chosen:
            host.wait_boot(after=before[host.name])
            host.wait_ssh()
            self.touched.discard(host.name)

    def reset_touched(self) -> None:
        """Clean hosts, at the price of resetting those only that were used (or had a fault) since the last time."""
        self.reset([host for host in self.hosts if host.name in self.touched])

    # ---- the operator's side

    @property
    def ssh_config(self) -> Path:
        """For `ssh -F` and ddops: all hosts by name, as root."""
        return self.state.ssh_config("root")

    @property
    def deploy_ssh_config(self) -> Path:
        """As `ssh_config`, but logging in as `deploy`; there if the lab has `sudoers`."""
        return self.state.ssh_config(DEPLOY)

    @property
    def known_hosts(self) -> Path:
        return self.state.known_hosts

    @property
    def identity_file(self) -> Path:
        return self.state.identity_file

    def run(
        self,
        argv: Sequence[str | os.PathLike[str]],
        *,
        input: str | None = None,  # noqa: A002
        timeout: float = 120.0,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command of this machine in the lab's network; raises subprocess.TimeoutExpired, never for its exit."""
        self.touched.update(host.name for host in self.hosts)
        return subprocess.run(
            [*self.enter(), *argv],
            input=input or "",
            capture_output=True,
            text=True,
            timeout=timeout,
            env=env,
            cwd=cwd,
            check=False,
        )

    def popen(self, argv: Sequence[str | os.PathLike[str]], **options: Any) -> subprocess.Popen[Any]:
        """subprocess.Popen in the lab's network; killed when the lab stops. Its pid is the command's own."""
        self.touched.update(host.name for host in self.hosts)
        child = subprocess.Popen([*self.enter(), *argv], **options)
        self._children.append(child)
        return child

    def connect(self, host: Host | str, port: int, *, timeout: float = 5.0) -> socket.socket:
        """A TCP connection from the operator to `port` of a host. Raises OSError as socket.connect does."""
        address = host.address if isinstance(host, Host) else host
        with self._dial() as control:
            control.sendall(b'{"do": "socket"}\n')
            _, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        connection = socket.socket(fileno=descriptors[0])
        try:
            connection.settimeout(timeout)
            connection.connect((address, port))
        except BaseException:
            connection.close()
            raise
        return connection

    def enter(self) -> list[str]:
        """The words to put before a command so that it runs in the lab's network."""
        user = [] if os.geteuid() == 0 else ["-U", "--preserve-credentials"]
        return ["nsenter", "-t", str(self.supervisor_pid()), *user, "-n", "--"]

    # ---- the supervisor

    @property
    def controllers(self) -> frozenset[str]:
        """cgroup controllers that limit units in the hosts for real (MemoryMax= needs "memory")."""
        return frozenset(self.request("status")["controllers"])

    def supervisor_pid(self) -> int:
        """The lab's PID 1, as this process sees it."""
        with self._dial() as control:
            credentials = control.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        return int.from_bytes(credentials[:4], sys.byteorder)

    def launcher_pid(self) -> int:
        """The process whose end is the lab's end."""
        if self._launcher is None:
            raise LabError("this lab was started by another process")
        return self._launcher.pid

    def request(self, what: str, **details: Any) -> dict[str, Any]:
        """Ask the supervisor (see its module). Raises LabError when it refuses, OSError when the lab is gone."""
        with self._dial() as control, control.makefile("rw") as stream:
            stream.write(json.dumps({"do": what, **details}) + "\n")
            stream.flush()
            line = stream.readline()
        if not line:
            raise ConnectionError(f"lab {self.id} ended while it was asked for {what}")
        answer: dict[str, Any] = json.loads(line)
        if not answer["ok"]:
            raise LabError(f"lab {self.id}: {answer['error']}")
        return answer

    def _dial(self) -> socket.socket:
        control = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        control.settimeout(WAIT_SECONDS)
        try:
            control.connect(str(self.state.socket))
        except BaseException:
            control.close()
            raise
        return control

    def console_log(self, name: str) -> str:
        """What systemd of that host printed while booting, and why the host ended."""
        path = self.state.console_log(name)
        return path.read_text(errors="replace") if path.exists() else ""
