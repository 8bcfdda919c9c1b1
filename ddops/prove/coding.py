"""Takes the code out of a reply, runs it in the sandbox and says whether it does what was asked.

The right values stay on this side; a reply that prints "all tests passed" has not passed anything.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from ddops.prove import sandbox
from ddops.prove.answers import Check, short, visible
from ddops.prove.problems import Problem

_FENCE = re.compile(r"```[^\n`]*\n(.*?)(?:```|\Z)", re.DOTALL)
_CODE_LINE = re.compile(r"(?:def|class|import|from|async def)\b|@|#")
_STATEMENT = re.compile(r"(?:if|for|while|with|try|else|elif|except|finally|print|assert|return|raise|async|del|not)\b")
_PROSE = re.compile(r"[A-Za-z*`-][\w*`'-]*[ ,.:!]+[A-Za-z`*]")


Key = tuple[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Job:
    """One reply and the problems its code must solve."""

    text: str
    problems: tuple[Problem, ...]

    @property
    def key(self) -> Key:
        """The same for jobs that need not be run twice."""
        return self.text, tuple(p.name for p in self.problems)


def judge(jobs: Sequence[Job], rng: random.Random, workers: int = 2) -> list[Check]:
    """Run every job's code. Raises SandboxUnavailable when there is no interpreter to run it in."""
    sandbox.shared_runtime()
    seeds = [rng.getrandbits(64) for _ in jobs]
    with ThreadPoolExecutor(max_workers=workers) as pool:
        return list(pool.map(_judge_one, jobs, seeds))


def _judge_one(job: Job, seed: int) -> Check:
    names = [p.name for p in job.problems]
    best = Check(False, "no code in the reply: " + short(job.text, 60))
    for code in candidates(job.text, names):
        best = _run(code, job, random.Random(seed))
        if best.ok or "SyntaxError" not in best.got:
            return best
    return best


def _run(code: str, job: Job, rng: random.Random) -> Check:
    wanted = [(p.name, args, value) for p in job.problems for args, value in p.cases(rng)]
    calls = [sandbox.Call(name, args) for name, args, _ in wanted]
    done = sandbox.run(code, calls)
    for (name, args, value), got in zip(wanted, done.values, strict=True):
        if not got.ok:
            return Check(False, short(f"{name}{_shown(args)}: {got.error}", 120))
        if not sandbox.equal(value, got.value):
            return Check(False, short(f"{name}{_shown(args)} returned {got.value!r}, not {value!r}", 160))
    return Check(True, f"{len(wanted)} cases")


def _shown(args: tuple[object, ...]) -> str:
    return short(f"({', '.join(map(repr, args))})", 60)


def candidates(text: str, names: Sequence[str]) -> list[str]:
    """Where the code may be, best guess first: a fenced block that defines the functions, all blocks, bare text."""
    shown = visible(text)
    blocks = _FENCE.findall(shown)
    full = [b for b in blocks if all(re.search(rf"def\s+{re.escape(n)}\b", b) for n in names)]
    found = [*full[:1], *(["\n".join(blocks)] if len(blocks) > 1 else blocks), *([] if blocks else _bare(shown))]
    return list(dict.fromkeys(c for c in found if c.strip()))


def _bare(text: str) -> list[str]:
    """Unfenced code: from its first line on; and once more without prose after it."""
    lines = text.split("\n")
    start = next((i for i, line in enumerate(lines) if _CODE_LINE.match(line)), None)
    if start is None:
        return []
    body = lines[start:]
    end = next((i for i, line in enumerate(body) if i and _is_prose(line)), len(body))
    return ["\n".join(body), "\n".join(body[:end])]


def _is_prose(line: str) -> bool:
    return _PROSE.match(line) is not None and not _CODE_LINE.match(line) and not _STATEMENT.match(line)
