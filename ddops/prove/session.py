"""One battery run's traffic: sends requests, alone or in waves, and keeps every reply for the probes and for replay.

It turns engine failures into facts (asked again once, so that a single cut is not called a crash) and ends the run at
once when the engine is gone. It judges no text.
"""

from __future__ import annotations

import queue
import random
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ddops.prove.evidence import Baseline, Level, plain
from ddops.prove.prompts import Item, Maker
from ddops.prove.verdicts import Policy
from ddops.prove.wire import Ask, EngineError, Failure, Gone, Hung, Reply, Unsupported

if TYPE_CHECKING:
    from ddops.prove.answers import Check
    from ddops.prove.client import EngineClient
    from ddops.prove.rescore import Judgement

_AT_MOST = 3  # times its usual time that a level may take
_REPEATED_AT_MOST = 4  # failed requests asked again after one wave; more would only wait for more deadlines


class EngineDied(Exception):
    """The engine stopped answering its health check in the middle of the battery."""


class OutOfTime(Exception):
    """The battery's own time is used up."""


@dataclass(slots=True)
class Turn:
    """One request and what became of it. Probes fill in `check` and `judged`."""

    index: int
    label: str
    ask: Ask
    item: Item | None = None
    reply: Reply | None = None
    error: EngineError | None = None
    cut: str = ""  # the failure of a first attempt that went through when repeated
    check: Check | None = None
    judged: Judgement | None = None
    started: float = 0.0
    ended: float = 0.0

    @property
    def text(self) -> str:
        return self.reply.text if self.reply else ""

    @property
    def whole(self) -> bool:
        return self.reply is not None and not self.reply.cancelled

    def to_dict(self) -> dict[str, Any]:
        """For evidence and replay."""
        found: dict[str, Any] = {"label": self.label, "ask": self.ask.to_dict()}
        if self.item is not None:
            found |= {"kind": str(self.item.kind), "expect": self.item.expect, "marks": list(self.item.marks)}
        if self.reply is not None:
            found |= {"text": self.reply.text, "ids": list(self.reply.ids or ()), "finish": self.reply.finish}
            found |= {"prompt_tokens": self.reply.meta.prompt_tokens, "verify_passes": self.reply.meta.verify_passes}
        if self.check is not None:
            found |= {"ok": self.check.ok, "found": self.check.got}
        if self.judged is not None:
            found["worst_gap"] = self.judged.worst
        if self.error is not None:
            found["error"] = f"{type(self.error).__name__}: {self.error}"
        kept: dict[str, Any] = plain(found)
        return kept


@dataclass(frozen=True, slots=True)
class Scale:
    """How much a level asks. Chosen so that quick ends within a minute on two CPU cores with the bundled model; its
    seconds leave a busy machine some more."""

    seconds: float
    wave_cap: int  # largest wave, whatever max_running is
    waves: int
    kin: int
    long_functions: int
    long_answers: int
    modes: int
    sampled: int
    streams: int
    repeats: int
    rounds: int  # of the throughput load
    round_requests: int
    warm: int  # replies scored a second time, from the cache
    sweep: int  # short replies, enough to meet a fault that touches few of them


SCALES = {
    Level.QUICK: Scale(75, 16, 1, 0, 16, 1, 6, 24, 3, 3, 3, 4, 4, 190),
    Level.STANDARD: Scale(300, 64, 12, 12, 16, 6, 32, 48, 12, 16, 5, 8, 32, 900),
    Level.DEEP: Scale(1800, 256, 24, 36, 16, 8, 48, 96, 24, 16, 9, 8, 64, 4500),
}


