"""Several hosts: order, limits and the exit code, as decisions over lists."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddops import rollout
from ddops.errors import Exit
from ddops.inventory import load
from ddops.outcome import Outcome, Result
from ddops.rollout import Continue, Done, Halt, Policy, decide, exit_code


@dataclass(frozen=True)
class Host:
    name: str
    arch: str | None = None


def fleet(*archs: str | None) -> list[Host]:
    return [Host(f"h{index}", arch) for index, arch in enumerate(archs)]


def ended(host: str, result: Result = Result.APPLIED) -> Outcome:
    return Outcome(host, result, "")


def play(hosts: list[Host], results: dict[str, Result], policy: Policy) -> tuple[list[list[str]], Halt | Done]:
    """Carry a run through to its end; every batch ends before the next one is asked for."""
    outcomes: list[Outcome] = []
    batches: list[list[str]] = []
    while isinstance(step := decide(hosts, outcomes, policy), Continue):
        assert step.hosts
        batches.append([host.name for host in step.hosts])
        outcomes += [ended(host.name, results.get(host.name, Result.APPLIED)) for host in step.hosts]
        assert len(batches) <= len(hosts)
    return batches, step


# ---------------------------------------------------------------- order
def test_one_canary_of_each_architecture_goes_alone_and_first() -> None:
    hosts = fleet("sm_90", "sm_90", "sm_103", "sm_103", None)
    batches, step = play(hosts, {}, Policy(batches=(2,)))
    assert batches == [["h0"], ["h2"], ["h4"], ["h1", "h3"]]
    assert isinstance(step, Done)


def test_batches_grow_and_the_last_size_repeats() -> None:
    batches, _ = play(fleet(*[None] * 12), {}, Policy(batches=(1, 2, 4)))
    assert [len(batch) for batch in batches] == [1, 1, 2, 4, 4]


def test_without_canaries_the_batches_start_at_once() -> None:
    batches, _ = play(fleet(None, None, None), {}, Policy(canary=0, batches=(2,)))
    assert batches == [["h0", "h1"], ["h2"]]


def test_a_run_that_is_resumed_goes_on_where_it_was() -> None:
    hosts, policy = fleet(*[None] * 8), Policy(batches=(1, 2, 4))
    batches, _ = play(hosts, {}, policy)
    flat = [name for batch in batches for name in batch]
    for done in range(len(flat)):
        step = decide(hosts, [ended(name) for name in flat[:done]], policy)
        assert isinstance(step, Continue)
        assert step.hosts[0].name == flat[done]


# ---------------------------------------------------------------- limits
def test_the_first_failure_stops_the_run_and_names_who_is_left() -> None:
    batches, step = play(fleet(None, None, None), {"h1": Result.ROLLED_BACK}, Policy())
    assert batches == [["h0"], ["h1"]]
    assert isinstance(step, Halt)
    assert step.left == ("h2",)
    assert "h1" in step.reason


def test_failures_count_over_the_whole_run_and_not_per_batch() -> None:
    results = {"h2": Result.ROLLED_BACK, "h5": Result.INCONCLUSIVE}
    batches, step = play(fleet(*[None] * 9), results, Policy(batches=(2,), max_failed=1))
    assert sum(len(batch) for batch in batches) < 9
    assert isinstance(step, Halt)


def test_unreachable_hosts_are_a_bucket_of_their_own() -> None:
    policy = Policy(max_failed=0, max_unreachable=1)
    away = {"h1": Result.UNKNOWN}
    assert isinstance(play(fleet(*[None] * 4), away, policy)[1], Done)
    assert isinstance(play(fleet(*[None] * 4), away | {"h2": Result.LOCKED}, policy)[1], Halt)
    assert isinstance(play(fleet(*[None] * 4), {"h1": Result.ROLLED_BACK}, policy)[1], Halt)


@pytest.mark.parametrize("result", [Result.RESTORE_FAILED, Result.INTERRUPTED])
def test_a_host_that_needs_a_person_stops_the_run_whatever_the_limits(result: Result) -> None:
    policy = Policy(max_failed=99, max_unreachable=99)
    batches, step = play(fleet(*[None] * 4), {"h1": result}, policy)
    assert batches == [["h0"], ["h1"]]
    assert isinstance(step, Halt)


def test_a_failed_canary_ends_its_architecture_even_where_failures_are_tolerated() -> None:
    hosts = fleet("sm_90", "sm_90", "sm_103", "sm_103")
    batches, step = play(hosts, {"h0": Result.ROLLED_BACK}, Policy(max_failed=9))
    assert [name for batch in batches for name in batch] == ["h0", "h2", "h3"]
    assert isinstance(step, Halt)
    assert step.left == ("h1",)
    assert "canary h0" in step.reason


def test_when_every_host_has_had_its_turn_the_run_is_done_even_if_limits_are_passed() -> None:
    assert isinstance(play(fleet(None), {"h0": Result.ROLLED_BACK}, Policy())[1], Done)


# ---------------------------------------------------------------- any run at all
hosts_any = st.lists(st.sampled_from(["sm_90", "sm_103", None]), min_size=1, max_size=20).map(lambda a: fleet(*a))
policies = st.builds(
    Policy,
    canary=st.integers(0, 3),
    batches=st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple),
    max_failed=st.integers(0, 4),
    max_unreachable=st.integers(0, 4),
)
results_any = st.dictionaries(st.integers(0, 19).map(lambda n: f"h{n}"), st.sampled_from(list(Result)), max_size=20)
FAILED = (Result.ROLLED_BACK, Result.INCONCLUSIVE, Result.NOT_PROVEN, Result.REFUSED, Result.HOST_KEY)
AWAY = (Result.UNKNOWN, Result.LOCKED)


@given(hosts_any, results_any, policies)
def test_every_host_has_its_turn_at_most_once_and_the_run_ends(
    hosts: list[Host], results: dict[str, Result], policy: Policy
) -> None:
    batches, step = play(hosts, results, policy)
    flat = [name for batch in batches for name in batch]
    assert len(flat) == len(set(flat))
    left = step.left if isinstance(step, Halt) else ()
    assert {*flat, *left} == {host.name for host in hosts}


@given(hosts_any, results_any, policies)
def test_never_more_hosts_at_once_than_the_policy_allows(hosts: list[Host], results: dict[str, Result], policy: Policy) -> None:
    batches, _ = play(hosts, results, policy)
    assert all(len(batch) <= policy.at_most for batch in batches)
    canaries = {f"h{i}" for i, h in enumerate(hosts) if [x.arch for x in hosts[:i]].count(h.arch) < policy.canary}
    assert all(len(batch) == 1 for batch in batches if canaries & set(batch))


@given(hosts_any, results_any, policies)
def test_no_host_is_touched_once_a_limit_is_passed(hosts: list[Host], results: dict[str, Result], policy: Policy) -> None:
    failed = away = 0
    for batch in play(hosts, results, policy)[0]:
        assert failed <= policy.max_failed
        assert away <= policy.max_unreachable
        failed += sum(results.get(name) in FAILED for name in batch)
        away += sum(results.get(name) in AWAY for name in batch)


@given(hosts_any, policies)
def test_with_every_host_well_every_host_has_its_turn(hosts: list[Host], policy: Policy) -> None:
    batches, step = play(hosts, {}, policy)
    assert isinstance(step, Done)
    assert sum(len(batch) for batch in batches) == len(hosts)


@pytest.mark.parametrize(
    "bad", [{"batches": ()}, {"batches": (0,)}, {"canary": -1}, {"max_failed": -1}, {"max_unreachable": -1}]
)
def test_a_policy_without_meaning_is_refused(bad: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"."):
        Policy(**bad)  # type: ignore[arg-type]


def test_the_inventorys_section_becomes_the_policy() -> None:
    text = "version: 1\nrollout: {canary: 2, batch: [1, 3], max_failed: 1}\n"
    text += "hosts: {a: {address: h, engine: {release: r, model: m, drafter: d}}}\n"
    assert rollout.policy(load(text, "f").rollout) == Policy(2, (1, 3), 1, 0)
    assert rollout.policy(load(text.replace("batch: [1, 3]", "batch: 5"), "f").rollout).batches == (5,)
    assert rollout.policy(load(text.replace("batch: [1, 3]", "batch: []"), "f").rollout).batches == (1,)


# ---------------------------------------------------------------- exit codes
R = Result


@pytest.mark.parametrize(
    ("results", "code"),
    [
        ([R.APPLIED], 0),
        ([R.UNCHANGED, R.APPLIED, R.VERIFIED], 0),
        ([R.PLANNED], 0),
        ([R.REFUSED], 3),
        ([R.ROLLED_BACK], 4),
        ([R.ROLLED_BACK, R.ROLLED_BACK], 4),
        ([R.APPLIED, R.ROLLED_BACK], 9),
        ([R.APPLIED, R.REFUSED], 9),
        ([R.UNCHANGED, R.INCONCLUSIVE], 9),
        ([R.RESTORE_FAILED], 5),
        ([R.APPLIED, R.RESTORE_FAILED], 5),
        ([R.ROLLED_BACK, R.UNKNOWN], 6),
        ([R.APPLIED, R.UNKNOWN], 6),
        ([R.UNKNOWN, R.RESTORE_FAILED], 5),
        ([R.LOCKED], 7),
        ([R.HOST_KEY, R.ROLLED_BACK], 8),
        ([R.INCONCLUSIVE], 11),
        ([R.INCONCLUSIVE, R.ROLLED_BACK], 4),
        ([R.APPLIED, R.INTERRUPTED], 130),
        ([], 1),
    ],
)
def test_the_exit_code_of_a_run(results: list[Result], code: int) -> None:
    assert exit_code([ended(f"h{i}", result) for i, result in enumerate(results)]) == code


@given(st.lists(st.sampled_from(list(Result)), max_size=8))
def test_no_run_with_a_host_that_did_not_end_well_exits_0(results: list[Result]) -> None:
    outcomes = [ended(f"h{i}", result) for i, result in enumerate(results)]
    good = bool(outcomes) and all(outcome.exit is Exit.OK for outcome in outcomes)
    assert (exit_code(outcomes) is Exit.OK) is good
    assert exit_code(outcomes) == exit_code(list(reversed(outcomes)))


def test_a_signal_keeps_its_own_code() -> None:
    stopped = Outcome("h0", Result.INTERRUPTED, "", exit_override=Exit.SIGTERM)
    assert exit_code([stopped]) is Exit.SIGTERM


def test_the_summary_counts_and_names_who_is_left() -> None:
    found = rollout.summary(fleet(None, None, None), [ended("h0"), ended("h1", Result.UNKNOWN)])
    assert found.counts == {"applied": 1, "unknown": 1}
    assert found.left == ("h2",)
