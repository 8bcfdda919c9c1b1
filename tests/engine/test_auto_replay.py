"""The replay of budget `auto`: what it counts is what trees accept, and the policy keeps to the best fixed choice."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "engine"))

from benchmarks import auto_live, auto_replay
from benchmarks.auto_replay import Grower, Machine, Slot, accepted_rows, walked
from benchmarks.texts import MISSED, Text, load
from ddtree_engine.budget import Fixed
from ddtree_engine.costs import Kind

MACHINES = sorted(auto_replay.DATA.glob("costs_*.json"))


@pytest.fixture(scope="module")
def texts() -> list[Text]:
    return load()


def test_recorded_texts_are_of_every_kind_and_whole(texts: list[Text]) -> None:
    assert {t.kind for t in texts} == {"coding", "copy", "chat", "hostile"}
    for t in texts:
        assert t.logprobs.shape[:2] == t.ranks.shape
        assert (np.diff(t.logprobs, axis=2) <= 0).all()  # best first
        assert ((t.ranks < t.logprobs.shape[2]) | (t.ranks == MISSED)).all()
        assert (t.ranks[-1, 2:] == MISSED).all()  # nothing is known beyond the end


def test_a_chain_accepts_as_many_as_first_choices_are_right(texts: list[Text]) -> None:
    text = next(t for t in texts if t.kind == "chat")
    arms, slot, policy = accepted_rows([text]), Slot([text], 0), Fixed()
    policy.chains = True  # type: ignore[misc]
    for at in range(0, len(text), 7):
        slot.at = at
        forest = Grower(text.ranks.shape[1]).proposal(slot, policy).forest
        assert len(walked(forest, 0, slot)) == arms["chain"][text][at]


def test_larger_budgets_accept_no_less(texts: list[Text]) -> None:
    arms = accepted_rows(texts[:1] + texts[-1:])
    for text in (texts[0], texts[-1]):
        by_budget = np.array([arms[f"tree {b}"][text] for b in auto_replay.BUDGETS])
        assert (np.diff(by_budget, axis=0) >= 0).all()


@pytest.mark.parametrize("path", MACHINES, ids=lambda p: p.stem)
def test_cost_tables_are_read_and_never_fall(path: Path) -> None:
    machine = Machine.read(path)
    for batch in machine.off:
        table = machine.tree[batch]
        assert list(table.seconds) == sorted(table.seconds)
        assert machine.seconds(Kind.OFF, batch, batch, 0) < machine.seconds(Kind.TREE, batch, table.sizes[-1], batch)


@pytest.mark.parametrize("kind", ["coding", "chat"])
def test_auto_keeps_to_the_best_fixed_choice(kind: str, texts: list[Text], monkeypatch: pytest.MonkeyPatch) -> None:
    """A short run, which pays for learning: the benchmark's own goal is for runs ten times as long."""
    monkeypatch.setattr(auto_replay, "ROUNDS", {4: 400})
    mine = [t for t in texts if t.kind == kind]
    cell = auto_replay.measure(Machine.read(MACHINES[-1]), mine, kind, 4, accepted_rows(mine))
    assert cell.regret < 0.1
    assert kind in auto_replay.report([cell])


def test_live_check_chooses_on_one_half_and_compares_on_the_other() -> None:
    rates = {"off": [1.0] * 6, "chain": [3.0, 1.0] * 3, "tree auto": [1.0, 0.9] * 3}
    cell = auto_live.Cell("code", 1, rates)
    assert cell.best == "chain"  # on the even repeats
    assert cell.ratios == [0.9] * 3  # on the odd ones
    assert auto_live.lower_bound([cell]) == pytest.approx(0.9)
    assert "0.90" in auto_live.report([cell])
