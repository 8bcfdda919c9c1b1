"""A reference that is not there is never taken for a fault of the engine it should have scored."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ddops import inventory, proof
from tests.ddops.foreign_fake import PlainServer, VllmServer, served
from tests.ddops.prove_fake import FakeEngine


def agent(reference: str) -> Any:
    text = (
        "version: 1\nhosts:\n"
        f"  h: {{address: 10.0.0.1, prove: {{reference: '{reference}'}}, "
        "engine: {release: r1, model: models/target, drafter: models/drafter-b16}}\n"
        "  other: {address: 127.0.0.1, ssh: {port: 1, connect_timeout_seconds: 1}, "
        "engine: {release: r1, model: models/target, drafter: models/drafter-b16}}\n"
    )
    hosts = inventory.load(text, "test.yaml").hosts
    warned: list[str] = []
    return SimpleNamespace(config=hosts["h"], hosts=hosts, warn=warned.append, warned=warned)


@pytest.mark.parametrize("reference", ["http://127.0.0.1:1", "other"])
def test_a_dead_reference_is_named_and_what_only_it_can_score_is_not_scored(reference: str) -> None:
    asked = agent(reference)
    with proof.reference(asked) as scorer:
        assert scorer is None
    assert len(asked.warned) == 1
    assert reference in asked.warned[0]


def test_a_reference_is_asked_in_the_way_that_it_speaks() -> None:
    with served(VllmServer()) as url:
        asked = agent(f"{url}/v1")
        with proof.reference(asked) as scorer:
            assert scorer is not None
            assert scorer.dialect.kind == "vllm"  # though the host's own engine is another one
            assert scorer.score([100, 101, 102], 1).tokens
    assert asked.warned == []


@pytest.mark.parametrize("server", [VllmServer(api_key="x"), PlainServer(models=("a", "b"))])
def test_a_reference_that_cannot_be_asked_is_named_with_the_reason(server: FakeEngine) -> None:
    with served(server) as url:
        asked = agent(url)
        with proof.reference(asked) as scorer:
            assert scorer is None
    [warning] = asked.warned
    assert "wants an API key" in warning or "serves a, b" in warning


def test_a_reference_at_the_address_of_the_proven_engine_is_named_and_not_asked() -> None:
    asked = agent("http://10.0.0.1:30000/v1")
    with proof.reference(asked) as scorer:
        assert scorer is None
    [warning] = asked.warned
    assert "is the engine that is proven" in warning
