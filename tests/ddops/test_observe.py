"""What the host script prints is read as facts, whatever is missing from it."""

from __future__ import annotations

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddops import observe
from ddops.errors import RemoteFailed


def _b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


FULL = f"""\
boot 0b7f
uptime 123.45
systemd 252
show.LoadState loaded
show.ActiveState active
show.SubState running
show.MainPID 42
show.NRestarts 1
show.InvocationID abc
show.NeedDaemonReload yes
show.StatusText loading weights 41 %
show.DropInPaths /a/b.conf /c/d.conf
etc {_b64(b"[Unit]")}
argv {_b64(b"/usr/bin/python3" + bytes(1) + b"-m" + bytes(1) + b"" + bytes(1))}
ledger {_b64(b'{"v":1,"kind":"confirmed","run":"r","digest":"d"}')}
lease.run r1
lease.left 17
lease.holder {_b64(b"ann@desk, run r1" + bytes([10]) + b"ddops reconfig")}
trial.run r1
trial.left -3
trial.open 1
trial.step fault port 30000 is held by pid 9
gpu NVIDIA B300, 10.3, 590.1, 1000, 288000
gpu NVIDIA B300, 10.3, 590.1, 900, 288000
disk 512 /opt
port_owner 0
release aaaa 0.1.0
script ff
address 127.0.0.1 10.0.0.5 fe80::1 \n"""


def test_a_full_observation() -> None:
    seen = observe.parse("h", FULL)
    assert (seen.boot, seen.systemd, seen.uptime_seconds) == ("0b7f", 252, 123.45)
    assert seen.unit.main_pid == 42
    assert seen.unit.need_daemon_reload
    assert seen.unit.status_text == "loading weights 41 %"
    assert seen.unit.drop_in_paths == ("/a/b.conf", "/c/d.conf")
    assert seen.etc_unit == b"[Unit]"
    assert seen.trial_unit is None
    assert seen.argv == ("/usr/bin/python3", "-m", ""), "an empty argument is an argument"
    assert [entry.run for entry in seen.ledger] == ["r"]
    assert seen.lease is not None
    assert (seen.lease.holder, seen.lease.command, seen.lease.expires_in_seconds) == (
        "ann@desk, run r1",
        "ddops reconfig",
        17.0,
    )
    assert seen.trial is not None
    assert seen.trial.open
    assert seen.trial.guard_in_seconds == -3
    assert seen.trial.step.startswith("fault port")
    assert seen.gpu is not None
    assert (seen.gpu.arch, seen.gpu.count, seen.gpu.memory_free_mib) == ("sm_103", 2, 900)
    assert seen.arch == "sm_103"
    assert seen.disk_free_mib == {"/opt": 512}
    assert seen.port_owner == 0
    assert seen.releases == {"0.1.0": "aaaa"}
    assert seen.addresses == ("127.0.0.1", "10.0.0.5", "fe80::1")


def test_a_bare_host_has_nothing_of_ours() -> None:
    seen = observe.parse("h", "boot x\nport_owner \nsystemd 257.9-1\n")
    assert seen.systemd == 257
    assert seen.etc_unit is None
    assert seen.lease is None
    assert seen.trial is None
    assert seen.port_owner is None
    assert seen.arch == "cpu"
    assert seen.script_digest == ""


@pytest.mark.parametrize("text", ["", "motd: welcome\n", "{}"])
def test_something_that_is_no_observation_is_refused(text: str) -> None:
    with pytest.raises(RemoteFailed):
        observe.parse("h", text)


@given(st.text())
def test_any_further_lines_are_an_observation_all_the_same(text: str) -> None:
    assert observe.parse("h", "boot x\n" + text).host == "h"


# ---------------------------------------------------------------- variables of the loaded unit and of the process
def _started(shown: str, *entries: str, more: str = "") -> observe.Observed:
    raw = b"".join(entry.encode() + bytes(1) for entry in entries)
    return observe.parse("h", f"{FULL}show.Environment {shown}\nenviron {_b64(raw)}\n{more}")


def test_a_variable_that_was_changed_after_the_start_is_named_and_others_are_not_looked_at() -> None:
    assert _started("A=1 B=2", "A=1", "B=2", "INVOCATION_ID=abc", "SECRET=x").other_environment == ()
    assert _started("A=1 B=3", "A=1", "B=2", "INVOCATION_ID=abc").other_environment == ("B",)
    assert _started("A=1 B=3 C=4", "A=1", "B=2", "INVOCATION_ID=abc").other_environment == ("B", "C")


@pytest.mark.parametrize(
    ("shown", "value"),
    [
        ('"A=two words"', "two words"),
        ('"A=say \\"hi\\" for \\$5 \\\\ \\`now\\`"', 'say "hi" for $5 \\ `now`'),
        ('"A=line\\nline\\ttab\\x01\\001"', "line\nline\ttab\x01\x01"),
        ("A=a=b", "a=b"),
        ("A=", ""),
        ("A=first A=last", "last"),
        ("A=größe", "größe"),
    ],
)
def test_values_are_read_as_systemd_shows_them(shown: str, value: str) -> None:
    assert _started(shown, f"A={value}", "INVOCATION_ID=abc").other_environment == ()
    assert _started(shown, f"A={value}x", "INVOCATION_ID=abc").other_environment == ("A",)


@pytest.mark.parametrize(
    ("entries", "more"),
    [
        (("A=1",), ""),  # the process has written over what /proc shows
        (("A=1", "INVOCATION_ID=other"), ""),
        (("A=1", "INVOCATION_ID=abc"), "show.EnvironmentFiles /etc/engine.env (ignore_errors=no)\n"),
        (("A=1", "INVOCATION_ID=abc"), "show.UnsetEnvironment A\n"),
    ],
)
def test_where_the_start_cannot_be_told_no_difference_is_claimed(entries: tuple[str, ...], more: str) -> None:
    assert _started("A=2", *entries, more=more).other_environment == ()
    assert observe.parse("h", f"{FULL}show.Environment A=2\n").other_environment == ()


@given(st.text(max_size=60), st.binary(max_size=60))
def test_no_variable_text_breaks_the_look(shown: str, raw: bytes) -> None:
    line = " ".join(shown.split())
    observe.parse("h", f"{FULL}show.Environment {line}\nenviron {_b64(raw)}\n")
