"""How much to draft and to verify: a fixed budget, or `auto`.

`auto` runs the kind of round, for the requests and at the size, that has the best rate: expected committed tokens over
measured seconds. Plain decoding, the chain and trees of one size cost exactly what they cost when they are asked for. In
fitted trees the nodes of all requests compete for one row budget (CaDDTree's rule, arXiv 2606.01813, for a batch), taken as
long as a row is worth what it costs at the best rate; that is work for the host in every round, so it is one kind among the
others. Kinds that do not run are tried now and then, so that a decision never rests on old figures.

Pure decisions over probabilities, costs and counts: no tensors, no clocks. `costs.py` and `calibration.py` hold what was
measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from ddtree_engine.calibration import Calibration
from ddtree_engine.config import SpecMode
from ddtree_engine.costs import Costs, Kind
from ddtree_engine.forest import Forest
from ddtree_engine.sequence import Sequence

MOST_NODES = 1 << 30  # as many as the engine has room for


@dataclass(frozen=True, slots=True)
class Round:
    """What a decoding round cost (rounds with prefill chunks are not reported)."""

    requests: int  # decoded
    rows: int  # verified
    drafted: int  # requests that the drafter ran for
    seconds: float


class Policy(Protocol):
    chains: bool  # whether requests in tree mode get the chain
    nodes: int  # of the next trees, at most
    off_spine: float  # added to the log-probability of steps below a node that is not on the spine
    floor: float  # paths below this summed log-probability are not built

    def to_draft(self, live: Many[Sequence]) -> list[Sequence]:
        """Of everything that goes on decoding, what shall be drafted for the next round."""
        ...

    def fit(self, forest: Forest, sequences: Many[Sequence]) -> Forest:
        """Cut the trees of a round to what is worth verifying. Called once a round, before anything else."""
        ...

    def learn(self, forest: Forest, sequences: Many[Sequence], paths: Many[Many[int]]) -> None:
        """The trees were verified and `paths` accepted."""
        ...

    def observe(self, spent: Round) -> None:
        """A round without prefill is over."""
        ...

    def forget(self) -> None:
        """Drop what was learnt (after a warm-up)."""
        ...


class Fixed:
    """Every drafting request every round, every tree as large as the budget says."""

    chains = False
    nodes = MOST_NODES
    off_spine = 0.0
    floor = -math.inf

    def to_draft(self, live: Many[Sequence]) -> list[Sequence]:
        return [s for s in live if s.drafts]

    def fit(self, forest: Forest, sequences: Many[Sequence]) -> Forest:
        return forest

    def learn(self, forest: Forest, sequences: Many[Sequence], paths: Many[Many[int]]) -> None:
        return None

    def observe(self, spent: Round) -> None:
        return None

    def forget(self) -> None:
        return None


def falling(probabilities: np.ndarray) -> np.ndarray:
    """[trees, nodes], never rising along a tree's order, so that the most probable nodes of a batch are whole trees."""
    return np.minimum.accumulate(np.minimum(probabilities, 1.0), axis=1)


# Auto -----------------------------------------------------------------------------------------------------------

SHARES = np.array((1, 2, 3, 4, 6, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64))  # nodes a drafted request


@dataclass(slots=True)
class Habit:
    """What one request's drafts have been worth lately."""

    chain: float  # expected accepted nodes of its chain
    passes: int = 0
    hits: float = 0.0  # nodes accepted
    hoped: float = 0.0  # nodes that were expected to be

    STEP, PRIOR, MEMORY = 0.25, 3.0, 60.0

    @property
    def bias(self) -> float:
        """What is accepted over what is expected: some texts suit the drafter better than it knows."""
        return (self.hits + self.PRIOR) / (self.hoped + self.PRIOR)

    def expect(self, chain: float) -> None:
        self.passes += 1
        self.chain += max(self.STEP, 1.0 / (self.passes + 1)) * (chain - self.chain)

    def learn(self, accepted: int, expected: float) -> None:
        self.hits += accepted
        self.hoped += expected
        if self.hoped > self.MEMORY:
            self.hits, self.hoped = self.hits / 2, self.hoped / 2


