"""Speculation changes how fast tokens come, never which: off = chain = tree, token by token, at any temperature.

float32 throughout. The number of rows in a pass changes rounding, so a difference is allowed where the two best tokens
were within TIE of each other (noise included); anything else fails.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from ddtree_engine.config import Algorithm, EngineConfig, SpecMode
from ddtree_engine.engine import Engine, Generated, collect
from ddtree_engine.requests import Finish, Request, Sampling
from ddtree_engine.sampling import gumbel, row_key

from tests.engine.small_models import Pair, Reference, plant_drafts

TIE = 1e-4
GREEDY = Sampling(max_new_tokens=40, ignore_eos=True)
WARM = replace(GREEDY, temperature=0.9, seed=13)
CUT = replace(GREEDY, temperature=1.2, top_p=0.9, top_k=30, seed=5)
PROMPTS = [[5, 0, 17, 99, 3, 42], [8], [61, 0, 12, 77, 30, 4, 4, 9, 1], [2, 2, 2], [90, 33] * 10]
ANSWERS = {SpecMode.CHAIN, SpecMode.TREE}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def reference(pair: Pair) -> Reference:
    return Reference(pair.target)


@pytest.fixture
def engine(pair: Pair) -> Engine:
    return pair.engine(speculative_ddtree_budget=24)


def is_tie(reference: Reference, prompt: Sequence[int], said: Sequence[int], rival: int, s: Sampling) -> bool:
    """Whether said[-1] and rival were equally good after prompt + said[:-1]."""
    logits = reference.logits([*prompt, *said[:-1]])[-1].float()
    if not s.greedy:
        position = len(prompt) + len(said) - 1
        logits = logits / s.temperature + gumbel(torch.tensor([row_key(s.seed or 0, position)]), len(logits))[0]
    return abs(float(logits[said[-1]] - logits[rival])) < TIE


def assert_same(reference: Reference, prompt: Sequence[int], got: Sequence[int], expected: Sequence[int], s: Sampling) -> None:
    for i, (a, b) in enumerate(zip(got, expected, strict=False)):
        if a != b:
            assert is_tie(reference, prompt, got[: i + 1], b, s), f"token {i}: {a} instead of {b}"
            return  # after a tie the texts are different ones
    assert len(got) == len(expected)


def plain(engine: Engine, prompts: Sequence[Sequence[int]], s: Sampling) -> list[Generated]:
    return [engine.generate([p], s, SpecMode.OFF)[0] for p in prompts]


def plant(engine: Engine, answers: Sequence[Generated], prompts: Sequence[Sequence[int]], seed: int = 3) -> None:
    expected = {tuple(p): list(a.token_ids) for p, a in zip(prompts, answers, strict=True)}
    plant_drafts(engine, expected, seed)


@pytest.mark.parametrize("s", [GREEDY, WARM, CUT], ids=["greedy", "warm", "cut"])
def test_off_chain_and_tree_say_the_same(engine: Engine, reference: Reference, s: Sampling) -> None:
    answers = plain(engine, PROMPTS, s)
    plant(engine, answers, PROMPTS)
    for mode in (SpecMode.CHAIN, SpecMode.TREE):
        for prompt, answer in zip(PROMPTS, answers, strict=True):
            got = engine.generate([prompt], s, mode)[0]
            assert_same(reference, prompt, got.token_ids, answer.token_ids, s)
    stats = engine.stats()
    assert stats.committed_tokens > 1.5 * stats.verify_passes  # drafts were accepted, so the walk was exercised


def test_plain_decoding_says_what_the_reference_says(engine: Engine, reference: Reference) -> None:
    for prompt in PROMPTS[:3]:
        got = engine.generate([prompt], GREEDY, SpecMode.OFF)[0].token_ids
        assert_same(reference, prompt, got, reference.greedy(prompt, 40), GREEDY)


@pytest.mark.parametrize("s", [GREEDY, WARM], ids=["greedy", "warm"])
def test_batch_of_unequal_trees_says_what_each_request_says_alone(engine: Engine, reference: Reference, s: Sampling) -> None:
    """Different prompts, modes, lengths left and start rounds: the shapes where requests get mixed up."""
    answers = plain(engine, PROMPTS, s)
    plant(engine, answers, PROMPTS)
    modes = [SpecMode.TREE, SpecMode.CHAIN, SpecMode.TREE, SpecMode.OFF, SpecMode.TREE]
    lengths = [40, 33, 7, 21, 38]
    updates: dict[str, list] = {}
    todo = list(zip(range(5), modes, lengths, strict=True))
    while todo or engine.busy:
        if todo:  # one more request every round; four slabs for five requests
            i, mode, length = todo.pop(0)
            engine.submit(Request(str(i), tuple(PROMPTS[i]), replace(s, max_new_tokens=length), mode))
        for update in engine.step():
            updates.setdefault(update.request_id, []).append(update)
    for i, length in enumerate(lengths):
        got = collect(updates[str(i)])
        assert got.finish is Finish.LENGTH
        assert_same(reference, PROMPTS[i], got.token_ids, answers[i].token_ids[:length], s)


def test_trees_in_a_batch_are_really_unequal(engine: Engine) -> None:
    plant(engine, plain(engine, PROMPTS[:3], GREEDY), PROMPTS[:3])
    sizes = []
    fit = engine._decoder.policy.fit

    def watch(forest, sequences):  # type: ignore[no-untyped-def]
        sizes.append(forest.rows.tolist())
        return fit(forest, sequences)

    engine._decoder.policy.fit = watch
    for i, n in enumerate((40, 9, 25)):
        engine.submit(Request(str(i), tuple(PROMPTS[i]), replace(GREEDY, max_new_tokens=n), SpecMode.TREE))
    engine.drain(["0", "1", "2"])
    assert any(len(set(rows)) > 1 for rows in sizes if len(rows) > 1)


def test_many_rounds_up_to_the_end_of_the_context(pair: Pair, reference: Reference) -> None:
    engine = pair.engine(speculative_ddtree_budget=24)
    s = replace(GREEDY, max_new_tokens=256 - 6)
    answers = plain(engine, PROMPTS[:1], s)
    plant(engine, answers, PROMPTS[:1], seed=8)
    got = engine.generate(PROMPTS[:1], s, SpecMode.TREE)[0]
    assert got.verify_passes > 25
    assert_same(reference, PROMPTS[0], got.token_ids, answers[0].token_ids, s)


@pytest.mark.parametrize("budget", [1, 2, 7, 8, 70])
@pytest.mark.parametrize("topk", [1, 3])
def test_every_budget_and_cap_says_the_same(pair: Pair, reference: Reference, budget: int, topk: int) -> None:
    engine = pair.engine(speculative_ddtree_budget=budget, speculative_ddtree_topk_cap=topk)
    answers = plain(engine, PROMPTS[:3], GREEDY)
    plant(engine, answers, PROMPTS[:3])
    for prompt, answer, got in zip(PROMPTS, answers, engine.generate(PROMPTS[:3], GREEDY, SpecMode.TREE), strict=False):
        assert_same(reference, prompt, got.token_ids, answer.token_ids, GREEDY)


def test_chain_shaped_tree_is_the_chain_to_the_last_bit(pair: Pair) -> None:
    """One candidate a depth and a budget of the block: the heap can only give the chain."""
    engine = pair.engine(speculative_ddtree_budget=7, speculative_ddtree_topk_cap=1)
    s = replace(GREEDY, max_new_tokens=25)

    def run(mode: SpecMode) -> list[tuple]:
        plant(engine, plain(engine, PROMPTS[:1], s), PROMPTS[:1])
        engine.submit(Request(mode, tuple(PROMPTS[0]), s, mode, want_logprobs=True))
        updates = engine.drain([mode])[mode]
        engine.flush()
        return [(u.token_ids, u.logprobs, u.verify_passes, u.proposed_drafts) for u in updates]

    assert run(SpecMode.TREE) == run(SpecMode.CHAIN)


def test_token_zero_is_accepted_as_a_draft(pair: Pair) -> None:
    engine = pair.engine()
    answer = [0, 0, 7, 0]
    forced = _ForcedChoices(answer)
    engine._decoder.faults = forced
    plant_drafts(engine, {(9,): answer}, seed=1, sure=True)
    got = engine.generate([[9]], replace(GREEDY, max_new_tokens=4), SpecMode.TREE)[0]
    # The first token comes from the prompt; it is whatever the model says, the rest is forced.
    assert got.token_ids[1:] == tuple(answer[1:])
    assert got.verify_passes == 1


class _ForcedChoices:
    """Make the target choose `answer` along the path, to put chosen tokens into an accepted path."""

    def __init__(self, answer: list[int]) -> None:
        from ddtree_engine.corruption import NoCorruption

        self._base, self._answer = NoCorruption(), answer

    def __getattr__(self, name: str):  # type: ignore[no-untyped-def]
        return getattr(self._base, name)

    def choices(self, token_ids, ctx):  # type: ignore[no-untyped-def]
        at = len(ctx.request.output_ids)
        tree = self._tree
        return [self._answer[min(at + depth, len(self._answer) - 1)] for depth in tree]

    def row_positions(self, positions, depths, ctx):  # type: ignore[no-untyped-def]
        self._tree = depths
        return positions


@pytest.mark.parametrize("mode", [SpecMode.OFF, SpecMode.CHAIN, SpecMode.TREE])
@pytest.mark.parametrize("place", range(1, 7))
def test_eos_inside_an_accepted_path_ends_the_answer_there(pair: Pair, mode: SpecMode, place: int) -> None:
    eos = 2
    answer = [11, 12, 13, 14, 15, 16, 17, 18]
    answer[place] = eos
    engine = pair.engine()
    engine._decoder.faults = _ForcedChoices(answer)
    plant_drafts(engine, {(9,): answer}, seed=1, sure=True)
    got = engine.generate([[9]], Sampling(max_new_tokens=8), mode)[0]
    assert got.token_ids[1:] == tuple(answer[1 : place + 1])
    assert (got.finish, got.updates[-1].matched_token) == (Finish.STOP, eos)
    held = max(engine._slabs.resident_tokens(slab) for slab in range(4))
    assert held == 1 + place  # the prompt and what was said before the EOS, which has no keys yet


@pytest.mark.parametrize("mode", [SpecMode.OFF, SpecMode.CHAIN, SpecMode.TREE])
@pytest.mark.parametrize("length", range(1, 12))
def test_max_tokens_inside_an_accepted_path_is_exact(pair: Pair, mode: SpecMode, length: int) -> None:
    engine = pair.engine()
    s = replace(GREEDY, max_new_tokens=length)
    answer = plain(engine, PROMPTS[:1], replace(s, max_new_tokens=12))
    plant_drafts(engine, {tuple(PROMPTS[0]): list(answer[0].token_ids)}, seed=1, sure=True)
    got = engine.generate(PROMPTS[:1], s, mode)[0]
    assert got.token_ids == answer[0].token_ids[:length]
    assert (got.finish, got.updates[-1].matched_token) == (Finish.LENGTH, None)


def test_stop_ids_and_ignored_eos(engine: Engine) -> None:
    answer = plain(engine, PROMPTS[:1], GREEDY)[0].token_ids
    stop = answer[10]
    first = answer.index(stop)
    for mode in SpecMode:
        got = engine.generate(PROMPTS[:1], replace(GREEDY, stop_token_ids=(stop,)), mode)[0]
        assert (got.token_ids, got.finish) == (answer[: first + 1], Finish.STOP)
        assert got.updates[-1].matched_token == stop


def test_chunked_prefill_says_what_whole_prefill_says(pair: Pair, reference: Reference) -> None:
    prompt = [(7 * i + i * i) % 101 for i in range(90)]
    whole, chunked = pair.engine(), pair.engine(chunked_prefill_size=13)
    for mode in SpecMode:
        a = whole.generate([prompt, PROMPTS[0]], GREEDY, mode)
        b = chunked.generate([prompt, PROMPTS[0]], GREEDY, mode)
        assert_same(reference, prompt, b[0].token_ids, a[0].token_ids, GREEDY)
        assert_same(reference, PROMPTS[0], b[1].token_ids, a[1].token_ids, GREEDY)


@pytest.mark.parametrize("mode", SpecMode)
def test_warm_prefix_says_what_a_cold_one_says(pair: Pair, reference: Reference, mode: SpecMode) -> None:
    shared = [(3 * i * i + i) % 101 for i in range(40)]
    prompts = [shared + tail for tail in ([1, 2, 3], [50], [9, 9, 9, 9])]
    engine, cold = pair.engine(), pair.engine(disable_radix_cache=True)
    answers = [cold.generate([p], GREEDY, SpecMode.OFF)[0] for p in prompts]
    for e in (engine, cold):
        plant(e, answers, prompts)
    # One after another (a free slab lends), then all at once (busy slabs lend).
    warm = [engine.generate([p], GREEDY, mode)[0] for p in prompts]
    again = engine.generate(prompts, GREEDY, mode)
    for prompt, answer, one, two in zip(prompts, answers, warm, again, strict=True):
        assert_same(reference, prompt, one.token_ids, answer.token_ids, GREEDY)
        assert_same(reference, prompt, two.token_ids, answer.token_ids, GREEDY)
    assert warm[0].cached_tokens == 0
    assert [w.cached_tokens for w in warm[1:]] == [40, 40]
    assert all(a.cached_tokens >= 40 for a in again)
    assert cold.generate(prompts[:1], GREEDY, mode)[0].cached_tokens == 0


def test_warm_prefix_drafts_what_a_cold_one_drafts(pair: Pair) -> None:
    """The drafter's context comes along with the prefix: same proposals, not just same tokens."""
    shared, tail = [(3 * i * i + i) % 101 for i in range(40)], [7, 7]
    cold, warm = pair.engine(), pair.engine()
    warm.generate([[*shared, 1, 2]], GREEDY, SpecMode.TREE)
    seen: dict[str, list] = {"cold": [], "warm": []}
    for name, engine in (("cold", cold), ("warm", warm)):
        engine.submit(Request("x", (*shared, *tail), GREEDY, SpecMode.TREE))
        for _ in range(4):
            engine.step()
            seen[name].append(engine._running["x"].proposal)
    assert warm._running["x"].lease.reused == 40
    for a, b in zip(seen["cold"], seen["warm"], strict=True):
        assert a.tree.token_ids == b.tree.token_ids
        assert torch.allclose(torch.tensor(a.tree.scores), torch.tensor(b.tree.scores), atol=1e-4)


