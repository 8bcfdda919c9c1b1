"""PID 1 of a lab: builds image, network and hosts, then serves requests on a Unix socket and reaps children.

A request is one line of JSON on a connection of its own, `{"do": "cut", "host": "lab-01"}`; so is the answer,
`{"ok": true, ...}` or `{"ok": false, "error": "..."}`. Every request is carried out at once; what takes time (a power
off) is started, and `status` shows when it is done. The one thread that does all this may therefore fork freely.
"""

import contextlib
import json
import os
import selectors
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ddops.lab import cgroups, image, network
from ddops.lab.linux import mount
from ddops.lab.machine import Machine
from ddops.lab.spec import LabError, Spec, State

_SLOWEST_CLIENT_SECONDS = 5.0
Answer = dict[str, Any]


def main() -> None:
    """`python -m ddops.lab.supervisor STATE_DIRECTORY root|rootless`"""
    directory, mode = sys.argv[1:]
    lab = Supervisor(State(Path(directory)), rootless=mode == "rootless")
    lab.build()
    lab.serve()


class Supervisor:
    """The hosts of one lab, and the socket they are controlled through."""

    def __init__(self, state: State, *, rootless: bool) -> None:
        self.state = state
        self.spec = Spec.load(state.spec.read_text())
        self.layout = cgroups.Layout.load(state.cgroups.read_text())
        layer = state.work / "layer"
        self.machines = {host.name: Machine(host, self.spec, state, self.layout, layer, rootless) for host in self.spec.hosts}

    def build(self) -> None:
        self.state.work.mkdir(exist_ok=True)
        mount("ddlab", self.state.work, "tmpfs", 0, "mode=755,size=64M")  # hosts' disks are file systems of their own
        layer = self.state.work / "layer"
        layer.mkdir()
        network.create()
        image.build(layer, self.spec, self.state)
        for machine in self.machines.values():
            machine.insert_disk()
            machine.power_on()

    def serve(self) -> None:
        wake_read, wake_write = os.pipe()
        os.set_blocking(wake_write, False)
        os.set_blocking(wake_read, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        listener = _listen(self.state.socket)
        self._reap()  # whatever died before the handler was there
        with selectors.DefaultSelector() as selector:
            selector.register(listener, selectors.EVENT_READ, lambda: self._answer(listener))
            selector.register(wake_read, selectors.EVENT_READ, lambda: self._woken(wake_read))
            while True:
                for key, _ in selector.select():
                    key.data()

    def _woken(self, pipe: int) -> None:
        os.read(pipe, 4096)
        self._reap()

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            for machine in self.machines.values():
                if pid == machine.pid:
                    _tell(lambda m=machine, s=status: m.ended(s))  # type: ignore[misc]
                elif pid == machine.wire_pid:
                    _tell(machine.wire_ended)

    def _answer(self, listener: socket.socket) -> None:
        connection, _ = listener.accept()
        connection.settimeout(_SLOWEST_CLIENT_SECONDS)
        with connection, contextlib.suppress(OSError):  # a client may give up at any point
            with connection.makefile("rb") as stream:
                line = stream.readline()
            if not line:
                return  # it only wanted to know our pid
            request = _parse(line)
            if request.get("do") == "socket":
                _pass_socket(connection)
            else:
                connection.sendall(json.dumps(self._attempt(request)).encode() + b"\n")

    def _attempt(self, request: Answer) -> Answer:
        try:
            return {"ok": True, **self._carry_out(request)}
        except (LabError, OSError, ValueError) as exc:
            return {"ok": False, "error": str(exc)}

    def _carry_out(self, request: Answer) -> Answer:
        """One request; `host` may be left out for `status` only."""
        match request:
            case {"do": "status"}:
                hosts = [m.status() for m in self.machines.values()]
                return {"hosts": hosts, "controllers": sorted(self.layout.controllers)}
            case {"do": "delay", "host": host, "milliseconds": milliseconds, "loss": loss}:
                self._machine(host).delay(float(milliseconds), float(loss))
            case {"do": "shrink_disk", "host": host, "free_bytes": free_bytes}:
                self._machine(host).shrink_disk(int(free_bytes))
            case {"do": what, "host": host} if what in _SIMPLE:
                _SIMPLE[what](self._machine(host))
            case _:
                raise LabError(f"no such request: {request}")
        return {}

    def _machine(self, name: str) -> Machine:
        try:
            return self.machines[name]
        except KeyError:
            raise LabError(f"no host {name!r} in lab {self.state.id}; it has {', '.join(self.machines)}") from None


_SIMPLE: dict[str, Callable[[Machine], None]] = {
    "cut": Machine.cut_cable,
    "restore": Machine.restore_cable,
    "undelay": Machine.undelay,
    "freeze": Machine.freeze,
    "thaw": Machine.thaw,
    "power_on": Machine.power_on,
    "power_off": Machine.power_off,
    "power_cut": Machine.power_cut,
    "reset": Machine.reset,
    "restore_disk": Machine.restore_disk,
}


def _parse(line: bytes) -> Answer:
    """A request, or an empty one (which is refused by name) when the line is none."""
    try:
        request = json.loads(line)
    except ValueError:
        return {}
    return request if isinstance(request, dict) else {}


def _listen(path: Path) -> socket.socket:
    """The socket appears under its name only once it can be connected to."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(f"{path}.new")
    listener.listen(64)
    os.rename(f"{path}.new", path)
    return listener


def _pass_socket(connection: socket.socket) -> None:
    """A TCP socket of the lab's network, for a client outside it to connect with."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as tcp:
        socket.send_fds(connection, [b"s"], [tcp.fileno()])


def _tell(work: Callable[[], None]) -> None:
    """Do `work`; a failure concerns one host and must not end the lab."""
    try:
        work()
    except (LabError, OSError) as exc:
        print(f"ddlab: {exc}", file=sys.stderr, flush=True)  # noqa: T201  (goes to the launcher's log)


if __name__ == "__main__":
    main()
