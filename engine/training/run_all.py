"""The whole run in one command: `python -m training.run_all --out DIR` (from engine/).

Writes DIR/target, DIR/drafter-b16, DIR/drafter-b8, DIR/report.json, DIR/failures.json and DIR/README.md (the model
card). A CUDA device is needed for the full recipe; `--micro` is a smoke run on a CPU.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict
from multiprocessing.pool import Pool
from pathlib import Path
from random import Random

import torch
from tokenizers import Tokenizer
from torch import Tensor

from training.acceptance import Acceptance, measure
from training.card import write_card
from training.evaluate import copied_ids, evaluate, failures, held_out_tasks, scores
from training.export import load_drafter, load_target, save_drafter, save_target
from training.generate import Prompt
from training.mixture import sample
from training.model import Target
from training.onpolicy import Written, chat_prompts, draft_rows, library_prompts, write_sequences
from training.recipe import END_OF_TEXT, FULL, MICRO, Recipe
from training.rows import batches, pieces, start_worker, stream_rows
from training.tasks import Split, prompt_text
from training.tokenizer import library_texts, save_tokenizer, train_tokenizer
from training.train_drafter import train_drafter
from training.train_target import library_loss, train_target

ACCEPTANCE_GROUPS = ("code", "several", "long", "code+nonce", "class", "copy", "json", "tool", "steps", "prose")
_started = time.time()


def log(text: str) -> None:
    print(f"[{time.time() - _started:6.1f}] {text}", flush=True)


def _example_texts(job: tuple[int, int]) -> list[str]:
    seed, count = job
    rng = Random(seed)
    return ["".join(text for text, _ in pieces(sample(rng, Split.TRAIN))) for _ in range(count)]


def make_tokenizer(recipe: Recipe, pool: Pool, library: Sequence[str]) -> Tokenizer:
    jobs = [(recipe.seed * 7919 + k, recipe.tokenizer_examples // 20) for k in range(20)]
    examples = [t for part in pool.map(_example_texts, jobs) for t in part]
    return train_tokenizer([*library, *examples], recipe.shape.vocab)


def library_tokens(tok: Tokenizer, texts: Sequence[str], device: torch.device) -> Tensor:
    """All files as one stream, each ended with <|endoftext|>."""
    stream: list[int] = []
    for encoded in tok.encode_batch(list(texts), add_special_tokens=False):
        stream += [*encoded.ids, END_OF_TEXT]
    return torch.tensor(stream, dtype=torch.int16, device=device)


def frozen(model: Target, device: torch.device) -> Target:
    """The target for generating: bfloat16 where there is a GPU, with float32 RoPE tables."""
    model = model.requires_grad_(False).eval()
    if device.type == "cuda":
        model = model.to(torch.bfloat16)
        model.set_tables(device)
    return model


def acceptance_texts(
    target: Target, tok: Tokenizer, recipe: Recipe, library: dict[str, list[int]], seed: int = 99
) -> dict[str, list[Written]]:
    """Greedy texts to held-out prompts, and continuations of library text."""
    wanted: dict[str, list[Prompt]] = {}
    for group, task in held_out_tasks(recipe.acceptance_prompts, seed):
        ids = tuple(tok.encode(prompt_text(task), add_special_tokens=False).ids)
        room = len(tok.encode(task.last.answer, add_special_tokens=False).ids) * 5 // 4 + 12
        if group in ACCEPTANCE_GROUPS and len(ids) + room <= recipe.generation.batches[-1][0]:
            wanted.setdefault(group, []).append(Prompt(ids, len(ids) + room))
    rng = Random(seed)
    for name, stream in library.items():
        starts = [rng.randrange(max(1, len(stream) - 80)) for _ in range(recipe.acceptance_prompts)]
        wanted[name] = [Prompt(tuple(stream[s : s + 64]), 256) for s in starts]
    return {g: write_sequences(target, p, recipe.generation) for g, p in wanted.items()}


def _table(results: dict[str, Acceptance]) -> dict[str, object]:
    return {
        group: {
            "tokens": a.tokens,
            "mean": {policy: round(a.mean(policy), 3) for policy in a.passes},
            "ranks": {str(depth): counts for depth, counts in sorted(a.ranks.items())},
        }
        for group, a in results.items()
    }


def machine(device: torch.device) -> dict[str, object]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu"
    cpus = multiprocessing.cpu_count()
    return {"device": name, "cpus": cpus, "torch": torch.__version__, "python": platform.python_version()}


def run(recipe: Recipe, out: Path, device: torch.device, processes: int) -> dict[str, object]:
    """Everything; returns (and writes) the report."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    report: dict[str, object] = {"recipe": asdict(recipe), "machine": machine(device)}
    context = multiprocessing.get_context("fork")  # before CUDA starts
    train_files, held_files = library_texts(recipe.library_files)
    with context.Pool(processes) as pool:
        tok = make_tokenizer(recipe, pool, train_files)
    save_tokenizer(tok, out / "target", recipe.shape.max_positions)
    log(f"tokenizer done, {len(train_files)} library files, {len(held_files)} held out")
    with context.Pool(processes, start_worker, (tok.to_str(),)) as pool:
        _train_and_measure(recipe, out, device, pool, tok, train_files, held_files, report)
    (out / "report.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf8")
    write_card(report, out / "README.md")
    log("done")
    return report


