"""From a forked child of the supervisor to the host's systemd: namespaces, mounts, new root, exec.

Runs in the child between fork and exec, so it only makes system calls and never returns. A host is not a security
boundary when root runs the lab (no user namespace; it keeps CAP_SYS_ADMIN); without root it is one.
"""

import os
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ddops.lab import cgroups, linux
from ddops.lab.linux import MS_BIND, MS_NODEV, MS_NOSUID, MS_PRIVATE, MS_RDONLY, MS_REC, SEALED, mount

_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_SYSTEMD = "/lib/systemd/systemd"
# sys_boot stays: reboot(2) is how systemd tells the supervisor "reboot" from "power off".
_DROPPED = "-sys_module,-sys_rawio,-sys_time,-syslog,-wake_alarm,-block_suspend,-mac_admin,-mac_override,-mknod"
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
_READ_ONLY_PROC = ("sys", "sysrq-trigger", "irq", "bus", "fs")
_HIDDEN_PROC = ("kcore", "kallsyms", "kmsg", "keys", "timer_list")


@dataclass(frozen=True, slots=True)
class Body:
    """What a host is booted on: its merged root directory, cgroups, console log, RAM disks' size, read-only mounts."""

    name: str
    root: Path
    layout: cgroups.Layout
    console: Path
    tmpfs_size: str
    mounts: tuple[str, ...]


def start(body: Body, wire_up: Callable[[int], None]) -> int:
    """Boot systemd on `body`; returns the pid of its PID 1. `wire_up(pid)` gives that process' network its cable.

    Two forks: the first enters the new namespaces, the second becomes PID 1 in them and is left to the supervisor,
    which is PID 1 of the lab and so inherits it.
    """
    ready_read, ready_write = os.pipe()
    go_read, go_write = os.pipe()
    middle = os.fork()
    if middle == 0:
        _never_return(lambda: _enter(body, go_read, ready_write), body.console)
    os.close(ready_write)
    os.close(go_read)
    try:
        if os.read(ready_read, 1) == b"r":
            wire_up(middle)
            os.write(go_write, b"g")
        pid = os.read(ready_read, 16)
    finally:
        os.close(ready_read)
        os.close(go_write)
        os.waitpid(middle, 0)
    if not pid:
        raise OSError(f"{body.name} did not start; its console log ends: {_tail(body.console)}")
    return int(pid)


def _tail(path: Path) -> str:
    return path.read_text(errors="replace")[-500:] if path.exists() else "(empty)"


def _never_return(work: Callable[[], None], console: Path) -> None:
    try:
        log = os.open(console, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        work()
    except BaseException as exc:  # whatever it was, this process must not run on as a second supervisor
        os.write(2, f"ddlab: {exc!r}\n".encode())
    finally:
        os._exit(70)


def _enter(body: Body, go: int, ready: int) -> None:
    linux.unshare(linux.CLONE_NEWNS | linux.CLONE_NEWPID | linux.CLONE_NEWUTS | linux.CLONE_NEWIPC | linux.CLONE_NEWNET)
    os.write(ready, b"r")
    if os.read(go, 1) != b"g":
        os._exit(71)  # the supervisor could not connect us
    pid = os.fork()
    if pid == 0:
        os.closerange(3, 65536)
        _become_host(body)
    os.write(ready, str(pid).encode())
    os._exit(0)


def _become_host(body: Body) -> None:
    cgroups.join_host(body.layout, body.name)
    linux.unshare(linux.CLONE_NEWCGROUP)  # the group just joined is the root of the tree that the host sees
    socket.sethostname(body.name)
    mount("none", "/", flags=MS_REC | MS_PRIVATE)
    root = body.root
    mount("proc", root / "proc", "proc", SEALED)
    mount("sysfs", root / "sys", "sysfs", SEALED | MS_RDONLY)
    _mount_cgroups(root / "sys/fs/cgroup", body.layout)
    _mount_devices(root / "dev", body.tmpfs_size)
    mount("tmpfs", root / "run", "tmpfs", MS_NOSUID | MS_NODEV, f"mode=755,size={body.tmpfs_size}")
    mount("tmpfs", root / "tmp", "tmpfs", MS_NOSUID | MS_NODEV, f"mode=1777,size={body.tmpfs_size}")
    for path in body.mounts:
        _mount_from_machine(Path(path), root / path.lstrip("/"))
    _guard_proc(root)
    _change_root(root)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it, and that would be inherited
    command = ["setpriv", f"--bounding-set={_DROPPED}", "--inh-caps=-all", _SYSTEMD]
    os.execvpe("/usr/bin/setpriv", command, {"container": "ddlab", "PATH": _PATH})


def _mount_cgroups(target: Path, layout: cgroups.Layout) -> None:
    if not layout.v1:
        mount("cgroup2", target, "cgroup2", SEALED)
        return
    mount("tmpfs", target, "tmpfs", SEALED, "mode=755")
    for hierarchy in [h for h in layout.v1 if h.limits]:
        (target / hierarchy.label).mkdir()
        mount("cgroup", target / hierarchy.label, "cgroup", SEALED, hierarchy.options)
    (target / "unified").mkdir()
    mount("cgroup2", target / "unified", "cgroup2", SEALED)


def _mount_devices(dev: Path, size: str) -> None:
    mount("tmpfs", dev, "tmpfs", MS_NOSUID, "mode=755,size=4M")
    for name in _DEVICES:
        (dev / name).touch()
        mount(f"/dev/{name}", dev / name, flags=MS_BIND)
    (dev / "pts").mkdir()
    (dev / "shm").mkdir()
    mount("devpts", dev / "pts", "devpts", MS_NOSUID | linux.MS_NOEXEC, "newinstance,ptmxmode=0666,mode=620,gid=5")
    mount("tmpfs", dev / "shm", "tmpfs", MS_NOSUID | MS_NODEV, f"mode=1777,size={size}")
    links = {"ptmx": "pts/ptmx", "fd": "/proc/self/fd", "stdin": "/proc/self/fd/0", "stdout": "/proc/self/fd/1"}
    for name, target in {**links, "stderr": "/proc/self/fd/2"}.items():
        (dev / name).symlink_to(target)


def _mount_from_machine(source: Path, target: Path) -> None:
    if source.is_dir():
        target.mkdir(parents=True, exist_ok=True)
    elif not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        target.touch()
    linux.bind_read_only(source, target)


def _guard_proc(root: Path) -> None:
    """A boot id of the host's own (a reboot must show), and no way to change the machine's kernel by accident."""
    boot_id = root / "run/ddlab-boot-id"
    boot_id.write_text(Path("/proc/sys/kernel/random/uuid").read_text())
    mount(boot_id, root / "proc/sys/kernel/random/boot_id", flags=MS_BIND)
    for name in _READ_ONLY_PROC:
        if (path := root / "proc" / name).exists():
            linux.bind_read_only(path, path, recursive=True)
    for name in _HIDDEN_PROC:
        if (path := root / "proc" / name).exists():
            mount("/dev/null", path, flags=MS_BIND)


def _change_root(root: Path) -> None:
    old = root / "run/ddlab-old"
    old.mkdir()
    os.chdir(root)
    linux.pivot_root(".", "run/ddlab-old")
    os.chdir("/")
    linux.detach("/run/ddlab-old")
    os.rmdir("/run/ddlab-old")
