"""Rounds that are run to see what they are worth, for budget `auto`: when, which, and how much they may cost. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ddtree_engine.costs import Kind
from ddtree_engine.plans import Plan


@dataclass(slots=True)
class Trials:
    """What was not run for long, if what it is likely to lose can be afforded."""

    credit: float = 0.0  # seconds that may be lost
    saved: int = 0  # round up to which the credit grew
    tried: dict[Kind, int] = field(default_factory=dict)  # round of the last trial
    looked: int = 0  # round of the last larger tree
    plan: Plan | None = None  # on trial
    left: int = 0  # rounds that it still takes
    fresh: bool = False  # it was just begun: its first round is learnt from, its second is measured

    SHARE, PLAIN_SHARE = 0.005, 0.02  # of all seconds may go to trials; more while nothing is drafted, as less is known
    LARGER_SHARE = 0.01  # to single rounds of larger trees
    GAP, YOUNG_GAP, LARGER_GAP = 128, 8, 24  # rounds between trials of a kind; while its cost rests on few; of a larger tree
    SWITCH_SECONDS = 3e-4  # that a trial takes of the host
    SAMPLES = 3
    PLAIN_ROUNDS, DRAFT_ROUNDS = 3, 2  # of a trial: the first is not measured, nor a plain one that still verifies trees

    def save(self, now: int, plan: Plan) -> None:
        """Rounds of this plan have earned something."""
        share = self.PLAIN_SHARE if plan.kind is Kind.OFF else self.SHARE
        self.credit += (now - self.saved) * share * plan.seconds
        self.saved = now

    def going_on(self) -> Plan | None:
        """What is on trial, for one round more."""
        if self.left == 0:
            return None
        self.left -= 1
        return self.plan

    def begin(self, now: int, plan: Plan, found: list[Plan], larger: Plan | None, samples: Callable[[Kind], int]) -> None:
        """Put something on trial, if it is time; `samples`: of rounds that a kind's cost rests on."""
        if larger is not None and self._look(now, plan, larger):
            return
        others = sorted((p for p in found if p.kind is not plan.kind), key=lambda p: self.tried.setdefault(p.kind, 0))
        if plan.kind is Kind.OFF:  # trees, where they may be, show what chains are worth too
            others = found[-1:]
        for other in others:
            unknown = samples(other.kind) < self.SAMPLES
            gap = self.YOUNG_GAP if unknown or plan.kind is Kind.OFF else self.GAP
            rounds = self._rounds(plan, other, unknown=unknown)
            if now - self.tried[other.kind] >= gap and self._afford(other, plan, rounds):
                self.tried[other.kind] = now
                return

    def _rounds(self, plan: Plan, other: Plan, *, unknown: bool) -> int:
        if plan.kind is Kind.OFF and not unknown:  # what drafts are worth shows in one
            return 1
        return self.PLAIN_ROUNDS if other.kind is Kind.OFF else self.DRAFT_ROUNDS

    def _look(self, now: int, plan: Plan, larger: Plan) -> bool:
        gap = max(self.LARGER_GAP, self._loss(larger, plan, 1) / (self.LARGER_SHARE * plan.seconds))
        if now - self.looked < gap:
            return False
        self.looked, self.plan, self.left, self.fresh = now, larger, 1, True
        return True

    def _afford(self, other: Plan, plan: Plan, rounds: int) -> bool:
        """Begin a trial of so many rounds, if the seconds that are likely to be lost by it have been saved."""
        loss = self._loss(other, plan, rounds)
        if loss > self.credit:
            return False
        self.credit -= loss
        self.plan, self.left, self.fresh = other, rounds, True
        return True

    def _loss(self, other: Plan, plan: Plan, rounds: int) -> float:
        """Seconds that a trial is likely to lose."""
        if other.kind is Kind.OFF:  # another round drafts again
            seconds = (rounds + 1) * plan.seconds
        else:
            seconds = rounds * other.seconds
        switching = 0.0 if plan.kind is Kind.OFF else self.SWITCH_SECONDS
        return seconds * max(0.0, 1.0 - other.rate / plan.rate) + switching
