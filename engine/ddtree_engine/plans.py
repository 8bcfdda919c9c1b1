"""What a round could be, for budget `auto`: the best plan of every kind, by hopes and costs. Pure."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass

import numpy as np

from ddtree_engine.config import SpecMode
from ddtree_engine.costs import Costs, Kind
from ddtree_engine.hopes import SHARES, Hopes
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


@dataclass(frozen=True, slots=True)
class Batch:
    """What is planned for."""

    requests: int
    able: tuple[Sequence, ...]  # those that drafts can help

    @classmethod
    def of(cls, live: Many[Sequence]) -> Batch:
        return cls(len(live), tuple(s for s in live if s.drafts and s.left_to_say > 1))


def plans(batch: Batch, hopes: Hopes, costs: Costs) -> list[Plan]:
    """The best plan of every kind there is: plain first, trees, where they may be, last."""
    seconds = float(costs.seconds(Kind.OFF, batch.requests, 0, 0))
    found = [Plan(Kind.OFF, 0, 0.0, batch.requests / seconds, seconds)]
    found.append(_best(Kind.CHAIN, np.array([hopes.depth]), np.ones(1), batch, hopes, costs))
    if any(s.request.mode is SpecMode.TREE for s in batch.able):
        found.append(_best(Kind.TREE, SHARES, hopes.trees.ratio(hopes.depth), batch, hopes, costs))
    return found


def _best(kind: Kind, nodes: np.ndarray, ratio: np.ndarray, batch: Batch, hopes: Hopes, costs: Costs) -> Plan:
    """The best of these sizes; `ratio`: what each accepts over what chains do."""
    seconds = costs.seconds(kind, batch.requests, nodes, len(batch.able))
    hoped = hopes.chains(batch.able) * ratio
    rates = (batch.requests + hopes.trust[kind].ratio * hoped) / seconds
    i = int(rates.argmax())
    return Plan(kind, int(nodes[i]), float(hoped[i]) / len(batch.able), float(rates[i]), float(seconds[i]))


def larger(plan: Plan, found: list[Plan], batch: Batch, hopes: Hopes, costs: Costs) -> Plan | None:
    """A tree that shows what the running plan never verifies: what lies off the chain, or below its last node."""
    if plan.kind is Kind.OFF or found[-1].kind is not Kind.TREE:
        return None
    if plan.kind is Kind.CHAIN:
        return found[-1]
    beyond = 2 * plan.nodes <= SHARES
    if not beyond.any():
        return None
    return _best(Kind.TREE, SHARES[beyond][:1], hopes.trees.ratio(hopes.depth)[beyond][:1], batch, hopes, costs)
