"""The host's state machine by itself: cut at every line, raced, starved of disk, lied to. A toy stands for the engine."""

from __future__ import annotations

import json

import pytest

from ddops.lab import Host
from tests.lab.toys import FENCE, Toy, cut_points, digest, line, sixty_four, unit_text

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
AT_A_TIME = 12


def run_stories(host: Host, end: str) -> dict[str, dict[str, str]]:
    """Every cut of a story; where it was cut -> how it ended."""
    points = cut_points(STORIES[end])
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
