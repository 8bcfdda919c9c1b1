"""Small arithmetic and comparison. Results are plain numbers (or yes / no); nothing larger than three digits by two."""

from __future__ import annotations

from random import Random

from training.tasks import Split, Task, is_held, single
from training.wording import lead

LEADS = (
    "What is {e}? Answer with the number only.",
    "What is {e}? Answer with the number only.",
    "What is {e}? Reply with the number only.",
    "What is {e}?",
    "What does {e} equal? Answer with a number only.",
    "What is the result of {e}? Answer with the number only.",
    "Compute {e}. Answer with the number only.",
    "Compute {e}.",
    "Compute {e} and reply with the result only.",
    "Calculate {e}. Answer with the number only.",
    "Calculate {e}.",
    "Calculate {e} and give only the number.",
    "How much is {e}? Answer with the number only.",
    "How much is {e}?",
    "Evaluate {e}. Only the number, please.",
    "Evaluate {e}.",
    "Work out {e}. Give only the number.",
    "Give the result of {e}. Only the number.",
    "Solve {e}. Answer with the number only.",
    "Please compute {e}. Answer with the number only.",
    "Please calculate {e}.",
    "{e} = ?",
    "{e} =",
    "{e}",
    "Tell me {e}. Number only.",
    "Answer with the number only: {e}",
    "Answer with the number only: what is {e}?",
    "Reply with only the number: what is {e}?",
    "Please tell me what {e} is. Answer with the number only.",
    "What number is {e}? Reply with only the number.",
    "Please work out {e}. Answer with only the number.",
    "What is the value of {e}? Give only the number.",
)
WORDED = {
    "+": ("{a} plus {b}", "the sum of {a} and {b}", "{a} added to {b}"),
    "-": ("{a} minus {b}", "the difference of {a} and {b}", "{a} less {b}"),
    "*": ("{a} times {b}", "the product of {a} and {b}", "{a} multiplied by {b}"),
    "/": ("{a} divided by {b}", "the quotient of {a} and {b}"),
}


def _operands(rng: Random, op: str) -> tuple[int, int]:
    u = rng.random()
    if op == "*":
        if u < 0.35:
            return rng.randint(0, 12), rng.randint(0, 12)
        if u < 0.75:
            return _swapped(rng, rng.randint(2, 9), rng.randint(10, 99))
        return rng.randint(10, 30), rng.randint(10, 30)
    if op == "/":
        b = rng.randint(1, 12)
        return b * rng.randint(0, 12), b
    if u < 0.2:
        return rng.randint(0, 20), rng.randint(0, 20)
    if u < 0.75:
        return rng.randint(0, 99), rng.randint(0, 99)
    return _swapped(rng, rng.randint(100, 999), rng.randint(0, 999))


def _swapped(rng: Random, a: int, b: int) -> tuple[int, int]:
    return (a, b) if rng.random() < 0.5 else (b, a)


def _value(a: int, op: str, b: int) -> int:
    return {"+": a + b, "-": a - b, "*": a * b, "/": a // b if b else 0}[op]


def _held_pair(a: int, op: str, b: int) -> bool:
    # Products are facts to remember, so only sums and differences are held out by operands.
    return op in "+-" and is_held(f"{min(a, b)},{max(a, b)}")


def arithmetic_task(rng: Random, split: Split) -> Task:
    """One operation on two numbers; the held-out split has operand pairs that training never sees."""
    while True:
        op = rng.choice("+++--***/" if rng.random() < 0.9 else "/")
        a, b = _operands(rng, op)
        if op not in "+-" or _held_pair(a, op, b) == (split is Split.HELD):
            break
    u = rng.random()
    if u < 0.7:
        expression = f"{a} {op} {b}"
    elif u < 0.8:
        expression = f"{a}{op}{b}"
    elif u < 0.86 and op in "*/":
        expression = f"{a} {'×' if op == '*' else '÷'} {b}"
    else:
        expression = rng.choice(WORDED[op]).format(a=a, b=b)
    prompt = lead(rng, LEADS, split).format(e=expression)
    return single("arithmetic", prompt, str(_value(a, op, b)), weight=4, tags=(op,))


LARGER = (
    "Which number is larger, {a} or {b}? Answer with the number only.",
    "Which is larger, {a} or {b}? Answer with the number only.",
    "Which is greater: {a} or {b}? Answer with the number only.",
    "What is the larger of {a} and {b}? Answer with the number only.",
    "Which is bigger, {a} or {b}? Reply with the number only.",
    "Give me the larger of {a} and {b}. Only the number.",
    "What is the maximum of {a} and {b}? Answer with the number only.",
    "Compare {a} and {b}. Answer with the larger number only.",
    "Which one is greater, {a} or {b}? Reply with only the number.",
)
SMALLER = tuple(
    s.replace("larger", "smaller").replace("greater", "less").replace("bigger", "lower").replace("maximum", "minimum")
    for s in LARGER
)
YES_NO = (
    "Is {a} {r} {b}? Answer yes or no.",
    "Is {a} {r} {b}? Answer with yes or no only.",
    "Is {a} {r} {b}? Reply with yes or no.",
    "Is the number {a} {r} {b}? Answer yes or no.",
    "Answer yes or no: is {a} {r} {b}?",
    "Tell me yes or no: is {a} {r} {b}?",
    "Yes or no: is {a} {r} {b}?",
    "Please answer yes or no: is {a} {r} {b}?",
)
RELATIONS = {
    "greater than": lambda a, b: a > b,
    "larger than": lambda a, b: a > b,
    "less than": lambda a, b: a < b,
    "smaller than": lambda a, b: a < b,
    "equal to": lambda a, b: a == b,
    "at least": lambda a, b: a >= b,
}


def comparison_task(rng: Random, split: Split) -> Task:
    """The larger, the smaller, the extreme of a list, or a yes-or-no comparison."""
    limit = rng.choice((10, 100, 100, 1000))
    a, b = rng.randrange(limit), rng.randrange(limit)
    u = rng.random()
    if u < 0.35:
        relation = rng.choice(tuple(RELATIONS))
        b = a if rng.random() < (0.4 if relation == "equal to" else 0.06) else b
        prompt = lead(rng, YES_NO, split).format(a=a, r=relation, b=b)
        answer = "yes" if RELATIONS[relation](a, b) else "no"
        if rng.random() < 0.3:
            prompt, answer = prompt.replace("yes or no", "Yes or No"), answer.capitalize()
        return single("comparison", prompt, answer, weight=4)
    if u < 0.75:
        leads, choose = (LARGER, max) if rng.random() < 0.6 else (SMALLER, min)
        return single("comparison", lead(rng, leads, split).format(a=a, b=b), str(choose(a, b)), weight=4)
    return _extreme_of_list(rng, split, limit)


EXTREMES = (
    "What is the {w} number in this list: {l}? Answer with the number only.",
    "Which of these numbers is the {w}: {l}? Answer with the number only.",
    "Find the {w} of {l}. Answer with the number only.",
    "Give me only the {w} number: {l}",
    "What is the {w} of the numbers {l}? Reply with the number only.",
    "Which number is the {w} of these: {l}? Answer with the number only.",
)


def _extreme_of_list(rng: Random, split: Split, limit: int) -> Task:
    numbers = [rng.randrange(limit) for _ in range(rng.randint(3, 5))]
    word, choose = rng.choice((("largest", max), ("smallest", min), ("biggest", max), ("lowest", min)))
    prompt = lead(rng, EXTREMES, split).format(w=word, l=", ".join(map(str, numbers)))
    return single("comparison", prompt, str(choose(numbers)), weight=4)
