"""A toy unit under the host script: every rule of the state machine without an engine, in fractions of a second.

`cut_points` makes copies of the script that kill themselves once, each before another line.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import time
from dataclasses import dataclass

from ddops import commands
from ddops.lab import Host

INSTALLED = commands.SCRIPT_PATH
FENCE = "[Service]\nRestart=no\nIPAddressDeny=any\nIPAddressAllow=localhost\n"
SLEEP = "/bin/sleep infinity"


def unit_text(value: int, *, start: str = SLEEP, extra: str = "") -> str:
    """A unit whose value can be read from the environment of its process."""
    return f"[Service]\nType=exec\nEnvironment=TOY={value}\nExecStart={start}\nRestart=always\n{extra}"


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def line(kind: str, run: str, text: str, invocation: str = "") -> str:
    """A ledger line as the controller writes it."""
    document = {"v": 1, "kind": kind, "run": run, "time": "2026-01-01T00:00:00Z", "digest": digest(text)}
    return json.dumps(document | ({"invocation": invocation} if invocation else {}), separators=(",", ":"))


def sixty_four(*parts: str) -> str:
    return "".join(base64.b64encode(part.encode()).decode() + "\n" for part in parts)


@dataclass(frozen=True)
class Said:
    """One call of the host script."""

    status: int
    text: str


@dataclass
class Toy:
    """One toy unit on one host, and one run that changes it."""

    host: Host
    unit: str = "toy.service"
    run: str = "r1"
    port: int = 30000

    # ------------------------------------------------------------ set-up
    def install(self, value: int = 8, *, text: str | None = None) -> None:
        """The script is there, and the unit runs with this value."""
        self.host.write(INSTALLED, commands.script(), mode=0o755)
        self.host.write(self.etc, text if text is not None else unit_text(value))
        self.host.console(f"systemctl daemon-reload; systemctl restart {self.unit}")

    @property
    def etc(self) -> str:
        return f"/etc/systemd/system/{self.unit}"

    # ------------------------------------------------------------ the verbs
    def call(self, verb: str, *words: object, stdin: str = "", sub: str = "") -> Said:
        words_text = " ".join(f"'{word}'" for word in words)
        out = self.host.console(f"{INSTALLED} {verb} {sub} '{self.unit}' {words_text} 2>&1; echo \"=$?\"", input=stdin)
        text, _, status = out.rpartition("=")
        return Said(int(status), text.strip())

    def ok(self, verb: str, *words: object, stdin: str = "", sub: str = "") -> str:
        said = self.call(verb, *words, stdin=stdin, sub=sub)
        assert said.status == 0, f"{verb}: {said}"
        return said.text

    def lease(self, ttl: int = 60) -> None:
        self.ok("lease", self.run, ttl, stdin="somebody\nddops reconfig\n", sub="take")

    def again(self, run: str) -> None:
        """This run ends, the next one begins."""
        self.ok("lease", self.run, sub="drop")
        self.run = run

    def arm(self, guard: int = 60, cap: int = 600) -> None:
        self.lease()
        self.ok("arm", self.run, guard, cap)

    def stage(self, text: str) -> None:
        self.ok("stage", self.run, digest(text), stdin=sixty_four(text, FENCE, line("attempt", self.run, text)))

    def switch(self, wait: int = 5) -> str:
        """Switch and wait for it; the step it ended with."""
        self.ok("switch", self.run, self.port, 0, wait)
        return self.until(lambda trial: trial["step"] == "started" or trial["step"].startswith("fault"))["step"]

    def try_out(self, value: int = 12, *, guard: int = 60, text: str | None = None) -> str:
        """A trial up to its running engine; the unit's text."""
        text = text if text is not None else unit_text(value)
        self.arm(guard)
        self.stage(text)
        assert self.switch() == "started"
        return text

    def confirm(self, text: str, invocation: str | None = None) -> Said:
        started = invocation if invocation is not None else self.show("InvocationID")
        lines = (line(kind, self.run, text, started) for kind in ("proven", "confirmed"))
        return self.call("confirm", self.run, started, digest(text), stdin=sixty_four(*lines))

    def undo(self, wait: int = 5, by: str = "somebody", why: str = "not proven") -> Said:
        return self.call("undo", self.run, by, self.port, 0, wait, stdin=why)

    # ------------------------------------------------------------ where it stands
    def show(self, what: str) -> str:
        return self.host.console(f"systemctl show '{self.unit}' -p {what} --value")

    def trial(self) -> dict[str, str]:
        lines = self.ok("trial").splitlines()
        return {key[6:]: value for key, _, value in (text.partition(" ") for text in lines) if key[:6] == "trial."}

    def until(self, reached, seconds: float = 30.0) -> dict[str, str]:  # type: ignore[no-untyped-def]
        give_up = time.monotonic() + seconds
        while time.monotonic() < give_up:
            found = self.trial()
            if found and reached(found):
                return found
            time.sleep(0.1)
        raise AssertionError(f"not reached in {seconds} s: {self.trial()}")

    def settled(self, seconds: float = 30.0) -> str:
        return self.until(lambda trial: trial["open"] == "0" and trial["run"] == self.run, seconds)["outcome"]

    def value(self) -> int:
        """What really runs."""
        pid = self.show("MainPID")
        return int(self.host.console(f"tr '\\0' '\\n' < /proc/{pid}/environ | sed -n 's/^TOY=//p'"))

    def ledger(self) -> list[dict[str, str]]:
        path = f"/var/lib/ddops/{self.unit}/ledger.ndjson"
        return [json.loads(text) for text in self.host.console(f"cat {path} 2>/dev/null || true").splitlines()]

    def kinds(self) -> list[str]:
        return [entry["kind"] for entry in self.ledger()]

    def assert_clean(self, value: int) -> None:
        """It runs this value from /etc, open to users, and nothing of any trial is left."""
        assert self.value() == value
        assert f"TOY={value}\n" in self.host.read(self.etc)
        assert self.show("FragmentPath") == self.etc
        assert (self.show("Restart"), self.show("IPAddressDeny")) == ("always", "")
        assert self.show("NeedDaemonReload") == "no"
        left = f"ls -d /run/systemd/system.control/{self.unit}* /run/ddops/{self.unit}/trial* 2>/dev/null || true"
        assert (found := self.host.console(left)) == "", found
        units = "systemctl list-units --all --no-legend 'ddops-*'"
        give_up = time.monotonic() + 5
        while (shown := self.host.console(units)) and time.monotonic() < give_up:
            time.sleep(0.2)
        assert shown == ""


