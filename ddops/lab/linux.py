"""The few Linux system calls the lab needs, with errors as OSError. Not a general binding: only what is used here."""

import ctypes
import os
from pathlib import Path

CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

MS_RDONLY = 1
MS_NOSUID = 2
MS_NODEV = 4
MS_NOEXEC = 8
MS_REMOUNT = 32
MS_BIND = 4096
MS_REC = 16384
MS_PRIVATE = 1 << 18
SEALED = MS_NOSUID | MS_NODEV | MS_NOEXEC

_MNT_DETACH = 2
_PR_SET_PDEATHSIG = 1
_SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41, "riscv64": 41, "ppc64le": 203, "s390x": 217}

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{what}: {os.strerror(error)}")


def mount(source: str | Path, target: str | Path, kind: str = "", flags: int = 0, options: str = "") -> None:
    """mount(2)."""
    arguments = [os.fsencode(x) if str(x) else None for x in (source, target, kind)]
    result = _libc.mount(*arguments, ctypes.c_ulong(flags), options.encode() or None)
    _check(result, f"mount {kind or source} on {target}")


def bind_read_only(source: str | Path, target: str | Path, *, recursive: bool = False) -> None:
    """Show `source` at `target`, read-only. Restrictions that `source` already has are kept (the kernel insists)."""
    mount(source, target, flags=MS_BIND | (MS_REC if recursive else 0))
    kept = os.statvfs(target).f_flag & SEALED  # ST_NOSUID, ST_NODEV, ST_NOEXEC have the numbers of MS_*
    mount("none", target, flags=MS_REMOUNT | MS_BIND | MS_RDONLY | kept)


def detach(target: str | Path) -> None:
    """Lazy unmount of `target` and all that is mounted below it."""
    _check(_libc.umount2(os.fsencode(target), _MNT_DETACH), f"umount {target}")


def unshare(flags: int) -> None:
    """unshare(2)."""
    _check(_libc.unshare(flags), "unshare")


def pivot_root(new_root: str | Path, put_old: str | Path) -> None:
    """pivot_root(2), which the C library has no function for."""
    number = _SYS_PIVOT_ROOT[os.uname().machine]
    _check(_libc.syscall(number, os.fsencode(new_root), os.fsencode(put_old)), f"pivot_root {new_root}")


def die_with_parent(signal_number: int) -> None:
    """Ask the kernel for `signal_number` when the thread that forked us ends."""
    _check(_libc.prctl(_PR_SET_PDEATHSIG, signal_number, 0, 0, 0), "prctl")
