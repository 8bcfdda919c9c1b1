"""Budget `auto`: pure rules by themselves, then whole lives simulated with known costs and known acceptance."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from ddtree_engine import rehearsal
from ddtree_engine.auto import Auto
from ddtree_engine.budget import Fixed, Policy, Round
from ddtree_engine.cache import Lease
from ddtree_engine.calibration import Calibration
from ddtree_engine.config import SpecMode
from ddtree_engine.costs import Costs, CostTable, Kind
from ddtree_engine.forest import Forest, Growth, Proposal, Sizes, gather, grow
from ddtree_engine.hopes import SHARES, Habit, Tally
from ddtree_engine.measuring import sizes_up_to
from ddtree_engine.plans import Batch, Plan, plans
from ddtree_engine.requests import Request, Sampling
from ddtree_engine.sequence import Sequence
from ddtree_engine.tree import Tree, best_first, chain, root_only
from ddtree_engine.trials import Trials
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.small_models import Pair, Reference
from tests.engine.test_exactness import GREEDY, PROMPTS, WARM, assert_same, plain, plant

FLAT = CostTable((1, 64, 1024), (1.0, 1.05, 4.0), staircase=False)  # an idle accelerator: rows are nearly free
STEEP = CostTable((1, 1024), (1.0, 300.0), staircase=False)  # compute bound: every row costs
STAIRS = CostTable((1, 8, 16, 32, 64, 128, 256, 512), (1.0, 1.0, 1.1, 1.4, 2.0, 3.3, 6.0, 12.0), staircase=True)
DRAFT = CostTable((1, 16), (0.3, 0.6), staircase=False)


def sequence(name: str, mode: SpecMode = SpecMode.TREE) -> Sequence:
    r = Request(name, (1,), Sampling(max_new_tokens=10**6), mode)
    s = Sequence(r, Lease(0, 0, 0, 0, 0), 0, 0, frozenset())
    s.output_ids.append(1)
    return s


# Costs ----------------------------------------------------------------------------------------------------------


def test_staircase_costs_the_next_size_and_a_line_is_interpolated() -> None:
    assert [STAIRS.at(n) for n in (1, 2, 8, 9, 16, 17)] == [1.0, 1.0, 1.0, 1.1, 1.1, 1.4]
    line = CostTable((1, 11), (1.0, 2.0), staircase=False)
    assert line.at(6) == pytest.approx(1.5)
    assert line.at(22) == pytest.approx(4.0)
    assert line.at(0) == 0.0


def test_a_disturbed_size_is_no_dearer_than_passes_of_a_smaller_one() -> None:
    table = CostTable((1, 64, 128, 192, 256), (1.0, 2.0, 3.0, 90.0, 90.0), staircase=False).smoothed()
    assert table.seconds == (1.0, 2.0, 3.0, 6.0, 6.0)


@given(st.lists(st.floats(0.1, 9), min_size=1, max_size=9))
def test_smoothed_table_never_falls_and_never_rises_above_what_was_measured(seconds: list[float]) -> None:
    table = CostTable(tuple(range(1, len(seconds) + 1)), tuple(seconds), staircase=True).smoothed()
    assert list(table.seconds) == sorted(table.seconds)
    assert all(a <= b for a, b in zip(table.seconds, seconds, strict=True))


def test_table_without_order_is_refused() -> None:
    for sizes, seconds in (((), ()), ((2, 1), (1.0, 1.0)), ((1, 1), (1.0, 1.0)), ((1, 2), (1.0,))):
        with pytest.raises(ValueError, match="ascending"):
            CostTable(sizes, seconds, staircase=True)


def test_sizes_end_at_the_limit_or_at_the_largest() -> None:
    assert sizes_up_to(5, (1, 2, 4, 8)) == (1, 2, 4, 5)
    assert sizes_up_to(8, (1, 2, 4, 8)) == (1, 2, 4, 8)
    assert sizes_up_to(900, (1, 2, 4, 8)) == (1, 2, 4, 8)


def test_kinds_are_compared_with_the_rounds_around_them() -> None:
    """The table is wrong about trees by half, and the machine is three times as slow for a while: only the first matters."""
    costs = Costs(FLAT, DRAFT)
    for n in range(600):
        slow = 3.0 if 200 < n < 400 else 1.0
        tree = n % 20 > 1
        true = 1.5 * FLAT.at(20) + 0.6 if tree else FLAT.at(4)
        spent = Round(4, 20 if tree else 4, 4 if tree else 0, slow * true)
        costs.observe(Kind.TREE if tree else Kind.OFF, 4 if tree else 0, spent)
        if n in (190, 390, 599):
            ratio = float(costs.seconds(Kind.TREE, 4, 4, 4) / costs.seconds(Kind.OFF, 4, 0, 0))
            assert ratio == pytest.approx((1.5 * FLAT.at(20) + DRAFT.at(4)) / FLAT.at(4), rel=0.15)


@given(st.integers(0, 40), st.floats(1.5, 1000.0))
def test_one_disturbed_round_changes_no_comparison_by_much(when: int, factor: float) -> None:
    costs = Costs(FLAT, DRAFT)
    for n in range(80):
        kind, nodes, drafted = (Kind.OFF, 0, 0) if n % 10 < 2 else (Kind.TREE, 4, 4)
        rows, disturbed = 4 * (nodes + 1), factor if n == when else 1.0
        costs.observe(kind, nodes, Round(4, rows, drafted, disturbed * (FLAT.at(rows) + DRAFT.at(drafted))))
    true = (FLAT.at(20) + DRAFT.at(4)) / FLAT.at(4)
    assert float(costs.seconds(Kind.TREE, 4, 4, 4) / costs.seconds(Kind.OFF, 4, 0, 0)) == pytest.approx(true, rel=0.05)


def test_a_batch_size_not_seen_is_like_the_nearest() -> None:
    costs = Costs(FLAT, DRAFT)
    for n in range(60):
        kind, nodes = (Kind.OFF, 0) if n % 6 < 3 else (Kind.TREE, 4)
        rows, drafted = 8 * (nodes + 1), 8 * (nodes > 0)
        costs.observe(kind, nodes, Round(8, rows, drafted, FLAT.at(rows) + DRAFT.at(drafted) + 0.8 * (nodes > 0)))
    for requests in (7, 9, 16):
        ratio = costs.seconds(Kind.TREE, requests, 4, requests) / costs.seconds(Kind.OFF, requests, 0, 0)
        true = FLAT.at(5 * requests) + DRAFT.at(requests) + 0.1 * requests
        assert float(ratio) == pytest.approx(true / FLAT.at(requests), rel=0.1)


@given(st.sampled_from(list(Kind)), st.integers(1, 32), st.sampled_from((0, 7, 15, 31)), st.floats(0.6, 1.9))
def test_a_rehearsed_round_costs_what_it_took(kind: Kind, requests: int, nodes: int, beyond: float) -> None:
    costs, drafted = Costs(FLAT, DRAFT), 0 if kind is Kind.OFF else requests
    rows = requests + drafted * nodes
    took = beyond * (FLAT.at(rows) + DRAFT.at(drafted))
    costs.rehearsed(kind, nodes, Round(requests, rows, drafted, took))
    assert float(costs.seconds(kind, requests, nodes, drafted)) == pytest.approx(took)
    assert costs.seconds(kind, requests, np.array([nodes, 63]), drafted).shape == (2,)


# Calibration ----------------------------------------------------------------------------------------------------


def planted(*trees: Tree) -> Forest:
    return Forest.planted(trees, Sizes(65, 8))


def test_probabilities_start_as_the_drafter_says_and_become_what_happens() -> None:
    calibration, half = Calibration(), np.array([math.log(0.5)])
    assert calibration.probability(half, 1) == pytest.approx(0.5)
    tree = best_first(0, [[math.log(0.5)]], [[4]], 1)
    for i in range(400):
        calibration.learn(planted(tree), [[0, 1] if i % 10 == 0 else [0]])
    assert calibration.probability(half, 1) == pytest.approx(0.1, abs=0.03)
    assert calibration.probability(half, 0) == pytest.approx(0.5)


def test_discount_off_the_spine_is_learnt_and_never_a_bonus() -> None:
    logprobs = [[math.log(0.5), math.log(0.4)], [math.log(0.8), math.log(0.1)]]
    tree = best_first(0, logprobs, [[1, 2], [3, 4]], 6)
    second = next(i for i in range(tree.rows) if tree.depths[i] == 1 and not tree.on_spine[i])
    child = next(i for i in range(tree.rows) if tree.parents[i] == second and tree.scores[i] > -2)
    never, always = Calibration(), Calibration()
    for _ in range(300):
        never.learn(planted(tree), [[0, second]])
        always.learn(planted(tree), [[0, second, child]])
    assert never.off_spine < math.log(0.2)
    assert always.off_spine == 0.0


# Rehearsal ------------------------------------------------------------------------------------------------------


class Rehearsed:
    """A stage on which rounds take what a table says, each first one twice as long; requests end after `life`."""

    def __init__(self, life: int = 10**6, slow: tuple[int, ...] = ()) -> None:
        self.life, self.slow, self.begun, self.ended = life, slow, list[int](), 0

    def begin(self, requests: int, prompt: int, give_up: float) -> bool:
        self.begun.append(requests)
        self.requests, self.left = requests, self.life
        return requests not in self.slow

    def play(self, policy: Policy, rounds: int) -> bool:
        assert isinstance(policy, rehearsal.Forced)
        drafted = 0 if policy.kind is Kind.OFF else self.requests
        rows = self.requests + drafted * policy.nodes
        for n in range(rounds):
            if (left := self.left) == 0:
                return False
            self.left = left - 1
            policy.observe(Round(self.requests, rows, drafted, (1 + (n == 0)) * 1.5 * (FLAT.at(rows) + DRAFT.at(drafted))))
        return True

    def end(self) -> None:
        self.ended += 1


def rehearsed(stage: Rehearsed, most: int) -> Costs:
    costs = Costs(FLAT, DRAFT)
    rehearsal.rehearse(stage, costs, most=most, depth=15, largest=64, progress=lambda share: None)
    return costs


def test_a_rehearsal_measures_every_kind_at_the_ends_and_between_and_gives_the_requests_back() -> None:
    stage = Rehearsed()
    costs = rehearsed(stage, 20)
    assert stage.begun == [1, 20, 4, 16]
    assert stage.ended == 4
    for kind, nodes in ((Kind.OFF, 0), (Kind.CHAIN, 15), (Kind.TREE, 7), (Kind.TREE, 63)):
        drafted = 4 * (kind is not Kind.OFF)
        true = 1.5 * (FLAT.at(4 + drafted * nodes) + DRAFT.at(drafted))
        assert float(costs.seconds(kind, 4, nodes, drafted)) == pytest.approx(true)
        assert costs.samples(kind, 4) > 0


@pytest.mark.parametrize("life", [0, 1, 5])
def test_a_rehearsal_whose_requests_end_keeps_what_it_has(life: int) -> None:
    stage = Rehearsed(life)
    costs = rehearsed(stage, 4)
    assert stage.ended == len(stage.begun) == 2
    assert float(costs.seconds(Kind.TREE, 4, 63, 4)) > 0


def test_a_rehearsal_leaves_out_batches_whose_prompts_take_too_long_to_read() -> None:
    stage = Rehearsed(slow=(20,))
    costs = rehearsed(stage, 20)
    assert stage.ended == len(stage.begun) == 4
    assert costs.samples(Kind.OFF, 4) > 0
    assert costs.samples(Kind.OFF, 32) == 0


def test_a_policy_anew_has_learnt_nothing_but_costs() -> None:
    stage = Stage(Auto(Costs(FLAT, DRAFT), depth=7))
    stage.play(EASY, 300)
    policy = stage.policy
    seconds = float(policy.costs.seconds(Kind.TREE, 1, 7, 1))
    anew = policy.anew()
    assert float(anew.costs.seconds(Kind.TREE, 1, 7, 1)) == seconds
    assert (anew.rounds, anew.hopes.rounds, anew.hopes.habits, anew.trials) == (0, 0, {}, Trials())


def test_costs_of_ever_new_batches_take_no_more_room() -> None:
    costs = Costs(FLAT, DRAFT)
    for requests in range(1, 3 * Costs.MOST_SAID):
        costs.seconds(Kind.TREE, requests, SHARES, requests)
    assert len(costs._said) <= Costs.MOST_SAID


def test_a_rehearsal_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rehearsal, "SECONDS", 0.0)
    stage = Rehearsed()
    assert rehearsed(stage, 8).samples(Kind.OFF, 1) == 0
    assert stage.ended == len(stage.begun)
    assert not stage.begun  # no prompt is read for nothing


# Sizes ----------------------------------------------------------------------------------------------------------


def test_all_requests_that_may_be_drafted_are_or_none() -> None:
    policy = Auto(Costs(FLAT, DRAFT), depth=7)
    group = [sequence("t"), sequence("c", SpecMode.CHAIN), sequence("o", SpecMode.OFF)]
    assert policy.to_draft(group) == group[:2]
    assert policy.to_draft(group[2:]) == []


def test_chains_and_plain_requests_are_left_as_they_are() -> None:
    trees = [chain(0, [1, 2, 3]), root_only(5), best_first(0, [[math.log(0.9)]] * 3, [[1]] * 3, 3)]
    group = [sequence("c", SpecMode.CHAIN), sequence("o", SpecMode.OFF), sequence("t")]
    policy = Auto(Costs(STEEP, DRAFT), depth=3)
    policy.coming = Plan(Kind.TREE, 1, 1.0, 1.0, 1.0)
    forest = policy.fit(planted(*trees), group)
    assert [forest.tree(i) for i in range(2)] == [planted(t).tree(0) for t in trees[:2]]
    assert forest.tree(2).nodes == 1


@given(st.lists(st.floats(0.05, 0.95), min_size=1, max_size=7), st.integers(1, 16))
@settings(deadline=None)
def test_the_size_taken_is_the_one_with_the_best_rate(sure: list[float], requests: int) -> None:
    """Found here by trying every size."""
    policy, group = Auto(Costs(STAIRS, DRAFT), depth=7), [sequence(str(i)) for i in range(requests)]
    for s, chance in zip(group, sure, strict=False):
        policy.hopes.habits[s.request.id] = Habit(7 * chance)
    hopes = policy.hopes.chains(group) * policy.hopes.trees.ratio(7)
    rates = [
        (requests + hope) / (STAIRS.at(requests * (1 + int(n))) + DRAFT.at(requests))
        for n, hope in zip(SHARES, hopes, strict=True)
    ]
    plan = plans(Batch.of(group), policy.hopes, policy.costs)[-1]
    assert plan.rate == pytest.approx(max(rates))
    assert plan.nodes == SHARES[int(np.argmax(rates))]


def test_hopes_that_came_to_nothing_are_trusted_less_and_again_when_they_come_true() -> None:
    tally = Tally(30.0, 400.0)
    assert tally.ratio == 1.0
    for _ in range(100):
        tally.learn(1.0, 4.0)
    assert tally.ratio == pytest.approx(0.3, abs=0.1)
    for _ in range(400):
        tally.learn(4.0, 4.0)
    assert tally.ratio > 0.9


# Whole lives ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Text:
    """How well the drafter knows a text: its first choice is right with `sure`, the others share most of the rest.

    After a wrong first choice its guesses below are worth `after_miss` of what it believes.
    """

    sure: float
    after_miss: float = 0.2
    boast: float = 1.0  # what it believes over what is true

    def marginals(self, depth: int, k: int) -> list[list[float]]:
        first = min(0.99, self.sure * self.boast)
        rest = [(1 - first) * 0.6**i * 0.4 for i in range(1, k)]
        return [[math.log(first), *(math.log(r) for r in sorted(rest, reverse=True))] for _ in range(depth)]


def accept(tree: Tree, text: Text, dice: random.Random) -> list[int]:
    path = [0]
    while True:
        kids = [i for i in range(1, tree.rows) if tree.parents[i] == path[-1]]
        worth = (1.0 if tree.on_spine[path[-1]] else text.after_miss) / text.boast
        roll = dice.random()
        for kid in kids:
            roll -= math.exp(tree.scores[kid] - tree.scores[path[-1]]) * worth
            if roll < 0:
                path.append(kid)
                break
        else:
            return path


def proposals(policy: Auto | Fixed, texts: list[Text], depth: int) -> list[Proposal]:
    """The next trees of requests that say such texts."""
    if not texts:
        return []
    logprobs = np.array([text.marginals(depth, 4) for text in texts])
    ids, n = np.broadcast_to(np.arange(4), logprobs.shape), len(texts)
    chains = policy.chains or isinstance(policy, Chain)
    growth = Growth([0] * n, [depth] * n, [1 if chains else 4] * n, [64] * n, policy.off_spine, policy.floor)
    forest = grow(logprobs, ids, growth, Sizes(65, depth))
    return [Proposal(forest, i) for i in range(n)]


def rate(policy: Auto | Fixed, texts: list[Text], verify: CostTable, rounds: int = 1000, depth: int = 7) -> float:
    """Tokens per second of a policy once it has settled, with the true costs `verify` and DRAFT."""
    dice = random.Random(3)
    group = [sequence(str(i)) for i in range(len(texts))]
    drafted: list[Sequence] = []
    tokens, seconds = 0, 0.0
    for n in range(rounds):
        grown = dict(zip(map(id, drafted), proposals(policy, [texts[group.index(s)] for s in drafted], depth), strict=True))
        forest = policy.fit(gather([grown.get(id(s)) for s in group], [0] * len(group)), group)
        paths = [accept(forest.tree(i), text, dice) for i, text in enumerate(texts)]
        policy.learn(forest, group, paths)
        policy.meanwhile()
        rows = int(forest.rows.sum())
        drafted = policy.to_draft(group)
        spent = verify.at(rows) + DRAFT.at(len(drafted))
        policy.observe(Round(len(group), rows, len(drafted), spent))
        if n >= 200:
            tokens += sum(map(len, paths))
            seconds += spent
    return tokens / seconds


class Chain(Fixed):
    pass


class Plain(Fixed):
    def to_draft(self, live):  # type: ignore[no-untyped-def]
        return []


EASY, MIDDLING, HARD, BOASTFUL = Text(0.92), Text(0.6), Text(0.12), Text(0.3, boast=3.0)
CROWDS = {
    "one easy": [EASY],
    "one hard": [HARD],
    "one boastful": [BOASTFUL],
    "four middling": [MIDDLING] * 4,
    "sixteen easy": [EASY] * 16,
    "sixteen hard": [HARD] * 16,
    "sixteen mixed": [EASY, HARD, MIDDLING, BOASTFUL] * 4,
}
MACHINES = {"flat": FLAT, "steep": STEEP, "stairs": STAIRS}


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("crowd", CROWDS)
def test_auto_is_never_behind_the_chain_or_plain_decoding(crowd: str, machine: str) -> None:
    texts, table = CROWDS[crowd], MACHINES[machine]
    best = max(rate(policy, texts, table) for policy in (Plain(), Chain()))
    got = rate(Auto(Costs(table, DRAFT), depth=7), texts, table)
    assert got > 0.96 * best  # what probing costs


def test_auto_finds_the_costs_that_its_tables_had_wrong() -> None:
    """Start-up measured one request; the real batch is far dearer."""
    wrong = replace(STEEP, seconds=(1.0, 3.0))
    best = max(rate(policy, [HARD] * 16, STEEP) for policy in (Plain(), Chain()))
    assert rate(Auto(Costs(wrong, DRAFT), depth=7), [HARD] * 16, STEEP) > 0.9 * best


class Stage:
    """A policy with requests that say what they are told to: how many of them it drafts, round by round."""

    def __init__(self, policy: Auto, machine: CostTable = FLAT, requests: int = 1) -> None:
        self.policy, self.machine, self.dice = policy, machine, random.Random(5)
        self.group = [sequence(str(i)) for i in range(requests)]
        self.drafted: list[Sequence] = []
        self.kinds: list[Kind] = []

    def play(self, text: Text, rounds: int, disturbance: float = 0.0) -> list[Kind]:
        """The kinds of rounds that were run."""
        kinds = []
        for _ in range(rounds):
            grown = dict(zip(map(id, self.drafted), proposals(self.policy, [text] * len(self.drafted), 7), strict=True))
            forest = self.policy.fit(gather([grown.get(id(s)) for s in self.group], [0] * len(self.group)), self.group)
            kinds.append(self.policy.running.kind)
            paths = [accept(forest.tree(i), text, self.dice) for i in range(len(forest))]
            self.policy.learn(forest, self.group, paths)
            self.policy.meanwhile()
            self.drafted = self.policy.to_draft(self.group)
            spent = self.machine.at(int(forest.rows.sum())) + DRAFT.at(len(self.drafted))
            slow = self.dice.uniform(1.0, 5.0) if self.dice.random() < disturbance else 1.0
            self.policy.observe(Round(len(self.group), int(forest.rows.sum()), len(self.drafted), spent * slow))
        return kinds


def test_plain_request_is_tried_again_and_speculates_once_it_pays() -> None:
    stage = Stage(Auto(Costs(FLAT, DRAFT), depth=7))
    hopeless = Text(0.02, boast=20.0)  # none of its candidates is worth anything
    stage.play(hopeless, 200)
    assert 1 <= sum(kind is not Kind.OFF for kind in stage.play(hopeless, 1000)) < 100
    stage.play(EASY, 150)
    assert sum(kind is not Kind.OFF for kind in stage.play(EASY, 200)) > 180


def test_drafting_for_long_takes_plain_rounds_now_and_then() -> None:
    stage = Stage(Auto(Costs(FLAT, DRAFT), depth=7))
    stage.play(EASY, 200)
    assert 1 <= sum(kind is Kind.OFF for kind in stage.play(EASY, 2000)) < 60


@pytest.mark.parametrize("text", [EASY, HARD], ids=["easy", "hard"])
def test_disturbed_rounds_do_not_change_what_is_run(text: Text) -> None:
    """A twentieth of all rounds take up to five times as long."""
    calm, busy = (Stage(Auto(Costs(STEEP, DRAFT), depth=7), STEEP, requests=4) for _ in range(2))
    for stage in (calm, busy):
        stage.play(text, 200)
    shares = [
        sum(kind is Kind.OFF for kind in stage.play(text, 600, disturbance)) / 600
        for stage, disturbance in ((calm, 0.0), (busy, 0.05))
    ]
    assert abs(shares[0] - shares[1]) < 0.1


def test_habits_of_requests_that_are_gone_are_forgotten() -> None:
    policy = Auto(Costs(FLAT, DRAFT), depth=7)
    for i in range(500):
        policy.to_draft([sequence(str(i))])
    assert len(policy.hopes.habits) < 40


# In the engine --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("s", [GREEDY, WARM], ids=["greedy", "warm"])
def test_auto_says_the_same_as_plain_decoding(tmp_path: Path, s: Sampling) -> None:
    pair = Pair(tmp_path)
    engine, reference = pair.engine(speculative_ddtree_budget="auto"), Reference(pair.target)
    assert engine._cache.shape.slab_slots == 256 + 65
    s = replace(s, max_new_tokens=120)
    answers = plain(engine, PROMPTS, s)
    plant(engine, answers, PROMPTS)
    for prompt, answer, got in zip(PROMPTS, answers, engine.generate(PROMPTS, s, SpecMode.TREE), strict=True):
        assert_same(reference, prompt, got.token_ids, answer.token_ids, s)


def test_auto_catches_up_the_drafter_after_plain_rounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The context that the drafter missed while it was idle is there when it drafts again."""
    pair = Pair(tmp_path)
    engine, always = pair.engine(speculative_ddtree_budget="auto"), pair.engine()
    idle = set(range(3, 9))
    rounds = iter(range(1000))
    monkeypatch.setattr(Auto, "to_draft", lambda _, live: [] if next(rounds) in idle else [s for s in live if s.drafts])
    seen = {}
    for name, e in (("auto", engine), ("always", always)):
        e.submit(Request("x", (5, 6, 7), replace(GREEDY, max_new_tokens=60), SpecMode.TREE))
        seen[name] = {}
        while e.busy:
            e.step()
            for s in e._running.values():
                if s.proposal:
                    seen[name][len(s.output_ids)] = s.proposal.forest.spines[s.proposal.index]
    shared = set(seen["auto"]) & set(seen["always"])
    assert max(shared) > 20
    assert all(np.allclose(seen["auto"][n], seen["always"][n], atol=1e-4) for n in shared)