def test_prefix_left_by_a_plain_request_serves_a_drafting_one(pair: Pair, reference: Reference) -> None:
    engine = pair.engine()
    said = engine.generate(PROMPTS[:1], GREEDY, SpecMode.OFF)[0].token_ids
    follow_up = [*PROMPTS[0], *said, 4]
    cold = pair.engine(disable_radix_cache=True).generate([follow_up], GREEDY, SpecMode.TREE)[0]
    got = engine.generate([follow_up], GREEDY, SpecMode.TREE)[0]
    # Plain decoding wrote no drafter features, so only the prompt's are there to reuse.
    assert got.cached_tokens == len(PROMPTS[0])
    assert_same(reference, follow_up, got.token_ids, cold.token_ids, GREEDY)
    assert engine.generate([follow_up], GREEDY, SpecMode.OFF)[0].cached_tokens == len(follow_up) - 1


def test_logprobs_with_speculation_are_those_of_plain_decoding(engine: Engine, reference: Reference) -> None:
    prompt, n = PROMPTS[0], 20
    answers = plain(engine, [prompt], replace(GREEDY, max_new_tokens=n))
    plant(engine, answers, [prompt])
    said = list(answers[0].token_ids)
    expected = reference.logits(prompt + said).log_softmax(-1)[len(prompt) - 1 : -1]
    own = expected.gather(-1, torch.tensor(said)[:, None])[:, 0]
    for mode in SpecMode:
        sampling = replace(GREEDY, max_new_tokens=n)
        engine.submit(Request(mode, tuple(prompt), sampling, mode, want_logprobs=True, top_logprobs=3))
        updates = engine.drain([mode])[mode]
        got = torch.tensor([x for u in updates for x in u.logprobs], dtype=torch.float64)
        assert torch.allclose(got, own, atol=1e-4)
        top = [t for u in updates for t in u.top_logprobs]
        assert [pairs[0][1] for pairs in top] == said
        values = torch.tensor([[p for p, _ in pairs] for pairs in top], dtype=torch.float64)
        assert torch.allclose(values, expected.topk(3, -1).values, atol=1e-4)


