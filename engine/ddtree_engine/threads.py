"""How many threads a pass on CPU runs with: all or one.

Large passes get all. A small one is a few hundred operations of microseconds, each of which wakes the other threads and waits
for them: with a core to spare that takes a third to a half off the pass; where other work holds the cores, every operation
waits for the scheduler (some 10 ms each, a hundred times the pass). So small passes are timed and get what has proven
faster; one that stalls goes on with one thread, and so do all for a while. Results do not depend on it: threads share rows and
columns of a product, never its sums.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ddtree_engine.attention import Attend
from ddtree_engine.checkpoint import StackConfig

# What threads are woken for in any case, of one product: about half a millisecond of one core with AVX-512.
WORK = 120e6  # multiply-adds x bytes of a number
BYTES = 4e6  # of the weight: as long, read from memory

WAKES = 12  # of one trial
LATE_SECONDS = 0.4e-3  # a trial's operation takes 10 us, and 100 us where threads have to be woken first
STALL_SECONDS = 3e-3  # beyond twice what one thread takes: no pass is that uneven by itself
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 10.0  # seconds on one thread after a stall, doubled from stall to stall
CALM_SECONDS = 3.0  # without a stall: the next pause is the first again
TRIES = 2  # with one thread and with all, before the faster is chosen; the first pass of a size compiles
REVIEW_EVERY = 64  # passes of a size, one is run the other way


def numbers_per_product(stack: StackConfig) -> float:
    """Numbers in a weight matrix of a layer, on average over its four products."""
    queries, keys = stack.heads * stack.head_dim, stack.kv_heads * stack.head_dim
    return stack.hidden * (2 * queries + 2 * keys + 3 * stack.ff) / 4


def slowest_wake(most: int, late: float = LATE_SECONDS) -> float:
    """Seconds of the slowest of a few tiny operations on all threads; gives up at the first that is late."""
    before = torch.get_num_threads()
    torch.set_num_threads(most)
    work = torch.zeros(most * 32768, dtype=torch.uint8)  # 32768 elements: the least that PyTorch gives a thread
    work.add_(1)  # threads that slept are late without anything being wrong
    slowest = 0.0
    for _ in range(WAKES):
        started = time.perf_counter()
        work.add_(1)
        slowest = max(slowest, time.perf_counter() - started)
        if slowest > late:
            break
    torch.set_num_threads(before)
    return slowest


@dataclass(slots=True)
class _Usual:
    """How long passes of one size take one way."""

    seconds: float = math.inf
    passes: int = 0

    def learn(self, seconds: float) -> None:
        self.passes += 1
        if self.passes <= TRIES:
            self.seconds = min(self.seconds, seconds)
        else:  # a disturbance counts for little
            self.seconds += (min(seconds, 1.5 * self.seconds) - self.seconds) / 8

    @property
    def known(self) -> bool:
        return self.passes >= TRIES


@dataclass(slots=True)
class _Size:
    one: _Usual
    all: _Usual
    met: int = 0

    def prefers_all(self) -> bool:
        """The faster way, and now and then the other."""
        self.met += 1
        if not self.one.known:
            return False
        if not self.all.known:
            return True
        return (self.all.seconds < self.one.seconds) != (self.met % REVIEW_EVERY == 0)


class Crowd:
    """Whether other work holds the cores: seen when a pass stalls, and asked again after a pause.

    `wake` gives the seconds of the slowest wake of all threads. One for all passes of a process's engine.
    """

    def __init__(self, wake: Callable[[], float], clock: Callable[[], float] = time.perf_counter) -> None:
        self._wake, self.clock = wake, clock
        self._pause, self._until, self._calm_since = FIRST_PAUSE, -math.inf, math.inf

    def there(self) -> bool:
        now = self.clock()
        if now < self._until:
            return True
        if self._calm_since == math.inf:  # not asked yet, or the pause is over
            if self._wake() > LATE_SECONDS:
                self.stalled()
                return True
            self._calm_since = self.clock()
        return False

    def stalled(self) -> None:
        now = self.clock()
        if now - self._calm_since > CALM_SECONDS:
            self._pause = FIRST_PAUSE
        self._until, self._calm_since = now + self._pause, math.inf
        self._pause = min(LONGEST_PAUSE, 2 * self._pause)


class Threads:
    """For the passes of one stack: `start` before each, `stop` after it."""

    def __init__(self, most: int, numbers: float, itemsize: int, crowd: Crowd) -> None:
        self._most, self._bytes, self._crowd = most, numbers * itemsize, crowd
        self._sizes: dict[int, _Size] = {}
        self._running: tuple[int, bool, float] | None = None  # rows, on all threads, started; small passes only

    def large(self, rows: int) -> bool:
        """Whether a pass gets all threads without being timed."""
        return rows * self._bytes >= WORK or self._bytes >= BYTES

    def start(self, rows: int) -> None:
        """Set the number of threads for a pass."""
        self._running, everyone = None, self._most > 1
        if everyone and not self.large(rows):
            size = self._sizes.setdefault(rows, _Size(_Usual(), _Usual()))
            everyone = size.prefers_all() and not self._crowd.there()
            self._running = (rows, everyone, self._crowd.clock())
        torch.set_num_threads(self._most if everyone else 1)

    def watched(self, attend: Attend) -> Attend:
        """`attend`, which every layer calls, and with it an eye on the clock: a pass that stalls goes on with one thread."""
        if self._running is None or not self._running[1]:
            return attend
        rows, _, started = self._running
        end = started + self._stall(self._sizes[rows])

        def watch(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
            if self._crowd.clock() > end:
                torch.set_num_threads(1)
            return attend(queries, keys, values)

        return watch

    def stop(self) -> None:
        """The pass is done."""
        if self._running is None:
            return
        rows, everyone, started = self._running
        seconds, size = self._crowd.clock() - started, self._sizes[rows]
        if everyone and seconds > self._stall(size):
            torch.set_num_threads(1)  # for what comes before the next pass
            self._crowd.stalled()
        else:
            (size.all if everyone else size.one).learn(seconds)

    @staticmethod
    def _stall(size: _Size) -> float:
        """Seconds that no pass of the size takes when all threads come at once."""
        return 2 * size.one.seconds + STALL_SECONDS
