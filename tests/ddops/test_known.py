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
    assert (memory.counts, memory.hosts, memory.last) == ({"good": 1, "bad": 1, "degraded": 0}, ["a", "b"], "bad")
    assert "coding: 0/5" in known.lines([memory])[0]


def test_a_neighbouring_budget_or_architecture_is_another_memory() -> None:
    others = [replace(BAD, key=KEY | {"budget": 31}), replace(BAD, key=KEY | {"arch": "sm_120"})]
    assert len(known.merge({"a": [GOOD, *others]})) == 3


def test_what_says_nothing_of_the_configuration_is_no_memory() -> None:
    unsure = replace(BAD, verdict={"kind": "inconclusive"})
    environment = replace(BAD, extra={"environment": True})
    attempt = replace(GOOD, kind=Kind.ATTEMPT)
    assert known.merge({"a": [unsure, environment, attempt, replace(GOOD, key={})]}) == []


def test_a_configuration_that_was_undone_for_being_slower_is_remembered_as_that() -> None:
    slow = replace(BAD, verdict={"kind": "degraded", "why": "throughput: 0.4 of before"}, time="2026-01-03T00:00:00Z")
    (memory,) = known.merge({"a": [GOOD, slow]})
    assert (memory.counts["degraded"], memory.last) == (1, "degraded")
    (told,) = known.lines([memory])
    assert told.startswith("degraded  ")
    assert "1 good, 1 degraded on a" in told
    assert "throughput: 0.4 of before" in told


def test_memories_that_would_read_the_same_say_in_what_they_differ() -> None:
    plain = replace(GOOD, key=KEY | {"extra_args": [], "target": "m1"})
    other = replace(GOOD, key=KEY | {"extra_args": ["--dtype", "bf 16"], "target": "m1"})
    built = replace(GOOD, key=KEY | {"extra_args": [], "target": "m1", "build": "b" * 64})
    far = replace(GOOD, key=KEY | {"extra_args": ["--x"], "budget": 31})
    memories = known.merge({"a": [plain, other, built, far]})
    by_args = {memory.key.get("build", "") + " ".join(memory.key["extra_args"]): line
               for memory, line in zip(memories, known.lines(memories), strict=True)}  # fmt: skip
    assert "(build not known; extra_args none)" in by_args[""]
    assert "(build not known; extra_args --dtype 'bf 16')" in by_args["--dtype bf 16"]
    assert f"(build {'b' * 40}; extra_args none)" in by_args["b" * 64]
    assert "extra_args" not in by_args["--x"]
    assert len(set(known.lines(memories))) == 4


@given(st.permutations([("a", GOOD), ("b", BAD), ("c", replace(GOOD, time="2026-01-03T00:00:00Z"))]))
def test_the_latest_word_counts_whatever_host_is_asked_first(order: list[tuple[str, Entry]]) -> None:
    (memory,) = known.merge({host: [entry] for host, entry in order})
    assert memory.last == "good"
    assert memory.when == "2026-01-03T00:00:00Z"
