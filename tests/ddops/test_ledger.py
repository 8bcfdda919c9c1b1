"""The ledger survives what happens to files, and the host script finds its own lines in it."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from ddops import ledger
from ddops.state import Entry, Kind

_TEXT = st.text(max_size=40)
_JSON: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | _TEXT, lambda inner: st.lists(inner, max_size=3), max_leaves=5
)
_OBJECT = st.dictionaries(_TEXT, _JSON, max_size=3)
ENTRIES = st.builds(
    Entry,
    kind=st.sampled_from(Kind),
    run=_TEXT,
    time=_TEXT,
    digest=_TEXT,
    invocation=_TEXT,
    boot=_TEXT,
    by=_TEXT,
    why=_TEXT,
    settings=_OBJECT,
    key=_OBJECT,
    verdict=_OBJECT,
    extra=_OBJECT,
)


@given(st.lists(ENTRIES, max_size=4))
def test_what_is_written_is_read_back(entries: list[Entry]) -> None:
    text = b"".join(ledger.to_line(entry) + b"\n" for entry in entries)
    assert ledger.parse(text) == (tuple(entries), ())


@given(ENTRIES)
def test_an_entry_is_one_line(entry: Entry) -> None:
    assert len(ledger.to_line(entry).splitlines()) == 1


@given(ENTRIES, st.integers(min_value=1))
def test_a_torn_last_line_is_left_out_and_named(entry: Entry, cut: int) -> None:
    whole = ledger.to_line(entry)
    torn = whole[: 1 + cut % (len(whole) - 1)]
    entries, notes = ledger.parse(whole + b"\n" + torn)
    assert entries == (entry,)
    assert len(notes) == 1
    assert "line 2" in notes[0]


def test_the_host_script_finds_kind_and_run_by_their_text() -> None:
    line = ledger.to_line(Entry(Kind.PROVEN, "20260101-r1", "t", "d")).decode()
    assert '"run":"20260101-r1"' in line
    assert '"kind":"proven"' in line


def test_another_version_is_left_out_and_named() -> None:
    entries, notes = ledger.parse(json.dumps({"v": 99, "kind": "proven"}).encode())
    assert entries == ()
    assert "version 99" in notes[0]


def test_binary_rubbish_is_left_out_and_named() -> None:
    entries, notes = ledger.parse(b"\xff\xfe\x00\n[]\n\n")
    assert entries == ()
    assert len(notes) == 2
