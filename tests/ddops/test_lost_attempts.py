"""An attempt that nothing says the end of: what the ledger and /etc tell of a trial that a boot swept away."""

from __future__ import annotations

import hashlib

import pytest

from ddops import plan
from ddops.state import Entry, Kind, Observed, Trial, UnitState

NEW, OLD = b"[Service]\nExecStart=/new\n", b"[Service]\nExecStart=/old\n"


def _entry(kind: Kind, run: str, text: bytes = NEW) -> Entry:
    return Entry(kind, run, "2026-01-01T00:00:00Z", hashlib.sha256(text).hexdigest())


def _observed(*ledger: Entry, etc: bytes = OLD, open_run: str = "") -> Observed:
    trial = Trial(open_run, "", "", "", 5.0, open=True) if open_run else None
    return Observed("h", "b", 1.0, 252, UnitState(), etc, None, (), tuple(ledger), trial=trial)


def test_an_attempt_without_an_end_is_lost() -> None:
    lost = plan.lost_attempt(_observed(_entry(Kind.CONFIRMED, "r0", OLD), _entry(Kind.ATTEMPT, "r1")))
    assert lost is not None
    assert lost.run == "r1"


@pytest.mark.parametrize("end", [Kind.CONFIRMED, Kind.UNDONE])
def test_an_attempt_with_an_end_is_not(end: Kind) -> None:
    assert plan.lost_attempt(_observed(_entry(Kind.ATTEMPT, "r1"), _entry(end, "r1"))) is None


def test_a_proof_counts_as_an_end_only_when_its_unit_has_reached_etc() -> None:
    ledger = (_entry(Kind.ATTEMPT, "r1"), _entry(Kind.PROVEN, "r1"))
    assert plan.lost_attempt(_observed(*ledger, etc=NEW)) is None
    assert plan.lost_attempt(_observed(*ledger, etc=OLD)) is not None


def test_an_open_trial_and_an_empty_ledger_have_lost_nothing() -> None:
    assert plan.lost_attempt(_observed(_entry(Kind.ATTEMPT, "r1"), open_run="r1")) is None
    assert plan.lost_attempt(_observed()) is None
