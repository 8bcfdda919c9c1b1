"""Memory in huge pages on CPU, so that a pass over the weights does not wait for the page tables.

A pass reads every weight once. In pages of 4 kB that misses the translation cache thousands of times, and on a virtual
machine every miss walks two page tables: a fifth of a plain step of the bundled model. oneDNN's blocked weights lie in the C
heap at addresses that PyTorch does not tell, so the process's own anonymous memory is gathered, as the kernel lists it.
Linux only; what the kernel refuses stays in small pages. Not here: the key-value cache, which stays in small pages on
purpose (`cache.py`).
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import re
from dataclasses import dataclass
from pathlib import Path

log = logging.getLogger("ddtree_engine")

HUGE_KB = 2048
_ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_SMAPS = Path("/proc/self/smaps")
_MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25  # Linux; collapse since 6.1, before that the kernel's daemon does it in time
_HEAD = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (\S+) \S+ \S+ (\d+) *(.*)")


@dataclass(frozen=True, slots=True)
class Region:
    """Private, writable memory without a file."""

    start: int
    end: int
    resident_kb: int
    huge_kb: int

    @property
    def kb(self) -> int:
        return (self.end - self.start) // 1024

    @property
    def gathered(self) -> bool:
        """But for its ends, which lie within a huge page."""
        return self.resident_kb - self.huge_kb < 2 * HUGE_KB


def regions(smaps: str) -> list[Region]:
    """What /proc/PID/smaps lists that may be gathered: not what asked for small pages, and no stacks of threads.

    A stack is hardly used, and huge pages would fill the rest of it with memory.
    """
    found = []
    for entry in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", smaps):
        head = _HEAD.match(entry)
        if head is None or head[3] != "rw-p" or head[4] != "0" or head[5] not in ("", "[heap]"):
            continue
        fields = {name: rest for name, _, rest in (line.partition(":") for line in entry.splitlines()[1:])}
        if "nh" in fields.get("VmFlags", "").split():
            continue
        found.append(Region(int(head[1], 16), int(head[2], 16), _kb(fields, "Rss"), _kb(fields, "AnonHugePages")))
    return [region for region in found if region.kb >= HUGE_KB and 2 * region.resident_kb >= region.kb]


def _kb(fields: dict[str, str], name: str) -> int:
    return int(fields.get(name, "0").split()[0])


def _now() -> list[Region]:
    return regions(_SMAPS.read_text(encoding="utf-8", errors="replace"))


def gather() -> int:
    """Move this process's memory to huge pages as far as the system allows; kB that are in them afterwards.

    Takes about a second for every few GB. An administrator's `never` is respected.
    """
    with contextlib.suppress(OSError, AttributeError):
        if "[never]" not in _ENABLED.read_text(encoding="ascii"):
            advise = ctypes.CDLL(None).madvise
            for region in _now():
                if region.gathered:
                    continue
                for advice in (_MADV_HUGEPAGE, _MADV_COLLAPSE):
                    advise(ctypes.c_void_p(region.start), ctypes.c_size_t(region.end - region.start), advice)
            kb = sum(region.huge_kb for region in _now())
            log.debug("%d MB of memory are in huge pages", kb // 1024)
            return kb
    return 0
