"""Replayed rounds compute what eager ones compute: the walk, compaction and drafting on the device, batch after batch.

On CPU with the attention's definition in place of the kernel, and graphs computed instead of replayed; `tests/gpu` runs the
same checks on a GPU.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from ddtree_engine.captured import Shape
from ddtree_engine.config import SpecMode
from ddtree_engine.engine import Engine, collect
from ddtree_engine.forest import Forest, Growth, Sizes, grow
from ddtree_engine.graphs import CudaRunner
from ddtree_engine.requests import Request, Sampling
from ddtree_engine.runner import Decoding, Settle
from ddtree_engine.tiles import ReferenceAttention
from ddtree_engine.tree import best_first, chain, root_only
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.engine.small_models import DRAFTER, TARGET, Pair, Reference
from tests.engine.test_exactness import BUNDLED, PROMPTS, assert_same, bundled_engine, bundled_prompts

GREEDY = Sampling(max_new_tokens=60, ignore_eos=True)
WARM = replace(GREEDY, temperature=0.9, seed=13)
SIZES = {"head_dim": 32, "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(tmp_path_factory.mktemp("pair"), TARGET | SIZES, DRAFTER | SIZES)


def replaying(pair: Pair, **changes: Any) -> Engine:
    """An engine whose decoding rounds are replayed."""
    return replay_in(pair.engine(**changes), graphs=not changes.get("disable_cuda_graph"))


def replay_in(engine: Engine, *, graphs: bool = True, prompt_rows: int = 48) -> Engine:
    plain, had = engine._decoder.runner, engine._decoder.settings
    runner = CudaRunner(plain.target, plain.drafter, plain.cache, plain.device, ReferenceAttention, grow_by_heap)
    if graphs:
        with torch.inference_mode():
            most = min(had.max_running, engine.config.cuda_graph_max_bs or had.max_running)
            shape = Shape(most, min(had.trees.width - 1, 64), had.block_size, had.topk_cap, prompt_rows)
            runner.capture(shape, lambda share: None)
    engine._decoder.runner = runner
    return engine


def grow_by_heap(  # type: ignore[no-untyped-def]
    out, logprobs, token_ids, roots, depths, ranks, nodes, bounds, sizes
) -> None:
    """What the kernel does, with the heap."""
    off_spine, floor = bounds.view(torch.float64).tolist()
    growth = Growth(roots.tolist(), depths.tolist(), ranks.tolist(), nodes.tolist(), off_spine, floor)
    out.copy_(torch.from_numpy(grow(logprobs.numpy(), token_ids.numpy(), growth, sizes).records))


@pytest.fixture(scope="module")
def engine(pair: Pair) -> Engine:
    return replaying(pair, speculative_ddtree_budget=12)


@pytest.fixture(scope="module")
def reference(pair: Pair) -> Reference:
    return Reference(pair.target, pair.drafter)


@pytest.mark.parametrize("s", [GREEDY, WARM], ids=["greedy", "warm"])
@pytest.mark.parametrize("mode", SpecMode)
def test_replayed_rounds_say_what_plain_decoding_says(
    pair: Pair, engine: Engine, reference: Reference, s: Sampling, mode: SpecMode
) -> None:
    expected = pair.engine().generate(PROMPTS[:3], s, SpecMode.OFF)
    engine.flush()
    for prompt, answer, got in zip(PROMPTS, expected, engine.generate(PROMPTS[:3], s, mode), strict=False):
        assert_same(reference, prompt, got.token_ids, answer.token_ids, s)
    assert engine.stats().cuda_graph


def test_replayed_rounds_draft_what_eager_ones_draft(pair: Pair, engine: Engine) -> None:
    """Same candidates after every round: the context, its positions and the compaction are all right."""
    engine.flush()
    seen: dict[str, dict[int, Any]] = {"cpu": {}, "device": {}}
    for name, e in (("cpu", pair.engine(speculative_ddtree_budget=12)), ("device", engine)):
        for i, prompt in enumerate(PROMPTS[:2]):
            e.submit(Request(str(i), tuple(prompt), GREEDY, SpecMode.TREE))
        while e.busy:
            e.step()
            for s in e._running.values():
                if s.proposal:
                    seen[name][int(s.request.id), len(s.output_ids)] = s.proposal
    both = set(seen["cpu"]) & set(seen["device"])
    assert len(both) >= 20
    for at in both:
        a, b = seen["cpu"][at].tree, seen["device"][at].tree
        assert np.allclose(a.scores, b.scores, atol=1e-3)
        assert a.rows == b.rows


def test_replayed_and_eager_rounds_say_the_same(pair: Pair, engine: Engine, reference: Reference) -> None:
    eager = replaying(pair, speculative_ddtree_budget=12, disable_cuda_graph=True)
    engine.flush()
    a, b = (e.generate(PROMPTS[:4], GREEDY, SpecMode.TREE) for e in (engine, eager))
    assert not eager.stats().cuda_graph
    for prompt, x, y in zip(PROMPTS, a, b, strict=False):
        assert_same(reference, prompt, x.token_ids, y.token_ids, GREEDY)


def test_prefill_between_replayed_rounds_and_cancellation(pair: Pair, engine: Engine, reference: Reference) -> None:
    expected = pair.engine().generate(PROMPTS[:4], GREEDY, SpecMode.OFF)
    engine.flush()
    modes = [SpecMode.TREE, SpecMode.CHAIN, SpecMode.OFF, SpecMode.TREE]
    updates: dict[str, list] = {str(i): [] for i in range(4)}
    todo = list(enumerate(modes))
    n = 0
    while todo or engine.busy:
        if todo and n % 3 == 0:
            i, mode = todo.pop(0)
            engine.submit(Request(str(i), tuple(PROMPTS[i]), GREEDY, mode))
        if n == 5:
            engine.cancel("1")
        for u in engine.step():
            updates[u.request_id].append(u)
        n += 1
    for i in (0, 2, 3):
        assert_same(reference, PROMPTS[i], collect(updates[str(i)]).token_ids, expected[i].token_ids, GREEDY)


def played(
    engine: Engine, prompts: list[list[int]], s: Sampling, modes: list[SpecMode], rounds: list[int]
) -> list[tuple[int, ...]]:
    """Answers of requests that come in these rounds."""
    updates: dict[str, list] = {str(i): [] for i in range(len(prompts))}
    n = 0
    while n <= max(rounds) or engine.busy:
        for i in (i for i, at in enumerate(rounds) if at == n):
            engine.submit(Request(str(i), tuple(prompts[i]), s, modes[i % len(modes)]))
        for u in engine.step():
            updates[u.request_id].append(u)
        n += 1
    return [collect(updates[str(i)]).token_ids for i in range(len(prompts))]


def staggered(engine: Engine, prompts: list[list[int]], s: Sampling, modes: list[SpecMode], gap: int) -> list[tuple[int, ...]]:
    """Answers of requests of which one comes every `gap` rounds."""
    return played(engine, prompts, s, modes, [i * gap for i in range(len(prompts))])


def count_passes(engine: Engine) -> dict[str, int]:
    """Of the target, from here on: replayed with prompts, replayed without, as they are."""
    counts = dict.fromkeys(("prompts", "trees", "eager"), 0)
    runner = engine._decoder.runner
    replay, verify = runner.replay, runner.verify

    def replayed(decoding: Decoding, *rest: Any) -> Any:
        counts["prompts" if decoding.prompts else "trees"] += 1
        return replay(decoding, *rest)

    def eager(*args: Any, **kwargs: Any) -> Any:
        counts["eager"] += 1
        return verify(*args, **kwargs)

    runner.replay, runner.verify = replayed, eager  # type: ignore[method-assign]
    return counts


MIXED = [SpecMode.TREE, SpecMode.CHAIN, SpecMode.OFF]
LONG = [[7, 1, 50, 3] * 11, [5], [9, 80, 2] * 30, [4, 4], [31] * 17, [9, 80, 2] * 30]  # up to 90 tokens; the last comes again


@pytest.mark.parametrize("chunk", [1, 7, 512])
@pytest.mark.parametrize("gap", [3])
@pytest.mark.parametrize("s", [GREEDY, WARM], ids=["greedy", "warm"])
def test_prompts_that_come_while_others_decode_change_no_answer(
    pair: Pair, reference: Reference, s: Sampling, gap: int, chunk: int
) -> None:
    """Prompts are read in replayed rounds as far as they fit: in chunks, one token at a time, after a reused prefix."""
    short = replace(s, max_new_tokens=24)
    expected = [pair.engine().generate([prompt], short, SpecMode.OFF)[0].token_ids for prompt in LONG]
    engine = replaying(pair, speculative_ddtree_budget=12, chunked_prefill_size=chunk, max_running_requests=4)
    counts = count_passes(engine)
    for prompt, answer, got in zip(LONG, expected, staggered(engine, LONG, short, MIXED, gap), strict=True):
        assert_same(reference, prompt, got, answer, short)
    assert counts["prompts"] > 0
    assert (counts["eager"] > 0) == (chunk == 512)  # 90 tokens and what else runs are more rows than were captured


@pytest.mark.parametrize("more", range(-3, 4))
@pytest.mark.parametrize("others", [0, 1, 3])
def test_prompts_about_as_long_as_the_captured_rows_change_no_answer(
    pair: Pair, reference: Reference, others: int, more: int
) -> None:
    """Rows, and with them the roots of prompts that are complete, are as many as were captured, or a few more or less."""
    short, rows = replace(GREEDY, max_new_tokens=8), 4 * 13 + 16  # of four trees and prompts
    engine = replay_in(pair.engine(speculative_ddtree_budget=12, max_running_requests=4), prompt_rows=16)
    prompts = [*PROMPTS[:others], *[[7 + i, 3] * 50 for i in range(4 - others)]]
    length = (rows - 13 * others) // (4 - others)
    prompts = [p if i < others else p[: length + more] for i, p in enumerate(prompts)]
    expected = [pair.engine().generate([p], short, SpecMode.OFF)[0].token_ids for p in prompts]
    said = played(engine, prompts, short, [SpecMode.TREE], [min(i, others) for i in range(4)])
    for prompt, answer, got in zip(prompts, expected, said, strict=True):
        assert_same(reference, prompt, got, answer, short)


@pytest.mark.parametrize("mode", SpecMode)
@pytest.mark.parametrize("most", [1, 2, 3])
def test_more_requests_than_graphs_were_captured_for_run_without(
    pair: Pair, reference: Reference, most: int, mode: SpecMode
) -> None:
    engine = replaying(pair, speculative_ddtree_budget=2, max_running_requests=8, cuda_graph_max_bs=most)
    short, prompts = replace(GREEDY, max_new_tokens=12), [[5 + i] * (1 + i % 3) for i in range(8)]
    expected = [g.token_ids for g in pair.engine().generate(prompts, short, SpecMode.OFF)]
    counts = count_passes(engine)
    for prompt, answer, got in zip(prompts, expected, staggered(engine, prompts, short, [mode], 2), strict=True):
        assert_same(reference, prompt, got, answer, short)
    assert counts["eager"] > 0
    assert counts["prompts"] + counts["trees"] > 0


def test_prompts_whose_tokens_are_scored_are_read_by_the_host(pair: Pair, engine: Engine) -> None:
    engine.flush()
    counts = count_passes(engine)
    engine.submit(Request("x", tuple(LONG[0]), GREEDY, SpecMode.TREE, want_logprobs=True, logprob_start=0))
    assert collect(engine.drain(["x"])["x"]).updates[0].input_logprobs is not None
    assert counts["eager"] == 1
    assert counts["prompts"] == 0


def test_replayed_prompts_draft_what_eager_ones_draft(pair: Pair) -> None:
    """The drafter's context over a prompt that was read by replays: the same candidates from the first round on."""
    seen: list[dict[int, Any]] = []
    for e in (pair.engine(speculative_ddtree_budget=12), replaying(pair, speculative_ddtree_budget=12)):
        e.submit(Request("a", tuple(LONG[0]), GREEDY, SpecMode.TREE))
        found: dict[int, Any] = {}
        while e.busy:
            e.step()
            for s in e._running.values():
                if s.proposal and s.request.id == "a":
                    found[len(s.output_ids)] = s.proposal
        seen.append(found)
    assert 1 in set(seen[0]) & set(seen[1])
    for at in set(seen[0]) & set(seen[1]):
        a, b = seen[0][at].tree, seen[1][at].tree
        assert np.allclose(a.scores, b.scores, atol=1e-3)
        assert a.token_ids == b.token_ids


