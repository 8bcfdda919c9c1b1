"""How a run ended on one host. Pure data: the exit code follows from it, and so does every report."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from ddops.errors import DdopsError, Exit, Interrupted


class Result(StrEnum):
    """What became of one host."""

    APPLIED = "applied"  # proven and confirmed
    UNCHANGED = "unchanged"  # nothing to do, and the verdict stands
    VERIFIED = "verified"  # what runs was proven again, without a restart
    PLANNED = "planned"  # dry run
    REFUSED = "refused"  # preflight said no; nothing touched
    ROLLED_BACK = "rolled-back"  # not proven; the restored configuration is verified
    INCONCLUSIVE = "inconclusive"  # undone for want of proof; the restored configuration is verified
    NOT_PROVEN = "not-proven"  # what runs was looked at without a change, and is not proven
    RESTORE_FAILED = "restore-failed"  # undone, but what was restored is not verified
    UNKNOWN = "unknown"  # the host did not answer; its guard decides
    LOCKED = "locked"
    HOST_KEY = "host-key"
    INTERRUPTED = "interrupted"  # the operator stopped it; the host is back on a verified configuration


_EXITS = {
    Result.APPLIED: Exit.OK,
    Result.UNCHANGED: Exit.OK,
    Result.VERIFIED: Exit.OK,
    Result.PLANNED: Exit.OK,
    Result.REFUSED: Exit.REFUSED,
    Result.ROLLED_BACK: Exit.ROLLED_BACK,
    Result.INCONCLUSIVE: Exit.INCONCLUSIVE,
    Result.NOT_PROVEN: Exit.RESTORE_FAILED,
    Result.RESTORE_FAILED: Exit.RESTORE_FAILED,
    Result.UNKNOWN: Exit.UNKNOWN,
    Result.LOCKED: Exit.LOCKED,
    Result.HOST_KEY: Exit.HOST_KEY,
    Result.INTERRUPTED: Exit.SIGINT,
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """One host's end of a run.

    `what`, `means` and `hint` are the three lines a person reads; `facts` go into --json as they are.
    """

    host: str
    result: Result
    what: str
    means: str = ""
    hint: str = ""
    facts: dict[str, Any] = field(default_factory=dict)
    exit_override: Exit | None = None

    @property
    def exit(self) -> Exit:
        return self.exit_override if self.exit_override is not None else _EXITS[self.result]

    def to_dict(self) -> dict[str, Any]:
        """As the journal's `outcome` event and --json carry it."""
        return {
            "result": str(self.result),
            "exit": int(self.exit),
            "what": self.what,
            "means": self.means,
            "hint": self.hint,
            "facts": self.facts,
        }


def from_error(host: str, problem: DdopsError | Interrupted) -> Outcome:
    """The outcome an expected error stands for."""
    results = {
        Exit.REFUSED: Result.REFUSED,
        Exit.UNKNOWN: Result.UNKNOWN,
        Exit.LOCKED: Result.LOCKED,
        Exit.HOST_KEY: Result.HOST_KEY,
        Exit.RESTORE_FAILED: Result.RESTORE_FAILED,
        Exit.INCONCLUSIVE: Result.INCONCLUSIVE,
        Exit.SIGHUP: Result.INTERRUPTED,
        Exit.SIGINT: Result.INTERRUPTED,
        Exit.SIGTERM: Result.INTERRUPTED,
    }
    result = results.get(problem.exit, Result.REFUSED)
    return Outcome(host, result, problem.what, means=problem.means, hint=problem.hint, exit_override=problem.exit)
