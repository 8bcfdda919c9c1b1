"""Several hosts: what comes next, given how it went so far. Pure; it changes nothing and waits for nothing.

Canaries first, one of each architecture, since a pass on one kind of GPU says nothing about another. Then
batches. Limits count over the whole run, and hosts that can't be reached are counted apart from hosts
that failed. `decide` is asked before every batch, so a limit holds in every state.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from ddops.errors import Exit
from ddops.outcome import Outcome, Result

if TYPE_CHECKING:
    from ddops.inventory import Rollout


class Host(Protocol):
    """What of a host matters here (inventory.HostConfig has it)."""

    @property
    def name(self) -> str: ...
    @property
    def arch(self) -> str | None: ...


@dataclass(frozen=True, slots=True)
class Policy:
    """How a run proceeds.

    canary: hosts of each architecture that go first, alone (0: none).
    batches: sizes of the batches after that; the last one repeats.
    max_failed, max_unreachable: how many hosts may end so, over the whole run, before it stops.
    """

    canary: int = 1
    batches: tuple[int, ...] = (1,)
    max_failed: int = 0
    max_unreachable: int = 0

    def __post_init__(self) -> None:
        if self.canary < 0 or not self.batches or min(self.batches) < 1:
            raise ValueError("a batch has at least one host")
        if self.max_failed < 0 or self.max_unreachable < 0:
            raise ValueError("a limit is not negative")

    @property
    def at_most(self) -> int:
        """The most hosts that are ever changed at the same time."""
        return max(1, *self.batches)


@dataclass(frozen=True, slots=True)
class Continue:
    """Change these hosts now, together."""

    hosts: tuple[Host, ...]
    why: str


@dataclass(frozen=True, slots=True)
class Halt:
    """Change no further host; `left` were not touched."""

    reason: str
    left: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Done:
    """Every host has had its turn."""


def policy(section: Rollout) -> Policy:
    """The inventory's `rollout` section."""
    batches = section.batch if isinstance(section.batch, tuple) else (section.batch,)
    return Policy(
        section.canary,
        batches or (1,),
        section.max_failed,
        section.max_unreachable,
    )


# ---------------------------------------------------------------- what comes next
_STOPS = (Result.RESTORE_FAILED, Result.INTERRUPTED)  # a person is needed, or has spoken
_FAILED = (Result.ROLLED_BACK, Result.INCONCLUSIVE, Result.NOT_PROVEN, Result.REFUSED, Result.HOST_KEY)
_AWAY = (Result.UNKNOWN, Result.LOCKED)  # nothing was learnt about the configuration
_GOOD = (Result.APPLIED, Result.UNCHANGED, Result.VERIFIED, Result.PLANNED)


def decide(hosts: Sequence[Host], outcomes: Sequence[Outcome], policy: Policy) -> Continue | Halt | Done:
    """The next batch, or why there is none.

    Args:
        hosts: all hosts of the run, in order.
        outcomes: one for each host that has had its turn, in the order they ended.
    """
    ended = {outcome.host for outcome in outcomes}
    left = [host for host in hosts if host.name not in ended]
    reason = _stop(outcomes, policy)
    if reason and left:
        return Halt(reason, tuple(host.name for host in left))
    if not left:
        return Done()
    canaries = _canaries(hosts, policy.canary)
    waiting = [host for host in left if host.name in canaries]
    if waiting:
        return Continue((waiting[0],), f"canary {waiting[0].name}" + (f" of {waiting[0].arch}" if waiting[0].arch else ""))
    broken = [name for name in canaries if not _went_well(name, outcomes)]
    if broken:
        # With a limit above 0 a failed canary may be tolerated in number, but it proves nothing for its kind.
        kinds = {host.arch for host in hosts if host.name in broken}
        sane = [host for host in left if host.arch not in kinds]
        if not sane:
            reason = f"canary {', '.join(broken)} was not proven"
            return Halt(reason, tuple(host.name for host in left))
        left = sane
    size = _batch_size(hosts, outcomes, canaries, policy)
    return Continue(tuple(left[:size]), f"batch of {len(left[:size])}")