# ---------------------------------------------------------------- a script that kills itself
_FUNCTION = re.compile(r"^(\w+)\(\) \{")
_CHANGES = re.compile(
    r"\b(put|mv|rm|rmdir|mkdir|cp|systemctl (?!show)|systemd-run|append|append_once|append_anyway|decide|worker|watch|"
    r"to_etc|drop_trial|restore|take_back|settle|settling|restart_clean|emptied|room|store|promote|sync)\b"
)
_NO_PLACE = re.compile(r"^\s*(\}|else|elif|\||&&|--|[^ (]*\) )")


def cut_points(functions: tuple[str, ...]) -> list[tuple[str, str]]:
    """(where, script) for every line of these functions that changes something; each script kills itself once,
    before that line, which is after the change before it."""
    lines = commands.script().decode().splitlines()
    found: list[tuple[str, str]] = []
    inside = ""
    for number, text in enumerate(lines):
        if (start := _FUNCTION.match(text)) and not text.rstrip().endswith("}"):
            inside = start[1]
            continue
        if text.startswith("}"):
            inside = ""
        continued = lines[number - 1].rstrip().endswith(("\\", "|", "&&"))
        if inside not in functions or continued or _NO_PLACE.match(text) or not _CHANGES.search(text):
            continue
        cut = "[ -e $KEEP/cut ] || { : > $KEEP/cut; kill -9 $$; }"
        found.append((f"{inside}: {text.strip()}", "\n".join([*lines[:number], cut, *lines[number:]]) + "\n"))
    return found
