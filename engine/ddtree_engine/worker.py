"""The one thread that owns the device, and its two queues to the web thread.

Inbox (thread-safe queue): submit, cancel, flush. Outbox: the event loop's own thread-safe call queue, one
call per round. Every wait has a deadline, and every ticket gets an end: its last update, a refusal, or `EngineDead`.
Not here: what a round does (decode.py), one request's side of it (tickets.py), HTTP (api*.py), or leaving the
process (server.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol, TypeAlias

from ddtree_engine.config import ConfigError
from ddtree_engine.metrics import Meter, Tally
from ddtree_engine.requests import Request, RequestError, Sampling, Stats, Update
from ddtree_engine.tickets import Busy, EngineDead, NotReady, Stalled, Ticket

if TYPE_CHECKING:
    from ddtree_engine.engine import Engine  # imports torch: only the device thread waits for that

log = logging.getLogger("ddtree_engine")

IDLE_WAIT_S = 0.1  # how long the idle device thread waits for a command before it looks around
HANG_S = 300.0  # one step longer than this means a hung device
ANSWER_S = 30.0  # a command that the device thread answers itself (flush)


class State(StrEnum):
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    DEAD = "dead"


@dataclass(frozen=True, slots=True)
class Death:
    """Why the device thread ended: a setting that cannot be served, or a failure."""

    reason: str
    config_error: ConfigError | None = None


class Observer(Protocol):
    """What the device thread tells about itself. Called on the device thread; must not block or raise."""

    def progress(self, text: str) -> None: ...
    def ready(self, engine: Engine) -> None: ...
    def died(self, death: Death) -> None: ...


class ShellFaults(Protocol):
    """The faults that live in this shell rather than in a decoding round (see faults.py)."""

    def while_starting(self, engine: Engine, progress: Callable[[str], None]) -> None: ...
    def updates(self, updates: Sequence[Update], stats: Stats) -> list[Update]: ...


Load: TypeAlias = "Callable[[Callable[[str, float], None]], Engine]"


@dataclass(frozen=True, slots=True)
class _Submit:
    request: Request


@dataclass(frozen=True, slots=True)
class _Cancel:
    request_id: str


@dataclass(frozen=True, slots=True)
class _Flush:
    done: asyncio.Future[None]


_Command: TypeAlias = _Submit | _Cancel | _Flush


class Worker:
    """Runs the engine on a thread of its own and hands its updates to the event loop's tickets."""

    def __init__(self, load: Load, observer: Observer, meter: Meter, faults: ShellFaults | None = None) -> None:
        self._load = load
        self._observer = observer
        self._meter = meter
        self._faults = faults
        self._tally = Tally()
        self._inbox: queue.Queue[_Command] = queue.Queue()
        self._tickets: dict[str, Ticket] = {}  # event-loop thread only
        self._stop = threading.Event()
        self._step_began: float | None = None
        self._thread = threading.Thread(target=self._main, name="device", daemon=True)
        self.state = State.STARTING
        self.engine: Engine | None = None
        self.death: Death | None = None

    # --- the web thread's side ---

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._thread.start()

    def submit(self, request: Request) -> Ticket:
        """Queue a request. Raises NotReady, EngineDead, Busy or RequestError (it can never run)."""
        engine = self._ready_engine()
        limit = queue_limit(engine.config.max_running_requests)
        if len(self._tickets) >= limit:
            raise Busy(f"{len(self._tickets)} requests are running or waiting; the limit is {limit}")
        engine.check(request)
        ticket = Ticket(request, self.forget)
        self._tickets[request.id] = ticket
        self._inbox.put(_Submit(request))
        return ticket

    def forget(self, request_id: str) -> None:
        """Cancel a request and drop its ticket."""
        if self._tickets.pop(request_id, None) is not None:
            self._inbox.put(_Cancel(request_id))

    async def flush(self) -> None:
        """Empty the prefix cache. Raises NotReady, EngineDead or Stalled."""
        self._ready_engine()
        done: asyncio.Future[None] = self._loop.create_future()
        self._inbox.put(_Flush(done))
        try:
            async with asyncio.timeout(ANSWER_S):
                await done
        except TimeoutError as exc:
            raise Stalled(f"the device thread did not answer in {ANSWER_S:.0f} s") from exc

    def drain(self) -> None:
        """Take no new requests; those in flight go on."""
        if self.state is not State.DEAD:
            self.state = State.DRAINING

    def abandon(self) -> None:
        """Answer everything still in flight with NotReady: the time to drain is over."""
        for request_id, ticket in list(self._tickets.items()):
            ticket.deliver(NotReady("shutting down"))
            self.forget(request_id)

    def stop(self, timeout_s: float) -> None:
        """Ask the thread to end and wait a little; a longer round is left to the process's end."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    @property
    def in_flight(self) -> int:
        return len(self._tickets)

    def hung_for(self) -> float:
        """Seconds beyond HANG_S that the current step has taken; 0 when all is well."""
        began = self._step_began
        return max(0.0, time.monotonic() - began - HANG_S) if began is not None else 0.0

    def declare_dead(self, reason: str) -> None:
        """The event loop's own verdict on a device thread that hangs."""
        self._fail_all(Death(reason))

    def _ready_engine(self) -> Engine:
        if self.state is State.DEAD:
            raise EngineDead(self.death.reason if self.death else "the device thread is gone")
        if self.state is not State.READY or self.engine is None:
            raise NotReady(str(self.state))
        return self.engine

    def _dispatch(self, updates: Sequence[Update]) -> None:
        for update in updates:
            ticket = self._tickets.get(update.request_id)
            if ticket is not None:
                ticket.deliver(update)
            if update.finish is not None:
                self._tickets.pop(update.request_id, None)

    def _refuse(self, request_id: str, error: RequestError) -> None:
        if (ticket := self._tickets.pop(request_id, None)) is not None:
            ticket.deliver(error)

    def _fail_all(self, death: Death) -> None:
        if self.state is State.DEAD:
            return
        self.state, self.death = State.DEAD, death
        for ticket in self._tickets.values():
            ticket.deliver(EngineDead(death.reason))
        self._tickets.clear()
        self._observer.died(death)

    # --- the device thread's side ---

    def _main(self) -> None:
        try:
            engine = self._start_engine()
            self._serve(engine)
        except ConfigError as exc:
            self._post(self._fail_all, Death(str(exc), exc))
        except BaseException as exc:  # whatever ends this thread ends the process, and says why
            reason = f"{type(exc).__name__}: {' '.join(str(exc).split())}"
            log.error("Scheduler hit an exception: %s", traceback.format_exc().rstrip())
            self._post(self._fail_all, Death(reason))

    def _start_engine(self) -> Engine:
        engine = self._load(lambda stage, share: self._observer.progress(f"{stage} {share * 100:.0f} %"))
        if self._faults is not None:
            self._faults.while_starting(engine, self._observer.progress)
        self._observer.progress("warming up")
        warm_up(engine)
        self.engine = engine
        self._meter.idle(engine.stats(), self._tally.totals, time.monotonic())
        if self.state is State.STARTING:
            self.state = State.READY
            self._observer.ready(engine)
        return engine

    def _serve(self, engine: Engine) -> None:
        while not self._stop.is_set():
            self._take_commands(engine)
            if engine.busy:
                self._round(engine)

    def _round(self, engine: Engine) -> None:
        before = engine.stats()
        self._step_began = time.monotonic()
        updates = engine.step()
        self._step_began = None
        stats, now = engine.stats(), time.monotonic()
        if self._faults is not None:
            updates = self._faults.updates(updates, stats)
        for update in updates:
            self._tally.note(update)
        self._post(self._dispatch, updates)
        line = self._meter.round(stats, self._tally.totals, now, ran=_busier(before, stats, len(updates)))
        if line is not None:
            log.info(line)
        if not engine.busy:
            self._meter.idle(stats, self._tally.totals, now)

    def _take_commands(self, engine: Engine) -> None:
        """Carry out what is waiting; when the engine is idle, wait a moment for something."""
        with contextlib.suppress(queue.Empty):
            command = self._inbox.get_nowait() if engine.busy else self._inbox.get(timeout=IDLE_WAIT_S)
            while True:
                self._carry_out(command, engine)
                command = self._inbox.get_nowait()

    def _carry_out(self, command: _Command, engine: Engine) -> None:
        if isinstance(command, _Submit):
            try:
                engine.submit(command.request)
            except RequestError as exc:
                self._post(self._refuse, command.request.id, exc)
                return
            self._tally.start(command.request.id, speculates=command.request.mode.drafts)
        elif isinstance(command, _Cancel):
            engine.cancel(command.request_id)
        else:
            engine.flush()
            self._post(_resolve, command.done)

    def _post(self, call: Callable[..., None], *args: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has closed: nobody listens any more
            self._loop.call_soon_threadsafe(call, *args)


def queue_limit(max_running: int) -> int:
    """How many requests may run and wait at once before a client is told 503."""
    return max_running + max(64, 4 * max_running)


def warm_up(engine: Engine) -> None:
    """One real generation, so that READY means it can generate. Raises RuntimeError when it cannot."""
    prompt = tuple(i % engine.info.vocab_size for i in range(100, 104))
    sampling = Sampling(max_new_tokens=4, ignore_eos=True)
    [generated] = engine.generate([prompt], sampling, engine.config.speculative_algorithm.mode)
    if not generated.token_ids:
        raise RuntimeError("the warm-up generation gave no token")
    engine.flush()


def _busier(before: Stats, after: Stats, updates: int) -> Stats:
    """`after`, with what ran during the round rather than what is left of it: requests may have come and gone."""
    running = max(before.running, after.running, updates)
    return replace(after, running=running, tokens_in_use=max(before.tokens_in_use, after.tokens_in_use))


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