@dataclass(slots=True)
class Session:
    """State of one run: the client, the draw of prompts, every turn so far."""

    client: EngineClient
    level: Level
    policy: Policy
    baseline: Baseline | None = None
    reference: EngineClient | None = None
    turns: list[Turn] = field(default_factory=list)
    notes: dict[str, Any] = field(default_factory=dict)  # what one probe leaves for another
    started: float = field(default_factory=time.monotonic)
    rng: random.Random = field(init=False)
    make: Maker = field(init=False)
    seed: int = field(init=False)

    def __post_init__(self) -> None:
        self.seed = self.policy.seed if self.policy.seed is not None else secrets.randbits(48)
        self.rng = random.Random(self.seed)
        self.make = Maker(self.rng)

    @property
    def scale(self) -> Scale:
        return SCALES[self.level]

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started

    @property
    def seconds_meant(self) -> float:
        """What the level shall take. After it nothing is asked any more that only adds certainty."""
        return self.policy.battery_seconds or self.scale.seconds

    @property
    def seconds_allowed(self) -> float:
        """What every probe may take together; a slow engine gets its proof, and a hopeless one an end."""
        return _AT_MOST * self.seconds_meant

    @property
    def late(self) -> bool:
        return self.seconds > self.seconds_meant

    @property
    def closing(self) -> bool:
        """Whether no more traffic is wanted: the time is used up, or the run has seen enough."""
        return self.seconds > self.seconds_allowed or bool(self.notes.get("ended"))

    @property
    def max_running(self) -> int:
        """The most requests the engine runs at once: the policy's word, the engine's, or a cautious 8."""
        return self.policy.max_running or self.client.facts().max_running or 8

    def shorten(self, probe: str, how: str) -> None:
        """Note that a probe asked less than its level means to; '' for nothing."""
        if how:
            said = self.notes.setdefault("shortened", {})
            said[probe] = f"{said[probe]}; {how}" if probe in said else how

    @property
    def shortened(self) -> dict[str, str]:
        """Probes that asked less than the level means to, and how."""
        return self.notes.get("shortened", {})  # type: ignore[no-any-return]

    @property
    def speculates(self) -> bool:
        return self.client.facts().speculates is not False

    def ask_for(self, item: Item, **options: Any) -> Ask:
        extra = {"chat_template_kwargs": self.policy.chat_template_kwargs} if self.policy.chat_template_kwargs else {}
        tokens = item.max_tokens + self.policy.thinking_tokens
        asked = Ask.user(item.prompt, **({"max_tokens": tokens, "extra": extra} | options))
        return replace(asked, messages=item.messages)

    def send_items(self, label: str, items: Sequence[Item], **options: Any) -> list[Turn]:
        """All items at once, greedy."""
        return self.send(label, [(item, self.ask_for(item, **options)) for item in items])

    def send(
        self,
        label: str,
        asks: Sequence[tuple[Item | None, Ask]],
        *,
        stagger_seconds: float = 0.0,
        overtime: bool = False,
    ) -> list[Turn]:
        """Send requests together and wait for all; the second half may arrive apart, `stagger_seconds` each.

        `overtime`: also when the battery's time is used up, since a finding must be confirmed or cleared.
        Raises EngineDied as soon as the engine is known to be gone (requests still under way are left behind),
        OutOfTime when the battery's time was up before.
        """
        turns = self._enlist(label, asks, overtime)
        flight = _Flight(self)
        half = len(turns) // 2
        for i, turn in enumerate(turns):
            flight.start(turn, max(0, i - half) * stagger_seconds)
        flight.land(len(turns))
        self._repeat_failed([t for t in turns if isinstance(t.error, Failure)])
        return turns

    def climb(self, label: str, asks: Sequence[tuple[Item | None, Ask]], steps: Sequence[int]) -> list[Turn]:
        """Send requests one after another, with at most steps[i] in flight while request i is. Raises as `send`."""
        turns = self._enlist(label, asks, False)
        flight = _Flight(self)
        for turn, most in zip(turns, steps, strict=True):
            flight.land(max(0, flight.aloft - most + 1))
            flight.start(turn)
        flight.land(flight.aloft)
        self._repeat_failed([t for t in turns if isinstance(t.error, Failure)])
        return turns

    def _enlist(self, label: str, asks: Sequence[tuple[Item | None, Ask]], overtime: bool) -> list[Turn]:
        if self.seconds > self.seconds_allowed and not overtime:
            raise OutOfTime(f"the {self.seconds_allowed:g} s that the {self.level} level may take are used up")
        turns = [Turn(len(self.turns) + i, label, ask, item) for i, (item, ask) in enumerate(asks)]
        self.turns += turns
        return turns

    def deliver(self, turn: Turn, delay: float, done: queue.SimpleQueue[Turn | BaseException]) -> None:
        try:
            time.sleep(delay)
            self.fill(turn)
        except BaseException as exc:  # for the thread that waits: a lost connection, or a fault of ours
            done.put(exc)
        else:
            done.put(turn)

    def fill(self, turn: Turn) -> None:
        """Send one turn's request and note what came."""
        turn.started = time.monotonic()
        try:
            turn.reply, turn.error = self.client.ask(turn.ask), None
        except EngineError as exc:
            turn.error = exc
        turn.ended = time.monotonic()

    def _repeat_failed(self, failed: Sequence[Turn]) -> None:
        """Ask failed requests once more; a request that fails twice stays failed."""
        if not failed:
            return
        self.check_alive(failed[0].error)
        for turn in failed[:_REPEATED_AT_MOST]:
            before = turn.error
            self.fill(turn)
            if turn.error is None:
                turn.cut = named(before)
                continue
            self.check_alive(turn.error)
            if isinstance(turn.error, Hung):
                return

    def check_alive(self, error: EngineError | None) -> None:
        """Raises EngineDied when the engine is gone. One that hangs may still call itself healthy: ask for a token."""
        if not self.engine_answers():
            raise EngineDied(f"{named(error)}; its health check fails")
        if isinstance(error, Hung) and not self.client.answers(timeout=self.policy.stall_seconds):
            raise EngineDied(f"{named(error)}; it calls itself healthy and gives no token")

    def engine_answers(self) -> bool:
        """Healthy now, or within the few seconds that a dying process needs to say either."""
        for pause in (0.0, 0.5, 1.5):
            time.sleep(pause)
            if self.client.healthy(timeout=5.0):
                return True
        return False

    def greedy(self, turns: Iterable[Turn] | None = None) -> list[Turn]:
        """Whole T=0 replies."""
        return [t for t in (self.turns if turns is None else turns) if t.whole and t.ask.temperature == 0]

    def parallel(self, work: Callable[[Turn], None], turns: Sequence[Turn], workers: int = 4) -> None:
        if turns:
            with ThreadPoolExecutor(max_workers=workers) as pool:
                list(pool.map(work, turns))


