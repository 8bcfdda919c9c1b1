"""One request in flight, as the web thread sees it: its updates as they come, and how it may end.

Not here: who delivers the updates (worker.py) and what is made of them (reply.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import TypeAlias

from ddtree_engine.requests import Request, RequestError, Update

STALL_S = 600.0  # a request without any update for this long is given up


class EngineDead(Exception):
    """The device thread is gone; nothing will be generated any more."""


class Busy(Exception):
    """The queue is full."""


class Stalled(Exception):
    """No progress on a request within STALL_S."""


class NotReady(Exception):
    """Still starting, or already leaving; the message is the state."""


Event: TypeAlias = Update | RequestError | EngineDead | NotReady


class Ticket:
    """One request in flight, on the web thread's side: iterate its updates, or cancel it."""

    def __init__(self, request: Request, forget: Callable[[str], None]) -> None:
        self.request = request
        self._forget = forget
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._ended = False

    async def updates(self) -> AsyncIterator[Update]:
        """The request's updates up to the one with `finish`. Raises RequestError, EngineDead, NotReady, Stalled."""
        while not self._ended:
            event = await self._next()
            self._ended = not isinstance(event, Update) or event.finish is not None
            if isinstance(event, Exception):
                raise event
            yield event

    def cancel(self) -> None:
        """Stop caring. Safe at any time, also twice, also after the end."""
        if not self._ended:
            self._ended = True
            self._forget(self.request.id)

    def deliver(self, event: Event) -> None:
        self._events.put_nowait(event)

    async def _next(self) -> Event:
        try:
            # Not `wait_for`: before Python 3.12 it loses a cancellation that comes with an event, and a client that left.
            async with asyncio.timeout(STALL_S):
                return await self._events.get()
        except TimeoutError as exc:
            self.cancel()
            raise Stalled(f"no progress in {STALL_S:.0f} s; the request was cancelled") from exc