@dataclass(slots=True)
class Yield:
    """What trees bring beside chains from the same drafts, by nodes a request: smoothed over rounds of trees."""

    STEP = 0.1

    chain: float = 0.0
    even: np.ndarray = field(default_factory=lambda: np.zeros(len(SHARES)))
    fitted: np.ndarray = field(default_factory=lambda: np.zeros(len(SHARES)))
    rounds: int = 0

    def add(self, chain: float, even: np.ndarray, fitted: np.ndarray) -> None:
        self.rounds += 1
        step = max(self.STEP, 1.0 / self.rounds)
        self.chain += step * (chain - self.chain)
        self.even = self.even + step * (even - self.even)
        self.fitted = self.fitted + step * (fitted - self.fitted)

    def ratio(self, kind: Kind, depth: int) -> np.ndarray:
        """[SHARES]: accepted nodes of trees over those of the chain."""
        if not self.rounds or self.chain <= 0:  # nothing is known: a tree of a chain's size is as good
            return np.minimum(1.0, SHARES / depth)
        return (self.even if kind is Kind.TREE else self.fitted) / self.chain


@dataclass(frozen=True, slots=True)
class Plan:
    """A kind of round, how many of the requests to draft, those first whose drafts are worth most, and nodes for each."""

    kind: Kind
    drafted: int
    nodes: int
    rate: float  # expected tokens a second, as `Costs` counts seconds
    seconds: float  # of a round


