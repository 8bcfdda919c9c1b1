"""Forward passes against a plain reference: the target, the drafter, rows in trees and chunks, and padded attention."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from ddtree_engine.attention import _OneByOne, _Padded
from ddtree_engine.engine import Engine
from ddtree_engine.model import Norm
from ddtree_engine.rows import Segment, Sight, batch_rows, bucket
from ddtree_engine.runner import Runner
from ddtree_engine.tree import Tree, best_first
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.small_models import DRAFTER, TARGET, Pair, Reference

CPU = torch.device("cpu")
PROMPT = [5, 0, 17, 99, 3, 42, 42, 8, 61, 0, 12, 77, 30]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture
def runner(pair: Pair) -> Iterator[Runner]:
    with torch.inference_mode():
        yield pair.engine()._decoder.runner


@pytest.fixture(scope="module")
def reference(pair: Pair) -> Reference:
    return Reference(pair.target, pair.drafter)


def causal(base: int, past: int, tokens: list[int]) -> Segment:
    return Segment(base, past, tokens, range(past, past + len(tokens)), Sight.CAUSAL)


def close(got: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.allclose(got.double(), expected, rtol=1e-4, atol=1e-4)


def logits(runner: Runner, *segments: Segment) -> torch.Tensor:
    batch = runner.batch(segments)
    return runner.logits(runner.verify(batch, features=True), range(batch.rows))


def test_whole_prompt_gives_the_reference_logits(runner: Runner, reference: Reference) -> None:
    assert close(logits(runner, causal(0, 0, PROMPT)), reference.logits(PROMPT))


@pytest.mark.parametrize(
    "changes",
    [
        {"tie_word_embeddings": False},
        {"num_key_value_heads": 4},
        {"num_key_value_heads": 1},
        {"head_dim": 16, "rope_theta": 1e6},
        {"num_hidden_layers": 6, "intermediate_size": 40},
    ],
)
def test_other_sizes_of_the_family_give_the_reference_logits(tmp_path: Path, changes: dict[str, object]) -> None:
    target = TARGET | changes
    drafter = DRAFTER | {k: v for k, v in changes.items() if k not in ("num_hidden_layers", "tie_word_embeddings")}
    drafter["num_target_layers"] = target["num_hidden_layers"]
    pair = Pair(tmp_path, target, drafter, seed=11)
    reference = Reference(pair.target, pair.drafter)
    with torch.inference_mode():
        runner = pair.engine()._decoder.runner
        assert close(logits(runner, causal(0, 0, PROMPT)), reference.logits(PROMPT))
        assert close(*drafts_of(runner, reference))


def test_prompt_in_chunks_equals_the_whole_prompt(runner: Runner, reference: Reference) -> None:
    parts = [logits(runner, causal(0, a, PROMPT[a:b])) for a, b in ((0, 1), (1, 6), (6, 13))]
    assert close(torch.cat(parts), reference.logits(PROMPT))


def test_requests_in_one_batch_do_not_see_each_other(runner: Runner, reference: Reference) -> None:
    slab = runner.cache.shape.slab_slots
    prompts = [PROMPT, PROMPT[:4], PROMPT[::-1], [7]]
    together = logits(runner, *(causal(i * slab, 0, p) for i, p in enumerate(prompts)))
    assert close(together, torch.cat([reference.logits(p) for p in prompts]))


@st.composite
def trees(draw: st.DrawFn) -> Tree:
    depths, k = draw(st.integers(1, 7)), draw(st.integers(1, 4))
    numbers = st.floats(-3.0, -0.05)
    logprobs = [sorted(draw(st.lists(numbers, min_size=k, max_size=k)), reverse=True) for _ in range(depths)]
    tokens = [draw(st.permutations(range(12)))[:k] for _ in range(depths)]
    return best_first(draw(st.integers(0, 100)), logprobs, tokens, draw(st.integers(1, 24)))


def tree_segment(base: int, past: int, tree: Tree) -> Segment:
    positions = [past + depth for depth in tree.depths]
    return Segment(base, past, tree.token_ids, positions, Sight.TREE, tree.visible())


def path_to(tree: Tree, row: int) -> list[int]:
    tokens: list[int] = []
    while row >= 0:
        tokens.insert(0, tree.token_ids[row])
        row = tree.parents[row]
    return tokens


@given(st.lists(trees(), min_size=1, max_size=4))
@settings(max_examples=15, deadline=None)
def test_a_nodes_logits_are_those_of_its_ancestor_path_alone(pair: Pair, reference: Reference, drawn: list[Tree]) -> None:
    with torch.inference_mode():
        runner = _cached_runner(pair)
        slab = runner.cache.shape.slab_slots
        prompts = [PROMPT[: 3 + 2 * i] for i in range(len(drawn))]
        logits(runner, *(causal(i * slab, 0, p) for i, p in enumerate(prompts)))
        got = logits(runner, *(tree_segment(i * slab, len(p), t) for i, (p, t) in enumerate(zip(prompts, drawn, strict=True))))
        expected = [
            reference.logits(prompt + path_to(tree, row))[-1]
            for prompt, tree in zip(prompts, drawn, strict=True)
            for row in range(tree.rows)
        ]
        assert close(got, torch.stack(expected))


_runners: dict[Path, Runner] = {}


def _cached_runner(pair: Pair) -> Runner:
    if pair.root not in _runners:
        _runners[pair.root] = pair.engine(speculative_ddtree_budget=24)._decoder.runner
    return _runners[pair.root]


def drafts_of(runner: Runner, reference: Reference) -> tuple[torch.Tensor, torch.Tensor]:
    """Drafted log-probabilities after a context that was appended in two parts, and the reference's."""
    vocab, block, context = reference.config["vocab_size"], runner.drafter.block_size, PROMPT[:-1]
    logits(runner, causal(0, 0, context))
    runner.extend(range(5), range(5))
    runner.extend(range(5, len(context)), range(5, len(context)))
    rows = range(len(context), len(context) + block)
    segment = Segment(0, len(context), runner.block(PROMPT[-1]), rows, Sight.FULL)
    logprobs, token_ids = runner.draft(runner.batch([segment]), vocab)
    unsorted = torch.empty(block - 1, vocab).scatter(-1, token_ids[0], logprobs[0])
    return unsorted, reference.draft_logits(PROMPT, block).log_softmax(-1)


