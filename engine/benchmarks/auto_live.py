"""Budget `auto` against the best fixed choice, live: the best is chosen on half of the repeats, compared on the others.

    python engine/benchmarks/auto_live.py [--device cuda] [--dtype bfloat16] [--batch 1 4 16 32] [--repeats 8] [--by-group]
        [--json-file FILE]

Method: one process, one engine per budget, all arms interleaved in an order that changes from repeat to repeat; texts of
three kinds (code, chat, tokens at random), each kind and batch size a cell. The batch is held full: as a request ends the
next begins, and the clock stops when none is left to begin (`--by-group`: groups start and end together, so that the last
of a group decodes alone, which any drafting that favours one request makes longer). A cell's best arm, of plain decoding,
the chain and every fixed budget, is the one with the best median over the even repeats; `auto` is then compared with it in
the odd ones, pair by pair, so that luck in choosing helps nobody. `auto` goes from cell to cell with what it has learnt; the
first repeat of a cell is not counted. The lower bound of the geometric mean over cells is one-sided, 95 %, by resampling pairs.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ddtree_engine.config import SpecMode
from ddtree_engine.engine import Engine
from ddtree_engine.requests import Request, Sampling

sys.path.insert(0, str(Path(__file__).parent))  # runs as a file, from anywhere

from bench_engine import TASKS, Arm, arms, load, parse, run_once

GOAL, LEAST = 0.97, 0.93
TURNS = 3  # requests for every place of a batch
CHATS = (
    "Tell me a short story about a lighthouse keeper who finds a map.",
    "Explain to a child why the sky is blue.",
    "What should I pack for three days in the mountains?",
    "Describe a small town by a river in a few sentences.",
)


@dataclass(frozen=True, slots=True)
class Cell:
    texts: str
    batch: int
    rates: dict[str, list[float]]  # tokens a second of every counted repeat, by arm

    @property
    def best(self) -> str:
        return max((a for a in self.rates if a != AUTO), key=lambda a: statistics.median(self.rates[a][::2]))

    @property
    def ratios(self) -> list[float]:
        """auto over the best, in the repeats that did not choose it."""
        return [a / b for a, b in zip(self.rates[AUTO][1::2], self.rates[self.best][1::2], strict=True)]

    @property
    def ratio(self) -> float:
        return statistics.median(self.ratios)


AUTO = "tree auto"


def texts(model_path: str, vocab: int, batch: int) -> dict[str, list[list[list[int]]]]:
    """Groups of `batch` prompts by kind."""
    from tokenizers import Tokenizer

    tokenizer, dice = Tokenizer.from_file(str(Path(model_path) / "tokenizer.json")), random.Random(3)
    count = max(batch, 4)

    def chats(prompts: Sequence[str]) -> list[list[int]]:
        wrapped = [f"<|im_start|>user\n{prompts[i % len(prompts)]}<|im_end|>\n<|im_start|>assistant\n" for i in range(count)]
        return [tokenizer.encode(text, add_special_tokens=False).ids for text in wrapped]

    found = {"code": chats(TASKS), "chat": chats(CHATS)}
    found["random"] = [[dice.randrange(vocab) for _ in range(40)] for _ in range(count)]
    return {kind: [ids[i : i + batch] for i in range(0, count, batch)] for kind, ids in found.items()}


def held_full(engine: Engine, prompts: Sequence[Sequence[int]], mode: SpecMode, sampling: Sampling, batch: int) -> float:
    """Tokens a second while `batch` requests run; what still runs when none is left to begin is not waited for."""
    engine.flush()
    waiting = [Request(f"live-{i}", tuple(prompt), sampling, mode) for i, prompt in enumerate(prompts)]
    left, running, tokens = deque(waiting), 0, 0
    started = time.perf_counter()
    while left or running == batch:
        while left and running < batch:
            engine.submit(left.popleft())
            running += 1
        for update in engine.step():
            tokens += len(update.token_ids)
            running -= update.finish is not None
    seconds = time.perf_counter() - started
    for request in waiting:
        engine.cancel(request.id)
    engine.drain([request.id for request in waiting])
    return tokens / seconds


def measure(
    engines: dict[str, Engine], plan: Sequence[Arm], kind: str, groups: list[list[list[int]]], args: argparse.Namespace
) -> Cell:
    batch, prompts = len(groups[0]), [prompt for group in groups for prompt in group] * (1 if len(groups[0]) == 1 else TURNS)
    # Code ends by itself; chat and noise go on, so that every cell decodes for as long.
    sampling = Sampling(max_new_tokens=args.max_new_tokens, temperature=args.temperature, seed=1, ignore_eos=kind != "code")
    rates: dict[str, list[float]] = {arm.name: [] for arm in plan}
    for n in range(args.repeats + 1):
        turn = n % len(plan)
        for arm in (*plan[turn:], *plan[:turn]):
            if args.by_group:
                run = run_once(engines[arm.budget], groups, arm.mode, sampling)
                rate = run.tokens / run.seconds
            else:
                rate = held_full(engines[arm.budget], prompts, arm.mode, sampling, batch)
            if n:
                rates[arm.name].append(rate)
    return Cell(kind, batch, rates)


def lower_bound(cells: Sequence[Cell], draws: int = 2000) -> float:
    """Of the geometric mean over cells, one-sided 95 %."""
    dice = random.Random(1)
    means = []
    for _ in range(draws):
        drawn = [statistics.median(dice.choices(c.ratios, k=len(c.ratios))) for c in cells]
        means.append(math.exp(statistics.fmean(map(math.log, drawn))))
    return sorted(means)[draws // 20]


def report(cells: Sequence[Cell]) -> str:
    names = list(cells[0].rates)
    head = ["texts", "batch", "best fixed", "auto / best (range)", *names]
    lines = [f"| {' | '.join(head)} |", "| --- " * len(head) + "|"]
    for c in cells:
        ratio = f"{c.ratio:.2f} ({min(c.ratios):.2f}-{max(c.ratios):.2f}){'' if c.ratio >= LEAST else ' **'}"
        rates = " | ".join(f"{statistics.median(c.rates[name]):.0f}" for name in names)
        lines.append(f"| {c.texts} | {c.batch} | {c.best} | {ratio} | {rates} |")
    mean = math.exp(statistics.fmean(math.log(c.ratio) for c in cells))
    least = min(c.ratio for c in cells)
    lines.append(f"geometric mean {mean:.3f}, lower bound {lower_bound(cells):.3f} (goal {GOAL}); least {least:.2f} ({LEAST})")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--json-file", type=Path)
    parser.add_argument("--by-group", action="store_true")
    own, rest = parser.parse_known_args(argv)
    args = parse(["--repeats", "8", "--max-new-tokens", "160", *rest])
    args.by_group = own.by_group
    engines = {budget: load(args, budget) for budget in args.budgets}
    info = next(iter(engines.values())).info
    print(f"{info.device_name}, {info.dtype}", file=sys.stderr)
    cells = []
    for batch in args.batch:
        for kind, groups in texts(args.model_path, info.vocab_size, batch).items():
            cells.append(measure(engines, arms(args.budgets), kind, groups, args))
            print(report(cells).splitlines()[1 + len(cells)], file=sys.stderr, flush=True)
    print(report(cells))
    if own.json_file:
        own.json_file.write_text(json.dumps([asdict(c) for c in cells]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
