"""A slow or lossy wire for one host: carries Ethernet frames between two taps, late or not at all.

The kernel's own tool for this, sch_netem, is a module that many kernels of virtual machines lack.
"""

import fcntl
import heapq
import os
import random
import select
import struct
import time

from ddops.lab.spec import LabError

_TUNSETIFF = 0x400454CA
_IFF_TAP = 0x0002
_IFF_NO_PI = 0x1000
_LONGEST_FRAME = 65536


def open_tap(name: str) -> int:
    """A new tap interface; it lives as long as the returned file descriptor."""
    try:
        tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        fcntl.ioctl(tap, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TAP | _IFF_NO_PI))
    except OSError as exc:
        raise LabError(f"delay needs /dev/net/tun open to us: {exc}") from exc
    return tap


def carry(near: int, far: int, *, delay_seconds: float, loss: float) -> None:
    """Carry frames both ways for ever, each `delay_seconds` late, dropping a share `loss` (0 to 1) of them."""
    other = {near: far, far: near}
    queue: list[tuple[float, int, int, bytes]] = []
    number = 0  # keeps frames of equal due time in order
    while True:
        wait = max(0.0, queue[0][0] - time.monotonic()) if queue else None
        for tap in select.select([near, far], [], [], wait)[0]:
            frame = os.read(tap, _LONGEST_FRAME)
            if random.random() >= loss:
                number += 1
                heapq.heappush(queue, (time.monotonic() + delay_seconds, number, other[tap], frame))
        while queue and queue[0][0] <= time.monotonic():
            _, _, tap, frame = heapq.heappop(queue)
            _send(tap, frame)


def _send(tap: int, frame: bytes) -> None:
    try:
        os.write(tap, frame)
    except OSError:
        return  # the interface is down: a wire loses such frames too
