"""The host's state machine by itself: cut at every line, raced, starved of disk, lied to. A toy stands for the engine."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator

import pytest

from ddops import commands
from ddops.lab import Host
from tests.lab.toys import FENCE, INSTALLED, Toy, cut_points, digest, line, sixty_four, unit_text

pytestmark = [pytest.mark.lab, pytest.mark.timeout(300)]


@pytest.fixture
def toy(hosts: list[Host]) -> Toy:
    """Budget 8 runs; nothing is on trial."""
    made = Toy(hosts[0])
    made.install(8)
    return made


# ---------------------------------------------------------------- cut at every line
# A caller that loses a call asks again, as ddops does after a reconnect.
STORY = r"""
n=$1; end=$2; U=cut-$n.service; S=/root/cut/$n; R=run-$n; L=/run/ddops/$U
again() { for i in 1 2 3; do "$@" < /root/cut/$n.in && return 0; [ $? = 137 ] || return 1; done; }
for_what() { i=0; while ! eval "$1"; do i=$((i + 1)); [ $i -lt 120 ] || return 1; sleep 0.25; done; }
: > /root/cut/$n.in
again $S lease take $U $R 300 && again $S arm $U $R 120 600
cp /root/cut/trial.in /root/cut/$n.in && sed -i "s/RUN/$R/" /root/cut/$n.in
staged=$(sed -n 3p /root/cut/$n.in | base64 -w0); { sed -n 1,2p /root/cut/$n.in; echo "$staged"; } > /root/cut/$n.in2
mv /root/cut/$n.in2 /root/cut/$n.in
if [ $end = revoke ]; then
    sed "s/RUN/$R/; s/attempt/revoked/" /root/cut/line > /root/cut/$n.in
    mkdir -p /var/lib/ddops/$U/units; cp /root/cut/new /var/lib/ddops/$U/units/$(cat /root/cut/digest)
    again $S revoke $U $R $(cat /root/cut/digest)
else
    again $S stage $U $R $(cat /root/cut/digest)
    again $S switch $U $R 30000 0 5
    for_what '[ "$(cat $L/trial/step)" = started ]'
fi
I=$(systemctl show $U -p InvocationID --value)
if [ $end = confirm ]; then
    for kind in proven confirmed; do sed "s/RUN/$R/; s/attempt/$kind/" /root/cut/line | base64 -w0; echo; done > /root/cut/$n.in
    again $S confirm $U $R $I $(cat /root/cut/digest)
else
    echo why > /root/cut/$n.in
    again $S undo $U $R me 30000 0 5
fi
for_what '[ -d $L/last ] && ! [ -d $L/trial ]'
for_what '[ -z "$(systemctl list-units --all --no-legend "ddops-*cut-$n.*")" ]'
P=$(systemctl show $U -p MainPID --value)
echo "$n" \
    "outcome=$(cat $L/last/outcome)" \
    "etc=$(sed -n 's/.*TOY=//p' /etc/systemd/system/$U)" \
    "runs=$(tr '\0' '\n' < /proc/$P/environ | sed -n 's/^TOY=//p')" \
    "same=$([ "$I" = "$(systemctl show $U -p InvocationID --value)" ] && echo yes || echo no)" \
    "open=$(systemctl show $U -p Restart,IPAddressDeny --value | tr -d '\n')" \
    "reload=$(systemctl show $U -p NeedDaemonReload --value)" \
    "kinds=$(sed 's/.*"kind":"\([a-z]*\)".*/\1/' /var/lib/ddops/$U/ledger.ndjson | tr '\n' ',')" \
    "left=$(ls -d /run/systemd/system.control/$U* 2>/dev/null | wc -l)" \
    "units=$(systemctl list-units --all --no-legend "ddops-*cut-$n.*" | wc -l)" \
    "cut=$([ -e /var/lib/ddops/$U/cut ] && echo yes || echo no)"
