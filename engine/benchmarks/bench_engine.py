"""Measures the engine in process: plain decoding, the chain, trees of several budgets and `auto`, at several batch sizes.

    python engine/benchmarks/bench_engine.py [--device cuda] [--dtype float32] [--batch 1 4 16] [--json]

Method: one process; every arm warmed up; arms interleaved, their order rotated from repeat to repeat; the prefix cache
flushed before each run; the median of the repeats with the range beside it, never the best. A comparison counts wins
of paired repeats: fewer than all but one of them is called a tie. Stage times come from runs of their own, since timers
synchronise. Numbers from a shared machine are as noisy as their ranges say.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ddtree_engine.config import Algorithm, EngineConfig, SpecMode
from ddtree_engine.engine import Engine
from ddtree_engine.requests import Sampling

MODELS = Path(__file__).parents[1] / "models"
TASKS = (
    "Write the Python functions is_palindrome(s), fib(n) and gcd(a, b).",
    "Write a Python function merge_sorted(a, b) that merges two sorted lists into one sorted list.",
    "Write a Python function word_count(text) that returns a dictionary mapping each word to its count.",
    "Write the Python functions is_prime(n), factorial(n) and count_vowels(s).",
    "Write a Python function is_anagram(a, b) that returns True if a and b are anagrams.",
    "Write a Python function flatten(items) that flattens a nested list.",
    "Write the Python functions is_even(n), max_of(items) and reverse(s).",
    "Write a Python function fib(n) that returns the n-th Fibonacci number, with fib(0) = 0 and fib(1) = 1.",
)


@dataclass(frozen=True, slots=True)
class Arm:
    name: str
    mode: SpecMode
    budget: str  # of the engine that runs it


def arms(budgets: Sequence[str]) -> list[Arm]:
    """Plain and chain run on the first budget's engine: neither depends on it."""
    trees = [Arm(f"tree {b}", SpecMode.TREE, b) for b in budgets]
    return [Arm("off", SpecMode.OFF, budgets[0]), Arm("chain", SpecMode.CHAIN, budgets[0]), *trees]


@dataclass(slots=True)
class Result:
    arm: str
    batch: int
    tokens_per_second: list[float] = field(default_factory=list)
    tokens_per_pass: float = 0.0
    ms_per_pass: float = 0.0
    stage_ms_per_pass: dict[str, float] = field(default_factory=dict)

    @property
    def median(self) -> float:
        return statistics.median(self.tokens_per_second)


@dataclass(frozen=True, slots=True)
class Run:
    tokens: int
    seconds: float
    passes: int  # of the target, prefill included
    said: int  # tokens of the passes after prefill
    verified: int  # (request, pass) pairs


def run_once(engine: Engine, groups: list[list[list[int]]], mode: SpecMode, sampling: Sampling) -> Run:
    """Answer the groups one after another, each as one batch."""
    engine.flush()
    before = engine.stats().rounds
    started = time.perf_counter()
    answers = [answer for prompts in groups for answer in engine.generate(prompts, sampling, mode)]
    seconds = time.perf_counter() - started
    tokens = sum(len(a.token_ids) for a in answers)
    verified = sum(a.verify_passes for a in answers)
    return Run(tokens, seconds, engine.stats().rounds - before, tokens - len(answers), verified)


def measure(
    engines: dict[str, Engine], plan: list[Arm], groups: list[list[list[int]]], sampling: Sampling, repeats: int
) -> list[Result]:
    results = {arm.name: Result(arm.name, len(groups[0])) for arm in plan}
    for arm in plan:
        run_once(engines[arm.budget], groups, arm.mode, sampling)
    for n in range(repeats):
        for arm in plan[n % len(plan) :] + plan[: n % len(plan)]:
            run, result = run_once(engines[arm.budget], groups, arm.mode, sampling), results[arm.name]
            result.tokens_per_second.append(run.tokens / run.seconds)
            result.tokens_per_pass = run.said / max(1, run.verified)
            result.ms_per_pass = run.seconds / run.passes * 1e3
    for arm in plan:
        results[arm.name].stage_ms_per_pass = stages(engines[arm.budget], groups, arm.mode, sampling)
    return list(results.values())


