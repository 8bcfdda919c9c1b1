"""A fleet's memory: every key apart, the latest word first, evidence beside it."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from ddops import known
from ddops.state import Entry, Kind

KEY = {"arch": "sm_103", "driver": "590.1", "engine": "ddtree", "algorithm": "DDTREE", "budget": 32, "max_running": 16}
GOOD = Entry(Kind.CONFIRMED, "r1", "2026-01-01T00:00:00Z", "d1", key=KEY, verdict={"kind": "pass", "why": "15 passed"})
BAD = Entry(Kind.FAILED, "r2", "2026-01-02T00:00:00Z", "d1", key=KEY, verdict={"kind": "corrupt", "why": "coding: 0/5"})


def test_hosts_with_the_same_key_are_one_memory() -> None:
    (memory,) = known.merge({"a": [GOOD], "b": [BAD]})
    assert (memory.good, memory.bad, memory.hosts, memory.last) == (1, 1, ["a", "b"], "bad")
    assert "coding: 0/5" in known.line(memory)


def test_a_neighbouring_budget_or_architecture_is_another_memory() -> None:
    others = [replace(BAD, key=KEY | {"budget": 31}), replace(BAD, key=KEY | {"arch": "sm_120"})]
    assert len(known.merge({"a": [GOOD, *others]})) == 3


def test_what_says_nothing_of_the_configuration_is_no_memory() -> None:
    unsure = replace(BAD, verdict={"kind": "inconclusive"})
    environment = replace(BAD, extra={"environment": True})
    attempt = replace(GOOD, kind=Kind.ATTEMPT)
    assert known.merge({"a": [unsure, environment, attempt, replace(GOOD, key={})]}) == []


@given(st.permutations([("a", GOOD), ("b", BAD), ("c", replace(GOOD, time="2026-01-03T00:00:00Z"))]))
def test_the_latest_word_counts_whatever_host_is_asked_first(order: list[tuple[str, Entry]]) -> None:
    (memory,) = known.merge({host: [entry] for host, entry in order})
    assert memory.last == "good"
    assert memory.when == "2026-01-03T00:00:00Z"
