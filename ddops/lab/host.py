"""One host of a lab as a test or the demo uses it: run commands, break it, look at what it did."""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ddops.lab.spec import LabError
from ddops.lab.waiting import WAIT_SECONDS, until

if TYPE_CHECKING:
    from ddops.lab.lab import Lab

Command = str | Sequence[str]
_CLEAN = ["env", "-i", "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/root"]


class Host:
    """One host of a lab. Waits have deadlines and raise LabError."""

    def __init__(self, lab: Lab, name: str, address: str) -> None:
        self.lab = lab
        self.name = name
        self.address = address

    def __repr__(self) -> str:
        return f"<Host {self.name} {self.address}>"

    # ---- use

    def ssh(
        self,
        command: Command,
        *,
        timeout: float = WAIT_SECONDS,
        user: str = "root",
        input: str = "",  # noqa: A002
    ) -> subprocess.CompletedProcess[str]:
        """Run a shell command (or argv) over ssh, as any operator would. Exit status 255: no connection."""
        config = self.lab.ssh_config if user == "root" else self.lab.deploy_ssh_config
        options = ["-F", str(config), "-o", f"User={user}", "-o", f"ConnectTimeout={max(1, min(5, int(timeout)))}"]
        self.lab.touched.add(self.name)
        argv = [*self.lab.enter(), "ssh", *options, self.name, "--", _shell(command)]
        return subprocess.run(argv, input=input, capture_output=True, text=True, timeout=timeout, check=False)

    def sh(self, command: Command, *, timeout: float = WAIT_SECONDS) -> str:
        """`ssh` that returns what was printed, stripped, and raises LabError when the command fails."""
        return self._printed(command, self.ssh(command, timeout=timeout))

    def console(self, command: Command, *, timeout: float = WAIT_SECONDS, input: str = "") -> str:  # noqa: A002
        """Run a shell command as root as if sitting in front of the host: no network, works when cut off.

        When the host is off, the command sees its disk (no /proc, /run or processes). Raises LabError when it fails.
        """
        result = self._inside(["/bin/sh", "-c", _shell(command)], input.encode(), timeout)
        out, err = (stream.decode(errors="replace") for stream in (result.stdout, result.stderr))
        return self._printed(command, subprocess.CompletedProcess(result.args, result.returncode, out, err))

    def write(self, path: str, data: str | bytes, mode: int = 0o644) -> None:
        """Write a file (its folder is made too), at once or not at all."""
        target, new = shlex.quote(path), shlex.quote(f"{path}.ddlab-new")
        script = f'mkdir -p "$(dirname {target})" && cat > {new} && chmod {mode:o} {new} && mv -f {new} {target}'
        content = data if isinstance(data, bytes) else data.encode()
        self._checked(["/bin/sh", "-c", script], f"write {path}", content)

    def read(self, path: str) -> str:
        """A file's text. Raises LabError when it can't be read."""
        return self._checked(["cat", "--", path], f"read {path}").decode()

    def _checked(self, argv: list[str], what: str, input: bytes = b"") -> bytes:  # noqa: A002
        result = self._inside(argv, input)
        if result.returncode != 0:
            raise LabError(f"{self.name}: can't {what}: {result.stderr.decode(errors='replace').strip()}")
        return result.stdout

    def _inside(
        self,
        argv: list[str],
        stdin: bytes,
        timeout: float = WAIT_SECONDS,
    ) -> subprocess.CompletedProcess[bytes]:
        """Run `argv` in the host's namespaces, or, when it is off, on its disk."""
        self.lab.touched.add(self.name)
        user = [] if os.geteuid() == 0 else ["-U", "--preserve-credentials"]
        lab = ["nsenter", "-t", str(self.lab.supervisor_pid()), *user, "-m", "-p", "-n", "--", *_CLEAN]
        status = self.status()
        if status["on"]:
            host = ["nsenter", "-t", str(status["pid"]), "-m", "-p", "-n", "-u", "-i", "-C", "--"]
        else:
            host = ["chroot", str(self.lab.state.work / "root" / self.name)]
        return subprocess.run([*lab, *host, *argv], input=stdin, capture_output=True, timeout=timeout, check=False)

    def _printed(self, command: Command, result: subprocess.CompletedProcess[str]) -> str:
        if result.returncode != 0:
            said = (result.stderr or result.stdout).strip()
            raise LabError(f"{self.name}: exit status {result.returncode} of {_shell(command)}: {said}")
        return result.stdout.strip()

    def journal(self, unit: str | None = None) -> str:
        """The journal (of one unit), all boots, as `journalctl -o short-precise` shows it."""
        place = [] if self.status()["on"] else ["-D", "/var/log/journal"]
        choice = ["-u", unit] if unit else []
        return self.console(["journalctl", "--no-pager", "-q", "-o", "short-precise", *place, *choice])

    def wait_ssh(self, timeout: float = WAIT_SECONDS) -> None:
        """Until sshd answers, or LabError with the reason and the end of the console log."""
        for _ in until(timeout, f"{self.name} did not answer on port 22", self._why):
            status = self.status()
            if not status["on"] and status["boots"] and status["last_exit"] not in ("", "reboot"):
                raise LabError(f"{self.name} is off ({status['last_exit']}); {self._why()}")
            with contextlib.suppress(OSError), self.lab.connect(self, 22, timeout=1.0) as connection:
                if connection.recv(4) == b"SSH-":
                    return

    def _why(self) -> str:
        return f"its console log ends: {self.lab.console_log(self.name)[-500:]}"

    def status(self) -> dict[str, Any]:
        """on, boots, pid, cut, frozen, delayed, last_exit."""
        hosts: list[dict[str, Any]] = self.lab.request("status")["hosts"]
        return next(status for status in hosts if status["name"] == self.name)

    # ---- network faults

    def cut(self) -> None:
        """Pull the network cable: nothing is refused, nothing answers."""
        self._do("cut")

    def restore(self) -> None:
        self._do("restore")

    def delay(self, milliseconds: float, loss: float = 0.0) -> None:
        """Every frame so much later, each way; a share `loss` (0 to 1) of them lost."""
        self._do("delay", milliseconds=milliseconds, loss=loss)

    def undelay(self) -> None:
        self._do("undelay")

    # ---- power

    def freeze(self) -> None:
        """Stop all processes of the host where they are; the network stays up (the kernel still takes connections)."""
        self._do("freeze")

    def thaw(self) -> None:
        self._do("thaw")

    def power_off(self) -> None:
        """Shut down in order, and wait until it is off."""
        self._do("power_off")
        self._wait_power(on=False)

    def power_cut(self) -> None:
        """Pull the plug: no process gets to do anything any more."""
        self._do("power_cut")
        self._wait_power(on=False)

    def power_on(self, *, wait: bool = True) -> None:
        """Boot from the same disk; `wait` until sshd answers (not when the host is cut off)."""
        self._do("power_on")
        if wait and not self.status()["cut"]:
            self.wait_ssh()

    def reboot(self, *, wait: bool = True) -> None:
        """`systemctl reboot`, and `wait` until the new boot's sshd answers (not when the host is cut off)."""
        before = self.status()["boots"]
        self.console(["systemctl", "reboot"])
        self.wait_boot(after=before)
        if wait and not self.status()["cut"]:
            self.wait_ssh()

    def reset(self) -> None:
        """A clean host: faults undone, an empty disk, booted again. Keeps name, address and host key."""
        self.lab.reset([self])

    def wait_boot(self, *, after: int) -> None:
        """Until it is on, in a later boot than number `after` (see status)."""
        for _ in until(WAIT_SECONDS, f"{self.name} did not boot again", self._why):
            status = self.status()
            if status["on"] and status["boots"] > after:
                return

    def undo_faults(self) -> None:
        """Thaw, restore, undelay, unfill the disk and power on; what isn't broken is left alone."""
        status = self.status()
        for broken, remedy in [("frozen", "thaw"), ("cut", "restore"), ("delayed", "undelay")]:
            if status[broken]:
                self._do(remedy)
        self._do("restore_disk")
        if not status["on"]:
            self.power_on()

    def _wait_power(self, *, on: bool) -> None:
        for _ in until(WAIT_SECONDS, f"{self.name} is not {'on' if on else 'off'}", self._why):
            if self.status()["on"] is on:
                return

    # ---- disk

    def fill(self, path: str = "/", free_bytes: int = 0) -> None:
        """Leave `free_bytes` (rounded up to pages) of the disk, or, for another path, of a file system made for it.

        What is there stays there. A path of its own goes back to the disk with `unfill`, not with a reboot: what was
        written to it since is lost then.
        """
        if path == "/":
            self._do("shrink_disk", free_bytes=free_bytes)
            return
        self.console(_FILL, input=f"{path}\n{free_bytes}\n")

    def unfill(self, path: str = "/") -> None:
        if path == "/":
            self._do("restore_disk")
            return
        self.console(_UNFILL, input=f"{path}\n")

    def _do(self, what: str, **details: Any) -> None:
        self.lab.touched.add(self.name)
        self.lab.request(what, host=self.name, **details)


# A file system just for one path: copied, put over it, then made as small as its contents.
_FILL = """set -e
read -r path; read -r free
mkdir -p "$path" /run/ddlab-fill
mount -t tmpfs -o mode="$(stat -c %a "$path")" ddlab-fill /run/ddlab-fill
cp -a "$path/." /run/ddlab-fill/
mount --bind /run/ddlab-fill "$path"
umount /run/ddlab-fill
used=$(( $(stat -f -c '(%b - %f) * %S' "$path") ))
size=$((used + free)); [ "$size" -gt 0 ] || size=4096
mount -o remount,size=$size "$path"
"""
_UNFILL = """set -e
read -r path
mkdir -p /run/ddlab-disk
mount --bind / /run/ddlab-disk
find "/run/ddlab-disk$path" -mindepth 1 -delete
cp -a "$path/." "/run/ddlab-disk$path/"
umount -l "$path"
umount /run/ddlab-disk
"""


def _shell(command: Command) -> str:
    return command if isinstance(command, str) else shlex.join(command)
