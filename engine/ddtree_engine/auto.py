"""Budget `auto`: the kind of round and the size of trees with the best rate, expected committed tokens over measured seconds.

Plain decoding, the chain, and trees of one size for all requests: exactly the rounds that exist when they are asked for by
hand, so that nothing is lost beside the best of them but what choosing takes. Kinds and sizes that do not run are tried now
and then, for as little as that may cost, so that a decision never rests on old figures. (Rounds of their own, in which only
some requests are drafted or the nodes of a batch compete, were replayed and lost more by wrong hopes than they won:
docs/decisions/0012.)

Pure decisions over probabilities, costs and counts: no tensors, no clocks. `costs.py`, `calibration.py` and `hopes.py` hold
what was measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Many
from dataclasses import dataclass, field

import numpy as np

from ddtree_engine.budget import MOST_NODES, Round
from ddtree_engine.calibration import Calibration
from ddtree_engine.config import SpecMode
from ddtree_engine.costs import Costs, Kind
from ddtree_engine.forest import Forest
from ddtree_engine.hopes import SHARES, Habit, Tally, Yield, falling
from ddtree_engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Plan:
    """A kind of round, for every request that may be drafted."""

    kind: Kind
    nodes: int  # for each
    hope: float  # accepted nodes for each, as drafts before promise them
    rate: float  # expected tokens a second, as `Costs` counts seconds
    seconds: float  # of a round


PLAIN = Plan(Kind.OFF, 0, 0.0, 0.0, 0.0)


def _untried() -> dict[Kind, Tally]:
    """How far hopes are to be trusted, by kind of draft."""
    return {kind: Tally(30.0, 400.0) for kind in (Kind.CHAIN, Kind.TREE)}


@dataclass(frozen=True, slots=True)
class Settled:
    """What was decided for a batch: until the next review if it is lasting, else for one round."""

    requests: int
    plan: Plan
    lasting: bool

    def fits(self, requests: int, within: float) -> bool:
        """Whether it was decided for about as many requests."""
        return 1 / within <= requests / self.requests <= within


@dataclass(frozen=True, slots=True)
class Lesson:
    """A round to learn from: its trees as they were grown and as they were verified, and what was accepted."""

    kind: Kind
    grown: Forest
    cut: Forest
    sequences: tuple[Sequence, ...]
    paths: list[list[int]]


@dataclass(slots=True)
class Auto:
    """Largest expected tokens per second, for the batch as a whole."""

    costs: Costs
    depth: int  # block size - 1
    calibration: Calibration = field(default_factory=Calibration)
    habits: dict[str, Habit] = field(default_factory=dict)
    trees: Yield = field(default_factory=Yield)
    trust: dict[Kind, Tally] = field(default_factory=_untried)
    usual: float | None = None  # what a request's chain is worth, for newcomers
    passes: int = 0  # of requests, drafted and learnt from
    studied: int = 0  # rounds with any
    floor: float = math.log(1e-4)  # a node less likely than this never pays for its row
    chains: bool = False
    nodes: int = MOST_NODES
    plan: Plan = PLAIN
    running: Plan = PLAIN  # of the trees that this round verifies
    coming: Plan = PLAIN  # of those that were drafted for the next
    drafted: int = 0  # requests with trees in this round
    drafting: int = 0  # and in the next
    settled: Settled | None = None
    live: tuple[Sequence, ...] = ()  # that were decided for last
    due: bool = False  # what to do next is to be decided anew
    grown: Forest | None = None  # this round's trees, if it is learnt from
    lesson: Lesson | None = None  # not yet learnt from
    rounds: int = 0
    reviewed: int = 0  # round of the last review
    study_at: int = 0  # round that is learnt from next
    every: int = 1  # rounds between those
    studying: bool = True  # this round is
    fresh: bool = False  # a trial was just begun: its first round is learnt from, its second is measured
    heed: bool = False  # the coming round is such a first one
    credit: float = 0.0  # seconds that may be lost to trials
    tried: dict[Kind, int] = field(default_factory=dict)  # round of the last trial
    looked: int = 0  # round of the last larger tree
    trial: Plan | None = None
    trial_left: int = 0  # rounds that the trial still takes
    OPENING, OPENING_ROUNDS = 24, 5  # passes of a request, and rounds, that are drafted whatever they promise
    EAGER = 16  # rounds that are all learnt from
    STUDY_SECONDS, MOST_EVERY = 0.03, 32  # then one in so many seconds is, and reviewed: it costs some 0.3 ms
    USUAL_STEP = 0.03
    NEAR, FAR = 1.5, 3.0  # times as many requests: when to decide anew in time, and at once
    SHARE, PLAIN_SHARE = 0.005, 0.02  # of all seconds may go to trials; more while nothing is drafted, as less is known
    LARGER_SHARE = 0.01  # to single rounds of larger trees
    GAP, YOUNG_GAP, LARGER_GAP = 128, 8, 24  # rounds between trials of a kind; while its cost rests on few; of a larger tree
    SWITCH_SECONDS = 3e-4  # that a trial takes of the host
    SAMPLES = 3
    PLAIN_ROUNDS, DRAFT_ROUNDS = 3, 2  # of a trial: the first is not measured, nor a plain one that still verifies trees

    @property
    def off_spine(self) -> float:
        return self.calibration.off_spine

    @property
    def _opened(self) -> bool:
        """Whether enough was drafted for hopes to rest on."""
        return self.passes >= self.OPENING and self.studied >= self.OPENING_ROUNDS

    # What to draft ----------------------------------------------------------------------------------------------

    def to_draft(self, live: Many[Sequence]) -> list[Sequence]:
        able, self.live = _able(live), tuple(live)
        if not able:
            self.settled, self.coming, self.chains, self.nodes, self.drafting = None, PLAIN, False, MOST_NODES, 0
            return []
        if self.settled is None or not self.settled.fits(len(live), self.FAR) or self._news(self.settled, able):
            self.settled = self._settle(able, len(live))
        self.due |= not self.settled.fits(len(live), self.NEAR)
        self.heed, self.fresh = self.fresh, False
        self.coming = self.settled.plan
        self.due |= not self.settled.lasting
        self.chains = self.coming.kind is Kind.CHAIN
        whole = self.heed or self.rounds + 1 >= self.study_at
        self.nodes = MOST_NODES if whole else self.coming.nodes
        drafted = [] if self.coming.kind is Kind.OFF else able
        self.drafting = len(drafted)
        return drafted

    def _news(self, before: Settled, able: list[Sequence]) -> bool:
        """Whether nothing is drafted, and some of these requests were not there when that was decided."""
        return before.plan.kind is Kind.OFF and any(s.request.id not in self.habits for s in able)

    def meanwhile(self) -> None:
        """Learn what the last round showed, and decide what to do if that, or a trial that is over, asks for it."""
        lesson, self.lesson = self.lesson, None
        if lesson is not None:
            self._take(lesson)
        if (lesson is not None or self.due) and (able := _able(self.live)):
            self._keep_only(self.live)
            self.settled, self.due = self._settle(able, len(self.live)), False

    def _settle(self, able: list[Sequence], requests: int) -> Settled:
        plans = self.plans(able, requests)
        plan = self.review(plans)
        if self.trial_left == 0:
            self.trial = self._next_trial(plans, plan, able, requests)
        if self.trial is None:
            return Settled(requests, plan, lasting=True)
        self.trial_left -= 1
        trial, self.trial = self.trial, self.trial if self.trial_left else None
        return Settled(requests, trial, lasting=False)

    def review(self, plans: list[Plan]) -> Plan:
        """The best of all plans; trees at first, where they may be, as nothing is known."""
        self.plan = max(plans, key=lambda p: p.rate) if self._opened else plans[-1]
        share = self.PLAIN_SHARE if self.plan.kind is Kind.OFF else self.SHARE
        self.credit += (self.rounds - self.reviewed) * share * self.plan.seconds
        self.reviewed = self.rounds
        return self.plan

    def plans(self, able: list[Sequence], requests: int) -> list[Plan]:
        """The best plan of every kind there is for these requests."""
        kinds = [Kind.OFF, Kind.CHAIN]
        if any(s.request.mode is SpecMode.TREE for s in able):
            kinds.append(Kind.TREE)
        return [self._best(kind, able, requests) for kind in kinds]

    def _best(self, kind: Kind, able: list[Sequence], requests: int) -> Plan:
        if kind is Kind.OFF:
            seconds = float(self.costs.seconds(kind, requests, 0, 0))
            return Plan(kind, 0, 0.0, requests / seconds, seconds)
        if kind is Kind.CHAIN:
            return self._at(kind, np.array([self.depth]), np.ones(1), able, requests)
        return self._at(kind, SHARES, self.trees.ratio(self.depth), able, requests)

    def _at(self, kind: Kind, nodes: np.ndarray, ratio: np.ndarray, able: list[Sequence], requests: int) -> Plan:
        """The best of these sizes; `ratio`: what each accepts over what chains do."""
        seconds = self.costs.seconds(kind, requests, nodes, len(able))
        hopes = sum(self._habit(s).chain for s in able) * ratio
        rates = (requests + self.trust[kind].ratio * hopes) / seconds
        i = int(rates.argmax())
        return Plan(kind, int(nodes[i]), float(hopes[i]) / len(able), float(rates[i]), float(seconds[i]))

    # Trials of what is not run ----------------------------------------------------------------------------------

    def _next_trial(self, plans: list[Plan], plan: Plan, able: list[Sequence], requests: int) -> Plan | None:
        """What was not run for long, if what it is likely to lose can be afforded."""
        self.tried[plan.kind] = self.rounds
        if not self._opened:
            return None
        if (larger := self._larger(plans, plan, able, requests)) is not None:
            gap = max(self.LARGER_GAP, self._loss(larger, plan, 1) / (self.LARGER_SHARE * plan.seconds))
            if self.rounds - self.looked >= gap:
                self.looked, self.trial_left, self.fresh = self.rounds, 1, True
                return larger
        others = sorted((p for p in plans if p.kind is not plan.kind), key=lambda p: self.tried.setdefault(p.kind, 0))
        if plan.kind is Kind.OFF:  # trees, where they may be, show what chains are worth too
            others = plans[-1:]
        for other in others:
            unknown = self.costs.samples(other.kind, requests) < self.SAMPLES
            young = unknown or plan.kind is Kind.OFF
            rounds = self.PLAIN_ROUNDS if other.kind is Kind.OFF else self.DRAFT_ROUNDS
            if plan.kind is Kind.OFF and not unknown:  # what drafts are worth shows in one
                rounds = 1
            gap = self.YOUNG_GAP if young else self.GAP
            if self.rounds - self.tried[other.kind] >= gap and self._afford(other, plan, rounds):
                self.tried[other.kind] = self.rounds
                return other
        return None

    def _larger(self, plans: list[Plan], plan: Plan, able: list[Sequence], requests: int) -> Plan | None:
        """A tree that shows what the running plan never verifies: what lies off the chain, or below its last node."""
        if plan.kind is Kind.OFF or plans[-1].kind is not Kind.TREE:
            return None
        if plan.kind is Kind.CHAIN:
            return plans[-1]
        beyond = 2 * plan.nodes <= SHARES
        if not beyond.any():
            return None
        return self._at(Kind.TREE, SHARES[beyond][:1], self.trees.ratio(self.depth)[beyond][:1], able, requests)

    def _afford(self, other: Plan, plan: Plan, rounds: int) -> bool:
        """Begin a trial of so many rounds, if the seconds that are likely to be lost by it have been saved."""
        loss = self._loss(other, plan, rounds)
        if loss > self.credit:
            return False
        self.credit -= loss
        self.trial_left, self.fresh = rounds, True
        return True

    def _loss(self, other: Plan, plan: Plan, rounds: int) -> float:
        """Seconds that a trial is likely to lose."""
        if other.kind is Kind.OFF:  # another round drafts again
            seconds = (rounds + 1) * plan.seconds
        else:
            seconds = rounds * other.seconds
        switching = 0.0 if plan.kind is Kind.OFF else self.SWITCH_SECONDS
        return seconds * max(0.0, 1.0 - other.rate / plan.rate) + switching

    # How large the trees are ------------------------------------------------------------------------------------

    def fit(self, forest: Forest, sequences: Many[Sequence]) -> Forest:
        self.rounds += 1
        self.running, self.drafted, self.grown = self.coming, self.drafting, None
        self.studying = self.heed or self.rounds <= self.EAGER or self.rounds >= self.study_at
        if self.studying:
            self.study_at = self.rounds + self.every
        if forest.sizes.width == 1:
            self.due |= self.studying  # a plain round teaches nothing, and is reviewed
            return forest
        if self.studying:
            self.grown = forest
        if self.running.kind is Kind.CHAIN or self.nodes <= self.running.nodes:  # they were not grown larger
            return forest
        chain = np.array([s.request.mode is SpecMode.CHAIN for s in sequences])
        return forest.cut(np.where(chain, forest.rows, 1 + self.running.nodes))

    # Learning ---------------------------------------------------------------------------------------------------

    def learn(self, forest: Forest, sequences: Many[Sequence], paths: Many[Many[int]]) -> None:
        """Hopes are compared with what came at once; the rest, which takes as long as a small round, waits."""
        if self.running.kind is not Kind.OFF and self._opened:
            self.trust[self.running.kind].learn(sum(map(len, paths)) - len(paths), self.drafted * self.running.hope)
        if self.grown is not None:
            self.lesson = Lesson(self.running.kind, self.grown, forest, tuple(sequences), [list(p) for p in paths])

    def _take(self, lesson: Lesson) -> None:
        promised = self.calibration.expected(lesson.grown)
        self._study(lesson, promised)
        expected = np.where(lesson.cut.inside, promised, 0.0).sum(axis=1).tolist()
        self.calibration.learn(lesson.cut, lesson.paths)
        for s, path, hoped in zip(lesson.sequences, lesson.paths, expected, strict=True):
            if hoped > 0.0 and self._opened:  # before, the calibration is still off for all of them
                self._habit(s).bias.learn(len(path) - 1, hoped)

    def _study(self, lesson: Lesson, expected: np.ndarray) -> None:
        """What these drafts promise."""
        forest, sequences = lesson.grown, lesson.sequences
        drafted = np.flatnonzero(forest.rows > 1).tolist()
        if not drafted:
            return
        self.passes += len(drafted)
        self.studied += 1
        chain = self.calibration.spine(forest)
        for i in drafted:
            habit = self._habit(sequences[i])
            worth = min(float(self.depth), float(chain[i]) * habit.bias.ratio)
            habit.expect(worth)
            self.usual = worth if self.usual is None else self.usual + self.USUAL_STEP * (worth - self.usual)
        if lesson.kind is not Kind.CHAIN:
            mine = falling(expected[drafted, 1:])
            at = np.minimum(SHARES, mine.shape[1]) - 1
            self.trees.add(float(chain[drafted].mean()), np.cumsum(mine.mean(axis=0))[at])

    def observe(self, spent: Round) -> None:
        every = max(1, min(self.MOST_EVERY, int(self.STUDY_SECONDS / spent.seconds)))
        self.every = every if self.running.kind is not Kind.OFF else -(-every // 2)  # a plain round is only reviewed
        if self.running.kind is Kind.OFF and spent.drafted:  # drafts after a pause: the drafter's context was behind
            return
        usual = not self.studying or self.every == 1 or self.rounds <= self.EAGER  # else longer by what learning takes
        self.costs.observe(self.running.kind, self.running.nodes, spent, usual=usual)

    def forget(self) -> None:
        self.calibration, self.trees, self.trust = Calibration(), Yield(), _untried()
        self.habits, self.usual, self.passes, self.studied = {}, None, 0, 0
        self.settled, self.grown, self.lesson, self.live = None, None, None, ()

    def _habit(self, s: Sequence) -> Habit:
        habit = self.habits.get(s.request.id)
        if habit is None:  # nothing is known yet: as usual, or hope
            habit = self.habits[s.request.id] = Habit(self.depth / 2 if self.usual is None else self.usual)
        return habit

    def _keep_only(self, live: Many[Sequence]) -> None:
        ids = {s.request.id for s in live}
        if len(self.habits) > 2 * len(ids) + 16:
            self.habits = {i: h for i, h in self.habits.items() if i in ids}


def _able(live: Many[Sequence]) -> list[Sequence]:
    """Those that drafts can help."""
    return [s for s in live if s.drafts and s.left_to_say > 1]
