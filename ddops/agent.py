"""The host script over one connection, as methods. It survives a lost connection; it decides nothing.

Every verb of the host script looks at the state before it acts, so asking again after a reconnect is
asking the host, not repeating a step blindly.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

from ddops import commands, ledger, observe, units
from ddops.commands import Command
from ddops.errors import ConnectionLost, DdopsError, Exit, Locked, Refused, RemoteFailed, RemoteTimeout, Unreachable
from ddops.state import Entry, Kind, Observed, Trial, UnitState

if TYPE_CHECKING:
    from ddops.hosts import Remote, Result
    from ddops.inventory import HostConfig
    from ddops.journal import Journal

RECONNECT_SECONDS = 60.0
SETTLE_SECONDS = 180.0  # a confirm or an undo on the host, its wait for port and memory included
TICK_SECONDS = 5.0  # how long something may be overdue before the host's guard is helped
OUTCOMES = ("confirmed", "confirmed-restarted", "undone")
T = TypeVar("T")
_OF_A_TRIAL = ("extend", "stage", "revoke", "switch", "confirm", "undo")


class TooLate(DdopsError):
    """The other side (the guard, another operator) has claimed the trial first."""

    exit = Exit.LOCKED


class NotSettled(Unreachable):
    """The host has not finished a confirm or an undo yet; how it will end is not known from here."""


class Agent:
    """One host, one unit, one run.

    Args:
        remote: an open connection; reconnected here when it breaks.
        config: the host's resolved inventory.
        run: the run's id; the host tells runs apart by it.
        journal: where reconnects are reported.
        hosts: the whole fleet by name, for hosts that refer to another (a reference that scores).
    """

    def __init__(
        self,
        remote: Remote,
        config: HostConfig,
        run: str,
        journal: Journal,
        hosts: Mapping[str, HostConfig] | None = None,
    ) -> None:
        self.remote = remote
        self.config = config
        self.run = run
        self.unit = config.engine.unit
        self._guard = int(config.guard.seconds)
        self.hosts = hosts or {}
        self._journal = journal
        self._reconnecting = threading.Lock()
        self._away = False
        self.armed = False  # this run has changed something on the host, or may have

    # ------------------------------------------------------------ asking
    def call(self, command: Command) -> Result:
        """Run one command and map the host script's statuses to errors.

        Raises:
            Locked: another run holds the host. TooLate: the trial is being settled by the other side.
            Refused: no room, or a unit systemd does not accept. RemoteFailed: anything else.
            ConnectionLost, RemoteTimeout: the host stayed away for RECONNECT_SECONDS.
        """
        result = self.patiently(
            lambda: self.remote.run(
                command.argv,
                stdin=command.stdin,
                deadline=command.deadline_seconds,
                sudo=command.privileged,
            )
        )
        if result.status != 0:
            raise self._error(command, result)
        return result

    def patiently(self, ask: Callable[[], T]) -> T:
        """Ask; when the connection breaks, reconnect and ask again until RECONNECT_SECONDS are over."""
        # A host that has stayed away for so long is not waited for a second time, such as to give a lease back.
        give_up = time.monotonic() + (0.0 if self._away else RECONNECT_SECONDS)
        while True:
            try:
                said = ask()
            except (ConnectionLost, RemoteTimeout) as lost:
                self._reconnect(give_up, lost)
            else:
                self._away = False
                return said

    def warn(self, text: str) -> None:
        self._journal.emit("warning", host=self.config.name, text=text)

    def _reconnect(self, give_up: float, lost: DdopsError) -> None:
        """Make the connection anew, or wait for the thread that does.

        Raises:
            lost, or why there is no connection: nobody has made one until `give_up`.
        """
        try:
            left = give_up - time.monotonic()
            if left <= 0 or not self._reconnecting.acquire(timeout=left):
                raise lost
            try:
                if not self.remote.alive(timeout=5.0):
                    self.warn(f"{lost.what}; reconnecting")
                    self.remote.reconnect(deadline=max(0.0, give_up - time.monotonic()))
            finally:
                self._reconnecting.release()
        except Unreachable:
            self._away = True  # for every thread, until the host answers again
            raise

    def _error(self, command: Command, result: Result) -> DdopsError:
        said = result.stderr.decode(errors="replace").strip()
        verb = " ".join(command.argv[1:2])
        name = self.config.name
        match result.status:
            case commands.HELD:
                return locked(name, self.unit, said)
            case commands.TOO_LATE:
                return TooLate(f"{name}: {said}")
            case commands.NOTHING_OPEN if verb in _OF_A_TRIAL:
                return TooLate(f"{name}: {said}; a reboot undoes a trial")
            case commands.INVALID_UNIT:
                return Refused(
                    f"{name}: systemd does not accept the unit: {said}",
                    means="warnings count as errors here; nothing was started",
                )
            case commands.NOT_OURS:
                return Refused(f"{name}: {said}", means="nothing was changed")
            case commands.NO_ROOM:
                return Refused(f"{name}: {said}", means="nothing was changed", hint="free disk space and repeat")
        if result.status in (126, 127) or "command not found" in said:
            return Refused(
                f"{name} has no ddops-host script",
                means="nothing was asked of the host",
                hint=f"ddops install --host {name}",
            )
        if "No space left on device" in said:
            return Refused(f"{name}: no space left on the device", means=said.splitlines()[-1], hint="free disk space")
        what = said.splitlines()[-1] if said else f"exit status {result.status}"
        return RemoteFailed(f"{name}: ddops-host {verb} failed: {what}", status=result.status, stderr=said)

    def look(self) -> Observed:
        return self.patiently(lambda: observe.look(self.remote, self.config))

    def trial(self) -> tuple[Trial | None, UnitState]:
        result = self.call(commands.trial(self.unit))
        return observe.parse_trial(result.stdout.decode(errors="replace"))

    def settled(self, run: str, seconds: float) -> Trial:
        """Wait until the host has finished a confirm or an undo; both run there by themselves.

        Raises:
            NotSettled: it had not in `seconds`.
        """
        begun = time.monotonic()
        next_tick = begun + TICK_SECONDS
        while True:
            state, _ = self.trial()
            if state is None or state.run != run:  # a reboot, or another run came after it
                return self._ended(run)
            if not state.open and state.outcome in OUTCOMES:
                return state
            if (now := time.monotonic()) >= begun + seconds:
                raise NotSettled(
                    f"{self.config.name}: the host did not finish in {seconds:.0f} s ({state.token or state.step})",
                    means="it goes on by itself; how it ends is not known yet",
                    hint=f"ddops resume --host {self.config.name}",
                )
            if now >= next_tick:
                next_tick = now + TICK_SECONDS
                if state.token or state.guard_in_seconds < -TICK_SECONDS:
                    self._tick(run)
            time.sleep(0.1)

    def _tick(self, run: str) -> None:
        """Do what the host's guard does, in case somebody has stopped it."""
        command = commands.guard(self.unit, run)
        with contextlib.suppress(DdopsError):
            self.remote.run(command.argv, deadline=command.deadline_seconds, sudo=True)

    def _ended(self, run: str) -> Trial:
        """How a trial ended of which /run says nothing any more: by the ledger, and by what is in /etc."""
        observed = self.look()
        mine = {entry.kind: entry for entry in observed.ledger if entry.run == run}
        proven, outcome = mine.get(Kind.PROVEN), "undone"
        in_etc = proven is not None and proven.digest == units.digest(observed.etc_unit or b"")
        if Kind.UNDONE not in mine and Kind.CONFIRMED in mine:
            outcome = "confirmed"
        elif Kind.UNDONE not in mine and in_etc:
            # The power went between the rename into /etc and the last line of the ledger.
            outcome = "confirmed-restarted"
        return Trial(run, proven.digest if proven else "", "", "", 0.0, outcome=outcome)

    def logs(self, invocation: str, lines: int = 200) -> list[str]:
        """The journal of one start only, oldest first; empty when there was no such start."""
        if not invocation:
            return []
        result = self.call(commands.logs(self.unit, invocation, lines))
        return result.stdout.decode(errors="replace").splitlines()

    # ------------------------------------------------------------ acting
    def record(self, entry: Entry) -> None:
        self.call(commands.record(self.unit, self.run, ledger.to_line(entry)))

    @contextmanager
    def lease(self, holder: str) -> Iterator[None]:
        """The host is ours until the block ends, proof of a restored configuration included."""
        self.call(commands.lease_take(self.unit, self.run, self._guard, holder))
        try:
            with self._beating(commands.lease_beat(self.unit, self.run, self._guard)):
                yield
        finally:
            try:
                self.call(commands.lease_drop(self.unit, self.run))
            except DdopsError as problem:
                self.warn(f"the lease was not given back ({problem.what}); it expires in {self._guard} s")

    @contextmanager
    def heartbeat(self, on_taken: Callable[[], None]) -> Iterator[None]:
        """Keep the guard's deadline ahead until the block ends; `on_taken`: the trial is not ours any more."""

        def taken(problem: DdopsError) -> bool:
            if gone := isinstance(problem, (TooLate, RemoteFailed, Locked)):
                on_taken()
            return gone

        with self._beating(commands.extend(self.unit, self.run, self._guard), taken):
            yield

    @contextmanager
    def _beating(self, beat: Command, over: Callable[[DdopsError], bool] = lambda _: False) -> Iterator[None]:
        """Send `beat` from a thread until the block ends, or until a failed one is `over`.

        Other failures are not reported here: the main thread meets the same trouble and does it.
        """
        stop = threading.Event()

        def beats() -> None:
            # Four tries fit into one deadline: a single lost packet must not undo a healthy trial.
            while not stop.wait(self._guard / 4):
                try:
                    self.call(beat)
                except DdopsError as problem:
                    if over(problem):
                        return

        thread = threading.Thread(target=beats, name="ddops-beats", daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join(timeout=5.0)


def locked(host: str, unit: str, holder: str) -> Locked:
    """The error for a host that is held; `holder` is what the holder wrote into the lease."""
    first = holder.splitlines()[0] if holder else "another run"
    return Locked(
        f"{host} is held: {first}",
        means="nothing was changed here; two runs never touch one host at a time",
        hint=f"wait for it, or, when its controller is gone: ddops resume --host {host} (unit {unit})",
    )
