"""Can this machine run a lab? If not: what is missing, and the command that puts it right."""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from ddops.lab import cgroups

# Debian's and Ubuntu's package for each program the lab runs, here or in the hosts.
_PACKAGE_OF = {
    "unshare": "util-linux", "nsenter": "util-linux", "setpriv": "util-linux", "flock": "util-linux",
    "ip": "iproute2", "ssh": "openssh-client", "ssh-keygen": "openssh-client", "sshd": "openssh-server",
    "/lib/systemd/systemd": "systemd", "systemctl": "systemd", "dbus-daemon": "dbus",
}  # fmt: skip
_SUDO = {"sudo": "sudo", "visudo": "sudo"}
_ROOTLESS = {"newuidmap": "uidmap", "newgidmap": "uidmap"}
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


_USER_NAMESPACE = ["--user", "--map-root-user", "--map-auto"]


@dataclass(frozen=True, slots=True)
class Obstacle:
    """Why a lab can't run here, and the command (or advice) that changes it."""

    what: str
    fix: str

    def __str__(self) -> str:
        return f"the lab can't run here: {self.what}; do: {self.fix}"


def packages() -> list[str]:
    """All Debian packages that a lab (with sudo in the hosts) needs."""
    return sorted({*_PACKAGE_OF.values(), *_SUDO.values()})


def install_command(wanted: list[str]) -> str:
    return f"apt-get update && apt-get install -y --no-install-recommends {' '.join(wanted)}"


def preflight(*, sudo: bool = False) -> Obstacle | None:
    """The first obstacle, or None. `sudo`: hosts shall have sudo. Takes some 30 ms; leaves nothing behind."""
    if sys.platform != "linux":
        return Obstacle("it needs Linux", "run it in a virtual machine, or in a container with --privileged")
    return _programs(sudo=sudo) or _merged_usr() or _rights() or _cgroups() or _kernel()


def _programs(*, sudo: bool) -> Obstacle | None:
    if sudo and os.geteuid() != 0:
        return Obstacle("sudo in the hosts needs a lab run by root", "run the same command as root (sudo)")
    needed = {**_PACKAGE_OF, **(_SUDO if sudo else {}), **(_ROOTLESS if os.geteuid() != 0 else {})}
    missing = [name for name in needed if shutil.which(name, path=_PATH) is None]
    if missing:
        wanted = sorted({needed[name] for name in missing})
        return Obstacle(f"{', '.join(missing)} not found", _as_root(install_command(wanted)))
    numbers = re.search(r"(\d+)\.(\d+)", _run("unshare", "--version").stdout)
    if numbers is None or (int(numbers[1]), int(numbers[2])) < (2, 38):
        return Obstacle("util-linux is older than 2.38", "use Debian 12, Ubuntu 24.04 or newer")
    return None


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False, env={"PATH": _PATH})


def _as_root(command: str) -> str:
    return command if os.geteuid() == 0 else f"sudo sh -c '{command}'"


def _merged_usr() -> Obstacle | None:
    if os.path.islink("/bin") and os.path.islink("/lib"):
        return None
    return Obstacle("/bin and /lib are not links into /usr", _as_root("apt-get install -y usrmerge"))


def _rights() -> Obstacle | None:
    """Root always may. Others need user namespaces, ranges of ids, and a cgroup of their own."""
    if os.geteuid() == 0:
        return None
    again = "run the same command as root (sudo)"
    if _number("/proc/sys/kernel/apparmor_restrict_unprivileged_userns") == 1:
        return Obstacle("AppArmor keeps users from making user namespaces", again)
    probe = _run("unshare", *_USER_NAMESPACE, "true")
    if probe.returncode != 0:
        return Obstacle(f"no user namespace for this user ({probe.stderr.strip()})", again)
    return None


def _number(path: str) -> int | None:
    return int(text) if Path(path).exists() and (text := Path(path).read_text().strip()).isdigit() else None


def _cgroups() -> Obstacle | None:
    if cgroups.unified_mount() is None:
        return Obstacle("no cgroup2 file system is mounted", _as_root("mount -t cgroup2 cgroup2 /sys/fs/cgroup"))
    parent = cgroups.plan("probe").root.parent
    if os.access(parent, os.W_OK) and os.access(parent / "cgroup.procs", os.W_OK):
        return None
    if os.geteuid() == 0:
        return Obstacle(f"{parent} is read-only", "start this container with --privileged --cgroupns=private")
    return Obstacle("no cgroup is delegated to this user", "systemd-run --user --scope -p Delegate=yes COMMAND")


def _kernel() -> Obstacle | None:
    """Try what the kernel (or a container's rules) may refuse, in namespaces that vanish at once."""
    user = _USER_NAMESPACE if os.geteuid() != 0 else []
    steps = (
        "ip link add b0 type bridge && ip link add v0 type veth peer name v1"
        " && mount -t tmpfs x /mnt && mkdir /mnt/l /mnt/u /mnt/w /mnt/m"
        f" && mount -t overlay -o lowerdir=/mnt/l,upperdir=/mnt/u,workdir=/mnt/w{',userxattr' if user else ''} x /mnt/m"
    )
    probe = _run("unshare", *user, "--mount", "--net", "--pid", "--fork", "--mount-proc", "sh", "-c", steps)
    if probe.returncode == 0:
        return None
    reason = (probe.stderr.strip().splitlines() or ["no reason given"])[-1]
    advice = "use a kernel with bridge, veth and overlay, and a container with --privileged (or none)"
    return Obstacle(f"namespaces, bridge, veth or overlay don't work ({reason})", advice)
