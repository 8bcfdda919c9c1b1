"""The fake engine used by the battery's tests: it answers rightly, scores honestly, and each lie does what it says."""

from __future__ import annotations

import random

import pytest

from ddops.prove import prompts
from ddops.prove.client import EngineClient
from ddops.prove.coding import Job, judge
from ddops.prove.problems import BY_NAME
from ddops.prove.prompts import Maker
from ddops.prove.wire import Ask
from tests.ddops.prove_fake import SOLUTIONS, FakeEngine, Lies


def reply_to(prompt: str, **lies: object) -> str:
    engine = FakeEngine(Lies(**lies))  # type: ignore[arg-type]
    return EngineClient(engine.client(), "ddtree").ask(Ask.user(prompt, max_tokens=600)).text


def test_it_has_a_right_solution_for_every_problem() -> None:
    assert set(SOLUTIONS) == set(BY_NAME)
    found = judge([Job(SOLUTIONS[name], (problem,)) for name, problem in BY_NAME.items()], random.Random(2))
    assert all(check.ok for check in found)


def test_it_answers_every_curated_prompt_rightly() -> None:
    for item in Maker(random.Random(3)).mixed(30):
        reply = EngineClient(FakeEngine().client(), "ddtree").ask(Ask(messages=item.messages, max_tokens=600))
        found = prompts.check(item, reply.text)
        assert found is None or found.ok, item


@pytest.mark.parametrize("kind", ["garbage", "typo", "loop", "empty", "special", "script"])
def test_each_lie_changes_the_answer_and_off_tells_the_truth(kind: str) -> None:
    prompt = BY_NAME["fib"].prompt
    truth = reply_to(prompt)
    assert reply_to(prompt, kind=kind) != truth
    engine = FakeEngine(Lies(kind=kind))
    assert EngineClient(engine.client(), "ddtree").ask(Ask.user(prompt, max_tokens=600, mode="off")).text == truth


def test_sampling_is_keyed_by_the_seed() -> None:
    client = EngineClient(FakeEngine().client(), "ddtree")
    asks = [Ask.user(BY_NAME["fib"].prompt, temperature=0.7, seed=s, max_tokens=600) for s in (1, 1, 2, 3, 4)]
    texts = [client.ask(a).text for a in asks]
    assert texts[0] == texts[1]
    assert len(set(texts)) > 1
