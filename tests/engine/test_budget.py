"""Budget `auto`: pure rules by themselves, then whole lives simulated with known costs and known acceptance."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from ddtree_engine.budget import Auto, Calibration, Costs, CostTable, Fixed, Round
from ddtree_engine.cache import Lease
from ddtree_engine.config import SpecMode
from ddtree_engine.costs import sizes_up_to
from ddtree_engine.requests import Request, Sampling
from ddtree_engine.sequence import Sequence
from ddtree_engine.tree import Tree, best_first, chain, root_only
from hypothesis import given
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


def test_costs_follow_what_rounds_take_and_ignore_a_hiccup() -> None:
    costs = Costs(FLAT, DRAFT)
    for _ in range(200):
        costs.observe(Round(requests=4, rows=20, verify_seconds=2 * FLAT.at(20), drafted=4, draft_seconds=1.0))
    assert costs.verify(20, 4) == pytest.approx(2 * FLAT.at(20), rel=0.01)
    assert costs.verify(20, 3) == pytest.approx(2 * FLAT.at(20), rel=0.01)  # the nearest batch seen
    assert costs.verify(4, 4) == pytest.approx(FLAT.at(4))  # plain rounds are another kind
    costs.observe(Round(requests=4, rows=20, verify_seconds=1000.0, drafted=0, draft_seconds=0.0))
    assert costs.verify(20, 4) < 2.3 * FLAT.at(20)


# Calibration ----------------------------------------------------------------------------------------------------


def test_probabilities_start_as_the_drafter_says_and_become_what_happens() -> None:
    calibration = Calibration()
    assert calibration.probability(math.log(0.5), True) == pytest.approx(0.5)
    tree = best_first(0, [[math.log(0.5)]], [[4]], 1)
    for i in range(400):
        calibration.learn(tree, [0, 1] if i % 10 == 0 else [0])
    assert calibration.probability(math.log(0.5), True) == pytest.approx(0.1, abs=0.03)
    assert calibration.probability(math.log(0.5), False) == pytest.approx(0.5)


def test_discount_off_the_spine_is_learnt_and_never_a_bonus() -> None:
    logprobs = [[math.log(0.5), math.log(0.4)], [math.log(0.8), math.log(0.1)]]
    tree = best_first(0, logprobs, [[1, 2], [3, 4]], 6)
    second = next(i for i in range(tree.rows) if tree.depths[i] == 1 and not tree.on_spine[i])
    child = next(i for i in range(tree.rows) if tree.parents[i] == second and tree.scores[i] > -2)
    never, always = Calibration(), Calibration()
    for _ in range(300):
        never.learn(tree, [0, second])
        always.learn(tree, [0, second, child])
    assert never.off_spine < math.log(0.2)
    assert always.off_spine == 0.0


# Fitting --------------------------------------------------------------------------------------------------------


def test_free_rows_are_filled_and_dear_ones_are_not() -> None:
    tree = best_first(0, [[math.log(p), math.log(0.9 - p)] for p in (0.8, 0.7, 0.6, 0.5)], [[1, 2]] * 4, 16)
    s = sequence("a")
    (wide,) = Auto(Costs(FLAT, DRAFT), depth=4).fit([tree], [s])
    (narrow,) = Auto(Costs(STEEP, DRAFT), depth=4).fit([tree], [s])
    assert wide.nodes > 8 > narrow.nodes >= 1
    dear = CostTable((1, 2), (1.0, 100.0), staircase=False)
    assert Auto(Costs(dear, DRAFT), depth=4).fit([tree], [s])[0].nodes == 0


def test_requests_compete_for_rows_by_how_likely_their_nodes_are() -> None:
    sure = best_first(0, [[math.log(0.99), math.log(0.005)]] * 6, [[1, 2]] * 6, 12)
    vague = best_first(0, [[math.log(0.2), math.log(0.19)]] * 6, [[1, 2]] * 6, 12)
    both = [sequence("sure"), sequence("vague")]
    cut = Auto(Costs(STEEP, DRAFT), depth=6).fit([sure, vague], both)
    assert cut[0].nodes >= 5 > cut[1].nodes


def test_staircase_is_filled_to_a_step() -> None:
    vague = best_first(0, [[math.log(0.3)] * 3] * 6, [[1, 2, 3]] * 6, 64)
    (cut,) = Auto(Costs(STAIRS, DRAFT), depth=6).fit([vague], [sequence("a")])
    assert cut.rows in STAIRS.sizes


def test_chains_and_plain_requests_are_left_as_they_are() -> None:
    trees = [chain(0, [1, 2, 3]), root_only(5), best_first(0, [[math.log(0.9)]] * 3, [[1]] * 3, 3)]
    group = [sequence("c", SpecMode.CHAIN), sequence("o", SpecMode.OFF), sequence("t")]
    cut = Auto(Costs(STEEP, DRAFT), depth=3).fit(trees, group)
    assert cut[:2] == trees[:2]
    assert Auto(Costs(STEEP, DRAFT), depth=3).fit([], []) == []


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


def rate(policy: object, texts: list[Text], verify: CostTable, rounds: int = 1000, depth: int = 7) -> float:
    """Tokens per second of a policy, with the true costs `verify` and DRAFT."""
    dice = random.Random(3)
    group = [sequence(str(i)) for i in range(len(texts))]
    drafted: list[Sequence] = []
    tokens, seconds = 0, 0.0
    for n in range(rounds):
        trees = []
        for s, text in zip(group, texts, strict=True):
            if s not in drafted:
                trees.append(root_only(0))
            elif isinstance(policy, Chain):
                trees.append(chain(0, range(depth)))
            else:
                marginals = text.marginals(depth, 4)
                trees.append(
                    best_first(0, marginals, [[0, 1, 2, 3]] * depth, 64, off_spine=policy.off_spine, floor=policy.floor)
                )
        trees = policy.fit(trees, group)
        said = 0
        for s, t, text in zip(group, trees, texts, strict=True):
            if isinstance(policy, Chain) and t.nodes:
                scored = best_first(0, [[math.log(text.sure * text.boast)]] * depth, [[0]] * depth, depth)
                path = accept(scored, text, dice)
            else:
                path = accept(t, text, dice)
            policy.learn(s, t, path)
            said += len(path)
        rows = sum(t.rows for t in trees)
        drafted = policy.to_draft(group)
        spent = Round(len(group), rows, verify.at(rows), len(drafted), DRAFT.at(len(drafted)))
        policy.observe(spent)
        if n >= 200:  # what it has settled on
            tokens += said
            seconds += spent.verify_seconds + spent.draft_seconds
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


def test_plain_request_is_tried_again_and_speculates_once_it_pays() -> None:
    policy = Auto(Costs(FLAT, CostTable((1,), (1.5,), staircase=False)), depth=7)
    s = sequence("a")
    missed = best_first(0, [[math.log(0.5)]] * 7, [[0]] * 7, 7)
    tries = []
    for n in range(600):
        text_is_easy = n > 400
        drafted = policy.to_draft([s])
        tries.append(bool(drafted))
        if drafted:
            policy.learn(s, missed, list(range(8)) if text_is_easy else [0])
    assert all(tries[:2])
    assert 3 <= sum(tries[20:400]) < 30
    assert sum(tries[560:]) > 35  # at most one more idle stretch, then it goes on


def test_drafting_for_long_takes_one_plain_round_now_and_then() -> None:
    policy = Auto(Costs(FLAT, DRAFT), depth=7)
    s = sequence("a")
    good = best_first(0, [[math.log(0.9)]] * 7, [[0]] * 7, 7)
    plain_rounds = 0
    for _ in range(1000):
        if policy.to_draft([s]):
            policy.learn(s, good, list(range(8)))
        else:
            plain_rounds += 1
    assert 2 <= plain_rounds <= 5


def test_habits_of_requests_that_are_gone_are_forgotten() -> None:
    policy = Auto(Costs(FLAT, DRAFT), depth=7)
    for i in range(500):
        policy.to_draft([sequence(str(i))])
    assert len(policy.habits) < 40


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
                    seen[name][len(s.output_ids)] = s.proposal.token_ids
    shared = set(seen["auto"]) & set(seen["always"])
    assert max(shared) > 20
    assert all(seen["auto"][n] == seen["always"][n] for n in shared)
