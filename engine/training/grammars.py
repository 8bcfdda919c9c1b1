"""Combinatorial code families: filter x map x reduce over lists, character filters, number rules, record classes.

Each function returns a Family for one combination (cached); combinations with is_held(key) never reach training.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from random import Random

from training.families import Example, Family, parse_body
from training.tasks import Split, is_held, words


@dataclass(frozen=True, slots=True)
class Part:
    """A phrase and the Python expression over `x` that it stands for."""

    key: str
    phrase: str
    expression: str


FILTERS = (
    Part("all", "numbers", ""),
    Part("even", "even numbers", "x % 2 == 0"),
    Part("odd", "odd numbers", "x % 2 == 1"),
    Part("positive", "positive numbers", "x > 0"),
    Part("negative", "negative numbers", "x < 0"),
    Part("nonzero", "nonzero numbers", "x != 0"),
    Part("above_{k}", "numbers greater than {k}", "x > {k}"),
    Part("below_{k}", "numbers less than {k}", "x < {k}"),
    Part("at_least_{k}", "numbers that are at least {k}", "x >= {k}"),
    Part("divisible_by_{k}", "numbers divisible by {k}", "x % {k} == 0"),
    Part("not_divisible_by_{k}", "numbers not divisible by {k}", "x % {k} != 0"),
)
MAPS = (
    Part("", "the {}", "x"),
    Part("squared", "the squares of the {}", "x ** 2"),
    Part("cubed", "the cubes of the {}", "x ** 3"),
    Part("doubled", "the doubles of the {}", "x * 2"),
    Part("negated", "the negatives of the {}", "-x"),
    Part("absolute", "the absolute values of the {}", "abs(x)"),
    Part("plus_{m}", "{m} plus each of the {}", "x + {m}"),
    Part("times_{m}", "{m} times each of the {}", "x * {m}"),
)
REDUCTIONS = ("sum", "list", "count", "product", "largest", "smallest")
REDUCED = {
    "sum": "the sum of",
    "list": "a list of",
    "count": "the number of",
    "product": "the product of",
    "largest": "the largest of",
    "smallest": "the smallest of",
}
CHARACTERS = (
    Part("digits", "digits", "c.isdigit()"),
    Part("uppercase", "uppercase letters", "c.isupper()"),
    Part("lowercase", "lowercase letters", "c.islower()"),
    Part("letters", "letters", "c.isalpha()"),
    Part("alphanumerics", "alphanumeric characters", "c.isalnum()"),
    Part("spaces", "whitespace characters", "c.isspace()"),
    Part("char_{k}", "occurrences of the letter {k}", "c == '{k}'"),
)
LISTS = ([1, 2, 3, 4, 5, 6, 15, -3, -4, 0, 20, 30, 99, 140], [12, 7, -9, 10, -5, 11, 64, 100, 121])
TEXTS = ("Hello World 123", "aEi 9z!", "", "ABC def b kk")


def _block(init: str, condition: str, statement: str, end: str, loop: str = "for x in numbers:") -> str:
    inner = f"    if {condition}:\n        {statement}" if condition else f"    {statement}"
    return f"{init}\n{loop}\n{inner}\n{end}"


def _reduction_bodies(reduction: str, expression: str, condition: str) -> list[str]:
    each = f"{expression} for x in numbers" + (f" if {condition}" if condition else "")
    loops = {
        "sum": ("total = 0", f"total += {expression}", "return total"),
        "list": ("result = []", f"result.append({expression})", "return result"),
        "count": ("count = 0", "count += 1", "return count"),
        "product": ("result = 1", f"result *= {expression}", "return result"),
        "largest": ("result = []", f"result.append({expression})", "return max(result)"),
        "smallest": ("result = []", f"result.append({expression})", "return min(result)"),
    }
    short = {
        "sum": f"return sum({each})",
        "list": f"return [{each}]",
        "count": f"return sum(1{each[len(expression) :]})",
        "largest": f"return max({each})",
        "smallest": f"return min({each})",
    }
    init, statement, end = loops[reduction]
    return [b for b in (short.get(reduction), _block(init, condition, statement, end)) if b]


def _family(
    names: list[str], params: str, returns: str, descriptions: list[str], bodies: list[str], inputs: tuple[object, ...]
) -> Family:
    """Builds a Family whose examples come from executing its first body; every input is one argument."""
    alternatives = tuple((p,) for p in params.split())
    scope: dict[str, Callable[..., object]] = {}
    exec(f"def f({alternatives[0][0]}):\n" + "\n".join("    " + s for s in bodies[0].split("\n")), scope)
    examples = tuple(Example(repr(v), repr(scope["f"](v))) for v in inputs)
    parsed = tuple(parse_body(b) for b in bodies)
    kind = {list: "list", str: "str", int: "int"}[type(inputs[0])]
    return Family(tuple(names), alternatives, (kind,), returns, tuple(descriptions), examples, parsed)


@cache
def list_pipeline(chosen: int, mapped: int, reduction: str, k: int, m: int) -> Family:
    """`the sum of the squares of the even numbers in xs` and its kin."""
    if reduction == "count":
        mapped = 0  # how many there are does not depend on the map
    part, mapping = FILTERS[chosen], MAPS[mapped]
    noun = mapping.phrase.replace("{m}", str(m)).replace("{}", part.phrase.replace("{k}", str(k)))
    condition = part.expression.replace("{k}", str(k))
    expression = mapping.expression.replace("{m}", str(m))
    name = "_".join(p for p in (reduction, mapping.key, part.key) if p)
    what = f"{REDUCED[reduction]} {noun} in {{numbers}}"
    descriptions = [
        f"returns {what}",
        f"computes {what}",
        f"takes a list {{numbers}} and returns {REDUCED[reduction]} {noun} in it",
        f"goes through {{numbers}} and gives back {REDUCED[reduction]} {noun}",
    ]
    return _family(
        [name.replace("{k}", str(k)).replace("{m}", str(m)), f"{reduction}_values", "process", "compute"],
        "numbers values items nums xs",
        "list" if reduction == "list" else "int",
        descriptions,
        _reduction_bodies(reduction, expression, condition),
        LISTS,
    )


@cache
def character_filter(which: int, mode: str, k: str) -> Family:
    """Counts, keeps, removes or looks for a kind of character in a string."""
    part = CHARACTERS[which]
    what, condition = part.phrase.replace("{k}", f"'{k}'"), part.expression.replace("{k}", k)
    negated = condition.replace("==", "!=") if "==" in condition else f"not {condition}"
    loop = "for c in text:"
    specs = {
        "count": ("int", [f"counts the {what} in {{text}}", f"returns the number of {what} in {{text}}",
                          f"computes how many {what} the string {{text}} has"],
                  [f"return sum(1 for c in text if {condition})",
                   _block("count = 0", condition, "count += 1", "return count", loop)]),
        "keep": ("str", [f"keeps only the {what} of {{text}}", f"returns just the {what} in {{text}}",
                         f"filters {{text}} down to its {what}"],
                 [f"return ''.join(c for c in text if {condition})",
                  _block("result = ''", condition, "result += c", "return result", loop)]),
        "remove": ("str", [f"removes all {what} from {{text}}", f"returns {{text}} without its {what}",
                           f"deletes the {what} in {{text}}"],
                   [f"return ''.join(c for c in text if {negated})",
                    _block("result = ''", negated, "result += c", "return result", loop)]),
        "has": ("bool", [f"checks whether {{text}} contains any {what}", f"returns True if there are {what} in {{text}}",
                         f"tells if {{text}} has some {what}"],
                [f"return any({condition} for c in text)",
                 f"{loop}\n    if {condition}:\n        return True\nreturn False"]),
    }  # fmt: skip
    returns, descriptions, bodies = specs[mode]
    name = f"{mode}_{part.key.replace('{k}', k)}"
    return _family([name, f"{mode}_them", "scan"], "text s string line", returns, descriptions, bodies, TEXTS)


@cache
def threshold_rule(word_high: str, word_low: str, limit: int, strict: bool) -> Family:
    """`returns 'hot' if n is greater than 30 and 'cold' otherwise`."""
    relation, phrase = (">", "greater than") if strict else (">=", "at least")
    descriptions = [
        f"returns '{word_high}' if {{n}} is {phrase} {limit} and '{word_low}' otherwise",
        f"gives '{word_high}' when {{n}} is {phrase} {limit}, else '{word_low}'",
        f"labels {{n}} as '{word_high}' if it is {phrase} {limit} and as '{word_low}' if not",
    ]
    bodies = [
        f"if n {relation} {limit}:\n    return '{word_high}'\nreturn '{word_low}'",
        f"return '{word_high}' if n {relation} {limit} else '{word_low}'",
    ]
    names = [f"{word_high}_or_{word_low}", "label", "classify"]
    return _family(names, "n value x score level", "str", descriptions, bodies, (limit - 1, limit, limit + 1))


WORDS = words(
    "hot cold big small high low fast slow loud quiet rich poor old young full empty long short hard soft "
         "pass fail yes no open closed on off warm cool deep flat near far early late wet dry"
)  # fmt: skip


def sample_grammar(rng: Random, split: Split) -> tuple[str, Family]:
    """A random combination of the wanted split, with its key."""
    while True:
        key, family = _sample_any(rng)
        if is_held(key) == (split is Split.HELD):
            return key, family()


def _sample_any(rng: Random) -> tuple[str, Callable[[], Family]]:
    kind = rng.random()
    if kind < 0.6:
        chosen, mapped = rng.randrange(len(FILTERS)), rng.randrange(len(MAPS))
        # Constants that the chosen parts do not show are fixed, so that equal functions have equal keys.
        k = rng.choice((2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 20, 25, 50, 100)) if "{k}" in FILTERS[chosen].key else 2
        m = rng.choice((2, 3, 4, 5, 7, 10)) if "{m}" in MAPS[mapped].key else 2
        reduction = rng.choice(REDUCTIONS)
        if reduction in ("largest", "smallest") and FILTERS[chosen].key.startswith("below"):
            k = max(k, 12)  # a filter that matches nothing would make max() fail on the example lists
        args = (chosen, 0 if reduction == "count" else mapped, reduction, k, m)
        return f"list:{args}", lambda: list_pipeline(*args)
    if kind < 0.8:
        which, mode = rng.randrange(len(CHARACTERS)), rng.choice(("count", "keep", "remove", "has"))
        k = rng.choice("abcdehiklmnorstxyz")
        letter = k if "{k}" in CHARACTERS[which].key else "a"
        if letter != "a" or "{k}" in CHARACTERS[which].key:
            mode = "count"  # "removes all occurrences of the letter 'a'" reads well only for counting
        return f"char:{which}:{mode}:{letter}", lambda: character_filter(which, mode, letter)
    high, low = rng.sample(WORDS, 2)
    limit, strict = rng.choice((0, 1, 5, 10, 12, 18, 20, 21, 25, 30, 50, 60, 75, 99, 100)), rng.random() < 0.5
    return f"rule:{high}:{low}:{limit}:{strict}", lambda: threshold_rule(high, low, limit, strict)
