"""Measures what whole decoding rounds take, for `auto_replay.py`: every kind, batch size and number of rows.

    cd engine && python -m benchmarks.round_costs --out data/costs_NAME.json [--device cuda] [--dtype bfloat16]
    cd engine && python -m benchmarks.round_costs --out data/costs_NAME.json --shape8b         # CUDA

Bundled models: the engine itself runs rounds of one kind and size after another, and reports each round's seconds to the
policy as it always does; medians. Shape of Qwen3-8B: random weights (`shape8b.py`), whole rounds by the wall clock with
2,048 tokens of context, at the engine's own row buckets. The start-up tables are what `measuring.py` finds there.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from ddtree_engine.auto import Auto
from ddtree_engine.captured import Shape
from ddtree_engine.config import Algorithm, EngineConfig, SpecMode
from ddtree_engine.costs import CostTable, Kind
from ddtree_engine.engine import Engine
from ddtree_engine.forest import Sizes
from ddtree_engine.loading import device_facts
from ddtree_engine.measuring import measure_draft, measure_verify
from ddtree_engine.rehearsal import Forced
from ddtree_engine.requests import Sampling

sys.path.insert(0, str(Path(__file__).parent))  # the other benchmarks are run as files

from bench_engine import MODELS, encode

NODES = (1, 3, 7, 15, 31, 63, 64)  # powers of two with the root: sizes that graphs are captured for
BATCHES = (1, 4, 16, 32)
TOKENS = 160


def median(forced: Forced, batch: int) -> float:
    """Seconds of the rounds in which every request had a tree of this size."""
    taken = [r.seconds for r in forced.whole(batch)]
    if len(taken) < 3:
        raise SystemExit(f"error: only {len(taken)} rounds of {forced.nodes} nodes for {batch} requests; use more tokens")
    return statistics.median(taken)


def bundled(device: str, dtype: str, batches: Sequence[int]) -> dict[str, object]:
    engine = Engine.load(
        EngineConfig(
            str(MODELS / "target"),
            device=device,
            dtype=dtype,
            speculative_algorithm=Algorithm.DDTREE,
            speculative_draft_model_path=str(MODELS / "drafter-b16"),
            speculative_ddtree_budget="auto",
            max_running_requests=max(batches),
            random_seed=1,
        )
    )
    policy = engine.policy
    assert isinstance(policy, Auto)
    verify, draft = policy.costs._tables
    depth = policy.depth

    def one(forced: Forced, batch: int) -> float:
        engine.policy = forced
        # Plain rounds say one token each, so fewer of them are enough.
        tokens = TOKENS // 2 if forced.kind is Kind.OFF else TOKENS
        prompts = [p for group in encode(str(MODELS / "target"), batch) for p in group]
        for first in range(0, min(len(prompts), max(batch, 4)), batch):
            engine.flush()
            sampling = Sampling(max_new_tokens=tokens, ignore_eos=True)
            engine.generate(prompts[first : first + batch], sampling, SpecMode.TREE)
        return median(forced, batch)

    found = {}
    for batch in batches:
        trees = {str(batch * (n + 1)): one(Forced(Kind.TREE, n), batch) for n in NODES}
        found[str(batch)] = {
            "off": one(Forced(Kind.OFF, 0), batch),
            "chain": one(Forced(Kind.CHAIN, depth), batch),
            "tree": {str(batch): one(Forced(Kind.TREE, 0), batch)} | trees,
        }
        print(f"batch {batch}", {k: v for k, v in found[str(batch)].items() if k != "tree"}, trees, file=sys.stderr)
    facts = device_facts(engine._decoder.runner.device)
    return {
        "machine": f"{facts.name}, bundled models, {engine.info.dtype}",
        "staircase": verify.staircase,
        "startup": {"verify": _json(verify), "draft": _json(draft)},
        "batches": found,
    }


def shape8b_rounds(batches: Sequence[int], repeats: int, *, micro: bool) -> dict[str, object]:
    from device_timing import wall_times
    from shape8b import MAX_NODES, Batch, K, _round, build, random_tree
    from shape8b_sizes import MICRO, QWEN3_8B

    scale, device = (MICRO, torch.device("cpu")) if micro else (QWEN3_8B, torch.device("cuda"))
    most = max(scale.batches)
    shape = Shape(most, MAX_NODES, scale.drafter.block_size, K)
    buckets = tuple(n for n in shape.row_buckets if n <= 32 * (MAX_NODES + 1) // 2)
    dtype = torch.float32 if micro else torch.bfloat16
    runners = build(scale, device, dtype, buckets)
    calls = {}
    for n in batches:
        plain = Batch.of(runners.plain, [random_tree(scale, 0)] * n, scale.context)
        calls[f"{n} off"] = _round(runners.plain, plain, settle=False)
        for rows in (b for b in buckets if n <= b <= n * (MAX_NODES + 1)):
            nodes = [rows // n - 1 + (i < rows % n) for i in range(n)]
            trees = [random_tree(scale, count) for count in nodes]
            calls[f"{n} {rows}"] = _round(runners.drafting, Batch.of(runners.drafting, trees, scale.context), settle=True)
    times = {name: t.median / 1e3 for name, t in wall_times(calls, device, repeats).items()}
    found = {}
    for n in batches:
        trees = {key.split()[1]: s for key, s in times.items() if key.split()[0] == str(n) and not key.endswith("off")}
        found[str(n)] = {"off": times[f"{n} off"], "chain": trees[str(n * 16)], "tree": trees}
    sizes = Sizes(MAX_NODES + 1, scale.drafter.block_size - 1)
    verify = measure_verify(runners.drafting, buckets, sizes, scale.context, lambda share: None)
    draft = measure_draft(runners.drafting, scale.batches, scale.context, K, sizes)
    name = device_facts(device).name
    return {
        "machine": f"{name}, Qwen3-8B's shape, bfloat16",
        "staircase": True,
        "startup": {"verify": _json(verify), "draft": _json(draft)},
        "batches": found,
    }


def _json(table: CostTable) -> dict[str, float]:
    return {str(n): s for n, s in zip(table.sizes, table.seconds, strict=True)}


def _rounded(value: object) -> object:
    """Tenths of a microsecond."""
    if isinstance(value, dict):
        return {k: _rounded(v) for k, v in value.items()}
    return round(value, 7) if isinstance(value, float) else value


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--batch", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--shape8b", action="store_true")
    parser.add_argument("--micro", action="store_true", help="with --shape8b: a tiny shape on CPU, to try the benchmark itself")
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args(argv)
    with torch.inference_mode():
        if args.shape8b:
            found = shape8b_rounds(args.batch, args.repeats, micro=args.micro)
        else:
            found = bundled(args.device, args.dtype, args.batch)
    args.out.write_text(json.dumps(_rounded(found), indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
