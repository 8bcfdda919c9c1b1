"""Where a lab's cgroups go, on cgroup2 machines and on those that still give the controllers to cgroup v1.

Each host gets a subtree that looks like a whole cgroup file system to it. On a "hybrid" machine (cgroup2 mounted, but
memory, pids and cpu taken by v1) each host gets a v1 tree as well: otherwise MemoryMax=, TasksMax= and CPUQuota= would
be accepted and do nothing. Then EVERY v1 hierarchy needs a directory per host, or the host's systemd would write into
the machine's own groups.
"""

import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ddops.lab.spec import LabError

# What a host's unit files can limit. The rest (devices, freezer, ...) systemd mounts for itself.
_LIMITS = {"memory", "pids", "cpu", "cpuacct"}
PREFIX = "ddlab-"  # of every directory of a lab
_GROUP_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """One cgroup v1 hierarchy: the mount options that select it, where it is mounted, and our own group in it."""

    options: str
    mount_point: Path
    own_group: str

    @property
    def label(self) -> str:
        return self.options.removeprefix("none,name=")

    @property
    def limits(self) -> bool:
        return bool(_LIMITS & set(self.options.split(","))) or self.label == "systemd"


@dataclass(frozen=True, slots=True)
class Layout:
    """The lab's cgroup2 directory, and the v1 hierarchies that its hosts need (none on a cgroup2 machine)."""

    root: Path
    v1: tuple[Hierarchy, ...]

    @property
    def launcher(self) -> Path:
        """A leaf for launcher and supervisor: a group with processes of its own can't hand on controllers."""
        return self.root / "launcher"

    def host(self, name: str) -> Path:
        return self.root / name

    def v1_host(self, hierarchy: Hierarchy, name: str) -> Path:
        return self._v1_root(hierarchy) / name

    def _v1_root(self, hierarchy: Hierarchy) -> Path:
        return hierarchy.mount_point / hierarchy.own_group.strip("/") / self.root.name

    @property
    def directories(self) -> list[Path]:
        return [self.root, *(self._v1_root(h) for h in self.v1)]

    @property
    def controllers(self) -> frozenset[str]:
        """The controllers that limit units in the hosts for real."""
        if self.v1:
            return frozenset(c for h in self.v1 for c in h.options.split(",") if c in _LIMITS)
        return frozenset((self.root / "cgroup.subtree_control").read_text().split())

    def dump(self) -> str:
        v1 = [[h.options, str(h.mount_point), h.own_group] for h in self.v1]
        return json.dumps({"root": str(self.root), "v1": v1})

    @classmethod
    def load(cls, text: str) -> "Layout":
        values = json.loads(text)
        return cls(Path(values["root"]), tuple(Hierarchy(o, Path(m), g) for o, m, g in values["v1"]))


def _mounts(kind: str) -> list[tuple[Path, set[str]]]:
    lines = (line.split() for line in Path("/proc/self/mounts").read_text().splitlines())
    return [(Path(f[1]), set(f[3].split(","))) for f in lines if f[2] == kind]


def unified_mount() -> Path | None:
    """Where cgroup2 is mounted, or None."""
    return next((path for path, _ in _mounts("cgroup2")), None)


def _own_groups() -> list[tuple[str, str]]:
    """(controllers, group) of this process; controllers are '' for cgroup2."""
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    return [(line.split(":", 2)[1], line.split(":", 2)[2]) for line in lines]


def plan(lab_id: str) -> Layout:
    """Where the cgroups of `lab_id` go. Makes nothing."""
    unified = unified_mount()
    if unified is None:
        raise LabError("no cgroup2 file system is mounted; run: mount -t cgroup2 cgroup2 /sys/fs/cgroup")
    parent = unified
    if os.geteuid() != 0:  # only what was delegated to us is ours
        parent = unified / dict(_own_groups())[""].strip("/")
    taken_by_v1 = "memory" not in (parent / "cgroup.controllers").read_text().split()
    hybrid = os.geteuid() == 0 and taken_by_v1 and any("memory" in options for _, options in _mounts("cgroup"))
    return Layout(parent / f"{PREFIX}{lab_id}", tuple(_hierarchies()) if hybrid else ())


def _hierarchies() -> Iterator[Hierarchy]:
    mounts = _mounts("cgroup")
    for controllers, group in _own_groups():
        wanted = set(controllers.split(","))
        where = next((path for path, options in mounts if controllers and wanted <= options), None)
        if where is not None:
            yield Hierarchy(f"none,{controllers}" if controllers.startswith("name=") else controllers, where, group)


def create(layout: Layout) -> None:
    """Make the lab's own group, hand on every controller there is, and move this process into its leaf."""
    layout.root.mkdir(exist_ok=True)
    layout.launcher.mkdir(exist_ok=True)
    join(layout.launcher)
    for group in (layout.root.parent, layout.root):
        _hand_on_controllers(group)


def _hand_on_controllers(group: Path) -> None:
    for controller in (group / "cgroup.controllers").read_text().split():
        try:
            (group / "cgroup.subtree_control").write_text(f"+{controller}")
        except OSError:
            continue  # not delegated, or processes of others in the group: Layout.controllers tells


def create_host(layout: Layout, name: str) -> None:
    """Fresh groups for one host that is off: what was set on the old ones (limits, fences) must not outlive a boot."""
    old = [layout.host(name), *(layout.v1_host(h, name) for h in layout.v1)]
    left = remove([d for d in old if d.exists()], time.monotonic() + _GROUP_SECONDS)
    if left:
        raise LabError(f"cgroups of the last boot of {name} can't be removed: {', '.join(map(str, left))}")
    layout.host(name).mkdir()
    for hierarchy in layout.v1:
        directory = layout.v1_host(hierarchy, name)
        directory.mkdir(parents=True, exist_ok=True)
        if "cpuset" in hierarchy.options.split(","):  # a v1 cpuset starts empty, and then nothing can join it
            for path in (directory.parent, directory):
                for part in ("cpuset.cpus", "cpuset.mems"):
                    (path / part).write_text((path.parent / part).read_text())


def join(group: Path) -> None:
    """Move the calling process into `group`."""
    (group / "cgroup.procs").write_text("0")


def join_host(layout: Layout, name: str) -> None:
    for group in [layout.host(name), *(layout.v1_host(h, name) for h in layout.v1)]:
        join(group)


def remove(directories: list[Path], deadline: float) -> list[Path]:
    """Kill what is left in the trees and remove them; returns those that are still there at `deadline` (monotonic)."""
    while True:
        for directory in directories:
            _kill(directory)
            _remove_tree(directory)
        directories = [d for d in directories if d.exists()]
        if not directories or time.monotonic() > deadline:
            return directories
        time.sleep(0.02)


def _kill(directory: Path) -> None:
    switch = directory / "cgroup.kill"  # kernel >= 5.14
    try:
        if switch.exists():
            switch.write_text("1")
    except OSError:
        return  # gone meanwhile


def _remove_tree(directory: Path) -> None:
    for path, _, _ in os.walk(directory, topdown=False):
        try:
            os.rmdir(path)
        except OSError:
            continue  # still has a dying process in it: the caller tries again


def find() -> list[Path]:
    """Every lab's cgroup directories on this machine."""
    found: list[Path] = []
    for mount_point in {path for kind in ("cgroup", "cgroup2") for path, _ in _mounts(kind)}:
        for path, children, _ in os.walk(mount_point):
            for child in [c for c in children if c.startswith(PREFIX)]:
                children.remove(child)
                found.append(Path(path, child))
    return sorted(found)
