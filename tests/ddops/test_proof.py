"""A reference that is not there is never taken for a fault of the engine it should have scored."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ddops import inventory, proof


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
