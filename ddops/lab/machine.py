"""A host as its supervisor sees it: a disk, a cable, a power state. Every method acts at once and returns."""

import os
import signal
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ddops.lab import cgroups, hostinit, image, linux, network, wire
from ddops.lab.linux import MS_BIND, MS_NODEV, mount
from ddops.lab.spec import HostSpec, LabError, Spec, State


@dataclass(frozen=True, slots=True)
class Status:
    """What a client may know. `pid` counts in the lab's PID namespace; 0 when the host is off."""

    name: str
    address: str
    on: bool
    boots: int
    pid: int
    cut: bool
    frozen: bool
    delayed: bool
    last_exit: str


_REASONS: dict[int, str] = {signal.SIGHUP: "reboot", signal.SIGINT: "power off", signal.SIGKILL: "power cut"}


@dataclass(slots=True)
class Machine:
    """One host of the lab: what it is made of and the state it is in."""

    host: HostSpec
    spec: Spec
    state: State
    layout: cgroups.Layout
    shared_layer: Path
    rootless: bool
    pid: int = 0
    boots: int = 0
    cut: bool = False
    wire_pid: int = 0
    resetting: bool = False
    last_exit: str = ""

    @property
    def _disk(self) -> Path:
        return self.state.work / "disk" / self.host.name

    @property
    def _root(self) -> Path:
        return self.state.work / "root" / self.host.name

    def status(self) -> dict[str, Any]:
        status = Status(
            name=self.host.name,
            address=self.host.address,
            on=self.pid != 0,
            boots=self.boots,
            pid=self.pid,
            cut=self.cut,
            frozen=self._freezer.exists() and self._freezer.read_text().strip() == "1",
            delayed=self.wire_pid != 0,
            last_exit=self.last_exit,
        )
        return asdict(status)

    # ---- disk

    def insert_disk(self) -> None:
        """An empty disk of the host's own over the shared layer, with the machine's /usr."""
        for directory in (self._disk, self._root):
            directory.mkdir(parents=True, exist_ok=True)
        mount("ddlab", self._disk, "tmpfs", MS_NODEV, f"mode=755,size={self.spec.tmpfs_size}")
        for name in ("upper", "work", "usr-upper", "usr-work"):
            (self._disk / name).mkdir()
        image.personalise(self._disk / "upper", self.host, self.state)
        self._overlay(self.shared_layer, "upper", "work", self._root)
        self._mount_usr()

    def _overlay(self, lower: str | Path, upper: str, work: str, target: Path) -> None:
        options = f"lowerdir={lower},upperdir={self._disk / upper},workdir={self._disk / work}"
        mount(f"ddlab-{self.host.interface}", target, "overlay", 0, options + (",userxattr" if self.rootless else ""))

    def _mount_usr(self) -> None:
        if not self.rootless:
            self._overlay("/usr", "usr-upper", "usr-work", self._root / "usr")
            return
        # Without root the owners of /usr's files aren't mapped, so it can't be written; /usr/local is the host's own.
        linux.bind_read_only("/usr", self._root / "usr", recursive=True)
        local = self._disk / "usr-upper"
        for name in ("bin", "sbin", "lib", "etc", "share", "src"):
            (local / name).mkdir()
        mount(local, self._root / "usr/local", flags=MS_BIND)

    def _wipe(self) -> None:
        """A new, empty disk. The host is off."""
        linux.detach(self._root)
        linux.detach(self._disk)
        self.insert_disk()

    def shrink_disk(self, free_bytes: int) -> None:
        """Make the disk as small as what is on it, plus `free_bytes`."""
        used = os.statvfs(self._disk)
        size = (used.f_blocks - used.f_bfree) * used.f_frsize + free_bytes
        self._resize_disk(str(size))

    def restore_disk(self) -> None:
        self._resize_disk(self.spec.tmpfs_size)

    def _resize_disk(self, size: str) -> None:
        mount("ddlab", self._disk, "tmpfs", linux.MS_REMOUNT | MS_NODEV, f"size={size}")

    # ---- power

    def power_on(self) -> None:
        if self.pid:
            return
        cgroups.create_host(self.layout, self.host.name)
        self.thaw()
        body = hostinit.Body(
            name=self.host.name,
            root=self._root,
            layout=self.layout,
            console=self.state.console_log(self.host.name),
            tmpfs_size=self.spec.tmpfs_size,
            mounts=self.spec.mounts,
        )
        self.pid = hostinit.start(body, self._plug)
        self.boots += 1

    def _plug(self, pid: int) -> None:
        network.unplug(self.host)
        bridge = network.detour_bridge(self.host) if self.wire_pid else network.BRIDGE
        network.plug(self.host, pid, bridge=bridge, up=not self.cut)

    def ended(self, wait_status: int) -> None:
        """The host's PID 1 has died: reboot(2) there shows as SIGHUP (reboot) or SIGINT (power off)."""
        self.pid = 0
        network.unplug(self.host)
        died_of = os.WTERMSIG(wait_status) if os.WIFSIGNALED(wait_status) else 0
        self.last_exit = _REASONS.get(died_of, f"PID 1 ended with wait status {wait_status}")
        with self.state.console_log(self.host.name).open("a") as log:
            log.write(f"ddlab: {self.host.name} ended: {self.last_exit}\n")
        if self.resetting:
            self._boot_clean()
        elif died_of == signal.SIGHUP:
            self.power_on()

    def power_off(self) -> None:
        """As the power button: systemd stops the units, then the host is off (later; see status)."""
        if self.pid:
            self.thaw()
            os.kill(self.pid, signal.SIGRTMIN + 4)

    def power_cut(self) -> None:
        """As pulling the plug: all processes die at once (a moment later the host is off; see status)."""
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)

    def reset(self) -> None:
        """All faults undone; then, once the host is off, an empty disk and a new boot (see status: boots)."""
        self.cut = False
        self.undelay()
        self.resetting = True
        if self.pid:
            self.power_cut()
        else:
            self._boot_clean()

    def _boot_clean(self) -> None:
        self.resetting = False
        self.state.console_log(self.host.name).write_text("")
        self._wipe()
        self.power_on()

    @property
    def _freezer(self) -> Path:
        return self.layout.host(self.host.name) / "cgroup.freeze"

    def freeze(self) -> None:
        self._freezer.write_text("1")

    def thaw(self) -> None:
        self._freezer.write_text("0")

    # ---- cable

    def cut_cable(self) -> None:
        self.cut = True
        if self.pid:
            network.set_link(self.host, up=False)

    def restore_cable(self) -> None:
        self.cut = False
        if self.pid:
            network.set_link(self.host, up=True)

    def delay(self, milliseconds: float, loss: float) -> None:
        """Every frame `milliseconds` late, each way; a share `loss` of them lost."""
        if not 0 <= loss <= 1 or milliseconds < 0:
            raise LabError(f"delay of {milliseconds} ms with loss {loss}: needs a delay >= 0 and a loss from 0 to 1")
        self.undelay()
        near, far = (wire.open_tap(f"{self.host.interface}-{end}") for end in ("near", "far"))
        bridge = network.detour(self.host, f"{self.host.interface}-near", f"{self.host.interface}-far")
        self.wire_pid = os.fork()
        if self.wire_pid == 0:
            try:
                signal.set_wakeup_fd(-1)
                wire.carry(near, far, delay_seconds=milliseconds / 1000, loss=loss)
            finally:
                os._exit(1)
        os.close(near)
        os.close(far)
        if self.pid:
            network.move(self.host, bridge)

    def undelay(self) -> None:
        if self.wire_pid:
            os.kill(self.wire_pid, signal.SIGKILL)
            os.waitpid(self.wire_pid, 0)
            self.wire_ended()

    def wire_ended(self) -> None:
        self.wire_pid = 0
        if self.pid:
            network.move(self.host, network.BRIDGE)
        network.remove_detour(self.host)
