"""The tables of `ddops status` and `ddops history`: plain data in, aligned text out. Pure.

Why a host is unknown is not said here: the commands say it in full, on stderr.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ddops.report.text import columns, mapping, one_line, sequence, settings_text

Row = Mapping[str, Any]


def status_table(rows: Sequence[Row]) -> str:
    """One line a host, then what else there is to know about it (drift, lease, open trial, notes)."""
    head = ["HOST", "UNIT", "STATE", "SETTINGS", "CONFIGURATION"]
    lines = columns([head, *(_status(row) for row in rows)])
    remarks = [f"{one_line(row.get('host', ''))}: {remark}" for row in rows for remark in _remarks(row)]
    return "\n".join([*lines, *([""] if remarks else []), *remarks])


def _status(row: Row) -> list[str]:
    host = str(row.get("host", ""))
    if row.get("error"):
        return [host, "?", "unknown", "", ""]
    return [
        host,
        str(row.get("unit", "")),
        str(row.get("verification") or ("verified" if row.get("verified") else "unverified")),
        settings_text(row.get("settings")),
        str(row.get("digest", ""))[:12],
    ]


def _remarks(row: Row) -> Iterable[str]:
    drift = row.get("drift")
    for text in [drift] if isinstance(drift, str) else sequence(drift):
        if text:
            yield f"drift: {one_line(text, 600)}"
    if restarts := row.get("n_restarts"):
        yield f"restarted {restarts} times by systemd since it was started"
    if lease := mapping(row.get("lease")):
        left = lease.get("expires_in_seconds")
        until = f", expires in {left:.0f} s" if isinstance(left, (int, float)) else ""
        yield f"held by {one_line(lease.get('holder', '?'))} (run {one_line(lease.get('run', '?'))}{until})"
    if trial := mapping(row.get("trial")):
        left = trial.get("guard_in_seconds")
        when = f", its guard undoes it in {max(0.0, left):.0f} s" if isinstance(left, (int, float)) else ""
        yield f"open trial {str(trial.get('digest', ''))[:12]} of run {one_line(trial.get('run', '?'))}{when}"
    for note in sequence(row.get("notes")):
        yield one_line(note, 600)


def history_table(rows: Sequence[Row]) -> str:
    """The ledgers' entries, oldest first, host by host."""
    head = ["HOST", "TIME", "ENTRY", "CONFIGURATION", "SETTINGS", "VERDICT", "BY", "WHY"]
    cells = [head]
    remarks = []
    for row in rows:
        host = str(row.get("host", ""))
        if row.get("error"):
            remarks.append(f"{one_line(host)}: unknown")
            continue
        entries = [mapping(entry) for entry in sequence(row.get("entries"))]
        cells += [_entry(host, entry) for entry in entries]
        if not entries:
            remarks.append(f"{one_line(host)}: no history")
    lines = columns(cells) if len(cells) > 1 else []
    return "\n".join([*lines, *([""] if lines and remarks else []), *remarks])


def _entry(host: str, entry: Row) -> list[str]:
    return [
        host,
        str(entry.get("time", ""))[:19].replace("T", " "),
        str(entry.get("kind", "")),
        str(entry.get("digest", ""))[:12],
        settings_text(entry.get("settings")),
        str(mapping(entry.get("verdict")).get("kind", "")),
        str(entry.get("by", "")),
        one_line(entry.get("why", ""), 120),
    ]
