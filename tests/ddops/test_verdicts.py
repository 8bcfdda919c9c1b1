"""Evidence to verdict, the printed power, and the trip through JSON. All pure."""

from __future__ import annotations

import ast
import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import ddops.prove
from ddops.prove import power
from ddops.prove.evidence import Baseline, Evidence, Fault, Level, Outcome, Verdict, VerdictKind
from ddops.prove.verdicts import Gates, Policy, decide

P, F, D, N, E = Outcome.PASS, Outcome.FAIL, Outcome.DEGRADED, Outcome.NOT_SCORED, Outcome.ERROR


def evidence(*rows: tuple[str, Outcome] | tuple[str, Outcome, Fault]) -> list[Evidence]:
    return [Evidence(r[0], r[1], fault=r[2] if len(r) > 2 else Fault.NONE, got="seen") for r in rows]


CODING = ("coding", P)
TABLE = {
    "nothing ran": ([], VerdictKind.INCONCLUSIVE),
    "everything was not scored": ([("coding", N), ("rescore", N)], VerdictKind.INCONCLUSIVE),
    "only errors": ([("coding", E)], VerdictKind.INCONCLUSIVE),
    "all good": ([CODING, ("rescore", P)], VerdictKind.PASS),
    "good, the rest not scored": ([CODING, ("rescore", N), ("golden", N)], VerdictKind.PASS),
    "the required probe was not scored": ([("coding", N), ("rescore", P)], VerdictKind.INCONCLUSIVE),
    "wrong output": ([("coding", F, Fault.OUTPUT), ("rescore", P)], VerdictKind.CORRUPT),
    "wrong output in a later probe": ([CODING, ("stream", F, Fault.OUTPUT)], VerdictKind.CORRUPT),
    "a failure of no stated kind is wrong output": ([CODING, ("copy", F)], VerdictKind.CORRUPT),
    "crash": ([CODING, ("served", F, Fault.CRASH)], VerdictKind.CRASHED),
    "crash before anything": ([("served", F, Fault.CRASH)], VerdictKind.CRASHED),
    "crash and wrong output": ([("coding", F, Fault.OUTPUT), ("served", F, Fault.CRASH)], VerdictKind.CRASHED),
    "a call that crashed a probe": ([CODING, ("rescore", E, Fault.CRASH)], VerdictKind.CRASHED),
    "drafter dead": ([CODING, ("acceptance", D, Fault.SPEED)], VerdictKind.DEGRADED),
    "slower": ([CODING, ("throughput", D, Fault.SPEED)], VerdictKind.DEGRADED),
    "slow and wrong": ([("throughput", D), ("coding", F, Fault.OUTPUT)], VerdictKind.CORRUPT),
    "slow and open": ([CODING, ("throughput", D), ("copy", E)], VerdictKind.INCONCLUSIVE),
    "detector contradicts itself": ([CODING, ("rescore", E, Fault.DETECTOR)], VerdictKind.INCONCLUSIVE),
    "a detector fault never counts as a pass": ([("coding", P, Fault.DETECTOR)], VerdictKind.INCONCLUSIVE),
    "only a detector fault": ([("rescore", E, Fault.DETECTOR)], VerdictKind.INCONCLUSIVE),
    "detector fault, but another saw it": (
        [("coding", F, Fault.OUTPUT), ("rescore", E, Fault.DETECTOR)], VerdictKind.CORRUPT,
    ),
    "another unit runs": ([("applied", F, Fault.IDENTITY), CODING], VerdictKind.INCONCLUSIVE),
    "another unit runs and it is wrong": (
        [("applied", F, Fault.IDENTITY), ("coding", F, Fault.OUTPUT)], VerdictKind.CORRUPT,
    ),
    "one finding stays open": ([CODING, ("isolation", E)], VerdictKind.INCONCLUSIVE),
}  # fmt: skip


@pytest.mark.parametrize("case", TABLE)
def test_verdict_follows_from_the_evidence(case: str) -> None:
    rows, expected = TABLE[case]
    kind, why = decide(evidence(*rows), Policy())
    assert kind is expected
    assert why