class _Flight:
    """Requests under way, each in a thread of its own."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._done: queue.SimpleQueue[Turn | BaseException] = queue.SimpleQueue()
        self._checked = False
        self.aloft = 0

    def start(self, turn: Turn, delay: float = 0.0) -> None:
        # Daemon threads: a request that hangs must not keep the battery from ending.
        threading.Thread(target=self._session.deliver, args=(turn, delay, self._done), daemon=True).start()
        self.aloft += 1

    def land(self, count: int) -> None:
        """Wait for `count` of them. Raises EngineDied when the engine is gone, and what a request's thread raised."""
        longest = 2 * self._session.policy.request_seconds
        for _ in range(count):
            try:
                turn = self._done.get(timeout=longest)
            except queue.Empty:
                raise EngineDied(f"a request did not end within {longest:g} s") from None
            self.aloft -= 1
            if isinstance(turn, BaseException):
                raise turn
            if isinstance(turn.error, (Hung, Gone)) and not self._checked:
                self._checked = True
                self._session.check_alive(turn.error)


def most_in_flight(turns: Iterable[Turn]) -> int:
    """The largest number of requests under way at one moment, as the client saw it."""
    edges = sorted([(t.started, 1) for t in turns if t.ended] + [(t.ended, -1) for t in turns if t.ended])
    most = now = 0
    for _, step in edges:
        now += step
        most = max(most, now)
    return most


def unsupported(turns: Iterable[Turn]) -> str:
    """Why the engine refused, if it refused any of these."""
    return next((str(t.error) for t in turns if isinstance(t.error, Unsupported)), "")


def named(error: EngineError | None) -> str:
    return f"{type(error).__name__.lower()}: {error}" if error else "no error"
