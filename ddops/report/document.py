"""The one JSON object of --json. Pure."""

from __future__ import annotations

from typing import Any

from ddops.report.model import HostRun, Run

VERSION = 1


def document(run: Run) -> dict[str, Any]:
    """The run as one object:

        {"v": 1, "run": id, "command": as typed, "started": time, "finished": time, "seconds": number,
         "exit": code, "result": the hosts' common result, or "mixed", "counts": {result: hosts},
         "halted": reason or null, "left": [hosts not started for it], "warnings": [text],
         "hosts": [{"host", "result", "exit", "what", "means", "hint", "facts",
                    "steps": [{"step", "ok": true|false|null, "seconds"}],
                    "probes": [{"step", "probe", "outcome", "expected", "got", "threshold", "sample", ...}],
                    "verdict": {...} or null, "plan": {...} or null, "warnings": [text]}]}

    Times are UTC, ISO 8601. `v` rises only when a key changes its meaning; readers ignore keys they do not know.
    Requests and replies of probes (`replay`) are left out; the event stream has them.
    """
    return {
        "v": VERSION,
        "run": run.run,
        "command": run.command,
        "started": run.started,
        "finished": run.finished,
        "seconds": run.seconds,
        "exit": run.exit,
        "result": run.result,
        "counts": run.counts,
        "halted": run.halted or None,
        "left": run.left,
        "warnings": run.warnings,
        "hosts": [_host(host) for host in run.hosts],
    }


def _host(host: HostRun) -> dict[str, Any]:
    outcome = host.outcome
    return {
        "host": host.host,
        "result": host.result,
        "exit": outcome.get("exit"),
        "what": outcome.get("what", ""),
        "means": outcome.get("means", ""),
        "hint": outcome.get("hint", ""),
        "facts": outcome.get("facts", {}),
        "steps": [{"step": step.name, "ok": step.ok, "seconds": step.seconds} for step in host.steps],
        "probes": [
            {"step": step.name} | {key: value for key, value in probe.items() if key != "replay"} for step, probe in host.probes
        ],
        "verdict": host.verdict,
        "plan": host.plan or None,
        "warnings": host.warnings,
    }
