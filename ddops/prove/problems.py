"""Coding problems with one right behaviour: what is asked, and what the function must return. Pure.

The right values are worked out here, by our own functions, and never enter the sandbox. Arguments are partly fixed edge
cases and partly drawn afresh for each run, so that nothing can be right by heart.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Args = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Problem:
    """A function to write: `solve` gives the right value for any arguments that `fixed` or `draw` produce."""

    name: str
    signature: str
    does: str  # "returns ..."
    solve: Callable[..., Any]
    fixed: tuple[Args, ...]
    draw: Callable[[random.Random], Args]

    @property
    def prompt(self) -> str:
        return f"Write a Python function {self.signature} that {self.does}."

    def cases(self, rng: random.Random, drawn: int = 5) -> tuple[tuple[Args, Any], ...]:
        """(arguments, right value) pairs."""
        args = [*self.fixed, *(self.draw(rng) for _ in range(drawn))]
        return tuple((a, self.solve(*a)) for a in args)


def _word(rng: random.Random, low: int = 0, high: int = 9, letters: str = "abcde") -> str:
    return "".join(rng.choices(letters, k=rng.randint(low, high)))


def _numbers(rng: random.Random, low: int = 1, high: int = 8) -> list[int]:
    return [rng.randint(-20, 60) for _ in range(rng.randint(low, high))]


def _mirrored(rng: random.Random) -> str:
    half = _word(rng, 1, 4)
    return half + half[::-1] if rng.random() < 0.5 else _word(rng, 2, 6)


def _fib(n: int) -> int:
    a, b = 0, 1
    for _ in range(n):
        a, b = b, a + b
    return a


def _is_prime(n: int) -> bool:
    return n > 1 and all(n % d for d in range(2, math.isqrt(n) + 1))


def _second_largest(numbers: Sequence[int]) -> int:
    return sorted(set(numbers))[-2]


def _sentence(rng: random.Random) -> str:
    return " ".join(_word(rng, 1, 3, "abc") for _ in range(rng.randint(0, 8)))


def _letters(rng: random.Random) -> tuple[str, str]:
    a = _word(rng, 2, 6)
    b = "".join(rng.sample(a, len(a))) if rng.random() < 0.6 else _word(rng, 2, 6)
    return a, b


STANDARD = (
    Problem(
        "is_palindrome",
        "is_palindrome(s)",
        "returns True if s reads the same forwards and backwards",
        lambda s: s == s[::-1],
        (("racecar",), ("hello",), ("",), ("ab",), ("abba",)),
        lambda r: (_mirrored(r),),
    ),
    Problem(
        "fib",
        "fib(n)",
        "returns the n-th Fibonacci number, with fib(0) = 0 and fib(1) = 1",
        _fib,
        ((0,), (1,), (2,), (10,)),
        lambda r: (r.randint(3, 22),),
    ),
    Problem(
        "merge_sorted",
        "merge_sorted(a, b)",
        "merges two sorted lists into one sorted list",
        lambda a, b: sorted(a + b),
        (([], []), ([1, 3], [2]), ([], [1])),
        lambda r: (sorted(_numbers(r, 0)), sorted(_numbers(r, 0))),
    ),
    Problem(
        "word_count",
        "word_count(text)",
        "returns a dictionary mapping each word to its count",
        lambda t: dict(Counter(t.split())),
        (("a b a",), ("",), ("the cat the dog",)),
        lambda r: (_sentence(r),),
    ),
    Problem(
        "gcd",
        "gcd(a, b)",
        "returns the greatest common divisor of a and b",
        math.gcd,
        ((12, 18), (7, 5), (9, 3)),
        lambda r: (r.randint(1, 300), r.randint(1, 300)),
    ),
)

KIN = (
    Problem(
        "is_prime",
        "is_prime(n)",
        "returns True if n is a prime number",
        _is_prime,
        ((2,), (1,), (9,), (17,)),
        lambda r: (r.randint(2, 200),),
    ),
    Problem(
        "factorial",
        "factorial(n)",
        "returns the factorial of n",
        math.factorial,
        ((0,), (1,), (5,)),
        lambda r: (r.randint(2, 14),),
    ),
    Problem(
        "is_anagram",
        "is_anagram(a, b)",
        "returns True if a and b are anagrams",
        lambda a, b: sorted(a) == sorted(b),
        (("listen", "silent"), ("ab", "abc")),
        _letters,
    ),
    Problem(
        "flatten",
        "flatten(nested)",
        "flattens a list of lists into one list",
        lambda n: [x for row in n for x in row],
        (([],), ([[1, 2], [3]],)),
        lambda r: ([_numbers(r, 0, 4) for _ in range(r.randint(1, 4))],),
    ),
    Problem(
        "count_vowels",
        "count_vowels(s)",
        "counts the vowels in s",
        lambda s: sum(c in "aeiou" for c in s),
        (("hello",), ("",), ("xyz",)),
        lambda r: (_word(r, 0, 9, "abcdeiou"),),
    ),
    Problem(
        "reverse_string",
        "reverse_string(s)",
        "returns s reversed",
        lambda s: s[::-1],
        (("abc",), ("",)),
        lambda r: (_word(r, 1, 9),),
    ),
    Problem(
        "find_max",
        "find_max(numbers)",
        "returns the largest number in numbers",
        max,
        (([3, 1, 2],), ([-5],)),
        lambda r: (_numbers(r),),
    ),
    Problem(
        "find_min",
        "find_min(numbers)",
        "returns the smallest number in numbers",
        min,
        (([3, 1, 2],), ([-5],)),
        lambda r: (_numbers(r),),
    ),
    Problem(
        "digit_sum",
        "digit_sum(n)",
        "returns the sum of the digits of n",
        lambda n: sum(map(int, str(n))),
        ((0,), (123,)),
        lambda r: (r.randint(1, 99999),),
    ),
    Problem(
        "remove_duplicates",
        "remove_duplicates(items)",
        "removes duplicates from items while keeping the order",
        lambda i: list(dict.fromkeys(i)),
        (([1, 2, 1, 3],), ([],)),
        lambda r: ([r.randint(0, 4) for _ in range(r.randint(1, 8))],),
    ),
    Problem(
        "is_even",
        "is_even(n)",
        "returns True if n is even",
        lambda n: n % 2 == 0,
        ((0,), (3,), (8,)),
        lambda r: (r.randint(1, 500),),
    ),
    Problem(
        "lcm",
        "lcm(a, b)",
        "returns the least common multiple of a and b",
        math.lcm,
        ((4, 6), (3, 5)),
        lambda r: (r.randint(1, 60), r.randint(1, 60)),
    ),
    Problem(
        "is_leap_year",
        "is_leap_year(year)",
        "returns True if year is a leap year",
        lambda y: y % 4 == 0 and (y % 100 != 0 or y % 400 == 0),
        ((2000,), (1900,), (2024,), (2023,)),
        lambda r: (r.randint(1600, 2400),),
    ),
    Problem(
        "is_power_of_two",
        "is_power_of_two(n)",
        "returns True if n is a power of two",
        lambda n: n > 0 and n & (n - 1) == 0,
        ((1,), (2,), (6,), (64,)),
        lambda r: (2 ** r.randint(0, 12) if r.random() < 0.5 else r.randint(1, 4000),),
    ),
    Problem(
        "list_sum",
        "list_sum(numbers)",
        "returns the sum of numbers",
        sum,
        (([1, 2, 3],), ([],)),
        lambda r: (_numbers(r, 0),),
    ),
    Problem(
        "second_largest",
        "second_largest(numbers)",
        "returns the second largest distinct number in numbers",
        _second_largest,
        (([1, 2, 3],),),
        lambda r: (r.sample(range(-20, 60), r.randint(2, 7)),),
    ),
    Problem(
        "is_sorted",
        "is_sorted(items)",
        "returns True if items is sorted in ascending order",
        lambda i: i == sorted(i),
        (([1, 2, 3],), ([2, 1],), ([],)),
        lambda r: (sorted(_numbers(r)) if r.random() < 0.5 else _numbers(r, 2),),
    ),
    Problem(
        "celsius_to_fahrenheit",
        "celsius_to_fahrenheit(c)",
        "converts a temperature from Celsius to Fahrenheit",
        lambda c: c * 9 / 5 + 32,
        ((0,), (100,), (-40,)),
        lambda r: (r.randint(-60, 120),),
    ),
)

BY_NAME = {p.name: p for p in (*STANDARD, *KIN)}
