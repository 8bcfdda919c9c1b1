"""The CUDA engine says what the CPU engine says: kernels, captured graphs, bfloat16."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from ddtree_engine.config import Algorithm, EngineConfig, SpecMode
from ddtree_engine.engine import Engine
from ddtree_engine.requests import Sampling

from tests.engine.small_models import DRAFTER, TARGET, Pair, Reference
from tests.engine.test_exactness import PROMPTS, assert_same
from tests.engine.test_graphs import LONG, MIXED, count_passes, staggered

pytestmark = pytest.mark.gpu

GREEDY = Sampling(max_new_tokens=60, ignore_eos=True)
WARM = replace(GREEDY, temperature=0.9, seed=13)
MODELS = Path(__file__).parents[2] / "engine" / "models"
TASKS = ("is_palindrome(s)", "fib(n)", "merge_sorted(a, b)", "word_count(text)", "gcd(a, b)")
SIZES = {"head_dim": 32}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(tmp_path_factory.mktemp("pair"), TARGET | SIZES, DRAFTER | SIZES)


@pytest.fixture(scope="module")
def reference(pair: Pair) -> Reference:
    return Reference(pair.target)


@pytest.mark.parametrize("s", [GREEDY, WARM], ids=["greedy", "warm"])
@pytest.mark.parametrize("budget", [1, 8, 24, 64, 80, "auto"])
@pytest.mark.parametrize("graphs", [True, False])
def test_device_says_what_the_cpu_says(pair: Pair, reference: Reference, s: Sampling, budget: int | str, graphs: bool) -> None:
    expected = pair.engine().generate(PROMPTS[:4], s, SpecMode.OFF)
    engine = pair.engine(device="cuda", speculative_ddtree_budget=budget, disable_cuda_graph=not graphs)
    for mode in SpecMode:
        engine.flush()
        for prompt, answer, got in zip(PROMPTS, expected, engine.generate(PROMPTS[:4], s, mode), strict=False):
            assert_same(reference, prompt, got.token_ids, answer.token_ids, s)
    assert engine.stats().cuda_graph is (graphs and budget != 80)  # 80 nodes do not fit a mask


@pytest.mark.parametrize("s", [GREEDY, WARM], ids=["greedy", "warm"])
@pytest.mark.parametrize("chunk", [7, 512])
def test_prompts_that_come_while_others_decode_are_replayed_and_change_no_answer(
    pair: Pair, reference: Reference, s: Sampling, chunk: int
) -> None:
    short = replace(s, max_new_tokens=24)
    expected = [pair.engine().generate([prompt], short, SpecMode.OFF)[0].token_ids for prompt in LONG]
    engine = pair.engine(device="cuda", speculative_ddtree_budget=12, chunked_prefill_size=chunk, max_running_requests=4)
    counts = count_passes(engine)
    for prompt, answer, got in zip(LONG, expected, staggered(engine, LONG, short, MIXED, 3), strict=True):
        assert_same(reference, prompt, got, answer, short)
    assert counts["prompts"] > 0
    assert counts["eager"] == 0


def encode(task: str) -> list[int]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(MODELS / "target" / "tokenizer.json"))
    text = f"<|im_start|>user\nWrite a Python function {task}.<|im_end|>\n<|im_start|>assistant\n"
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


def bundled(dtype: str, device: str) -> Engine:
    return Engine.load(
        EngineConfig(
            str(MODELS / "target"),
            device=device,
            dtype=dtype,
            speculative_algorithm=Algorithm.DDTREE,
            speculative_draft_model_path=str(MODELS / "drafter-b16"),
        )
    )


def test_bundled_models_in_float32_say_what_the_cpu_says() -> None:
    reference, s = Reference(MODELS / "target"), Sampling(max_new_tokens=160)
    prompts = [encode(task) for task in TASKS]
    expected = bundled("float32", "cpu").generate(prompts, s, SpecMode.OFF)
    engine = bundled("float32", "cuda")
    for mode in SpecMode:
        for prompt, answer, got in zip(prompts, expected, engine.generate(prompts, s, mode), strict=True):
            assert_same(reference, prompt, got.token_ids, answer.token_ids, s)
    stats = engine.stats()
    assert stats.committed_tokens / stats.verify_passes > 4  # a wrong feature would show here only


def test_bundled_models_in_bfloat16_differ_only_at_near_ties() -> None:
    engine, reference, s = bundled("bfloat16", "cuda"), Reference(MODELS / "target"), Sampling(max_new_tokens=160)
    for prompt in map(encode, TASKS):
        plain, tree = (engine.generate([prompt], s, m)[0].token_ids for m in (SpecMode.OFF, SpecMode.TREE))
        for i, (a, b) in enumerate(zip(plain, tree, strict=False)):
            if a != b:
                logits = reference.logits([*prompt, *plain[:i]])[-1]
                assert abs(float(logits[a] - logits[b])) < 0.5, f"token {i}"
                break
    stats = engine.stats()
    assert stats.cuda_graph
    assert stats.committed_tokens / stats.verify_passes > 4