@pytest.mark.parametrize("mode", [SpecMode.OFF, SpecMode.TREE])
def test_sampled_tokens_follow_the_targets_distribution(pair: Pair, reference: Reference, mode: SpecMode) -> None:
    """The second token after a fixed prompt, over many seeds, against the exact mixture. Drafts are wrong half the time."""
    engine = pair.engine(max_running_requests=64, context_length=32)
    prompt, n, heat = [5, 9], 3000, 3.0
    plant_drafts(engine, _Anything([31, 7, 77]), seed=2, miss=0.5)
    got: list[tuple[int, ...]] = []
    for i in range(0, n, 500):
        for seed in range(i, i + 500):
            s = Sampling(temperature=heat, seed=seed, max_new_tokens=3, ignore_eos=True)
            engine.submit(Request(str(seed), tuple(prompt), s, mode))
        runs = engine.drain([str(seed) for seed in range(i, i + 500)])
        got += [collect(u).token_ids for u in runs.values()]
    first = (reference.logits(prompt)[-1] / heat).softmax(-1)
    second = torch.zeros_like(first)
    for token in range(len(first)):
        if first[token] > 1e-5:
            second += first[token] * (reference.logits([*prompt, token])[-1] / heat).softmax(-1)
    for place, expected in ((0, first), (1, second)):
        counts = torch.bincount(torch.tensor([g[place] for g in got]), minlength=len(expected)).double()
        assert _chi_square_z(counts, expected * n) < 4.5


