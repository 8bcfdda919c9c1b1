"""Run a call that knows no time limit of its own, and stop waiting for it in time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def within(timeout: float, work: Callable[[], T]) -> T:
    """The call's result. Raises TimeoutError, or what the call raised.

    For name look-ups and key agents; an abandoned call goes on in a daemon thread until it returns.
    """
    results: list[T] = []
    problems: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as exc:
            problems.append(exc)

    thread = threading.Thread(target=run, name="ddops-bounded-call", daemon=True)
    thread.start()
    thread.join(timeout)
    if problems:
        raise problems[0]
    if not results:
        raise TimeoutError
    return results[0]
