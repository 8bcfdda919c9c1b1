"""Budget `auto`: the kind of round and the size of trees with the best rate, expected committed tokens over measured seconds.

Plain decoding, the chain, and trees of one size for all requests: exactly the rounds that exist when they are asked for by
hand, so that nothing is lost beside the best of them but what choosing takes. Kinds and sizes that do not run are tried now
and then, for as little as that may cost, so that a decision never rests on old figures. (Rounds of their own, in which only
some requests are drafted or the nodes of a batch compete, were replayed and lost more by wrong hopes than they won:
docs/decisions/0012.)

Pure decisions over probabilities, costs and counts: no tensors, no clocks. What could be run is `plans.py`'s, from what
`costs.py` and `hopes.py` know; what is tried is `trials.py`'s.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Many
from dataclasses import dataclass, field

import numpy as np

from ddtree_engine.budget import MOST_NODES, Round
from ddtree_engine.config import SpecMode
from ddtree_engine.costs import Costs, Kind
from ddtree_engine.forest import Forest
from ddtree_engine.hopes import Hopes, Lesson
from ddtree_engine.plans import PLAIN, Batch, Plan, larger, plans
from ddtree_engine.sequence import Sequence
from ddtree_engine.trials import Trials


@dataclass(frozen=True, slots=True)
class Settled:
    """What was decided for a batch: until the next review if it is lasting, else for one round."""

    requests: int
    plan: Plan
    lasting: bool

    def fits(self, requests: int, within: float) -> bool:
        """Whether it was decided for about as many requests."""
        return 1 / within <= requests / self.requests <= within


@dataclass(slots=True)
class Auto:
    """Largest expected tokens per second, for the batch as a whole."""

    costs: Costs
    depth: int  # block size - 1
    hopes: Hopes = field(init=False)
    trials: Trials = field(default_factory=Trials)
    floor: float = math.log(1e-4)  # a node less likely than this never pays for its row
    chains: bool = False
    nodes: int = MOST_NODES
    # Decided
    plan: Plan = PLAIN
    settled: Settled | None = None
    live: tuple[Sequence, ...] = ()  # that were decided for last
    due: bool = False  # what to do next is to be decided anew
    coming: Plan = PLAIN  # of the trees that were drafted for the next round
    drafting: int = 0  # requests with trees in it
    heed: bool = False  # it is the first round of a trial
    # This round
    rounds: int = 0
    running: Plan = PLAIN  # of the trees that it verifies
    drafted: int = 0
    studying: bool = True  # it is learnt from, or reviewed
    grown: Forest | None = None  # its trees, if it is learnt from
    lesson: Lesson | None = None  # of the last such round, not yet learnt from
    study_at: int = 0  # round that is learnt from next
    every: int = 1  # rounds between those

    EAGER = 16  # rounds that are all learnt from
    STUDY_SECONDS, MOST_EVERY = 0.03, 32  # then one in so many seconds is, and reviewed: it costs some 0.3 ms
    NEAR, FAR = 1.5, 3.0  # times as many requests: when to decide anew in time, and at once

    def __post_init__(self) -> None:
        self.hopes = Hopes(self.depth)

    @property
    def off_spine(self) -> float:
        return self.hopes.calibration.off_spine

    # What to draft ----------------------------------------------------------------------------------------------

    def to_draft(self, live: Many[Sequence]) -> list[Sequence]:
        batch, self.live = Batch.of(live), tuple(live)
        if not batch.able:
            self.settled, self.coming, self.chains, self.nodes, self.drafting = None, PLAIN, False, MOST_NODES, 0
            return []
        before = self.settled
        if before is None or not before.fits(batch.requests, self.FAR) or self._news(before, batch):
            self.settled = before = self._settle(batch)
        self.due |= not (before.lasting and before.fits(batch.requests, self.NEAR))
        self.heed, self.trials.fresh = self.trials.fresh, False
        self.coming = before.plan
        self.chains = self.coming.kind is Kind.CHAIN
        whole = self.heed or self.rounds + 1 >= self.study_at
        self.nodes = MOST_NODES if whole else self.coming.nodes
        drafted = [] if self.coming.kind is Kind.OFF else list(batch.able)
        self.drafting = len(drafted)
        return drafted

    def _news(self, before: Settled, batch: Batch) -> bool:
        """Whether nothing is drafted, and some of these requests were not there when that was decided."""
        return before.plan.kind is Kind.OFF and self.hopes.strange(batch.able)

    def meanwhile(self) -> None:
        """Learn what the last round showed, and decide what to do if that, or a trial that is over, asks for it."""
        lesson, self.lesson = self.lesson, None
        if lesson is not None:
            self.hopes.learn(lesson)
        if lesson is None and not self.due:
            return
        batch = Batch.of(self.live)
        if batch.able:
            self.hopes.keep_only(self.live)
            self.settled, self.due = self._settle(batch), False

    def _settle(self, batch: Batch) -> Settled:
        found = plans(batch, self.hopes, self.costs)
        plan = self.review(found)
        trial = self.trials.going_on()
        if trial is None:
            self.trials.tried[plan.kind] = self.rounds
            if self.hopes.opened:
                beyond = larger(plan, found, batch, self.hopes, self.costs)
                self.trials.begin(self.rounds, plan, found, beyond, lambda kind: self.costs.samples(kind, batch.requests))
            trial = self.trials.going_on()
        return Settled(batch.requests, trial or plan, lasting=trial is None)

    def review(self, found: list[Plan]) -> Plan:
        """The best of all plans; trees at first, where they may be, as nothing is known."""
        self.plan = max(found, key=lambda p: p.rate) if self.hopes.opened else found[-1]
        self.trials.save(self.rounds, self.plan)
        return self.plan

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
        self.hopes.came(self.running.kind, sum(map(len, paths)) - len(paths), self.drafted * self.running.hope)
        if self.grown is not None:
            self.lesson = Lesson(self.running.kind, self.grown, forest, tuple(sequences), [list(p) for p in paths])

    def observe(self, spent: Round) -> None:
        every = max(1, min(self.MOST_EVERY, int(self.STUDY_SECONDS / spent.seconds)))
        self.every = every if self.running.kind is not Kind.OFF else -(-every // 2)  # a plain round is only reviewed
        if self.running.kind is Kind.OFF and spent.drafted:  # drafts after a pause: the drafter's context was behind
            return
        usual = not self.studying or self.every == 1 or self.rounds <= self.EAGER  # else longer by what learning takes
        self.costs.observe(self.running.kind, self.running.nodes, spent, usual=usual)

    def anew(self) -> Auto:
        return Auto(self.costs, self.depth)