class _Anything(dict):
    """The same planted future for every prompt."""

    def __init__(self, future: list[int]) -> None:
        self._future = future

    def __missing__(self, key: tuple[int, ...]) -> list[int]:
        return self._future


def _chi_square_z(counts: torch.Tensor, expected: torch.Tensor) -> float:
    """Standard score of the chi-square statistic, cells below five expected joined."""
    small = expected < 5
    counts = torch.cat([counts[~small], counts[small].sum()[None]])
    expected = torch.cat([expected[~small], expected[small].sum().clamp(min=1e-9)[None]])
    keep = expected >= 1e-6
    freedom = int(keep.sum()) - 1
    assert freedom >= 3
    chi = float(((counts - expected)[keep] ** 2 / expected[keep]).sum())
    return (chi - freedom) / (2 * freedom) ** 0.5


def test_same_seed_repeats_and_another_differs(engine: Engine) -> None:
    a, b = (engine.generate(PROMPTS[:1], WARM, m)[0].token_ids for m in (SpecMode.TREE, SpecMode.OFF))
    c = engine.generate(PROMPTS[:1], replace(WARM, seed=14), SpecMode.TREE)[0].token_ids
    assert a == b != c


BUNDLED = Path(__file__).parents[2] / "engine" / "models"
"""The models that ship with the engine; these tests are what holds them to the promise."""


