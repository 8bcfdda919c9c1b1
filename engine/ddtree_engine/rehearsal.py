"""Runs whole rounds of every kind at start-up and says what they took, for budget `auto`. About a second.

Passes alone (`measuring.py`) do not tell what a round costs: there is the host's work, and how rows are spread over requests.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Many
from typing import Protocol

import numpy as np

from ddtree_engine.budget import Fixed, Policy, Round
from ddtree_engine.costs import Costs, Kind
from ddtree_engine.forest import Forest
from ddtree_engine.sequence import Sequence

NODES = (7, 15, 31, 63)  # of trees: with the root, sizes that graphs are captured for
SWEEPS, ROUNDS = 2, 3  # the first round of a kind verifies what another kind drafted, and is not counted
COUNTED = SWEEPS * (ROUNDS - 1)  # the least of these rounds counts: disturbances only ever add
SECONDS = 1.5  # after which no more is measured; what is missing is estimated from what is nearest
PROMPT = 32  # tokens


class Forced(Fixed):
    """Rounds of one kind and size, and what they were."""

    def __init__(self, kind: Kind, nodes: int) -> None:
        self.kind, self.nodes, self.chains = kind, nodes, kind is Kind.CHAIN
        self.rounds = list[Round]()

    def to_draft(self, live: Many[Sequence]) -> list[Sequence]:
        return [] if self.kind is Kind.OFF else super().to_draft(live)

    def fit(self, forest: Forest, sequences: Many[Sequence]) -> Forest:
        return forest if self.kind is Kind.CHAIN else forest.cut(np.full(len(forest), self.nodes + 1))

    def observe(self, spent: Round) -> None:
        self.rounds.append(spent)

    def whole(self, requests: int) -> list[Round]:
        """The rounds in which every request was as it should be."""
        rows, drafted = requests * (self.nodes + 1), requests * (self.kind is not Kind.OFF)
        return [r for r in self.rounds if (r.requests, r.rows, r.drafted) == (requests, rows, drafted)]


class Stage(Protocol):
    """What the rounds run on: the engine."""

    def begin(self, requests: int, prompt: int, give_up: float) -> bool:
        """That many requests decode from here on, until `end`; False: not by `give_up`, on the clock `time.perf_counter`."""
        ...

    def play(self, policy: Policy, rounds: int) -> bool:
        """Run rounds; False when a request has ended by itself."""
        ...

    def end(self) -> None: ...


def rehearse(stage: Stage, costs: Costs, *, most: int, depth: int, largest: int, progress: Callable[[float], None]) -> None:
    """Measure every kind for batches up to `most` requests; trees up to `largest` nodes, chains of `depth`."""
    give_up = time.perf_counter() + SECONDS
    kinds = [(Kind.OFF, 0), (Kind.CHAIN, depth), *((Kind.TREE, n) for n in NODES if n <= largest)]
    batches = list(batch_sizes(most))
    for i, requests in enumerate(batches):
        if time.perf_counter() >= give_up:  # not even prompts are read for what would not be measured
            return
        begun = stage.begin(requests, PROMPT, give_up)
        seen = _sweeps(stage, kinds, requests, give_up) if begun else {}
        stage.end()
        for (kind, nodes), rounds in seen.items():
            if rounds:
                costs.rehearsed(kind, nodes, min(rounds, key=lambda spent: spent.seconds))
        progress((i + 1) / len(batches))


def _sweeps(stage: Stage, kinds: Many[tuple[Kind, int]], requests: int, give_up: float) -> dict[tuple[Kind, int], list[Round]]:
    """The rounds that count, by kind and nodes."""
    seen: dict[tuple[Kind, int], list[Round]] = {key: [] for key in kinds}
    for key in [*kinds] * SWEEPS:
        forced = Forced(*key)
        if time.perf_counter() >= give_up or not stage.play(forced, ROUNDS):
            break
        seen[key] += forced.whole(requests)[-(ROUNDS - 1) :]
    return seen


def batch_sizes(most: int) -> Iterator[int]:
    """One request, as many as there may be, and powers of four in between: the ends first."""
    yield 1
    if most > 1:
        yield most
    between = 4
    while between < most:
        yield between
        between *= 4
