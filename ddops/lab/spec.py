"""What a lab is (`Spec`) and where its files are (`State`). Pure data: nothing here runs or mounts anything."""

import json
import os
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

# Seen only inside the lab's own network namespace, so labs clash neither with each other nor with a LAN.
NETWORK = "10.231.0"
OPERATOR = f"{NETWORK}.1"
MOST_HOSTS = 200
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?")
_SIZE = re.compile(r"[1-9][0-9]*[kKmMgG]?")


_ONLY_THEIR_OWN = {"", "proc", "sys", "dev", "run", "etc", "bin", "sbin", "lib", "lib32", "lib64", "libx32"}
_OWN_TOP = {"usr", "var", "root", "home", "opt", "srv", "mnt", "tmp"}


class LabError(Exception):
    """The lab cannot do what was asked; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class HostSpec:
    """One host: `name` for people, `interface` on the lab's bridge (names of interfaces are short)."""

    name: str
    address: str
    interface: str


@dataclass(frozen=True, slots=True)
class Spec:
    """What the user asked for. Raises LabError when that can't be."""

    id: str
    names: tuple[str, ...]
    mounts: tuple[str, ...] = ()
    tmpfs_size: str = "512M"
    sudoers: str = ""
    hosts: tuple[HostSpec, ...] = field(init=False, default=())

    def __post_init__(self) -> None:
        for what, value in [("lab id", self.id), *(("host name", name) for name in self.names)]:
            if not _NAME.fullmatch(value):
                raise LabError(f"{what} {value!r}: use 1 to 40 of a-z, 0-9 and '-', not starting or ending with '-'")
        if not 1 <= len(self.names) <= MOST_HOSTS:
            raise LabError(f"a lab has 1 to {MOST_HOSTS} hosts, not {len(self.names)}")
        if len(set(self.names)) != len(self.names) or {"localhost", "operator"} & set(self.names):
            raise LabError("host names must differ from each other and from localhost and operator")
        if not _SIZE.fullmatch(self.tmpfs_size):
            raise LabError(f"tmpfs size {self.tmpfs_size!r}: a number of bytes, or one with k, M or G")
        for path in self.mounts:
            _check_mount(path)
        hosts = (HostSpec(n, f"{NETWORK}.{10 + i}", f"h{i}") for i, n in enumerate(self.names, 1))
        object.__setattr__(self, "hosts", tuple(hosts))

    def dump(self) -> str:
        values = asdict(self)
        del values["hosts"]
        return json.dumps(values)

    @classmethod
    def load(cls, text: str) -> "Spec":
        values: dict[str, Any] = json.loads(text)
        values.update(names=tuple(values["names"]), mounts=tuple(values["mounts"]))
        return cls(**values)


def _check_mount(path: str) -> None:
    if not os.path.isabs(path) or os.path.normpath(path) != path or not os.path.exists(path):
        raise LabError(f"mount {path!r}: an absolute path that exists, without '..', is needed")
    top = path.split("/")[1]
    if top in _ONLY_THEIR_OWN or (top in _OWN_TOP and path == f"/{top}"):
        raise LabError(f"mount {path!r}: that is what hosts have for themselves; mount it elsewhere, or a part of it")


def default_names(count: int) -> tuple[str, ...]:
    """lab-01, lab-02, ..."""
    return tuple(f"lab-{i:02}" for i in range(1, count + 1))


def base_directory() -> Path:
    """Where all labs of this user keep their state."""
    if os.geteuid() == 0:
        return Path("/run/ddlab")
    return Path(os.environ.get("XDG_RUNTIME_DIR", "/tmp")) / f"ddlab-{os.geteuid()}"


@dataclass(frozen=True, slots=True)
class State:
    """The files of one lab."""

    directory: Path

    @classmethod
    def of(cls, lab_id: str) -> "State":
        if not _NAME.fullmatch(lab_id):
            raise LabError(f"lab id {lab_id!r}: use 1 to 40 of a-z, 0-9 and '-'")
        return cls(base_directory() / lab_id)

    @property
    def id(self) -> str:
        return self.directory.name

    @property
    def lock(self) -> Path:
        """Held by launcher, unshare and supervisor only; free means that the lab is dead."""
        return self.directory / "lock"

    @property
    def spec(self) -> Path:
        return self.directory / "spec.json"

    @property
    def pid(self) -> Path:
        """The launcher's process id."""
        return self.directory / "pid"

    @property
    def cgroups(self) -> Path:
        """The lab's `cgroups.Layout`: written before the first directory is made, so that it can always be undone."""
        return self.directory / "cgroups"

    @property
    def socket(self) -> Path:
        return self.directory / "socket"

    @property
    def work(self) -> Path:
        """Mount point of the lab's tmpfs; empty when looked at from outside the lab."""
        return self.directory / "work"

    @property
    def identity_file(self) -> Path:
        return self.directory / "id_ed25519"

    @property
    def known_hosts(self) -> Path:
        return self.directory / "known_hosts"

    def ssh_config(self, user: str) -> Path:
        return self.directory / ("ssh_config" if user == "root" else f"ssh_config.{user}")

    def host_key(self, name: str) -> Path:
        return self.directory / f"{name}.hostkey"

    def console_log(self, name: str) -> Path:
        return self.directory / f"{name}.console.log"
