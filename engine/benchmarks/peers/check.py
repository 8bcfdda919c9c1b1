"""Checks the engine against the code it follows, float32: the DDTree authors' and z-lab's DFlash, run beside it, never copied.

    python -m benchmarks.peers.check --hf-python P [--ddtree-checkout DIR] [--dflash-checkout DIR]

in `engine/`. Three questions: does the heap build the authors' trees from the same log-probabilities; does the engine give the
tokens (and take the passes) of the authors' code on the bundled models; does the drafter give the hidden states of z-lab's
model for random weights that were written by it and read by the engine's checkpoint loader. A check whose checkout is not
given is listed as not run. Exit 0: all that ran agree; 1: not; 2: nothing could run.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from benchmarks.peers import figures, prompts
from benchmarks.peers.arms import Job
from benchmarks.peers.process import WORKERS, Worker, WorkerError
from ddtree_engine.attention import plan_sdpa
from ddtree_engine.cache import LayerCache
from ddtree_engine.checkpoint import Weights, drafter_tensors, read_drafter, read_target, target_tensors
from ddtree_engine.config import Algorithm, EngineConfig, SpecMode
from ddtree_engine.drafter import Drafter
from ddtree_engine.engine import Engine
from ddtree_engine.model import Target
from ddtree_engine.requests import Sampling
from ddtree_engine.rows import Segment, Sight, batch_rows
from ddtree_engine.tree import Tree, best_first

MODELS = Path(__file__).resolve().parents[2] / "models"
TOLERANCE = 1e-4
OFFLINE = {"HF_HUB_OFFLINE": "1"}
SIZES = {
    "hidden_size": 48,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 80,
    "vocab_size": 97,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
    "model_type": "qwen3",
}
TARGET = SIZES | {"architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": 6}
DRAFTER = SIZES | {
    "architectures": ["DFlashDraftModel"],
    "num_hidden_layers": 3,
    "num_target_layers": 6,
    "block_size": 8,
    "dflash_config": {"mask_token_id": 3, "target_layer_ids": [0, 2, 5]},
}


@dataclass(frozen=True, slots=True)
class Verdict:
    name: str
    agrees: bool | None  # None: not run
    text: str


# Trees ------------------------------------------------------------------------------------------------------------


def paths(token_ids: Sequence[int], parents: Sequence[int]) -> set[tuple[int, ...]]:
    """Every node as the tokens from the root down to it: equal sets are equal nodes with equal parents."""
    found: list[tuple[int, ...]] = [()]
    for token, parent in zip(token_ids, parents, strict=True):
        found.append((*found[parent], token))
    return set(found[1:])


def path_score(path: Sequence[int], logprobs: torch.Tensor) -> float:
    return float(sum(logprobs[depth, token] for depth, token in enumerate(path)))


def check_trees(worker: Worker, cases: int) -> Verdict:
    """Random marginals, sharp to flat; a node in one tree only is excused when it ties with the worst kept one."""
    draw, same, excused, wrong = random.Random(1), 0, 0, 0
    for case in range(cases):
        depths, vocab, budget = draw.randint(1, 15), draw.randint(2, 200), draw.randint(1, 64)
        generator = torch.Generator().manual_seed(case)
        logits = torch.randn(depths, vocab, generator=generator) * draw.choice((0.3, 1.0, 3.0, 8.0))
        theirs = worker.call("build", logits=logits.tolist(), budget=budget).value
        logprobs = logits - logits.logsumexp(-1, keepdim=True)
        top = logprobs.topk(min(budget, vocab), dim=-1)
        ours: Tree = best_first(0, top.values.tolist(), top.indices.tolist(), budget)
        mine, other = paths(ours.token_ids[1:], ours.parents[1:]), paths(theirs["token_ids"], theirs["parents"][1:])
        if mine == other:
            same += 1
            continue
        exact = logprobs.double()
        scores = [path_score(p, exact) for p in mine ^ other]
        if len(mine) == len(other) and max(scores) - min(scores) < 1e-5:
            excused += 1
        else:
            wrong += 1
    text = f"{cases} random marginals: {same} same nodes and parents, {excused} same but for ties, {wrong} different"
    return Verdict("trees", wrong == 0, text)


# Tokens -----------------------------------------------------------------------------------------------------------


def check_tokens(worker: Worker, target: Path, drafter: Path, budget: int) -> Verdict:
    """Greedy, 20 prompts: their tokens and passes, ours from the engine with every candidate they have."""
    ids = prompts.encode(target, prompts.TASKS + prompts.MORE_TASKS)
    theirs = worker.call("generate", prompts=ids, max_new_tokens=200, clients=1).value
    config = EngineConfig(
        model_path=str(target),
        dtype="float32",
        device="cpu",
        speculative_algorithm=Algorithm.DDTREE,
        speculative_draft_model_path=str(drafter),
        speculative_ddtree_budget=budget,
        speculative_ddtree_topk_cap=budget,
        max_running_requests=1,
        num_threads=2,
        disable_radix_cache=True,
    )
    engine = Engine.load(config)
    ours = [engine.generate([p], Sampling(max_new_tokens=200), SpecMode.TREE)[0] for p in ids]
    outputs = [list(a.token_ids) for a in ours]
    parted = figures.differences(theirs["outputs"], outputs)
    tokens, passes = sum(map(len, outputs)), sum(a.verify_passes for a in ours)
    text = (
        f"{len(ids)} prompts, budget {budget}, {tokens} tokens: {len(parted)} answers differ; "
        f"target passes {passes} (theirs {theirs['passes']})"
    )
    if parted:
        text += "".join(f"\n    prompt {d.prompt}, token {d.at}: {d.got} for {d.expected}" for d in parted)
    return Verdict(f"tokens, budget {budget}", not parted, text)


# Drafter ----------------------------------------------------------------------------------------------------------


def check_drafter(start: Callable[[dict[str, Any]], Worker], seeds: int) -> Verdict:
    """Several rounds of context and block over one growing cache, for several random checkpoints."""
    worst, numbers = 0.0, 0
    for seed in range(seeds):
        with tempfile.TemporaryDirectory() as folder:
            worker = start({"config": DRAFTER, "seed": seed})
            try:
                worst_here, count = _one_drafter(worker, Path(folder), seed)
            finally:
                worker.close()
        worst, numbers = max(worst, worst_here), numbers + count
    text = f"{seeds} random checkpoints, {numbers} hidden states: largest difference {worst:.1e} (limit {TOLERANCE:g})"
    return Verdict("drafter", worst <= TOLERANCE, text)


def _one_drafter(worker: Worker, folder: Path, seed: int) -> tuple[float, int]:
    drafter_folder = folder / "drafter"
    drafter_folder.mkdir()
    (drafter_folder / "config.json").write_text(json.dumps(DRAFTER), encoding="utf-8")
    worker.call("save", path=str(drafter_folder / "model.safetensors"))
    generator = torch.Generator().manual_seed(100 + seed)
    target, drafter = _load_ours(folder, drafter_folder, generator)
    counts = (11, 1, 5, 8, 3)  # tokens whose target states are new in each round
    width = SIZES["hidden_size"]
    assert isinstance(width, int)
    taps = [torch.randn(n, 3 * width, generator=generator) for n in counts]
    roots = [7, 0, 41, 96, 2]
    blocks = [target.embed(torch.tensor(drafter.block(root))) for root in roots]
    theirs = worker.call("hidden", tapped=[t.tolist() for t in taps], blocks=[b.tolist() for b in blocks]).value
    ours = _our_hidden(drafter, target, taps, roots)
    gaps = [float((mine - torch.tensor(other)[1:]).abs().max()) for mine, other in zip(ours, theirs, strict=True)]
    return max(gaps), sum(mine.numel() for mine in ours)


def _load_ours(folder: Path, drafter_folder: Path, generator: torch.Generator) -> tuple[Target, Drafter]:
    """Our models from the folders, through the checkpoint loader; the target's own weights do not matter here."""
    target_folder = folder / "target"
    target_folder.mkdir()
    (target_folder / "config.json").write_text(json.dumps(TARGET), encoding="utf-8")
    config = read_target(target_folder)
    drafter_config = read_drafter(drafter_folder, config)
    tensors = {n: torch.randn(shape, generator=generator) for n, shape in target_tensors(config).items()}
    weights = Weights(drafter_folder, "speculative_draft_model_path", drafter_tensors(drafter_config))
    cpu = torch.device("cpu")
    target = Target(tensors, config, 128, cpu)
    return target, Drafter(dict(weights.read()), drafter_config, target, block_size=8, positions=128, device=cpu)