def _stop(outcomes: Sequence[Outcome], policy: Policy) -> str:
    for outcome in outcomes:
        if outcome.result in _STOPS:
            return f"{outcome.host}: {outcome.result}"
    failed = [outcome.host for outcome in outcomes if outcome.result in _FAILED]
    away = [outcome.host for outcome in outcomes if outcome.result in _AWAY]
    if len(failed) > policy.max_failed:
        return f"{len(failed)} failed ({', '.join(failed)}), {policy.max_failed} allowed"
    if len(away) > policy.max_unreachable:
        return f"{len(away)} unreachable or held ({', '.join(away)}), {policy.max_unreachable} allowed"
    return ""


def _canaries(hosts: Sequence[Host], number: int) -> list[str]:
    """The first `number` hosts of each architecture; hosts whose architecture is not known are one kind."""
    taken: dict[str | None, list[str]] = {}
    for host in hosts:
        kind = taken.setdefault(host.arch, [])
        if len(kind) < number:
            kind.append(host.name)
    chosen = {name for names in taken.values() for name in names}
    return [host.name for host in hosts if host.name in chosen]


def _went_well(name: str, outcomes: Sequence[Outcome]) -> bool:
    return any(outcome.host == name and outcome.result in _GOOD for outcome in outcomes)


def _batch_size(hosts: Sequence[Host], outcomes: Sequence[Outcome], canaries: Sequence[str], policy: Policy) -> int:
    """Which batch we are in follows from how many hosts have ended, so that a resumed run goes on where it was."""
    after = len({outcome.host for outcome in outcomes} - set(canaries))
    for size in policy.batches:
        if after < size:
            return size - after
        after -= size
    last = policy.batches[-1]
    return last - after % last


# ---------------------------------------------------------------- how it ended
_WORST_FIRST = (
    Exit.INTERNAL, Exit.RESTORE_FAILED, Exit.UNKNOWN, Exit.SIGTERM, Exit.SIGINT, Exit.SIGHUP, Exit.HOST_KEY, Exit.USAGE,
    Exit.ROLLED_BACK, Exit.INCONCLUSIVE, Exit.LOCKED, Exit.REFUSED, Exit.CHANGES,
)  # fmt: skip
# Beside hosts that ended well these are a partial result; the others need a person or an answer first.
_MIXES = (Exit.ROLLED_BACK, Exit.INCONCLUSIVE, Exit.REFUSED, Exit.LOCKED)


def exit_code(outcomes: Iterable[Outcome]) -> Exit:
    """The exit code of a run: never 0 unless every host ended well.

    A host that needs a person (5), whose state is not known (6), or a signal outweighs everything; some hosts
    good and others not is partial (9); all of one kind is that kind. No outcome at all is an internal error.
    """
    found = list(outcomes)
    codes = [outcome.exit for outcome in found]
    if not codes:
        return Exit.INTERNAL
    bad = [code for code in codes if code is not Exit.OK]
    if not bad:
        return Exit.OK
    worst = min(bad, key=lambda code: _WORST_FIRST.index(code) if code in _WORST_FIRST else -1)
    some_good = len(bad) < len(codes)
    return Exit.PARTIAL if some_good and worst in _MIXES else worst


@dataclass(frozen=True, slots=True)
class Summary:
    """How many hosts ended how, and which have not had their turn (for `resume`)."""

    counts: Mapping[str, int] = field(default_factory=dict)
    left: tuple[str, ...] = ()


def summary(hosts: Sequence[Host], outcomes: Sequence[Outcome]) -> Summary:
    counts: dict[str, int] = {}
    for outcome in outcomes:
        counts[str(outcome.result)] = counts.get(str(outcome.result), 0) + 1
    ended = {outcome.host for outcome in outcomes}
    return Summary(counts, tuple(host.name for host in hosts if host.name not in ended))