def test_logprobs_of_replayed_rounds(engine: Engine, reference: Reference) -> None:
    prompt = PROMPTS[0]
    engine.flush()
    engine.submit(Request("x", tuple(prompt), GREEDY, SpecMode.TREE, want_logprobs=True, top_logprobs=2))
    updates = engine.drain(["x"])["x"]
    said = list(collect(updates).token_ids)
    logp = reference.logits(prompt + said).log_softmax(-1)[len(prompt) - 1 : -1]
    got = torch.tensor([x for u in updates for x in u.logprobs], dtype=torch.float64)
    assert torch.allclose(got, logp.gather(-1, torch.tensor(said)[:, None])[:, 0], atol=1e-3)


@st.composite
def walks(draw: st.DrawFn) -> list[tuple[Any, list[int]]]:
    found = []
    for _ in range(draw(st.integers(1, 4))):
        depths, k = draw(st.integers(1, 7)), draw(st.integers(1, 4))
        level = st.lists(st.floats(-3, -0.1), min_size=k, max_size=k)
        logprobs = [sorted(draw(level), reverse=True) for _ in range(depths)]
        tokens = [draw(st.permutations(range(5)))[:k] for _ in range(depths)]
        tree = draw(st.sampled_from([best_first(1, logprobs, tokens, 12), chain(1, [t[0] for t in tokens]), root_only(2)]))
        choices = draw(st.lists(st.integers(0, 4), min_size=tree.rows, max_size=tree.rows))
        found.append((tree, choices))
    return found