@torch.inference_mode()
def _our_hidden(drafter: Drafter, target: Target, taps: Sequence[torch.Tensor], roots: Sequence[int]) -> list[torch.Tensor]:
    """What the drafter hands to the head, drafted rows only, round by round."""
    stack, seen, past = drafter.config.stack, [], 0
    cache = LayerCache(stack, 129, torch.float32, torch.device("cpu"))
    head = target.head

    def watched(x: torch.Tensor) -> torch.Tensor:
        seen.append(x.clone())
        return head(x)

    target.head = watched  # type: ignore[assignment]
    for tapped, root in zip(taps, roots, strict=True):
        positions = torch.arange(past, past + len(tapped))
        drafter.extend(drafter.features(tapped.chunk(3, dim=-1)), positions, positions, cache)
        past += len(tapped)
        block = drafter.block(root)
        rows = batch_rows([Segment(0, past, block, range(past, past + len(block)), Sight.FULL)], torch.device("cpu"))
        attend = plan_sdpa(rows, 128, stack.heads // stack.kv_heads, torch.float32)
        drafter.draft(rows.token_ids, rows.positions, rows.slots, cache, attend, 4)
    return seen


# The run ----------------------------------------------------------------------------------------------------------


def ddtree_checks(args: argparse.Namespace, logs: Path) -> list[Verdict]:
    if args.ddtree_checkout is None:
        return [Verdict(name, None, "--ddtree-checkout was not given") for name in ("trees", "tokens")]
    verdicts = []
    target = read_target(args.model_path)
    drafter = read_drafter(args.draft_path, target)
    job = Job(args.model_path, args.draft_path, "float32", 2, 1024, target.eos_ids, drafter.block_size)
    for budget in (16, 32):
        settings = {
            "target": str(job.target),
            "drafter": str(job.drafter),
            "dtype": job.dtype,
            "threads": job.threads,
            "stops": list(job.stops),
            "budget": budget,
            "checkout": str(args.ddtree_checkout.resolve()),
        }
        worker = _start(args.hf_python, "reference.py", settings, logs)
        try:
            if not verdicts:
                verdicts.append(check_trees(worker, args.cases))
            verdicts.append(check_tokens(worker, args.model_path, args.draft_path, budget))
        finally:
            worker.close()
    return verdicts


def dflash_checks(args: argparse.Namespace, logs: Path) -> list[Verdict]:
    if args.dflash_checkout is None:
        return [Verdict("drafter", None, "--dflash-checkout was not given")]
    checkout = str(args.dflash_checkout.resolve())
    return [check_drafter(lambda s: _start(args.hf_python, "dflash_model.py", s | {"checkout": checkout}, logs), args.seeds)]


def _start(python: Path, worker: str, settings: dict[str, Any], logs: Path) -> Worker:
    return Worker([str(python), str(WORKERS / worker), json.dumps(settings)], OFFLINE, logs / f"{worker}.log")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    p = argparse.ArgumentParser(prog="python -m benchmarks.peers.check", description=(__doc__ or "").splitlines()[0])
    p.add_argument(
        "--hf-python", type=Path, required=True, help="a Python with torch and the transformers both were written for (4.57)"
    )
    p.add_argument("--ddtree-checkout", type=Path, help="the DDTree authors' repository")
    p.add_argument("--dflash-checkout", type=Path, help="z-lab's DFlash repository")
    p.add_argument("--model-path", type=Path, default=MODELS / "target")
    p.add_argument("--draft-path", type=Path, default=MODELS / "drafter-b16")
    p.add_argument("--cases", type=int, default=500, help="random marginals")
    p.add_argument("--seeds", type=int, default=5, help="random drafters")
    args = p.parse_args(argv)
    for name in ("hf_python", "ddtree_checkout", "dflash_checkout"):
        path = getattr(args, name)
        if path is not None and not path.exists():
            p.error(f"--{name.replace('_', '-')}: {path} does not exist")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    torch.set_num_threads(2)
    logs = Path(tempfile.mkdtemp(prefix="check-"))
    try:
        verdicts = ddtree_checks(args, logs) + dflash_checks(args, logs)
    except WorkerError as exc:
        print(f"error: {exc}", file=sys.stderr)
        return 1
    for v in verdicts:
        state = {True: "agrees", False: "DIFFERS", None: "not run"}[v.agrees]
        print(f"{v.name}: {state}: {v.text}")
    if all(v.agrees is None for v in verdicts):
        return 2
    return 0 if all(v.agrees is not False for v in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