"""
SHARED = ("append", "append_once", "decide", "drop_trial", "restart_clean", "settle", "worker")
STORIES = {
    "confirm": ("arm", "watch", "stage", "switch", "_switch", "confirm", "_confirm", "to_etc", *SHARED),
    "undo": ("undo", "_undo", "take_back", "restore", "guard", *SHARED),
    "revoke": ("revoke", "take_back", "restore", "to_etc"),
}
# The lines between two durable changes; the others too with DDOPS_EVERY_CUT=1 (minutes instead of one).
DECISIVE = ("_confirm", "to_etc", "drop_trial", "settle", "take_back", "revoke")
AT_A_TIME = 12


def run_stories(host: Host, end: str) -> dict[str, dict[str, str]]:
    """Every cut of a story; where it was cut -> how it ended."""
    every = os.environ.get("DDOPS_EVERY_CUT") == "1"
    points = cut_points(tuple(name for name in STORIES[end] if every or name in DECISIVE))
    text = unit_text(12)
    attempt = line("attempt", "RUN", text)
    host.write("/root/cut/line", attempt)
    host.write("/root/cut/new", text)
    host.write("/root/cut/digest", digest(text))
    host.write("/root/cut/trial.in", sixty_four(text, FENCE) + attempt + "\n")
    host.write("/root/cut/story", STORY)
    for number, (_, script) in enumerate(points):
        host.write(f"/root/cut/{number}", script, mode=0o755)
        host.write(f"/etc/systemd/system/cut-{number}.service", unit_text(8))
    host.console("systemctl daemon-reload; systemctl start $(cd /etc/systemd/system; ls cut-*.service)")
    told = host.console(
        f"seq 0 {len(points) - 1} | xargs -P {AT_A_TIME} -I N timeout 60 sh /root/cut/story N {end} 2>/root/cut/err",
        timeout=280,
    )
    rows = {int(row.split()[0]): dict(word.split("=", 1) for word in row.split()[1:]) for row in told.splitlines()}
    assert sorted(rows) == list(range(len(points))), host.console("tail -n 20 /root/cut/err")
    return {f"{where} (#{number})": rows[number] for number, (where, _) in enumerate(points)}


@pytest.mark.parametrize("end", STORIES)
def test_killed_before_any_line_it_is_finished_forward_by_the_guard(hosts: list[Host], end: str) -> None:
    wrong = {}
    rows = run_stories(hosts[0], end)
    for where, row in rows.items():
        good = row["etc"] == row["runs"] and row["open"] == "always" and row["reload"] == "no" and row["left"] == "0"
        good = good and row["units"] == "0"
        kinds = row["kinds"].strip(",").split(",")
        if end == "confirm":
            good = good and row["outcome"] == "confirmed" and row["etc"] == "12" and row["same"] == "yes"
            good = good and kinds == ["attempt", "proven", "confirmed"]
        elif end == "undo":
            good = good and row["outcome"] == "undone" and row["etc"] == "8" and kinds == ["attempt", "undone"]
        else:
            good = good and row["outcome"] == "undone" and row["etc"] == "12" and kinds == ["revoked", "undone"]
        if not good:
            wrong[where] = row
    assert not wrong, json.dumps(wrong, indent=1)
    assert sum(row["cut"] == "yes" for row in rows.values()) > len(rows) / 2, "the cuts were not reached"


# ---------------------------------------------------------------- who wins
def test_a_confirmed_trial_is_the_same_start_opened_and_kept(toy: Toy) -> None:
    text = toy.try_out(12)
    started = toy.show("InvocationID")
    assert toy.confirm(text).status == 0
    assert toy.settled() == "confirmed"
    assert toy.show("InvocationID") == started
    assert toy.confirm(text).status == 75, "asked again, it says what became of it"
    toy.assert_clean(12)


def test_confirm_and_undo_at_the_same_instant_have_one_winner(toy: Toy) -> None:
    for turn in range(4):
        toy.again(f"race-{turn}")
        before, after = toy.value(), 20 + turn
        text = toy.try_out(after)
        started = toy.show("InvocationID")
        lines = sixty_four(*(line(kind, toy.run, text, started) for kind in ("proven", "confirmed")))
        said = toy.host.console(
            f"(echo why | {INSTALLED} undo {toy.unit} {toy.run} me 30000 0 5 2>/dev/null; echo undo $?) & "
            f"({INSTALLED} confirm {toy.unit} {toy.run} {started} {digest(text)} 2>/dev/null; echo confirm $?); wait",
            input=lines,
        )
        statuses = dict(row.split() for row in said.splitlines())
        assert sorted(statuses.values()) == ["0", "75"], statuses
        assert toy.settled() == ("confirmed" if statuses["confirm"] == "0" else "undone")
        toy.assert_clean(after if statuses["confirm"] == "0" else before)


def test_only_the_start_that_was_proven_is_confirmed(toy: Toy) -> None:
    """It died, was started anew, or its unit or the one in /etc is another by now."""
    spoilers = [
        f"systemctl kill -s KILL {toy.unit}; sleep 0.3",
        f"systemctl restart {toy.unit}",
        f"systemctl stop {toy.unit}",
        f"echo '# by hand' >> /run/systemd/system.control/{toy.unit}",
        f"echo '# by hand' >> {toy.etc}",
    ]
    for turn, spoil in enumerate(spoilers):
        toy.again(f"spoilt-{turn}")
        text = toy.try_out(12)
        started = toy.show("InvocationID")
        toy.host.console(spoil)
        assert toy.confirm(text, started).status == 0
        assert toy.settled() == "undone", spoil
        toy.assert_clean(8)
    assert "confirmed" not in toy.kinds()
    assert "# by hand" in toy.host.read(toy.etc), "what somebody wrote in mid-trial is not overwritten"


def test_a_trial_nobody_switched_to_is_never_confirmed(toy: Toy) -> None:
    toy.arm()
    toy.stage(text := unit_text(12))
    assert toy.confirm(text).status == 0
    assert toy.settled() == "undone"
    toy.assert_clean(8)


def test_an_undo_before_the_switch_restarts_nothing(toy: Toy) -> None:
    started = toy.show("InvocationID")
    toy.arm(guard=3)
    toy.stage(unit_text(12))
    assert toy.settled() == "undone"
    assert toy.show("InvocationID") == started
    toy.assert_clean(8)


def test_another_run_gets_in_only_after_the_trial_has_ended(toy: Toy) -> None:
    toy.lease(ttl=1)
    toy.ok("arm", toy.run, 60, 600)
    other = Toy(toy.host, run="other")
    toy.host.console("sleep 2.1")  # the lease has expired, the trial is open
    assert other.call("lease", "other", 60, stdin="them", sub="take").status == 73
    assert other.call("lease", sub="break").status == 75
    for verb, words in [("stage", ["0"]), ("switch", [1, 0, 1]), ("extend", [60]), ("undo", ["x", 1, 0, 1])]:
        assert other.call(verb, "other", *words).status == 73, verb
    assert toy.undo().status == 0
    assert toy.undo().status in (0, 75)
    assert toy.settled() == "undone"
    other.lease()
    assert toy.call("arm", toy.run, 60, 600).status == 73


def test_a_guard_survives_what_is_done_to_it(toy: Toy) -> None:
    """Killed, reloaded around, its script and the installed one gone: the trial is still taken back in time."""
    toy.try_out(12, guard=5)
    toy.host.console(f"rm {INSTALLED}; systemctl kill -s KILL ddops-guard-toy.service")
    toy.host.console("for i in $(seq 25); do systemctl daemon-reload; sleep 0.2; done")
    toy.host.write(INSTALLED, commands.script(), mode=0o755)
    assert toy.settled(10) == "undone"
    toy.assert_clean(8)
    assert toy.ledger()[-1]["by"] == "guard"


def test_a_guard_that_somebody_stopped_is_started_by_the_heartbeat_or_helped_by_hand(toy: Toy) -> None:
    toy.try_out(12, guard=2)
    toy.host.console("systemctl stop ddops-guard-toy.service")
    toy.ok("extend", toy.run, 2)
    assert toy.settled(10) == "undone"
    toy.again("r2")
    toy.try_out(12, guard=1)
    toy.host.console("systemctl stop ddops-guard-toy.service; sleep 2.1")
    assert toy.trial()["open"] == "1"
    toy.ok("guard", toy.run)
    assert toy.settled(10) == "undone"
    toy.assert_clean(8)


def test_a_frozen_host_decides_when_it_thaws_and_only_once(toy: Toy) -> None:
    toy.try_out(12, guard=2)
    toy.host.freeze()
    time.sleep(3)
    toy.host.thaw()
    assert toy.settled(10) == "undone"
    toy.assert_clean(8)


def test_units_whose_names_differ_in_a_sign_have_guards_of_their_own(toy: Toy) -> None:
    names = ["a@1.service", "a_1.service", "a:1.service", "a_a1.service"]
    toys = [Toy(toy.host, unit=name, run=f"run-{n}") for n, name in enumerate(names)]
    for one in toys:
        one.install(8)
        one.try_out(12, guard=60)
    guards = toy.host.console("systemctl list-units --no-legend 'ddops-guard-*' | wc -l")
    assert guards == str(len(names))
    for one in toys:
        one.undo()
        assert one.settled() == "undone"
        assert one.value() == 8


# ---------------------------------------------------------------- no room, and other trouble of the host
FULL = ["/run", "/var/lib/ddops", "/etc"]


@contextlib.contextmanager
def full(host: Host, path: str) -> Iterator[None]:
    """Not a byte is left below path (of /run, which systemd itself needs: filled, and emptied again)."""
    if path == "/run":
        host.console("head -c 600M /dev/zero > /run/filler 2>/dev/null; :")
        yield
        host.console("rm -f /run/filler")
        return
    host.fill(path)
    yield
    host.unfill(path)


@pytest.mark.parametrize("path", FULL)
def test_a_full_disk_keeps_no_trial_open(toy: Toy, path: str) -> None:
    """Undone by hand, and by the guard; what ran before runs again while the disk is still full."""
    toy.try_out(12)
    with full(toy.host, path):
        assert toy.undo().status == 0
        assert toy.settled() == "undone"
        assert toy.value() == 8
        assert "undone" in toy.kinds(), "room was kept for the last line"
    toy.again("r2")
    toy.try_out(12, guard=4)
    with full(toy.host, path):
        assert toy.settled() == "undone"
        assert toy.value() == 8
    toy.assert_clean(8)


@pytest.mark.parametrize("path", FULL)
def test_a_full_disk_lets_a_confirmation_through_or_takes_it_back_but_never_half(toy: Toy, path: str) -> None:
    text = toy.try_out(12)
    with full(toy.host, path):
        toy.confirm(text)
        toy.undo()  # what the controller does when the confirmation is refused
        outcome = toy.settled()
        value = 12 if outcome == "confirmed" else 8
        assert toy.value() == value
    toy.assert_clean(value)
    assert ("confirmed" in toy.kinds()) == (value == 12)


def test_a_read_only_disk_does_not_stop_the_guard(toy: Toy) -> None:
    toy.try_out(12, guard=2)
    toy.host.console("mount --bind /var/lib/ddops /var/lib/ddops; mount -o remount,bind,ro /var/lib/ddops")
    assert toy.settled() == "undone"
    toy.host.console("umount /var/lib/ddops")
    toy.assert_clean(8)


def test_a_torn_ledger_line_is_closed_and_never_taken_for_a_whole_one(toy: Toy) -> None:
    toy.try_out(12)
    toy.host.console(f'printf \'{{"v":1,"run":"{toy.run}","kind":"undone","wh\' >> /var/lib/ddops/{toy.unit}/ledger.ndjson')
    toy.undo(by='CORP\\\\al"ice', why='a "quoted" reason, naïve\nand long ' + "x" * 500)
    assert toy.settled() == "undone"
    rows = toy.host.read(f"/var/lib/ddops/{toy.unit}/ledger.ndjson").splitlines()
    last = json.loads(rows[-1])
    assert (last["kind"], last["by"]) == ("undone", "CORPalice")
    assert "naïve" in last["why"]


# ---------------------------------------------------------------- engines and units of all kinds
STUBBORN = "/bin/sh -c 'trap \"\" TERM; while :; do sleep 1; done'"


@pytest.mark.parametrize("extra", ["TimeoutStopSec=2\n", "KillMode=process\nTimeoutStopSec=2\n"])
def test_an_engine_that_will_not_stop_is_killed_with_all_it_left(toy: Toy, extra: str) -> None:
    toy.try_out(text=unit_text(12, start=STUBBORN, extra=extra))
    assert toy.undo(wait=15).status == 0
    assert toy.settled(40) == "undone"
    toy.assert_clean(8)
    assert toy.host.console("pgrep -fc '[t]rap \"\" TERM' || true") == "0"


LISTEN = 'import socket,time; s=socket.socket(); s.setsockopt(1,2,1); s.bind(("0.0.0.0",30000)); s.listen(); time.sleep(600)'


def test_a_port_that_another_process_took_is_a_fault_and_the_old_engine_comes_back(toy: Toy) -> None:
    toy.host.console(f"systemd-run --quiet --unit=squatter /usr/bin/python3 -c '{LISTEN}'; sleep 0.5")
    toy.arm()
    toy.stage(unit_text(12))
    step = toy.switch(wait=1)
    assert step.startswith("fault port 30000 is held by pid"), step
    assert toy.undo(wait=1).status == 0
    assert toy.settled() == "undone"
    toy.assert_clean(8)


def test_a_link_or_a_mask_is_never_replaced(toy: Toy) -> None:
    unmasked = toy.host.read(toy.etc)
    toy.host.write("/root/real.service", unmasked)
    for made in (f"ln -sf /root/real.service {toy.etc}", f"ln -sf /dev/null {toy.etc}"):
        toy.host.console(f"{made}; systemctl daemon-reload")
        toy.lease()
        said = toy.call("arm", toy.run, 60, 600)
        assert said.status == 78, said
        assert toy.trial() == {}
        assert toy.host.console(f"readlink {toy.etc}") in ("/root/real.service", "/dev/null")


def test_drop_ins_and_rules_of_others_stay_theirs(toy: Toy) -> None:
    toy.host.write(f"{toy.etc}.d/10-theirs.conf", "[Service]\nIPAddressDeny=192.0.2.0/24\nEnvironment=THEIRS=1\n")
    toy.host.console("systemctl daemon-reload")
    text = toy.try_out(12)
    assert toy.confirm(text).status == 0
    assert toy.settled() == "confirmed"
    assert toy.show("IPAddressDeny") == "192.0.2.0/24"
    assert toy.show("DropInPaths") == f"{toy.etc}.d/10-theirs.conf"


def test_a_start_that_has_to_wait_is_not_taken_for_the_last_one(toy: Toy) -> None:
    """systemd names the last start until the new one begins, and that may have to wait for another unit."""
    toy.host.write("/etc/systemd/system/slow.service", "[Service]\nType=oneshot\nExecStart=/bin/sleep 3\n")
    toy.host.console("systemctl daemon-reload")
    before = toy.show("InvocationID")
    text = "[Unit]\nWants=slow.service\nAfter=slow.service\n" + unit_text(12)
    toy.try_out(text=text)
    assert toy.trial()["invocation"] == toy.show("InvocationID") != before
    assert toy.value() == 12


def test_a_first_unit_that_is_not_proven_leaves_nothing(toy: Toy) -> None:
    first = Toy(toy.host, unit="first.service", run="f1")
    first.try_out(12)
    first.undo()
    assert first.settled() == "undone"
    assert first.show("LoadState") == "not-found"
    first.again("f2")
    text = first.try_out(12)
    first.confirm(text)
    assert first.settled() == "confirmed"
    assert first.value() == 12


def test_a_look_never_mixes_two_trials(toy: Toy) -> None:
    """While trials come and go, every answer is of one trial: closed means there is an outcome."""
    toy.host.write(
        "/root/watch",
        f"while [ ! -e /root/stop ]; do {INSTALLED} trial {toy.unit} | grep -E '^trial.(run|open|outcome)' | tr '\\n' ' '\n"
        "echo; done",
    )
    toy.host.console("systemd-run --quiet --unit=watch -p StandardOutput=append:/root/seen sh /root/watch")
    for turn in range(4):
        toy.again(f"w{turn}")
        toy.arm()
        toy.undo()
        toy.settled()
    toy.host.console("touch /root/stop; sleep 0.5")
    seen = [row for row in toy.host.read("/root/seen").splitlines() if "open 0" in row]
    assert seen
    assert all("outcome undone" in row for row in seen), seen
