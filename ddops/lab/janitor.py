"""What is left of a dead lab, and its removal. Never touches a lab that is alive: a lab's lock says so."""

import contextlib
import fcntl
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from ddops.lab import cgroups
from ddops.lab.spec import LabError, State, base_directory

_CLEANUP_SECONDS = 60.0


def start(state: State) -> None:
    """A process of its own session, outside the lab and its lock, that cleans up once the lock is free."""
    from ddops.lab.launcher import environment, python  # imports us

    wait_then = ["sh", "-c", 'flock "$0" true; exec "$@"', str(state.lock)]
    subprocess.Popen(
        [*wait_then, *python("janitor", str(state.directory))],
        env=environment(), cwd="/", start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip


def clean_if_dead(state: State) -> bool:
    """Remove all of a lab if it is dead; returns whether it was."""
    with _dead(state) as dead:
        if dead:
            remove_remains(state)
            state.lock.unlink()
    with contextlib.suppress(OSError):  # taken anew meanwhile, or other labs are there
        state.directory.rmdir()
        state.directory.parent.rmdir()
    return dead


def remove_remains(state: State) -> None:
    """Remove what an earlier lab of this id left, except the directory and the lock. The caller holds the lock."""
    if state.cgroups.exists():
        with contextlib.suppress(ValueError, KeyError):  # killed while it wrote that file: then it had made nothing
            layout = cgroups.Layout.load(state.cgroups.read_text())
            left = cgroups.remove(layout.directories, time.monotonic() + _CLEANUP_SECONDS)
            if left:
                raise LabError(f"lab {state.id}: these cgroups can't be removed: {', '.join(map(str, left))}")
    for path in state.directory.iterdir():
        if path != state.lock:
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink()


def sweep() -> list[str]:
    """Clean up after every dead lab of this user; returns their ids."""
    return [directory.name for directory in _state_directories() if clean_if_dead(State(directory))]


def _state_directories() -> list[Path]:
    base = base_directory()
    return sorted(d for d in base.iterdir() if d.is_dir()) if base.is_dir() else []


@contextlib.contextmanager
def _dead(state: State) -> Iterator[bool]:
    """Whether the lab is dead; if so, its lock is held meanwhile."""
    lock = take_lock(state.lock, create=False)
    try:
        yield lock is not None
    finally:
        if lock is not None:
            os.close(lock)


def take_lock(path: Path, *, create: bool) -> int | None:
    """The lock as a file descriptor, or None when somebody holds it or (without `create`) there is none."""
    while True:
        try:
            lock = os.open(path, os.O_RDWR | (os.O_CREAT if create else 0), 0o600)
        except FileNotFoundError:
            return None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.exists() and os.fstat(lock).st_ino == path.stat().st_ino:
                return lock
        except BlockingIOError:
            os.close(lock)
            return None
        except FileNotFoundError:
            pass
        os.close(lock)  # a janitor removed that file between our open and our lock


def alive() -> list[str]:
    """The ids of this user's labs that run: somebody holds their locks."""
    found = []
    for state in map(State, _state_directories()):
        with _dead(state) as dead:
            if not dead and state.lock.exists():
                found.append(state.id)
    return found


def leftovers(lab_id: str) -> list[str]:
    """What exists of one lab on this machine, whether it runs or not: files, cgroups, processes."""
    return remains().get(lab_id, [])


def remains() -> dict[str, list[str]]:
    """What exists of every lab, by its id."""
    found: dict[str, list[str]] = {}
    for directory in _state_directories():
        found.setdefault(directory.name, []).append(str(directory))
    for path in cgroups.find():
        found.setdefault(path.name.removeprefix(cgroups.PREFIX), []).append(str(path))
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # ended while we looked
            _add_process(process, found)
    return found


def _add_process(directory: Path, found: dict[str, list[str]]) -> None:
    groups = (directory / "cgroup").read_text()
    command = (directory / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    if not command:
        return  # a zombie: ended, only its parent has not looked yet
    parts = {part for line in groups.splitlines() for part in line.split("/") if part.startswith(cgroups.PREFIX)}
    for part in parts:
        found.setdefault(part.removeprefix(cgroups.PREFIX), []).append(f"process {directory.name} {command}")


if __name__ == "__main__":
    clean_if_dead(State(Path(sys.argv[1])))
