"""Signals that ask a command to stop, as Interrupted in the main thread, and kept until somebody meets them.

Python loses an exception that a signal raises at a bad moment: inside `__del__` or a weakref's callback it is
dropped, and a clean-up that fails on its way (a terminal that is gone cannot be drawn on) takes its place. So
a stop is also kept here, and every step asks `check`. Signals are the process' own; so is this state.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from ddops.errors import Exit, Interrupted

SIGNALS = {signal.SIGINT: Exit.SIGINT, signal.SIGTERM: Exit.SIGTERM, signal.SIGHUP: Exit.SIGHUP}

_unmet: list[Interrupted] = []


@contextmanager
def stoppable() -> Iterator[None]:
    """While the block runs SIGNALS become Interrupted in the main thread; each further one raises again.

    A hang-up counts once, as a closing terminal may send several; under nohup it does not count at all.
    """
    kept = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else set()
    before = {number: signal.signal(number, _stop) for number in SIGNALS if number not in kept}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        _unmet.clear()


def ignore() -> None:
    """From now on nothing stops this process: all is done, and what is left is to say so."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def check() -> None:
    """Raises Interrupted when a stop was asked for that nobody has met yet. For the main thread."""
    if _unmet:
        raise _unmet[-1]


def meet() -> Interrupted | None:
    """The latest stop nobody has met yet, if there is one; the caller acts on it from here on."""
    latest = _unmet[-1] if _unmet else None
    _unmet.clear()
    return latest


def _stop(number: int, _: FrameType | None) -> None:
    if number == signal.SIGHUP:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    problem = Interrupted(f"stopped by {signal.Signals(number).name}", means="nothing was changed")
    problem.exit = SIGNALS[signal.Signals(number)]
    _unmet.append(problem)
    raise problem