PLAIN = Plan(Kind.OFF, 0, 0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Settled:
    """What was decided for a batch, until the next review if it is lasting."""

    requests: int
    able: list[Sequence]
    plan: Plan
    drafted: list[Sequence]
    lasting: bool

    def goes_on(self, requests: int, able: list[Sequence]) -> bool:
        """Whether it says what to do for these: they are the same, or all of about as many were drafted, or none."""
        if not self.lasting or not 2 / 3 <= requests / self.requests <= 3 / 2:
            return False
        return self.able == able or not self.drafted or len(self.drafted) == len(self.able) == len(able)


@dataclass(slots=True)
class Auto:
    """Largest expected tokens per second, for the batch as a whole."""

    costs: Costs
    depth: int  # block size - 1
    calibration: Calibration = field(default_factory=Calibration)
    habits: dict[str, Habit] = field(default_factory=dict)
    floor: float = math.log(0.01)  # a node less likely than this never pays for its row
    passes: int = 0  # of requests, drafted and learnt from
    usual: float | None = None  # what a request's chain is worth, for newcomers
    trees: Yield = field(default_factory=Yield)
    chains: bool = False
    nodes: int = MOST_NODES
    plan: Plan = PLAIN
    running: Plan = PLAIN  # of the trees that this round verifies
    coming: Plan = PLAIN  # of those that were drafted for the next
    rounds: int = 0
    reviewed: int = 0  # round of the last review
    study_at: int = 0  # round that is learnt from next
    every: int = 1  # rounds between those
    studying: bool = True  # this round is
    settled: Settled | None = None
    fresh: bool = False  # a trial was just begun: its first round is learnt from, its second is measured
    heed: bool = False  # the coming round is such a first one
    credit: float = 0.0  # seconds that may be lost to trials
    tried: dict[Kind, int] = field(default_factory=dict)  # round of the last trial
    trial: Plan | None = None
    trial_left: int = 0  # rounds that the trial still takes
    expected: np.ndarray | None = None  # nodes of each tree that should be accepted this round

    OPENING = 24  # passes of a request that are drafted whatever they promise
    STICK = 1.05  # another kind must promise this much more
    EAGER = 16  # rounds that are all learnt from
    STUDY_SECONDS, MOST_EVERY = 0.03, 32  # then one in so many seconds is, and reviewed: it costs some 0.3 ms
    USUAL_STEP = 0.03
    SHARE, PLAIN_SHARE = 0.005, 0.02  # of all seconds may go to trials; more while nothing is drafted, as less is known
    GAP, YOUNG_GAP = 128, 8  # rounds between trials of a kind; while its cost rests on few
    SWITCH_SECONDS = 5e-4  # that a trial takes of the host
    SAMPLES = 3
    PLAIN_ROUNDS, DRAFT_ROUNDS = 3, 2  # of a trial: the first is not measured, nor a plain one that still verifies trees

    @property
    def off_spine(self) -> float:
        return self.calibration.off_spine

    # What to draft ----------------------------------------------------------------------------------------------

    def to_draft(self, live: Many[Sequence]) -> list[Sequence]:
        able = [s for s in live if s.drafts and s.left_to_say > 1]
        before = self.settled
        if before is None or self.studying or not before.goes_on(len(live), able) or self._news(before, able):
            self._keep_only(live)
            self.settled = before = (
                self._choose(able, len(live)) if able else Settled(len(live), able, PLAIN, [], lasting=False)
            )
        drafted = able if before.drafted and len(before.drafted) == len(before.able) else before.drafted
        self.heed, self.fresh = self.fresh, False
        self.coming = before.plan if drafted else PLAIN
        self.chains = self.coming.kind is Kind.CHAIN
        whole = self.coming.kind is Kind.FITTED or self.heed or self.rounds + 1 >= self.study_at
        self.nodes = MOST_NODES if whole else self.coming.nodes
        return drafted

    def _news(self, before: Settled, able: list[Sequence]) -> bool:
        """Whether nothing is drafted, and some of these requests were not there when that was decided."""
        return not before.drafted and any(s.request.id not in self.habits for s in able)

    def _choose(self, able: list[Sequence], requests: int) -> Settled:
        ordered = self._ordered(able)
        plans = self.plans(ordered, requests)
        plan = self.review(plans)
        if self.trial_left == 0:
            self.trial = self._next_trial(plans, plan, requests)
        if self.trial is not None:
            self.trial_left -= 1
            trial = self.trial
            self.trial = trial if self.trial_left else None
            ordered.sort(key=lambda s: self._habit(s).passes > 0)  # newcomers first
            return Settled(requests, able, trial, ordered[: trial.drafted], lasting=False)
        chosen = ordered[: plan.drafted]
        if plan.kind is not Kind.OFF:  # nothing is known of newcomers, so they are drafted too
            chosen += [s for s in ordered[plan.drafted :] if not self._habit(s).passes]
        return Settled(requests, able, plan, chosen, lasting=True)

    def review(self, plans: list[Plan]) -> Plan:
        """The best of all plans. The kind that runs is kept unless another promises more than a little."""
        before = self.plan.kind
        self.plan = max(plans, key=lambda p: p.rate * (self.STICK if p.kind is before else 1.0))
        if self.passes < self.OPENING:
            self.plan = plans[2] if len(plans) > 2 else plans[-1]  # trees, where they may be
        share = self.PLAIN_SHARE if self.plan.kind is Kind.OFF else self.SHARE
        self.credit += (self.rounds - self.reviewed) * share * self.plan.seconds
        self.reviewed = self.rounds
        return self.plan

    def plans(self, ordered: list[Sequence], requests: int) -> list[Plan]:
        """The best plan of every kind there is for these requests."""
        gains = np.cumsum([self._habit(s).chain for s in ordered])
        return [self._best(kind, gains, requests) for kind in self._kinds(ordered)]

    def _best(self, kind: Kind, gains: np.ndarray, requests: int) -> Plan:
        if kind is Kind.OFF:
            seconds = float(self.costs.seconds(kind, requests, requests, 0))
            return Plan(kind, 0, 0, requests / seconds, seconds)
        drafted = np.arange(1, len(gains) + 1)[:, None]
        if kind is Kind.CHAIN:
            nodes, ratio = np.array([self.depth]), np.ones(1)
        else:
            nodes, ratio = SHARES, self.trees.ratio(kind, self.depth)
        seconds = self.costs.seconds(kind, requests, requests + drafted * nodes, drafted)
        rates = (requests + gains[:, None] * ratio) / seconds
        count, size = divmod(int(rates.argmax()), len(nodes))
        return Plan(kind, count + 1, int(nodes[size]), float(rates[count, size]), float(seconds[count, size]))

    def _kinds(self, able: list[Sequence]) -> list[Kind]:
        trees = any(s.request.mode is SpecMode.TREE for s in able)
        return list(Kind) if trees else [Kind.OFF, Kind.CHAIN]

    # Trials of what is not run ----------------------------------------------------------------------------------

    def _next_trial(self, plans: list[Plan], plan: Plan, requests: int) -> Plan | None:
        """A kind that was not run for long, if what it is likely to lose can be afforded."""
        self.tried[plan.kind] = self.rounds
        if self.passes < self.OPENING:
            return None
        others = sorted((p for p in plans if p.kind is not plan.kind), key=lambda p: self.tried.setdefault(p.kind, 0))
        if plan.kind is Kind.OFF:  # drafts say what they are worth whatever they are grown to
            others = [max(others, key=lambda p: p.rate)]
        for other in others:
            young = plan.kind is Kind.OFF or self.costs.samples(other.kind, requests) < self.SAMPLES
            rounds, loss = self._price(other, plan)
            if self.rounds - self.tried[other.kind] >= (self.YOUNG_GAP if young else self.GAP) and loss <= self.credit:
                self.credit -= loss
                self.tried[other.kind], self.trial_left, self.fresh = self.rounds, rounds, True
                return other
        return None

    def _price(self, other: Plan, plan: Plan) -> tuple[int, float]:
        """Rounds of a trial, and the seconds that are likely to be lost by it."""
        if other.kind is Kind.OFF:  # another round drafts again
            rounds, seconds = self.PLAIN_ROUNDS, (self.PLAIN_ROUNDS + 1) * plan.seconds
        else:
            rounds = 1 if plan.kind is Kind.OFF else self.DRAFT_ROUNDS
            seconds = rounds * other.seconds
        switching = 0.0 if plan.kind is Kind.OFF else self.SWITCH_SECONDS
        return rounds, seconds * max(0.0, 1.0 - other.rate / plan.rate) + switching

    # How large the trees are ------------------------------------------------------------------------------------

    def fit(self, forest: Forest, sequences: Many[Sequence]) -> Forest:
        self.rounds += 1
        self.running, self.expected = self.coming, None
        self.studying = self.heed or self.rounds <= self.EAGER or self.rounds >= self.study_at
        if self.studying:
            self.study_at = self.rounds + self.every
        if forest.sizes.width == 1:
            return forest
        fitted = self.running.kind is Kind.FITTED
        expected = self.calibration.expected(forest) if fitted or self.studying else None
        if self.studying and expected is not None:
            self._study(forest, sequences, expected)
        if self.running.kind is Kind.CHAIN:
            cut = forest
        elif fitted and expected is not None:
            cut = self._fitted(forest, sequences, expected)
        else:
            chain = np.array([s.request.mode is SpecMode.CHAIN for s in sequences])
            cut = forest.cut(np.where(chain, forest.rows, 1 + self.running.nodes))
        if self.studying and expected is not None:
            self.expected = np.where(cut.inside, expected, 0.0).sum(axis=1)
        return cut

    def _fitted(self, forest: Forest, sequences: Many[Sequence], expected: np.ndarray) -> Forest:
        bias = np.array([self._habit(s).bias for s in sequences])
        likely = falling(expected[:, 1:] * bias[:, None])
        fits = np.array([s.request.mode is SpecMode.TREE for s in sequences])
        likely[~fits] = 0.0
        fixed = np.where(fits, 1, forest.rows)
        return forest.cut(fixed + self._nodes(likely, int(fixed.sum()), int((forest.rows > 1).sum())))

    def _nodes(self, expected: np.ndarray, rows: int, drafted: int) -> np.ndarray:
        """[trees]: nodes of each, most probable first, as many as are worth their rows at the best rate."""
        values = np.sort(expected[expected > 0.0])[::-1]
        if not len(values):
            return np.zeros(len(expected), dtype=np.int64)
        tokens = len(expected) + np.concatenate([[0.0], np.cumsum(values)])
        seconds = self.costs.seconds(Kind.FITTED, len(expected), rows + np.arange(len(tokens)), drafted)
        rate = self.plan.rate or float((tokens / seconds).max())
        count = int((tokens - rate * seconds).argmax())
        if not count:
            return np.zeros(len(expected), dtype=np.int64)
        surely = (expected > values[count - 1]).sum(axis=1)
        ties = (expected == values[count - 1]).sum(axis=1)
        left = count - int(surely.sum()) - (np.cumsum(ties) - ties)
        return surely + np.clip(left, 0, ties)

    # Learning ---------------------------------------------------------------------------------------------------

    def _study(self, forest: Forest, sequences: Many[Sequence], expected: np.ndarray) -> None:
        """What these drafts promise."""
        drafted = np.flatnonzero(forest.rows > 1).tolist()
        if not drafted:
            return
        self.passes += len(drafted)
        chain = self.calibration.spine(forest)
        for i in drafted:
            habit = self._habit(sequences[i])
            worth = min(float(self.depth), float(chain[i]) * habit.bias)
            habit.expect(worth)
            self.usual = worth if self.usual is None else self.usual + self.USUAL_STEP * (worth - self.usual)
        if self.running.kind is not Kind.CHAIN:
            mine, n = expected[drafted, 1:], len(drafted)
            at = np.minimum(SHARES, mine.shape[1]) - 1
            pooled = np.cumsum(np.sort(falling(mine), axis=None)[::-1])
            every = np.minimum(SHARES * n, len(pooled)) - 1
            self.trees.add(float(chain[drafted].mean()), np.cumsum(mine.mean(axis=0))[at], pooled[every] / n)

    def learn(self, forest: Forest, sequences: Many[Sequence], paths: Many[Many[int]]) -> None:
        if self.expected is None:
            return
        self.calibration.learn(forest, paths)
        for s, path, expected in zip(sequences, paths, self.expected.tolist(), strict=True):
            if expected > 0.0 and self.passes > self.OPENING:  # before, the calibration is still off for all of them
                self._habit(s).learn(len(path) - 1, expected)

    def observe(self, spent: Round) -> None:
        every = max(1, min(self.MOST_EVERY, int(self.STUDY_SECONDS / spent.seconds)))
        self.every = every if self.running.kind is not Kind.OFF else -(-every // 2)  # a plain round is only reviewed
        if self.running.kind is Kind.OFF and spent.drafted:  # drafts after a pause: the drafter's context was behind
            return
        usual = not self.studying or self.every == 1 or self.rounds <= self.EAGER  # else longer by what learning takes
        seconds = spent.seconds if usual else None
        self.costs.observe(self.running.kind, spent.requests, spent.rows, spent.drafted, seconds)

    def forget(self) -> None:
        self.calibration, self.trees = Calibration(), Yield()
        self.habits, self.usual, self.settled, self.passes = {}, None, None, 0

    def _ordered(self, able: Many[Sequence]) -> list[Sequence]:
        return sorted(able, key=lambda s: (-self._habit(s).chain, s.request.id))

    def _habit(self, s: Sequence) -> Habit:
        habit = self.habits.get(s.request.id)
        if habit is None:  # nothing is known yet: as usual, or hope
            habit = self.habits[s.request.id] = Habit(self.depth / 2 if self.usual is None else self.usual)
        return habit

    def _keep_only(self, live: Many[Sequence]) -> None:
        ids = {s.request.id for s in live}
        if len(self.habits) > 2 * len(ids) + 16:
            self.habits = {i: h for i, h in self.habits.items() if i in ids}
