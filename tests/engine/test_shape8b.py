"""The benchmark of Qwen3-8B's shape: what it counts, and a run of a tiny shape on CPU. No figure is measured here."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from ddtree_engine.checkpoint import drafter_tensors, target_tensors

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "engine" / "benchmarks"))

import shape8b
from device_timing import Ceilings, Times, device_times
from shape8b_sizes import (
    MICRO,
    QWEN3_8B,
    draft_numbers,
    numbers,
    prefill_flops,
    slot_numbers,
    step_numbers,
)

EIGHT = QWEN3_8B.target
CPU = torch.device("cpu")


def test_the_shape_has_the_published_number_of_weights() -> None:
    """Qwen3-8B: 8.2 billion, 6.95 billion without embeddings."""
    total = numbers(target_tensors(EIGHT))
    assert round(total / 1e9, 2) == 8.19
    assert round((total - 2 * 151936 * 4096) / 1e9, 2) == 6.95


def test_a_step_reads_everything_but_the_embedding_table() -> None:
    total, table = numbers(target_tensors(EIGHT)), 151936 * 4096
    assert step_numbers(EIGHT) == total - table
    tied = replace(EIGHT, tied=True)  # one table, which is the head
    assert step_numbers(tied) == numbers(target_tensors(tied))


def test_a_draft_reads_the_drafter_without_its_fusion_and_the_head() -> None:
    shapes = drafter_tensors(QWEN3_8B.drafter)
    layers = numbers(shapes) - 5 * 4096 * 4096 - 2 * 4096
    context = 5 * 2 * 8 * 128 * 4096
    assert draft_numbers(EIGHT, QWEN3_8B.drafter) == layers + context + 151936 * 4096


def test_bytes_of_a_slot_are_the_cache_s_own() -> None:
    assert slot_numbers(EIGHT.stack) * 2 == 147456
    from ddtree_engine.cache import bytes_per_slot

    assert slot_numbers(EIGHT.stack) * 2 == bytes_per_slot(EIGHT.stack, None, torch.bfloat16)


@pytest.mark.parametrize("tokens", [1, 7, 24])
def test_operations_of_a_prompt_are_counted_product_by_product(tokens: int) -> None:
    s, expected = MICRO.target.stack, 0
    for token in range(tokens):
        for _ in range(s.layers):
            q, kv = s.heads * s.head_dim, s.kv_heads * s.head_dim
            for rows, columns in ((q, s.hidden), (kv, s.hidden), (kv, s.hidden), (s.hidden, q), *[(s.ff, s.hidden)] * 3):
                expected += 2 * rows * columns
            expected += s.heads * (token + 1) * 2 * 2 * s.head_dim  # scores and sums over the slots it sees
    assert prefill_flops(MICRO.target, tokens) == expected + 2 * s.vocab * s.hidden


@pytest.mark.parametrize("budget", QWEN3_8B.budgets)
def test_trees_have_as_many_nodes_as_the_budget_and_branch(budget: int) -> None:
    tree = shape8b.random_tree(QWEN3_8B, budget)
    assert tree.nodes == budget
    assert max(tree.depths) < budget
    assert max(tree.depths) <= 15


def test_times_are_medians_with_their_range() -> None:
    assert Times.of([3.0, 1.0, 900.0]) == Times(3.0, 1.0, 900.0)
    calls: list[str] = []
    times = device_times({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, CPU, 4)
    assert set(times) == {"a", "b"}
    assert calls == ["a", "b"] * (len(calls) // 2)  # interleaved
    assert len(calls) // 2 > 4  # warmed up


def figures(step: float, verify: float, prompt: float) -> shape8b.Figures:
    """A device that reads 1 GB and computes 1 TFLOP a millisecond."""
    one = Times(1.0, 1.0, 1.0)
    side = 10_000
    best = Ceilings(one, Times(2.0, 2.0, 2.0), 10**9, side)
    graphs = {"step 1": Times(step, step, step), "verify 1x33": Times(verify, verify, verify), "draft 1": one}
    prompts = {"prefill 512": Times(prompt, prompt, prompt)}
    return shape8b.Figures({"name": "toy"}, best, graphs, {}, prompts, {"qkv 1": (one, 5 * 10**8)}, {})


def test_the_report_holds_times_against_what_the_device_can_do() -> None:
    floor = step_numbers(EIGHT) * 2 / 1e9  # ms
    prompt = prefill_flops(EIGHT, 2048) / 1e12  # ms
    lines = shape8b.report(QWEN3_8B, figures(floor / 0.72, floor / 0.72 * 1.15, prompt / 0.6)).splitlines()
    found = {line.split()[0] + " " + line.split()[1]: line for line in lines if line.startswith("  ")}
    assert "72% of the weights' floor" in found["step 1"]
    assert "1.15x of step 1" in found["verify 1x33"]
    assert "60% of the product's rate" in found["prefill 512"]
    assert "100%" in found["qkv 1"]
    assert any(line.startswith("read 1.00 TB/s, product 1000 TFLOP/s") for line in lines)


def test_a_tiny_shape_goes_through_every_arm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "figures.json"
    assert shape8b.main(["--micro", "--repeats", "1", "--json", str(path)]) == 0
    found = json.loads(path.read_text())
    assert set(found["graphs"]) == {"step 1", "step 2", "verify 1x5", "verify 2x5", "verify 1x9", "draft 1", "draft 2"}
    assert set(found["rounds"]) == {"step 1", "step 2", "round 1x5", "round 2x5", "round 1x9"}
    assert set(found["prefill"]) == {"prefill 8", "prefill 24"}
    assert set(found["products"]) == {"qkv 1", "out 1", "gate_up 1", "down 1", "head 1"}
    every = [*found["graphs"].values(), *found["rounds"].values(), *found["prefill"].values()]
    assert all(math.isfinite(t["median"]) and 0 < t["low"] <= t["median"] <= t["high"] for t in every)
    assert "prefill of 24 tokens" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_without_a_device_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        shape8b.main([])
    assert "no CUDA device" in capsys.readouterr().err