def bundled_prompts() -> list[list[int]]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(BUNDLED / "target" / "tokenizer.json"))
    tasks = ["is_palindrome(s)", "fib(n)", "merge_sorted(a, b)", "word_count(text)", "gcd(a, b)"]
    chat = "<|im_start|>user\nWrite a Python function {}.<|im_end|>\n<|im_start|>assistant\n"
    return [tokenizer.encode(chat.format(task), add_special_tokens=False).ids for task in tasks]


def bundled_engine(drafter: str, **changes: Any) -> Engine:
    settings: dict[str, Any] = {
        "model_path": str(BUNDLED / "target"),
        "dtype": "float32",
        "device": "cpu",
        "num_threads": 2,
        "max_running_requests": 5,
        "speculative_algorithm": Algorithm.DDTREE,
        "speculative_draft_model_path": str(BUNDLED / drafter),
        "speculative_ddtree_budget": 24,
    }
    return Engine.load(EngineConfig(**settings | changes))


@pytest.mark.parametrize("drafter", ["drafter-b16", "drafter-b8"])
def test_bundled_models_say_the_same_with_and_without_speculation(drafter: str) -> None:
    prompts, engine, reference = bundled_prompts(), bundled_engine(drafter), Reference(BUNDLED / "target")
    for s in (Sampling(max_new_tokens=160), Sampling(max_new_tokens=160, temperature=0.7, seed=3)):
        answers = engine.generate(prompts, s, SpecMode.OFF)
        for mode in ANSWERS:
            for prompt, answer, got in zip(prompts, answers, engine.generate(prompts, s, mode), strict=True):
                assert_same(reference, prompt, got.token_ids, answer.token_ids, s)
    stats = engine.stats()
    assert stats.committed_tokens / stats.verify_passes > 2.5
