"""Every fault that `make detect` switches on is one the engine has."""

from __future__ import annotations

import pytest
from ddtree_engine.faults import parse_fault

from ddops.prove.detection_table import CASES, rare


@pytest.mark.parametrize("case", [*CASES, *rare("quick"), *rare("standard")])
def test_the_engine_knows_the_fault(case: str) -> None:
    assert parse_fault(case)


def test_no_case_is_there_twice() -> None:
    assert len(set(CASES)) == len(CASES)
