"""Answers in which every part follows from the one before: running totals, counting, tables, sorting, reversing.

This is the middle class for drafting: the target can work it out step by step, a parallel drafter only partly.
"""

from __future__ import annotations

from random import Random

from training.copying import ANIMALS, opaque_ids
from training.records import FIRST
from training.tasks import Split, Task, single
from training.wording import lead

TOTAL_LEADS = (
    "Add these numbers step by step: {l}",
    "Add up step by step: {l}",
    "Show the running total of these numbers: {l}",
    "Sum these numbers and show each step: {l}",
    "Give the running totals of {l}, one step per line.",
    "Add the numbers {l} step by step.",
    "Show each step of adding these numbers: {l}",
)
COUNT_LEADS = (
    "Count from {a} to {b} in steps of {s}.",
    "Count from {a} to {b} by {s}.",
    "List the numbers from {a} to {b} in steps of {s}.",
    "Write the numbers from {a} to {b} with step {s}.",
    "Give me the numbers from {a} to {b} in steps of {s}.",
    "Write down the numbers from {a} to {b} in steps of {s}.",
)
TABLE_LEADS = (
    "Write the multiplication table of {n} from 1 to {m}.",
    "Write the {n} times table up to {m}.",
    "Show the multiplication table of {n} up to {m}.",
    "Give me the times table of {n}, from 1 to {m}.",
    "List the multiples of {n} as a table from 1 to {m}.",
    "Show the times table of {n} from 1 to {m}.",
)
SORT_LEADS = (
    "Sort these {w} in ascending order: {l}",
    "Sort the {w} {l} in ascending order.",
    "Put these {w} in ascending order: {l}",
    "Arrange these {w} in ascending order: {l}",
    "Order these {w} from first to last: {l}",
    "Put the {w} {l} in ascending order.",
)
REVERSE_LEADS = (
    "Reverse the order of this list: {l}",
    "Write this list in reverse order: {l}",
    "Give me these items in reverse order: {l}",
    "List these from last to first: {l}",
    "Repeat this list backwards: {l}",
    "Write these items in reverse order: {l}",
)
LENGTH_LEADS = (
    "Give the number of letters of each word: {l}",
    "Write each word with its length: {l}",
    "List the length of each of these words: {l}",
    "How long is each of these words? {l}",
    "Count the letters of each word: {l}",
    "Write the length of each word: {l}",
)
UPPER_LEADS = (
    "Write these words in upper case: {l}",
    "Convert these words to upper case: {l}",
    "Turn these words into capital letters: {l}",
    "Give me these words in upper case: {l}",
    "Put these words in capitals: {l}",
    "Write the words in capital letters: {l}",
)


def _running_total(rng: Random, split: Split) -> tuple[str, str]:
    numbers = [rng.randrange(1, rng.choice((10, 50, 100))) for _ in range(rng.randint(3, 12))]
    total, lines = numbers[0], []
    for n in numbers[1:]:
        lines.append(f"{total} + {n} = {total + n}")
        total += n
    return lead(rng, TOTAL_LEADS, split).format(l=", ".join(map(str, numbers))), "\n".join([*lines, f"Total: {total}"])


def _counting(rng: Random, split: Split) -> tuple[str, str]:
    step, start, count = rng.choice((1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 25)), rng.randrange(100), rng.randint(5, 40)
    numbers = [start + step * k for k in range(count)]
    if rng.random() < 0.2:
        numbers.reverse()
    prompt = lead(rng, COUNT_LEADS, split).format(a=numbers[0], b=numbers[-1], s=step)
    return prompt, ", ".join(map(str, numbers))


def _table(rng: Random, split: Split) -> tuple[str, str]:
    n, m = rng.randint(2, 40), rng.choice((5, 10, 10, 12, 15, 20))
    lines = (f"{k} x {n} = {k * n}" for k in range(1, m + 1))
    return lead(rng, TABLE_LEADS, split).format(n=n, m=m), "\n".join(lines)


def _sorting(rng: Random, split: Split) -> tuple[str, str]:
    if rng.random() < 0.5:
        numbers = [rng.randrange(rng.choice((100, 100, 1000))) for _ in range(rng.randint(3, 12))]
        shown, ordered = map(str, numbers), map(str, sorted(numbers))
        return lead(rng, SORT_LEADS, split).format(w="numbers", l=", ".join(shown)), ", ".join(ordered)
    words = rng.sample(rng.choice((ANIMALS, FIRST)), rng.randint(3, 14))
    prompt = lead(rng, SORT_LEADS, split).format(w=rng.choice(("words", "names")), l=", ".join(words))
    return prompt, ", ".join(sorted(words))


def _reversing(rng: Random, split: Split) -> tuple[str, str]:
    items = rng.sample(ANIMALS + FIRST, rng.randint(3, 16)) if rng.random() < 0.6 else opaque_ids(rng, rng.randint(3, 10))
    return lead(rng, REVERSE_LEADS, split).format(l=", ".join(items)), ", ".join(items[::-1])


def _lengths(rng: Random, split: Split) -> tuple[str, str]:
    words = rng.sample(ANIMALS + [f.lower() for f in FIRST], rng.randint(3, 14))
    return lead(rng, LENGTH_LEADS, split).format(l=", ".join(words)), "\n".join(f"{w}: {len(w)}" for w in words)


def _upper(rng: Random, split: Split) -> tuple[str, str]:
    words = rng.sample(ANIMALS + [f.lower() for f in FIRST], rng.randint(3, 14))
    return lead(rng, UPPER_LEADS, split).format(l=", ".join(words)), ", ".join(w.upper() for w in words)


KINDS = (_running_total, _counting, _table, _sorting, _reversing, _lengths, _upper)


def steps_task(rng: Random, split: Split) -> Task:
    kind = rng.choice(KINDS)
    prompt, answer = kind(rng, split)
    return single("steps", prompt, answer, tags=(kind.__name__.lstrip("_"),))
