"""The error tree, the exit codes and what each means. Pure: it decides how a failure reads, not what to do.

Every error says what happened, what it means and what to do next. The exit codes are the same for
every command and are part of the interface: a run that ended in a rollback never exits 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class Exit(IntEnum):
    """Exit codes of every ddops command."""

    OK = 0  # applied and proven, or unchanged
    INTERNAL = 1
    USAGE = 2  # usage or inventory error
    REFUSED = 3  # preflight refused, nothing touched
    ROLLED_BACK = 4  # not proven; rolled back and the restored configuration is verified
    RESTORE_FAILED = 5  # rollback failed or unverified: a person is needed
    UNKNOWN = 6  # unreachable or outcome unknown; the host's guard decides
    LOCKED = 7
    HOST_KEY = 8
    PARTIAL = 9  # some hosts good, some rolled back
    CHANGES = 10  # dry run with changes, only with --detailed-exitcode
    INCONCLUSIVE = 11
    SIGHUP = 129
    SIGINT = 130
    SIGTERM = 143


class DdopsError(Exception):
    """Base of everything ddops reports on purpose.

    Args:
        what: what happened, one line.
        means: what it means for the host or the run ("nothing was changed").
        hint: what to do next, a command where there is one.
    """

    exit: Exit = Exit.INTERNAL

    def __init__(self, what: str, *, means: str = "", hint: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.means = means
        self.hint = hint

    def __str__(self) -> str:
        lines = [f"error: {self.what}"]
        lines += [f"       {line}" for line in self.means.splitlines()]
        if self.hint:
            lines.append(f"hint:  {self.hint}")
        return "\n".join(lines)


class UsageError(DdopsError):
    """A command line that cannot be carried out as written."""

    exit = Exit.USAGE


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that is wrong with a file; `field` as `hosts.gpu-01.spec.budget`, lines from 1."""

    what: str
    file: str
    line: int | None = None
    field: str = ""
    hint: str = ""

    def __str__(self) -> str:
        place = self.file if self.line is None else f"{self.file}:{self.line}"
        return f"{place}: {self.field + ': ' if self.field else ''}{self.what}"


class InventoryError(DdopsError):
    """An inventory that is not valid: everything that is wrong with it, in the order of its lines."""

    exit = Exit.USAGE

    def __init__(self, *faults: Fault) -> None:
        self.faults = tuple(sorted(faults, key=lambda fault: fault.line or 0))
        first, *others = self.faults
        told = [str(fault) + (f" ({fault.hint})" if fault.hint and others else "") for fault in self.faults]
        means = "the inventory was not used and no host was contacted"
        super().__init__(told[0], means="\n".join([*told[1:], means]), hint="" if others else first.hint)


class Refused(DdopsError):
    """Preflight said no; nothing was touched."""

    exit = Exit.REFUSED


class Locked(DdopsError):
    """Another run holds the host's lease."""

    exit = Exit.LOCKED


class HostKeyRejected(DdopsError):
    """The host's SSH key is unknown or not the known one; never retried."""

    exit = Exit.HOST_KEY


class Unreachable(DdopsError):
    """The host could not be reached or stopped answering: its state is not known from here."""

    exit = Exit.UNKNOWN


class ConnectionLost(Unreachable):
    """The connection broke while something was under way; ask the host before repeating anything."""


class RemoteTimeout(Unreachable):
    """A remote command did not end within its deadline; it may still run on the host."""


class RemoteFailed(DdopsError):
    """A remote command ended with an error the caller did not expect."""

    exit = Exit.REFUSED

    def __init__(self, what: str, *, status: int, stderr: str = "", means: str = "", hint: str = "") -> None:
        super().__init__(what, means=means, hint=hint)
        self.status = status
        self.stderr = stderr


class RestoreFailed(DdopsError):
    """The undo did not bring back a verified configuration: a person is needed."""

    exit = Exit.RESTORE_FAILED


class Interrupted(BaseException):
    """The operator or the pipeline asked to stop.

    No DdopsError and no Exception, as KeyboardInterrupt is none: it comes up wherever the program happens to be, and
    nothing that handles errors there may take it for one of its own and go on.
    """

    exit: Exit = Exit.SIGINT

    def __init__(self, what: str, *, means: str = "", hint: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.means = means
        self.hint = hint
