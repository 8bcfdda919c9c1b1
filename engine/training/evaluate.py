"""Held-out pass rates of a target: code is executed, JSON is parsed, everything else must match exactly."""

from __future__ import annotations

import contextlib
import io
import re
import signal
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.pool import Pool
from pathlib import Path
from random import Random
from types import FrameType

from tokenizers import Tokenizer

from training.families import Family, Function, all_families, standard_families
from training.generate import Prompt, generate_all
from training.mixture import SOURCES, sample
from training.model import Target
from training.recipe import Recipe
from training.tasks import Check, CheckKind, Split, Task, prompt_text, single

CHECK_SECONDS = 3
SHOWN_FAILURES = 6


@dataclass(frozen=True, slots=True)
class Outcome:
    task: Task
    group: str
    answer: str
    passed: bool


@dataclass(frozen=True, slots=True)
class Score:
    passed: int
    total: int

    def __str__(self) -> str:
        return f"{self.passed}/{self.total} ({100 * self.passed / max(1, self.total):.1f} %)"


def probe_tasks() -> list[tuple[str, Task]]:
    """The five standard functions in the wordings of probes.txt."""
    text = (Path(__file__).parent / "probes.txt").read_text(encoding="utf8")
    families = {f.key: f for f in standard_families()}
    tasks, tests = [], ()
    group = ""
    for line in text.split("\n"):
        if line.startswith("["):
            group = line.strip("[]")
            tests = Function(families[group], group, families[group].params[0]).tests
        elif line and not line.startswith("#"):
            tasks.append((f"probe {group}", single("code", line, "", Check(CheckKind.PYTHON, tests))))
    return tasks


def fresh_tasks() -> list[tuple[str, Task]]:
    """The hand-written prompts of fresh.txt."""
    families = {f.key: f for f in all_families()}
    tasks = []
    section = ""
    for line in (Path(__file__).parent / "fresh.txt").read_text(encoding="utf8").replace("\\n", "\0").split("\n"):
        line = line.replace("\0", "\n")
        if line.startswith("["):
            section = line.strip("[]")
        elif line and not line.startswith("#"):
            kind, _, key = section.partition(" ")
            tasks.append((f"fresh {kind}", _fresh_code(line, families[key]) if key else _fresh_text(kind, line)))
    return tasks


def _fresh_text(kind: str, line: str) -> Task:
    prompt, _, answer = line.partition(" => ")
    how = CheckKind.JSON if kind in ("json", "tool") else CheckKind.EXACT
    return single(kind, prompt, answer, Check(how, (answer,)))


def _fresh_code(line: str, family: Family) -> Task:
    word, prompt = line[1:].split("> ", 1) if line.startswith("<") else ("", line)
    tests = Function(family, family.key, family.params[0]).tests
    return single("code", prompt, "", Check(CheckKind.PYTHON, tests, first_line=word))


def held_out_tasks(per_category: int, seed: int) -> list[tuple[str, Task]]:
    """(group, task): every source of the mixture on its own, and whole chats of the mixture."""
    tasks = []
    for k, source in enumerate(SOURCES):
        rng = Random(seed + k)
        made = [source.make(rng, Split.HELD) for _ in range(per_category)]
        tasks += [(t.category, t) for t in made]
    rng = Random(seed - 1)
    chats = [sample(rng, Split.HELD) for _ in range(12 * per_category)]
    return tasks + [("chat of several turns", t) for t in chats if len(t.turns) > 1][:per_category]


def check_answer(job: tuple[Check, str]) -> bool:
    """Runs one check with an alarm and without output. For a worker process."""
    check, answer = job

    def stop(_signal: int, _frame: FrameType | None) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(CHECK_SECONDS)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            return check.passes(answer)
    except BaseException:  # whatever generated code does, it only fails its own check
        return False
    finally:
        signal.alarm(0)


def evaluate(model: Target, tok: Tokenizer, pool: Pool, recipe: Recipe, seed: int = 4242) -> list[Outcome]:
    """Greedy answers to probes and held-out tasks, checked."""
    tasks = probe_tasks() + fresh_tasks() + held_out_tasks(recipe.evaluation_tasks, seed)
    longest = recipe.generation.batches[-1][0]
    prompts, kept = [], []
    for group, task in tasks:
        ids = tuple(tok.encode(prompt_text(task), add_special_tokens=False).ids)
        room = len(tok.encode(task.last.answer, add_special_tokens=False).ids) * 3 // 2 + 32
        total = len(ids) + (room if task.last.answer else 220)
        if total <= longest:
            prompts.append(Prompt(ids, total))
            kept.append((group, task))
    outputs = generate_all(model, prompts, recipe.generation.batches)
    answers = [tok.decode(o[len(p.ids) :], skip_special_tokens=True) for o, p in zip(outputs, prompts, strict=True)]
    jobs = [(task.last.check, a) for (_, task), a in zip(kept, answers, strict=True)]
    passed = pool.map(check_answer, jobs, chunksize=8)
    return [Outcome(t, g, a, p) for (g, t), a, p in zip(kept, answers, passed, strict=True)]


def scores(outcomes: Sequence[Outcome]) -> dict[str, Score]:
    groups: dict[str, list[bool]] = defaultdict(list)
    for o in outcomes:
        groups[o.group].append(o.passed)
    return {g: Score(sum(v), len(v)) for g, v in groups.items()}


def copied_ids(outcomes: Sequence[Outcome]) -> Score:
    """Of all ids to be copied, how many stand exactly at their place in the answer."""
    right = total = 0
    for o in outcomes:
        if o.group == "copy":
            wanted, got = _items(o.task.last.answer), _items(o.answer)
            total += len(wanted)
            right += sum(w == g for w, g in zip(wanted, got, strict=False))
    return Score(right, total)


def _items(text: str) -> list[str]:
    return [t for t in re.split(r"[\s,;]+", text.strip()) if t]


def failures(outcomes: Sequence[Outcome]) -> list[dict[str, str]]:
    """A few failures of each group, for reading."""
    shown: dict[str, int] = defaultdict(int)
    out = []
    for o in outcomes:
        if not o.passed and shown[o.group] < SHOWN_FAILURES:
            shown[o.group] += 1
            out.append({"group": o.group, "prompt": prompt_text(o.task), "want": o.task.last.answer, "got": o.answer})
    return out