@given(walks())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_walk_on_the_device_is_the_walk_on_the_host(engine: Engine, drawn: list[tuple[Any, list[int]]]) -> None:
    graphs = engine._decoder.runner._graphs
    part = graphs._settle[4]
    launch, part.launch = part.launch, lambda: None  # fill the inputs only
    flat = [c for _, choices in drawn for c in choices]
    n = len(drawn)
    forest = Forest.planted([tree for tree, _ in drawn], Sizes(part._width, graphs._shape.block - 1))
    zeros = np.zeros(n, dtype=np.int64)
    settle = Settle(np.arange(n), zeros + 99, zeros + 1, zeros)
    with torch.inference_mode():
        graphs._board.choices[: len(flat)] = torch.tensor(flat)
        part.run(Decoding(forest, zeros, zeros), settle)
        part.launch = launch
        choices, path, length = part._walk()
    for i, (tree, mine) in enumerate(drawn):
        assert path[i, : length[i]].tolist() == tree.walk(mine)
        assert choices[i, : tree.rows].tolist() == mine


def test_buckets_cover_every_batch() -> None:
    shape = Shape(max_requests=16, max_nodes=16, block=16, k=8)
    assert shape.row_buckets[0] == 1
    assert shape.row_buckets[-1] == 16 * 17
    assert {17, 34, 68, 136} <= set(shape.row_buckets)
    assert len(shape.row_buckets) <= 16
    assert shape.request_buckets == (1, 2, 4, 8, 16)


@pytest.mark.parametrize("s", [Sampling(max_new_tokens=60), Sampling(max_new_tokens=60, temperature=0.7, seed=3)])
def test_bundled_models_replayed_accept_and_say_what_eager_ones_do(s: Sampling) -> None:
    """Random models accept next to nothing; here whole paths are accepted, so compaction and context matter."""
    prompts, reference = bundled_prompts()[:3], Reference(BUNDLED / "target")
    eager, replayed = bundled_engine("drafter-b16"), replay_in(bundled_engine("drafter-b16"))
    expected = eager.generate(prompts, s, SpecMode.OFF)
    for mode in (SpecMode.CHAIN, SpecMode.TREE):
        passes = [sum(g.verify_passes for g in e.generate(prompts, s, mode)) for e in (eager, replayed)]
        assert abs(passes[0] - passes[1]) <= 1
        replayed.flush()
        for prompt, answer, got in zip(prompts, expected, replayed.generate(prompts, s, mode), strict=True):
            assert_same(reference, prompt, got.token_ids, answer.token_ids, s)
    assert replayed.stats().committed_tokens / replayed.stats().verify_passes > 4