def _train_and_measure(
    recipe: Recipe,
    out: Path,
    device: torch.device,
    pool: Pool,
    tok: Tokenizer,
    train_files: list[str],
    held_files: list[str],
    report: dict[str, object],
) -> None:
    t, g = recipe.target, recipe.generation
    chat_rows = t.rows - t.library_rows
    shards = stream_rows(pool, recipe.seed, recipe.shard_rows, t.row_tokens, t.steps * chat_rows)
    library = library_tokens(tok, train_files, device)
    held = library_tokens(tok, held_files or train_files[:1], device)
    target = train_target(recipe, batches(shards, chat_rows), library, device, log)
    save_target(target, out / "target")
    report["library_loss"] = {
        "training files": library_loss(target, library, t.row_tokens),
        "held-out files": library_loss(target, held, t.row_tokens),
    }
    log(f"library loss {report['library_loss']}")

    target = frozen(target, device)
    outcomes = evaluate(target, tok, pool, recipe)
    report["pass"] = {k: [s.passed, s.total] for k, s in scores(outcomes).items()}
    copied = copied_ids(outcomes)
    report["copied ids"] = [copied.passed, copied.total]
    (out / "failures.json").write_text(json.dumps(failures(outcomes), indent=1, ensure_ascii=False), encoding="utf8")
    for group, score in scores(outcomes).items():
        log(f"pass {group}: {score}")
    log(f"ids copied exactly: {copied}")

    prompts = chat_prompts(g, recipe.seed + 1, pool) + library_prompts(library.tolist(), g, recipe.seed + 2)
    log(f"{len(prompts)} on-policy prompts")
    written = write_sequences(target, prompts, g)
    log(f"on-policy sequences {len(written)}, tokens {sum(len(w.ids) for w in written)}")
    data = draft_rows(target, written, recipe.drafters[0].target_layers, g.row_tokens)
    log(f"draft rows {tuple(data.ids.shape)}")
    for d in recipe.drafters:
        drafter = train_drafter(d, recipe.shape, target, data, recipe.seed + 3, log)
        save_drafter(drafter, out / d.name)
        log(f"{d.name} saved")
    del data

    texts = acceptance_texts(
        target, tok, recipe, {"library (training files)": library.tolist(), "library (held-out files)": held.tolist()}
    )
    exact = load_target(out / "target", recipe.shape).to(device)
    for d in recipe.drafters:
        results = measure(load_drafter(out / d.name, recipe.shape, d).to(device), exact, texts, pool)
        report[f"acceptance {d.name}"] = _table(results)
        for group, a in results.items():
            log(f"{d.name} {group}: " + ", ".join(f"{p} {a.mean(p):.2f}" for p in a.passes))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--micro", action="store_true", help="a smoke run in seconds, on a CPU too")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()
    use_cuda = torch.cuda.is_available() if not args.micro else False
    if not args.micro and not use_cuda:
        parser.error("the full recipe needs a CUDA device; --micro runs on a CPU")
    run(MICRO if args.micro else FULL, args.out, torch.device("cuda" if use_cuda else "cpu"), args.processes)


if __name__ == "__main__":
    main()
