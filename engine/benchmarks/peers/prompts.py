"""The prompts of a run: code from short to long, copying, running totals and prose, as the bundled models know them.

ChatML, token ids only.
"""

from __future__ import annotations

from pathlib import Path

from ddtree_engine.text import Tokenizer

TASKS = (
    "Write a Python function is_palindrome(s) that returns True if s reads the same forwards and backwards.",
    "Write the Python functions fib(n), gcd(a, b) and is_prime(n).",
    "Repeat these ids exactly, one per line:\nkx7f-29ab\nq0zd-7731\nm4ta-0c8e\nzz1b-55fd\np9we-41ac\nr2ty-88cd\nn5ub-03ef",
    "Remember the code word K7Q2-XN. Write a Python function gcd(a, b). Put the code word in a comment on the first line.",
    "Write a Python function word_count(text) that returns a dictionary mapping each word to its count.",
    "Write the Python functions count_vowels(s), is_anagram(a, b), factorial(n) and flatten(items).",
    "Add these numbers step by step: 12, 7, 30, 5, 18, 41",
    "Write a short story about Anna, a baker in Bergen.",
)

MORE_TASKS = (
    "Write a Python function fib(n) that returns the n-th Fibonacci number, with fib(0) = 0 and fib(1) = 1.",
    "Write a Python function is_prime(n) that returns True if n is prime.",
    "Write a Python function factorial(n) that returns the factorial of n.",
    "Write a Python function is_anagram(a, b) that returns True if a and b are anagrams.",
    "Write a Python function flatten(items) that flattens a list of lists.",
    "Write a Python function count_vowels(s) that counts the vowels in s.",
    "Your code word is ZEBRA-4417. Reply with the code word only.",
    "What is 17 + 25? Answer with the number only.",
    "The capital of Norland is Veska. The capital of Surland is Tomar. What is the capital of Surland? Answer with one word.",
    "Repeat these ids exactly, one per line:\nab12-cd34\n9f0e-zz7k\nqqq1-0x0y",
    'Call the tool get_weather with city "Oslo" and unit "c". Answer with JSON only.',
    "Write a Python function merge_sorted(a, b) that merges two sorted lists into one sorted list.",
)


def encode(target: Path, tasks: tuple[str, ...] = TASKS) -> list[list[int]]:
    tokenizer = Tokenizer.load(target)
    return [list(tokenizer.encode(f"<|im_start|>user\n{t}<|im_end|>\n<|im_start|>assistant\n")) for t in tasks]
