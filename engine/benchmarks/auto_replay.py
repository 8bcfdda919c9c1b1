"""What budget `auto` loses: the engine's own policy replayed over recorded acceptance and measured costs.

    cd engine && python -m benchmarks.auto_replay [--costs FILE ...] [--recorded FILE] [--batch 1 4 16 32] [--json FILE]

Method: `texts.py` knows what every tree would have accepted, `data/costs_*.json` what rounds take on a machine (made by
`round_costs.py`; every kind, batch size and number of rows). The policy sees these times disturbed: each by 5 %, and
now and then a spell of up to 30 rounds that take up to three times as long. Its start-up tables are the ones that the engine
measured. Regret is what it loses, in tokens per undisturbed second from the first round on, against the best of plain
decoding, the chain and every fixed budget, each run throughout on the same texts.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np
from benchmarks.texts import MISSED, OTHER, Text, load
from ddtree_engine import rehearsal
from ddtree_engine.auto import Auto
from ddtree_engine.budget import Policy, Round
from ddtree_engine.cache import Lease
from ddtree_engine.config import SpecMode
from ddtree_engine.costs import Costs, CostTable, Kind
from ddtree_engine.forest import Forest, Growth, Proposal, Sizes, gather, grow
from ddtree_engine.requests import Request, Sampling
from ddtree_engine.sequence import Sequence as Running

DATA = Path(__file__).parent / "data"
BUDGETS = (4, 8, 16, 32, 64)
ROUNDS = {1: 3000, 4: 1500, 16: 1000, 32: 800}
LIMIT = 64  # nodes of the largest tree
GOAL = 0.03
# What the policy itself takes beyond a fixed budget where the host waits for nothing meanwhile (two CPU cores): in a round
# that is studied, in a plain one that is reviewed. Where the device works meanwhile: only that larger trees are grown.
STUDYING, REVIEWING = 4e-4, 1.5e-4
GROWING = 1.5e-4


# Costs ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Machine:
    """Seconds of whole rounds on one machine with one pair of models."""

    name: str
    staircase: bool
    off: dict[int, float]  # by batch
    chain: dict[int, float]
    tree: dict[int, CostTable]  # by batch: rows -> seconds
    verify: CostTable  # what the engine measured at its start
    draft: CostTable

    @classmethod
    def read(cls, path: Path) -> Machine:
        data = json.loads(path.read_text())
        stairs = data["staircase"]

        def table(values: dict[str, float]) -> CostTable:
            pairs = sorted((int(n), s) for n, s in values.items())
            return CostTable(tuple(n for n, _ in pairs), tuple(s for _, s in pairs), stairs).smoothed()

        batches = {int(n): b for n, b in data["batches"].items()}
        return cls(
            data["machine"],
            stairs,
            {n: b["off"] for n, b in batches.items()},
            {n: b["chain"] for n, b in batches.items()},
            {n: table(b["tree"]) for n, b in batches.items()},
            table(data["startup"]["verify"]),
            table(data["startup"]["draft"]),
        )

    def seconds(self, kind: Kind, batch: int, rows: int, drafted: int) -> float:
        """Of one round that verifies trees of this kind and drafts for so many requests."""
        draft = self.draft.at(batch)
        if kind is Kind.OFF:
            whole = self.off[batch] + draft
        elif kind is Kind.CHAIN:  # its rows fall below the full ones where texts end
            whole = self.chain[batch] * self.tree[batch].at(rows) / self.tree[batch].at(batch * 16)
        else:
            whole = self.tree[batch].at(rows)
        return max(0.1 * whole, whole - draft + self.draft.at(drafted))


# Streams of requests --------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Slot:
    """One place of the batch: answers one text after another."""

    texts: Sequence[Text]
    turn: int
    at: int = 0
    sequence: Running = field(init=False)
    proposal: Proposal | None = None

    def __post_init__(self) -> None:
        self._next()

    def _next(self) -> None:
        left = len(self.text) + 1
        request = Request(f"{id(self)}-{self.turn}", (1,), Sampling(max_new_tokens=left), SpecMode.TREE)
        self.sequence = Running(request, Lease(0, 0, 0, 0, 0), 0, 0, frozenset())
        self.sequence.output_ids.append(0)
        self.at = 0

    @property
    def text(self) -> Text:
        return self.texts[self.turn % len(self.texts)]

    def say(self, tokens: int) -> int:
        """Go on by so many tokens, to the end of the text at most; the next text comes at once."""
        tokens = min(tokens, len(self.text) - self.at)
        self.at += tokens
        self.sequence.output_ids.extend([0] * tokens)
        if self.at == len(self.text):
            self.turn += 1
            self._next()
        return tokens


def slots(texts: Sequence[Text], batch: int) -> list[Slot]:
    """Every slot begins with another text."""
    return [Slot(texts, turn) for turn in range(batch)]


class Grower:
    """Trees at recorded positions. The discount off the spine is rounded, so that trees can be used again."""

    def __init__(self, depths: int) -> None:
        self.sizes = Sizes(LIMIT + 1, depths)
        self.one = cache(self._one)

    def _one(self, text: Text, at: int, chain: bool, off_spine: float, floor: float) -> Forest:
        k = text.logprobs.shape[2]
        depth = min(self.sizes.depths, len(text) - at)
        growth = Growth([0], [depth], [1 if chain else k], [LIMIT], off_spine, floor)
        ids = np.broadcast_to(np.arange(k), text.logprobs[at : at + 1].shape)
        return grow(text.logprobs[at : at + 1], ids, growth, self.sizes)

    def proposal(self, slot: Slot, policy: Policy) -> Proposal:
        off_spine = round(policy.off_spine * 8) / 8
        return Proposal(self.one(slot.text, slot.at, policy.chains, off_spine, policy.floor), 0)


def walked(forest: Forest, i: int, slot: Slot) -> list[int]:
    """The accepted rows: along the recorded ranks as far as the tree goes."""
    truth = [*slot.text.ranks[slot.at].tolist(), MISSED]
    tree = forest.tree(i)
    return tree.walk([truth[depth] for depth in tree.depths])


# Arms -----------------------------------------------------------------------------------------------------------


class Disturbed:
    """Times as a busy machine gives them."""

    def __init__(self, seed: int) -> None:
        self._dice = random.Random(seed)
        self._left, self._factor = 0, 1.0

    def __call__(self, seconds: float) -> float:
        if self._left == 0 and self._dice.random() < 0.005:
            self._left, self._factor = self._dice.randrange(1, 31), self._dice.uniform(1.2, 3.0)
        elif self._left:
            self._left -= 1
        return seconds * self._dice.lognormvariate(0, 0.05) * (self._factor if self._left else 1.0)


def run_policy(
    policy: Auto, machine: Machine, texts: Sequence[Text], batch: int, rounds: int, seen: Callable[[float], float]
) -> float:
    """Tokens per second of the policy, every round counted."""
    grower, group = Grower(texts[0].logprobs.shape[1]), slots(texts, batch)
    tokens, seconds = 0, 0.0
    for _ in range(rounds):
        running = [slot.sequence for slot in group]
        grown = gather([slot.proposal for slot in group], [0] * batch).cut(np.full(batch, 1 + policy.nodes))
        forest = policy.fit(grown, running)
        kind, rows = policy.running.kind, int(forest.rows.sum())
        paths = [walked(forest, i, slot) if forest.rows[i] > 1 else [0] for i, slot in enumerate(group)]
        if machine.staircase:  # a replayed round: what to draft is decided before it is known what was accepted
            drafted = len(policy.to_draft(running)) > 0
            policy.meanwhile()
            policy.learn(forest, running, paths)
        else:
            policy.learn(forest, running, paths)
            policy.meanwhile()
        tokens += sum(slot.say(len(path)) for slot, path in zip(group, paths, strict=True))
        if not machine.staircase:
            drafted = len(policy.to_draft([slot.sequence for slot in group])) > 0
        for slot in group:
            slot.proposal = grower.proposal(slot, policy) if drafted else None
        took = machine.seconds(kind, batch, rows, drafted * batch)
        if policy.studying:
            took += GROWING * (rows > batch) if machine.staircase else STUDYING if rows > batch else REVIEWING
        seconds += took
        policy.observe(Round(batch, rows, drafted * batch, seen(took)))
    return tokens / seconds


def accepted_rows(texts: Sequence[Text]) -> dict[str, dict[Text, list[int]]]:
    """By arm: accepted rows (the root's included) of the tree at every position."""
    arms: dict[str, dict[Text, list[int]]] = {"chain": {}} | {f"tree {b}": {} for b in BUDGETS}
    for text in texts:
        ids = np.broadcast_to(np.arange(text.logprobs.shape[2]), text.logprobs.shape)
        deep = text.logprobs.shape[1]
        depths = [min(deep, len(text) - at) for at in range(len(text))]
        growth = Growth([0] * len(text), depths, [ids.shape[2]] * len(text), [LIMIT] * len(text))
        forest = grow(text.logprobs, ids, growth, Sizes(LIMIT + 1, deep))
        paths = [
            forest.tree(at).walk([[*text.ranks[at].tolist(), MISSED][d] for d in forest.tree(at).depths])
            for at in range(len(text))
        ]
        right = np.minimum.accumulate(text.ranks == 0, axis=1).sum(axis=1)
        arms["chain"][text] = (1 + right).tolist()
        for budget in BUDGETS:
            arms[f"tree {budget}"][text] = [sum(row <= budget for row in path) for path in paths]
    return arms


def run_fixed(
    rows_of: dict[Text, list[int]], machine: Machine, texts: Sequence[Text], batch: int, rounds: int, arm: str
) -> float:
    group = slots(texts, batch)
    tokens = 0
    for _ in range(rounds):
        tokens += sum(slot.say(rows_of[slot.text][slot.at]) for slot in group)
    kind = Kind.CHAIN if arm == "chain" else Kind.TREE
    rows = 16 * batch if arm == "chain" else (int(arm.split()[1]) + 1) * batch
    return tokens / (rounds * machine.seconds(kind, batch, rows, batch))


@dataclass(frozen=True, slots=True)
class Cell:
    machine: str
    texts: str
    batch: int
    rates: dict[str, float]  # tokens a second by fixed arm
    auto: float

    @property
    def best(self) -> str:
        return max(self.rates, key=lambda arm: self.rates[arm])

    @property
    def regret(self) -> float:
        return 1.0 - self.auto / self.rates[self.best]


def rehearsed(machine: Machine, batch: int, seen: Callable[[float], float]) -> Costs:
    """What the engine knows after its start: the tables, and whole rounds of every kind."""
    costs = Costs(machine.verify, machine.draft)
    for kind, nodes in ((Kind.OFF, 0), (Kind.CHAIN, 15), *((Kind.TREE, n) for n in rehearsal.NODES)):
        rows, drafted = batch * (nodes + 1), batch * (nodes > 0)
        took = machine.seconds(kind, batch, rows, drafted)
        costs.rehearsed(kind, nodes, Round(batch, rows, drafted, min(seen(took) for _ in range(rehearsal.COUNTED))))
    return costs


def measure(machine: Machine, texts: Sequence[Text], name: str, batch: int, arms: dict[str, dict[Text, list[int]]]) -> Cell:
    rounds = ROUNDS.get(batch, 300)
    rates = {"off": batch / machine.seconds(Kind.OFF, batch, batch, 0)}
    rates |= {arm: run_fixed(of, machine, texts, batch, rounds, arm) for arm, of in arms.items()}
    policy = Auto(rehearsed(machine, batch, Disturbed(batch + 100)), depth=texts[0].logprobs.shape[1])
    return Cell(machine.name, name, batch, rates, run_policy(policy, machine, texts, batch, rounds, Disturbed(batch)))


def workloads(texts: Sequence[Text]) -> dict[str, list[Text]]:
    kinds = list(dict.fromkeys(t.kind for t in texts))
    by_kind = {kind: [t for t in texts if t.kind == kind] for kind in kinds}
    turns = max(len(group) for group in by_kind.values())
    return by_kind | {"mixed": [by_kind[k][i % len(by_kind[k])] for i in range(turns) for k in kinds]}


def report(cells: Sequence[Cell]) -> str:
    lines = ["| machine | texts | batch | best fixed | auto / best | off | chain | tree 16 | tree 64 |", "| --- " * 9 + "|"]
    for c in cells:
        others = " | ".join(f"{c.rates[arm] / c.rates[c.best]:.2f}" for arm in ("off", "chain", "tree 16", "tree 64"))
        mark = "" if c.regret <= GOAL else " **"
        lines.append(f"| {c.machine} | {c.texts} | {c.batch} | {c.best} | {1 - c.regret:.3f}{mark} | {others} |")
    worst = max(cells, key=lambda c: c.regret)
    lines.append(f"worst regret {worst.regret:.1%} ({worst.machine}, {worst.texts}, batch {worst.batch}); goal {GOAL:.0%}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--costs", type=Path, nargs="+", default=sorted(DATA.glob("costs_*.json")))
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 16, 32])
    parser.add_argument("--recorded", type=Path, default=OTHER, help="data/texts.json has other answers")
    parser.add_argument("--texts", nargs="+", help="kinds of texts (default: all and a mix)")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    cells = []
    for name, texts in workloads(load(args.recorded)).items():
        if args.texts and name not in args.texts:
            continue
        arms = accepted_rows(texts)
        for path in args.costs:
            machine = Machine.read(path)
            cells += [measure(machine, texts, name, batch, arms) for batch in args.batch if batch in machine.off]
    print(report(cells))
    if args.json:
        rows = [{"machine": c.machine, "texts": c.texts, "batch": c.batch, "auto": c.auto, "fixed": c.rates} for c in cells]
        args.json.write_text(json.dumps(rows, indent=1))
    return 0 if all(c.regret <= GOAL for c in cells) else 1


if __name__ == "__main__":
    raise SystemExit(main())