def test_drafter_gives_the_reference_marginals(runner: Runner, reference: Reference) -> None:
    assert close(*drafts_of(runner, reference))


def test_slot_zero_of_the_block_is_the_real_token(runner: Runner) -> None:
    assert runner.block(77) == [77] + [3] * 7


def test_block_size_below_the_trained_one_drafts_fewer_tokens(pair: Pair, reference: Reference) -> None:
    with torch.inference_mode():
        runner = pair.engine(speculative_dflash_block_size=5)._decoder.runner
        got, expected = drafts_of(runner, reference)
        assert got.shape[0] == 4
        assert close(got, expected)


@st.composite
def layouts(draw: st.DrawFn) -> list[Segment]:
    segments = []
    for slab in draw(st.permutations(range(5)))[: draw(st.integers(1, 5))]:
        rows, past = draw(st.integers(1, 6)), draw(st.integers(0, 12))
        sight = draw(st.sampled_from(Sight))
        visible = None
        if sight is Sight.TREE:
            visible = np.tri(rows, dtype=bool) & np.array(draw(st.lists(st.booleans(), min_size=rows, max_size=rows)))
            visible |= np.eye(rows, dtype=bool)
        segments.append(Segment(slab * 20, past, [0] * rows, range(rows), sight, visible))
    return segments


