"""Waits that end: deadlines are for a machine that is busy with other things, not expectations."""

import time
from collections.abc import Callable, Iterator

from ddops.lab.spec import LabError

START_SECONDS = 60.0
WAIT_SECONDS = 30.0
_POLL_SECONDS = 0.02


def until(seconds: float, complaint: str, why: Callable[[], str] = lambda: "") -> Iterator[None]:
    """Yield until the caller is content; LabError with the complaint when that takes longer than `seconds`."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        yield
        time.sleep(_POLL_SECONDS)
    raise LabError("; ".join(part for part in (f"{complaint} in {seconds:.0f} s", why()) if part))