outcomes = st.lists(
    st.builds(
        lambda probe, outcome, fault: Evidence(probe, outcome, fault=fault),
        st.sampled_from(["coding", "rescore", "copy", "served"]),
        st.sampled_from(list(Outcome)),
        st.sampled_from(list(Fault)),
    ),
    max_size=8,
)


@given(outcomes)
def test_pass_means_that_something_passed_and_nothing_else_happened(found: list[Evidence]) -> None:
    kind, _ = decide(found, Policy(require=()))
    if kind is VerdictKind.PASS:
        assert any(e.outcome is P for e in found)
        assert all(e.outcome in (P, N) and e.fault is not Fault.DETECTOR for e in found)


@given(outcomes)
def test_order_of_evidence_does_not_change_the_verdict(found: list[Evidence]) -> None:
    assert decide(found, Policy())[0] is decide(found[::-1], Policy())[0]


@given(outcomes, st.sampled_from(["coding", "rescore"]))
def test_more_not_scored_never_improves_a_verdict(found: list[Evidence], probe: str) -> None:
    before, _ = decide(found, Policy())
    after, _ = decide([*found, Evidence(probe, N)], Policy())
    assert after is before


def test_a_pass_names_what_was_not_scored() -> None:
    _, why = decide(evidence(CODING, ("rescore", N)), Policy())
    assert "not scored: rescore" in why


# ---- JSON

text = st.text(max_size=20)
values = st.dictionaries(text, st.floats(allow_nan=False, allow_infinity=False) | st.integers(-9, 9), max_size=3)
plain = st.recursive(
    st.none() | st.booleans() | st.integers() | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=5,
)
some_evidence = st.builds(
    Evidence, probe=text, outcome=st.sampled_from(list(Outcome)), expected=text, got=text, threshold=text,
    sample=st.integers(0, 10**6), seconds=st.floats(0, 1e6), detail=text, fault=st.sampled_from(list(Fault)),
    values=values, replay=st.lists(st.dictionaries(text, plain, max_size=3), max_size=2).map(tuple),
)  # fmt: skip
verdicts = st.builds(
    Verdict, kind=st.sampled_from(list(VerdictKind)), evidence=st.lists(some_evidence, max_size=3).map(tuple),
    level=st.sampled_from(list(Level)), seconds=st.floats(0, 1e6), power=text, why=text, digest=text, invocation=text,
    policy=st.dictionaries(text, plain, max_size=3),
)  # fmt: skip


@given(verdicts)
def test_verdict_survives_a_trip_through_json(verdict: Verdict) -> None:
    assert Verdict.from_json(verdict.to_json()) == verdict


@given(verdicts)
def test_ledger_form_leaves_replies_out_and_keeps_the_rest(verdict: Verdict) -> None:
    short = Verdict.from_dict(json.loads(verdict.to_json(replay=False)))
    assert all(e.replay == () for e in short.evidence)
    assert [e.probe for e in short.evidence] == [e.probe for e in verdict.evidence]


GOOD = Verdict(VerdictKind.PASS, (Evidence("coding", P),)).to_dict()