@given(layouts(), st.integers(0, 2**32), st.booleans())
@settings(max_examples=60, deadline=None)
def test_padded_attention_equals_one_call_per_request(segments: list[Segment], seed: int, padded: bool) -> None:
    random = torch.Generator().manual_seed(seed)
    batch = batch_rows(segments, CPU, trash=100 if padded else None)
    keys, values = (torch.randn(101, 2, 8, generator=random) for _ in range(2))
    queries = torch.randn(batch.padded, 4, 8, generator=random)
    joined = _Padded(batch, 20, 2, torch.float32, CPU)(queries, keys, values)
    single = _OneByOne(batch, 2, torch.float32, CPU)(queries, keys, values)
    assert joined.shape == single.shape == (batch.padded, 32)
    assert torch.allclose(joined[: batch.rows], single[: batch.rows], atol=1e-5)


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("slabs", [[0, 1, 2], [2, 1, 0], [1, 2, 4]])
def test_padded_attention_of_equal_segments_in_any_slabs(rows: int, slabs: list[int]) -> None:
    """In slab order nothing has to be moved; otherwise it must be."""
    segments = [Segment(slab * 20, 7, [0] * rows, range(rows), Sight.CAUSAL) for slab in slabs]
    batch = batch_rows(segments, CPU)
    queries, keys, values = torch.randn(batch.padded, 4, 8), torch.randn(101, 2, 8), torch.randn(101, 2, 8)
    joined = _Padded(batch, 20, 2, torch.float32, CPU)(queries, keys, values)
    assert torch.allclose(joined, _OneByOne(batch, 2, torch.float32, CPU)(queries, keys, values), atol=1e-5)


def test_few_row_counts_are_ever_computed() -> None:
    sizes = {bucket(n) for n in range(1, 1025)}
    assert len(sizes) <= 16 + 8 * 6
    for n in range(1, 1025):
        assert n <= bucket(n) <= max(n, 1.13 * n + 1)
        assert bucket(bucket(n)) == bucket(n)
    assert [bucket(n) for n in (1, 7, 16, 17, 33, 65)] == [1, 7, 16, 18, 36, 72]


def test_passes_of_all_sizes_run_in_few_shapes(runner: Runner) -> None:
    """Every shape that oneDNN meets costs it time and memory for good."""
    seen = set()
    embed = runner.target.embed

    def watch(token_ids: torch.Tensor) -> torch.Tensor:
        seen.add(len(token_ids))
        return embed(token_ids)

    runner.target.embed = watch  # type: ignore[method-assign]
    for n in range(1, 120):
        assert logits(runner, causal(0, 0, [5] * n)).shape[0] == n
    assert seen == {bucket(n) for n in range(1, 120)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_is_rms_norm_computed_in_float32(dtype: torch.dtype) -> None:
    x, weight = torch.randn(9, 40).to(dtype) * 30, torch.randn(40).to(dtype)
    expected = torch.nn.functional.rms_norm(x.float(), (40,), weight.float(), 1e-6)
    assert torch.allclose(Norm(weight, 1e-6).exact(x), expected, rtol=1e-5, atol=1e-6)
    assert Norm(weight, 1e-6)(x).dtype is dtype
    zeros = torch.zeros(2, 40, dtype=dtype)
    assert Norm(weight, 1e-6)(zeros).float().abs().max() == 0  # eps keeps it finite


def test_bfloat16_stays_close_to_the_reference(pair: Pair, reference: Reference) -> None:
    with torch.inference_mode():
        runner = pair.engine(dtype="bfloat16")._decoder.runner
        got = logits(runner, causal(0, 0, PROMPT)).double()
    expected = reference.logits(PROMPT)
    assert got.dtype is torch.float64
    assert (got - expected).abs().mean() < 0.02 * expected.std() * 3


def test_cache_has_room_for_budget_plus_one_rows_at_the_very_end(pair: Pair) -> None:
    engine: Engine = pair.engine(speculative_ddtree_budget=40, context_length=32)
    shape = engine._cache.shape
    assert shape.slab_slots == 32 + 41
    assert engine._cache.target.keys.shape[1] == 4 * shape.slab_slots + 1  # and the trash slot
    assert pair.engine(speculative_ddtree_budget=2, context_length=32)._cache.shape.slab_slots == 32 + 8
