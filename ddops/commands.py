"""Every command ddops runs on a host, as argv lists and stdin bytes. Pure: hosts.py runs them.

Nothing here quotes: words stay words until hosts.py joins them once. What the words do on the host is
written in templates/ddops-host.sh, which is the only program ddops installs there.
"""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path

SCRIPT_PATH = "/usr/local/lib/ddops/ddops-host"

# Exit statuses of the host script that carry a meaning of their own (see its head).
INVALID_UNIT = 65
NOTHING_OPEN = 66
NO_ROOM = 69
HELD = 73
OTHER_RELEASE = 74
TOO_LATE = 75
NOT_OURS = 78


@dataclass(frozen=True, slots=True)
class Command:
    """One remote command: words, what goes to stdin, and how long it may take.

    `privileged` commands go through `sudo -n` unless the login is root.
    """

    argv: tuple[str, ...]
    stdin: bytes = b""
    deadline_seconds: float = 30.0
    privileged: bool = True


@dataclass(frozen=True, slots=True)
class Room:
    """What must be free before an engine starts: its port, GPU memory (MiB; 0: don't look), in how long."""

    port: int
    memory_floor_mib: int = 0
    wait_seconds: int = 60

    @property
    def words(self) -> tuple[int, int, int]:
        return self.port, self.memory_floor_mib, self.wait_seconds


@cache
def script() -> bytes:
    """The host script's bytes, from the wheel or from a checkout."""
    inside = resources.files("ddops") / "templates" / "ddops-host.sh"
    if inside.is_file():
        return inside.read_bytes()
    return (Path(__file__).parent.parent / "templates" / "ddops-host.sh").read_bytes()


def script_digest() -> str:
    """sha256 of the host script this ddops speaks to."""
    return hashlib.sha256(script()).hexdigest()


def _host(*words: str | int, stdin: bytes = b"", deadline: float = 30.0) -> Command:
    return Command((SCRIPT_PATH, *map(str, words)), stdin, deadline)


def _lines(*parts: bytes) -> bytes:
    """Each part base64 on a line of its own; an empty part is "-" so that the line count holds."""
    return b"".join((base64.b64encode(part) or b"-") + b"\n" for part in parts)


def observe(unit: str, port: int, releases: str) -> Command:
    return _host("observe", unit, port, releases)


def observe_uninstalled(unit: str, port: int, releases: str) -> Command:
    """The same look at a host where the script is not installed (yet): sent over stdin, nothing kept."""
    return Command(("sh", "-s", "--", "observe", unit, str(port), releases), script(), 30.0, privileged=False)


def install_script() -> Command:
    """Put the host script in place, atomically and root-owned."""
    folder = SCRIPT_PATH.rsplit("/", 1)[0]
    put = (
        f"set -eu; umask 022; mkdir -p {folder}; cat > {SCRIPT_PATH}.new; "
        f'[ "$(sha256sum < {SCRIPT_PATH}.new | cut -d" " -f1)" = {script_digest()} ]; '
        f"chown 0:0 {SCRIPT_PATH}.new; chmod 755 {SCRIPT_PATH}.new; mv -f {SCRIPT_PATH}.new {SCRIPT_PATH}"
    )
    return Command(("sh", "-c", put), script())


def lease_take(unit: str, run: str, seconds: int, holder: str) -> Command:
    return _host("lease", "take", unit, run, seconds, stdin=holder.encode())


def lease_beat(unit: str, run: str, seconds: int) -> Command:
    return _host("lease", "beat", unit, run, seconds)


def lease_drop(unit: str, run: str) -> Command:
    return _host("lease", "drop", unit, run)


def lease_break(unit: str) -> Command:
    return _host("lease", "break", unit)


def check_unit(unit: str, text: bytes) -> Command:
    return _host("check-unit", unit, stdin=text)


def arm(unit: str, run: str, seconds: int, cap_seconds: int) -> Command:
    return _host("arm", unit, run, seconds, cap_seconds)


def extend(unit: str, run: str, seconds: int) -> Command:
    return _host("extend", unit, run, seconds, deadline=15.0)


def stage(unit: str, run: str, digest: str, text: bytes, fence: bytes, entry: bytes) -> Command:
    return _host("stage", unit, run, digest, stdin=_lines(text, fence, entry), deadline=60.0)


def revoke(unit: str, run: str, digest: str, entry: bytes) -> Command:
    return _host("revoke", unit, run, digest, stdin=entry)


def switch(unit: str, run: str, room: Room) -> Command:
    return _host("switch", unit, run, *room.words)


def confirm(unit: str, run: str, invocation: str, digest: str, proven: bytes, confirmed: bytes) -> Command:
    return _host("confirm", unit, run, invocation, digest, stdin=_lines(proven, confirmed))


def undo(unit: str, run: str, by: str, room: Room, why: str) -> Command:
    return _host("undo", unit, run, by, *room.words, stdin=why.encode())


def guard(unit: str, run: str) -> Command:
    """One tick of the guard, by hand: it undoes only what is overdue, and finishes what was cut off."""
    return _host("guard", unit, run)


def trial(unit: str) -> Command:
    return _host("trial", unit, deadline=15.0)


def record(unit: str, run: str, entry: bytes) -> Command:
    return _host("record", unit, run, stdin=entry)


def evidence(unit: str, run: str, document: bytes) -> Command:
    return _host("evidence", unit, run, stdin=document, deadline=60.0)


def stored(unit: str, digest: str) -> Command:
    return _host("stored", unit, digest)


def keep(unit: str, run: str) -> Command:
    return _host("keep", unit, run)


def golden(unit: str) -> Command:
    return _host("golden", unit)


def keep_golden(unit: str, run: str, document: bytes) -> Command:
    return _host("keep-golden", unit, run, stdin=document)


def logs(unit: str, invocation: str, lines: int) -> Command:
    return _host("logs", unit, invocation, lines)


def release(folder: str, version: str, manifest_digest: str, tar: bytes) -> Command:
    return _host("release", folder, version, manifest_digest, stdin=tar, deadline=900.0)


def python_check(python: str, release_folder: str) -> Command:
    """Does the host's own Python run the engine of that release? One JSON object on stdout."""
    return Command(
        (
            "env",
            f"PYTHONPATH={release_folder}",
            "PYTHONDONTWRITEBYTECODE=1",
            python,
            "-m",
            "ddtree_engine.selfcheck",
        ),
        deadline_seconds=120.0,
        privileged=False,
    )