def stages(engine: Engine, groups: list[list[list[int]]], mode: SpecMode, sampling: Sampling) -> dict[str, float]:
    engine.measure_stages(True)
    before = engine.stats().stage_seconds
    run = run_once(engine, groups, mode, sampling)
    engine.measure_stages(False)
    after = engine.stats().stage_seconds
    return {name: (seconds - before.get(name, 0.0)) / run.passes * 1e3 for name, seconds in after.items()}


def verdict(a: Result, b: Result) -> str:
    """a against b by paired repeats."""
    pairs = list(zip(a.tokens_per_second, b.tokens_per_second, strict=True))
    wins = sum(x > y for x, y in pairs)
    ratio = statistics.median(x / y for x, y in pairs)
    if wins >= len(pairs) - 1 and len(pairs) > 2:
        return f"{ratio:.2f}x"
    if wins <= 1 and len(pairs) > 2:
        return f"{ratio:.2f}x"
    return f"tie ({ratio:.2f}x)"


def report(results: list[Result]) -> str:
    named = {r.arm: r for r in results}
    columns = f"{'tok/s':>8}{'range':>16}{'vs off':>14}{'vs chain':>14}{'tok/pass':>10}{'ms/pass':>9}"
    lines = [f"batch {results[0].batch}", f"  {'arm':<10}{columns}  stages, ms a pass"]
    for r in results:
        low, high = min(r.tokens_per_second), max(r.tokens_per_second)
        parts = ", ".join(f"{name} {ms:.2f}" for name, ms in r.stage_ms_per_pass.items())
        lines.append(
            f"  {r.arm:<10}{r.median:>8.0f}{f'{low:.0f}-{high:.0f}':>16}{verdict(r, named['off']):>14}"
            f"{verdict(r, named['chain']):>14}{r.tokens_per_pass:>10.2f}{r.ms_per_pass:>9.2f}  {parts}"
        )
    return "\n".join(lines)


def load(args: argparse.Namespace, budget: str) -> Engine:
    return Engine.load(
        EngineConfig(
            args.model_path,
            dtype=args.dtype,
            device=args.device,
            num_threads=args.num_threads,
            speculative_algorithm=Algorithm.DDTREE,
            speculative_draft_model_path=args.draft_path,
            speculative_ddtree_budget=budget if budget == "auto" else int(budget),  # type: ignore[arg-type]
            max_running_requests=max(args.batch),
            context_length=args.context_length,
            random_seed=1,
        )
    )


def encode(model_path: str, batch: int) -> list[list[list[int]]]:
    """Prompts in groups of `batch`; every task at least once."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(Path(model_path) / "tokenizer.json"))
    count = max(batch, len(TASKS) - len(TASKS) % batch)
    chats = [f"<|im_start|>user\n{TASKS[i % len(TASKS)]}<|im_end|>\n<|im_start|>assistant\n" for i in range(count)]
    ids = [tokenizer.encode(chat, add_special_tokens=False).ids for chat in chats]
    return [ids[i : i + batch] for i in range(0, count, batch)]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--model-path", default=str(MODELS / "target"))
    parser.add_argument("--draft-path", default=str(MODELS / "drafter-b16"))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--num-threads", type=int)
    parser.add_argument("--context-length", type=int)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--budgets", nargs="+", default=["8", "16", "32", "auto"])
    parser.add_argument("--max-new-tokens", type=int, default=200)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout instead of tables")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    started = time.perf_counter()
    engines = {budget: load(args, budget) for budget in args.budgets}
    info, config = next(iter(engines.values())).info, next(iter(engines.values())).config
    sampling = Sampling(max_new_tokens=args.max_new_tokens, temperature=args.temperature, seed=1)
    print(
        f"{info.device_name}, {info.dtype}, {config.num_threads} threads; {len(engines)} engines loaded in "
        f"{time.perf_counter() - started:.1f} s",
        file=sys.stderr,
    )
    every: list[Result] = []
    for batch in args.batch:
        results = measure(engines, arms(args.budgets), encode(args.model_path, batch), sampling, args.repeats)
        every += results
        print(report(results), file=sys.stderr if args.json else sys.stdout, flush=True)
    if args.json:
        rows = [asdict(r) | {"median_tokens_per_second": r.median} for r in every]
        print(json.dumps({"info": asdict(info), "arguments": vars(args), "results": rows}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