@pytest.mark.parametrize(
    "broken",
    [
        {"v": 2}, {"kind": "fine"}, {"kind": None}, {"surprise": 1}, {"evidence": {}}, {"evidence": [1]},
        {"seconds": "x"},
        {"evidence": [{"probe": "coding"}]}, {"evidence": [{"probe": "c", "outcome": "ok"}]}, {"level": "slow"},
        {"evidence": [{"probe": 1, "outcome": "pass"}]},
        {"evidence": [{"probe": "c", "outcome": "pass", "values": {"a": "b"}}]},
        {"evidence": [{"probe": "c", "outcome": "pass", "sample": 1.5}]}, {"policy": []},
    ],
)  # fmt: skip
def test_anything_else_is_refused(broken: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        Verdict.from_dict(GOOD | broken)


def test_verdict_is_void_for_another_unit_or_start() -> None:
    verdict = Verdict(VerdictKind.PASS, digest="d", invocation="i")
    assert verdict.about("d", "i")
    assert not verdict.about("e", "i")
    assert not verdict.about("d", "j")
    assert not Verdict(VerdictKind.PASS).about("", "")


def test_baseline_takes_only_measurements() -> None:
    rows = (
        Evidence("throughput", P, values={"throughput": 300.0}),
        Evidence("acceptance", D, values={"acceptance": 1.5}),
        Evidence("coding", E, values={"coding_tokens_per_second": 1.0}),
    )
    baseline = Baseline.of(Verdict(VerdictKind.DEGRADED, rows, digest="d"))
    assert baseline.get("throughput") == 300
    assert baseline.get("acceptance") == 1.5
    assert baseline.get("coding_tokens_per_second") is None
    assert Baseline({"x": 0.0}).get("x") is None


def test_policy_is_printed_in_full() -> None:
    assert Policy(gates=Gates(coding=0.8)).to_dict()["gates"]["coding"] == 0.8


# ---- power


def test_the_printed_sentence_is_the_textbook_one() -> None:
    line = power.sentence(640, power.Sensitivity("rescore", 1.0, measured=True))
    claim = "no divergence in 640 replies on this boot: rules out, at 95 %, faults that show in more than 0.47 %"
    assert line.startswith(claim)
    assert "one boot is a sample of one" in line


@given(st.integers(1, 100000), st.floats(0.01, 1.0))
def test_the_claim_is_what_the_binomial_allows(replies: int, sensitivity: float) -> None:
    share = power.smallest_share(replies, sensitivity)
    if share < 1:
        assert (1 - share * sensitivity) ** replies <= 0.05 * (1 + 1e-6)
        assert power.replies_needed(share, sensitivity) <= replies + 1


@given(st.floats(1e-4, 0.9), st.floats(0.05, 1.0))
def test_needed_replies_suffice_and_one_less_does_not(share: float, sensitivity: float) -> None:
    n = power.replies_needed(share, sensitivity)
    assert (1 - share * sensitivity) ** n <= 0.05 * (1 + 1e-9)
    assert n == 1 or (1 - share * sensitivity) ** (n - 1) > 0.05 * (1 - 1e-9)


@given(st.integers(1, 10**6), st.floats(0.01, 1.0))
def test_printed_percentages_never_promise_too_much(replies: int, sensitivity: float) -> None:
    share = power.smallest_share(replies, sensitivity)
    assert float(power.percent(share).removesuffix(" %")) >= share * 100 * (1 - 1e-9)


def test_a_run_without_scored_replies_rules_nothing_out() -> None:
    assert "nothing is ruled out" in power.sentence(0, power.Sensitivity("rescore", 1.0, measured=True))
    assert power.smallest_share(0) == 1.0


def test_assumed_sensitivities_are_called_assumed() -> None:
    table = power.load_sensitivities()
    assert set(table) >= {"rescore", "modes", "golden", "coding", "copy", "stream"}
    for entry in table.values():
        word = "measured" if entry.measured else "assumed"
        assert f"{word} sensitivity" in power.sentence(100, entry)


@pytest.mark.parametrize("bad", [0.0, -0.1, 1.1, math.nan])
def test_shares_outside_zero_and_one_are_refused(bad: float) -> None:
    with pytest.raises(ValueError):
        power.replies_needed(bad)
    with pytest.raises(ValueError):
        power.smallest_share(10, bad)


# ---- purity

PURE = ("evidence", "verdicts", "power", "alarms", "answers", "copying", "isolation", "problems", "prompts", "scores",
        "dialects", "applied", "wire")  # fmt: skip
EFFECTS = {"httpx", "subprocess", "socket", "time", "threading", "wasmtime", "fabric", "paramiko", "requests", "os"}


@pytest.mark.parametrize("name", PURE)
def test_pure_modules_import_no_effects(name: str) -> None:
    tree = ast.parse((Path(ddops.prove.__file__).parent / f"{name}.py").read_text("utf-8"))
    found = {a.name.split(".")[0] for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    found |= {(n.module or "").split(".")[0] for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    assert not found & EFFECTS
    modules = {n.module or "" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    assert {m for m in modules if m.startswith("ddops.prove.")} <= {f"ddops.prove.{m}" for m in PURE}
