"""The training mixture: how often each kind of task occurs, and chats of several turns or with a system turn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random

from training.arithmetic import arithmetic_task, comparison_task
from training.coding import class_task, code_task, code_word_task, explain_task, many_task
from training.copying import code_word, copy_task, nonce_task, recall_task, select_task, word_list_task
from training.prose import prose_task
from training.records import fact_task, json_task, lookup_task, tool_task
from training.steps import steps_task
from training.tasks import Split, Task
from training.wording import maybe_system

Maker = Callable[[Random, Split], Task]


@dataclass(frozen=True, slots=True)
class Source:
    share: float  # of the examples
    make: Maker


SOURCES: tuple[Source, ...] = (
    Source(30.0, code_task),
    Source(5.0, lambda r, s: many_task(r, s, 2, 4, "several")),
    Source(4.0, lambda r, s: many_task(r, s, 5, 20, "long")),
    Source(7.0, lambda r, s: code_word_task(r, s, code_word(r))),
    Source(2.0, explain_task),
    Source(2.5, class_task),
    Source(11.0, copy_task),
    Source(5.0, select_task),
    Source(1.0, word_list_task),
    Source(2.5, recall_task),
    Source(8.0, nonce_task),
    Source(36.0, arithmetic_task),
    Source(12.0, comparison_task),
    Source(5.0, json_task),
    Source(5.0, tool_task),
    Source(7.0, fact_task),
    Source(3.0, lookup_task),
    Source(6.0, steps_task),
    Source(5.0, prose_task),
)
SHARES = [s.share for s in SOURCES]
TURNS_SHARE = 0.12
SYSTEM_SHARE = 0.15


def one_turn(rng: Random, split: Split) -> Task:
    return rng.choices(SOURCES, SHARES)[0].make(rng, split)


def sample(rng: Random, split: Split) -> Task:
    """One chat of the mixture."""
    task = one_turn(rng, split)
    if rng.random() < TURNS_SHARE:
        earlier = [one_turn(rng, Split.TRAIN) for _ in range(rng.choice((1, 1, 1, 2, 2, 3, 5, 8)))]
        turns = tuple(t for e in earlier for t in e.turns) + task.turns
        task = replace(task, turns=turns, weight=max(task.weight, *(e.weight for e in earlier)))
    return replace(task, system=maybe_system(rng, split, SYSTEM_SHARE))


def stand_alone(split: Split, make: Maker, seed: int, count: int) -> list[Task]:
    """`count` tasks of one maker from a seed of their own (for evaluation)."""
    rng = Random(seed)
    return [make(rng, split) for _ in range(count)]
