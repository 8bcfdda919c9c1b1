"""The detection table says what was measured: misses as misses, and a bound on false alarms for the boots there were."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddops.prove import detection_table as table
from ddops.prove.detection_table import HEALTHY, Boot
from ddops.prove.evidence import Evidence, Fault, Outcome, Verdict, VerdictKind

CAUGHT = Boot("garbage", "quick", "corrupt", 6.0, ("coding", "rescore"), "coding: 0/5", {"coding": (5, 5), "rescore": (8, 10)})
MISSED = Boot("mask", "quick", "pass", 30.0, (), "15 probes passed", {"coding": (0, 5)})
CLEAN = Boot(HEALTHY, "quick", "pass", 20.0, (), "15 probes passed")


@pytest.mark.parametrize(
    ("got", "counts"),
    [
        ("3/5 passed, 301.2 tok/s avg", (2, 5)),
        ("7/7 right, batches up to 4 in flight of 4, 0 cancelled", (0, 7)),
        ("1135 tokens of 14 replies, worst gap 45 nat, 0 near ties, 10 over", (10, 14)),
        ("8.55 tokens a pass", None),
        ("", None),
    ],
)
def test_counts_are_read_from_what_a_probe_says(got: str, counts: tuple[int, int] | None) -> None:
    assert table.counted(got) == counts


def test_a_verdict_becomes_a_boot_with_the_probes_that_found_something() -> None:
    evidence = (
        Evidence("coding", Outcome.FAIL, got="0/5 passed", fault=Fault.OUTPUT),
        Evidence("acceptance", Outcome.DEGRADED, got="1.0 tokens a pass"),
        Evidence("copy", Outcome.PASS, got="2/2 right"),
    )
    boot = table.boot_of("garbage", "quick", Verdict(VerdictKind.CORRUPT, evidence, why="coding: 0/5 passed"), 3.0)
    assert boot.by == ("coding", "acceptance")
    assert boot.flagged == {"coding": (5, 5), "copy": (0, 2)}
    assert Boot.from_dict(boot.to_dict()) == boot


def test_the_page_names_what_was_missed_and_bounds_false_alarms() -> None:
    text = table.page([CAUGHT, MISSED, CLEAN, CLEAN], "a machine")
    assert "| garbage | 1 of 1 | corrupt 1 | coding 1, rescore 1 | 6 |" in text
    assert "- mask (quick): 1 of 1" in text
    assert "0 of 2 healthy boots" in text
    assert "| coding | 50% | 2 |" in text


def test_measured_sensitivities_replace_assumed_ones_and_no_others() -> None:
    assumed = {"about": "x", "probes": {name: {"sensitivity": 0.5, "measured": False} for name in ("coding", "copy")}}
    found = table.measured([CAUGHT, MISSED], assumed)
    assert found["probes"]["coding"] == {"sensitivity": 0.5, "measured": True, "boots": 2}
    assert found["probes"]["copy"] == {"sensitivity": 0.5, "measured": False}
    assert "rescore" not in found["probes"]


def test_no_false_alarm_in_200_bounds_the_rate_at_one_and_a_half_percent() -> None:
    assert table.upper_bound(0, 200) == pytest.approx(0.0149, abs=1e-4)


@given(st.integers(0, 30), st.integers(1, 60))
def test_a_bound_is_above_the_rate_and_falls_with_more_boots(hits: int, more: int) -> None:
    trials = hits + more
    bound = table.upper_bound(hits, trials)
    assert hits / trials <= bound <= 1
    assert table.upper_bound(hits, trials + 10) <= bound
