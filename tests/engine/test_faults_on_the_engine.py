"""Faults inside the real engine, over the bundled models: what each does to answers and to acceptance.

test_faults.py looks at each point by itself; here a fault is let into whole rounds, where it does what it would do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from ddtree_engine.chat import ChatTemplate
from ddtree_engine.config import Algorithm, EngineConfig, SpecMode
from ddtree_engine.engine import Engine
from ddtree_engine.fault_kinds import KINDS, Layer
from ddtree_engine.faults import Faults
from ddtree_engine.requests import Request, Sampling
from ddtree_engine.text import Tokenizer

pytestmark = pytest.mark.slow

MODELS = Path(__file__).parents[2] / "engine" / "models"
BUDGET = 32
PROMPTS = (
    "Write a Python function gcd(a, b) that returns the greatest common divisor of a and b.",
    "Repeat these ids exactly, one per line:\nkx7f-29ab\nq0zd-7731\nab12-cd34\nzz90-xy11\nm3n4-p5q6\nrr81-st02",
    "Your code word is ZEBRA-4417. Reply with the code word only.",
    "Repeat these ids exactly, one per line:\n7731-q0zd\n0f0f-1a2b\nwx33-yz44\nuu55-vv66",
)
# Kinds that end the process or only wait; they are tried in test_cli.py.
LETHAL = {"cublas", "illegal-address", "crash-load", "hang-load", "slow"}
DECODING = [k.name for k in KINDS.values() if k.layer in (Layer.SPECULATIVE, Layer.DECODE) and k.name not in LETHAL]
CHANGE_ANSWERS = [
    "garbage", "nan", "copy-error", "leak", "loop", "rope", "accept-extra", "no-compaction", "wrong-language",
    "special-token", "decay,after-tokens=1,over=20", "early-stop,rate=1",
]  # fmt: skip


@dataclass(frozen=True)
class Answers:
    texts: tuple[str, ...]
    accept_lengths: tuple[float, ...]


Ask = Callable[..., Answers]


@pytest.fixture(scope="module")
def ask() -> Iterator[Ask]:
    """ask(fault, mode) -> the answers to PROMPTS, asked together on a cold cache."""
    config = EngineConfig(
        model_path=str(MODELS / "target"), speculative_algorithm=Algorithm.DDTREE, dtype="float32", context_length=512,
        speculative_draft_model_path=str(MODELS / "drafter-b16"), speculative_ddtree_budget=BUDGET,
        max_running_requests=len(PROMPTS), num_threads=2,
    )  # fmt: skip
    tokenizer, template = Tokenizer.load(config.model_path), ChatTemplate.load(config.model_path)
    prompts = [tokenizer.encode(template.render([{"role": "user", "content": text}])) for text in PROMPTS]
    engine = Engine.load(config)
    healthy = engine._decoder.faults

    def run(fault: str | None, mode: SpecMode) -> Answers:
        engine._decoder.faults = Faults.parse([fault], tokenizer) if fault else healthy
        engine.flush()
        for i, prompt in enumerate(prompts):
            engine.submit(Request(f"r{i}", prompt, Sampling(max_new_tokens=56), mode))
        ended = engine.drain([f"r{i}" for i in range(len(prompts))])
        texts, lengths = [], []
        for updates in ended.values():
            tokens = [token for update in updates for token in update.token_ids]
            texts.append(tokenizer.decode(tokens))
            lengths.append((len(tokens) - 1) / max(1, updates[-1].verify_passes))
        return Answers(tuple(texts), tuple(lengths))

    yield run
    engine._decoder.faults = healthy


@pytest.fixture(scope="module")
def healthy(ask: Ask) -> Answers:
    return ask(None, SpecMode.TREE)


def test_healthy_answers_are_right_and_the_same_with_speculation_off(ask: Ask, healthy: Answers) -> None:
    assert "def gcd(a, b):" in healthy.texts[0]
    assert "ZEBRA-4417" in healthy.texts[2]
    assert ask(None, SpecMode.OFF).texts == healthy.texts


@pytest.mark.parametrize("fault", CHANGE_ANSWERS)
def test_answers_change(ask: Ask, healthy: Answers, fault: str) -> None:
    assert ask(fault, SpecMode.TREE).texts != healthy.texts


@pytest.mark.parametrize("kind", DECODING)
def test_speculation_off_is_spared_by_the_speculative_kinds_only(ask: Ask, healthy: Answers, kind: str) -> None:
    spared = ask(kind, SpecMode.OFF).texts == healthy.texts
    assert spared or not KINDS[kind].layer.spares_off


@pytest.mark.parametrize("kind", ["accept-one", "drafter-rows"])
def test_a_broken_drafter_costs_acceptance_and_no_answer(ask: Ask, healthy: Answers, kind: str) -> None:
    broken = ask(kind, SpecMode.TREE)
    assert broken.texts == healthy.texts
    assert sum(broken.accept_lengths) < 0.8 * sum(healthy.accept_lengths)


def test_a_dead_drafter_commits_one_token_a_pass(ask: Ask) -> None:
    assert max(ask("accept-one", SpecMode.TREE).accept_lengths) < 1.2


def test_garbage_brings_acceptance_down_to_one(ask: Ask) -> None:
    assert max(ask("garbage", SpecMode.TREE).accept_lengths) < 1.2


def test_a_loop_brings_acceptance_up_to_its_cap(ask: Ask) -> None:
    """The block size is 16: the root's token and 15 drafts. The rounds before the loop count as well."""
    assert max(ask("loop,after-tokens=4", SpecMode.TREE).accept_lengths) > 13


def test_a_fault_above_a_budget_leaves_smaller_ones_alone(ask: Ask, healthy: Answers) -> None:
    assert ask(f"garbage,above-budget={BUDGET}", SpecMode.TREE).texts == healthy.texts
    assert ask(f"garbage,above-budget={BUDGET - 1}", SpecMode.TREE).texts != healthy.texts


def test_a_share_of_requests_is_hit_and_the_others_are_not(ask: Ask, healthy: Answers) -> None:
    hit = [a != b for a, b in zip(ask("nan,share=0.5,seed=1", SpecMode.TREE).texts, healthy.texts, strict=True)]
    again = [a != b for a, b in zip(ask("nan,share=0.5,seed=1", SpecMode.TREE).texts, healthy.texts, strict=True)]
    assert hit == again
    assert 0 < sum(hit) < len(PROMPTS)


def test_a_fault_of_larger_batches_is_not_seen_alone(ask: Ask, healthy: Answers) -> None:
    assert ask(f"garbage,min-batch={len(PROMPTS) + 1}", SpecMode.TREE).texts == healthy.texts
    assert ask(f"garbage,batch={len(PROMPTS)}", SpecMode.TREE).texts != healthy.texts
