"""Coding tasks: one function, several functions in one answer, record classes, and explaining a function.

Answers are always one ```python fence; the names and parameters of the prompt are used in the answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from training.coding_words import (
    ADJECTIVES,
    ANY_PARAMETERS,
    ASKING,
    CLASS_LEADS,
    CODE_WORD_LEADS,
    DOCSTRING,
    EXAMPLE,
    EXPLAIN,
    EXPLAIN_LEADS,
    FIELDS,
    HINTS,
    INLINE_LEADS,
    JOINS,
    KINDS,
    LEADS,
    LIST_LEADS,
    MADE_UP,
    MANY_LEADS,
    NAME_ONLY,
    NAMINGS,
    NUMBER_WORDS,
    ONE_LINE_LEADS,
    RECORDS,
    SUFFIXES,
    VERBS,
    WORD_GIVEN,
    WORD_NAMES,
    WORD_PLACED,
    WORD_VERBS,
)
from training.families import Family, Function, all_families, standard_families
from training.grammars import sample_grammar
from training.tasks import Check, CheckKind, Split, Task, pick, single, skewed
from training.wording import imperative, joined, lead, uncapital, vary, vary_words


def composed_lead(rng: Random, split: Split) -> str:
    """A request put together from ASKING, VERBS, ADJECTIVES, KINDS, NAMINGS and JOINS."""
    asking, verb, adjective, kind, naming, join = (
        pick(rng, part, split if rng.random() < 0.4 else Split.TRAIN)
        for part in (ASKING, VERBS, ADJECTIVES, KINDS, NAMINGS, JOINS)
    )
    if naming.endswith(" and"):
        join = " {d}."
    text = f"{asking}{verb} {adjective} {kind} {naming}{join}"
    text = text[0].upper() + text[1:]
    if asking.startswith(("can", "could", "would")) and join.endswith("{d}."):
        text = text[:-1] + "?"
    return vary(rng, text) if rng.random() < 0.3 else text


def fill_lead(template: str, shown: str, description: str, function: Function) -> str:
    order = imperative(description)
    names = joined([*function.params])
    return template.format(s=shown, d=description, i=order, u=uncapital(order), n=function.name, a=function.arguments, p=names)


def choose_function(rng: Random, family: Family, *, canonical: bool = False) -> Function:
    """Chooses the name and the parameters; a canonical function is recognisable by its name alone."""
    name = skewed(rng, family.names, 0.75) if canonical else skewed(rng, family.names, 0.55)
    if not canonical and rng.random() < 0.22:
        name = _made_up_name(rng, family)
    params = skewed(rng, family.params, 0.6)
    if not canonical and rng.random() < 0.12:
        params = tuple(rng.choice(ANY_PARAMETERS).split()[: len(params)])
    return Function(family, family.names[0] if name in params else name, params)


def _made_up_name(rng: Random, family: Family) -> str:
    word, tail = rng.choice(MADE_UP), rng.choice(family.names)
    number = str(rng.randrange(1, 100))
    options = (f"{word}_{tail}", f"{tail}_{number}", f"{word}_{rng.choice(MADE_UP)}", f"{word}{number}",
               f"{tail}_{word}", f"f{number}", f"{word}_{tail}_{number}", rng.choice("fghk"))  # fmt: skip
    return rng.choice(options)


def choose_family(rng: Random, split: Split) -> Family:
    u = rng.random()
    if u < 0.14:
        return rng.choice(standard_families())
    if u < 0.74:
        return rng.choice(all_families())
    return sample_grammar(rng, split)[1]


def _description(rng: Random, function: Function, split: Split) -> str:
    description = pick(rng, function.family.descriptions, split)
    return function.fill(vary_words(rng, description) if rng.random() < 0.5 else description)


def _signature(rng: Random, function: Function) -> tuple[str, bool]:
    """How the prompt shows the function, and whether that asks for type hints."""
    plain, name = f"{function.name}({function.arguments})", function.name
    if rng.random() < 0.07:
        typed = f"{name}({function.typed_arguments}) -> {function.family.returns}"
        return rng.choice((typed, f"`{typed}`", f"`def {typed}`")), True
    return skewed(rng, (plain, f"`{plain}`", f"`{name}`", name, f"`def {plain}:`"), 0.6), False


@dataclass(frozen=True, slots=True)
class Extras:
    """What the prompt asks for besides the function."""

    suffix: str = ""
    hints: bool = False
    docstring: bool = False
    example: bool = False
    explain: bool = False


def _extras(rng: Random, split: Split, *, hints: bool) -> Extras:
    u = rng.random()
    if u < 0.07:
        return Extras(lead(rng, DOCSTRING, split), hints, docstring=True)
    if u < 0.12:
        return Extras(lead(rng, HINTS, split), True)
    if u < 0.16:
        return Extras(lead(rng, EXAMPLE, split), hints, example=True)
    if u < 0.20:
        return Extras(lead(rng, EXPLAIN, split), hints, explain=True)
    return Extras("" if rng.random() < 0.4 else lead(rng, SUFFIXES, split), hints)


def code_task(rng: Random, split: Split) -> Task:
    """One function from a description (or, for well-known names, from the name alone)."""
    family = choose_family(rng, split)
    function = choose_function(rng, family)
    shown, hints = _signature(rng, function)
    if function.name in family.names[:2] and family in all_families() and rng.random() < 0.12:
        function = Function(family, function.name, family.params[0])
        shown = f"{function.name}({function.arguments})"
        return _code_answer(rng, lead(rng, NAME_ONLY, split).format(s=shown), function, Extras(), "")
    description = _description(rng, function, split)
    template = composed_lead(rng, split) if rng.random() < 0.5 else lead(rng, LEADS, split)
    prompt = fill_lead(template, shown, description, function)
    docstring = imperative(description) + "."
    if '"""' in template:
        return _code_answer(rng, prompt, function, Extras(docstring=True), docstring)
    extras = _extras(rng, split, hints=hints and "{s}" in template)
    return _code_answer(rng, prompt + extras.suffix, function, extras, docstring)


def _code_answer(rng: Random, prompt: str, function: Function, extras: Extras, docstring: str) -> Task:
    code = function.code(rng, hints=extras.hints, docstring=docstring if extras.docstring else "")
    if extras.example:
        example = function.family.examples[0]
        code += f"\n\n\nprint({function.name}({example.arguments}))  # {example.expected}"
    answer = f"```python\n{code}\n```"
    if extras.explain:
        answer += f"\n\nThe function `{function.name}` {_lower_verb(docstring)}"
    check = Check(CheckKind.PYTHON, function.tests)
    return single("code", prompt, answer, check, tags=(function.family.key,))


def _lower_verb(docstring: str) -> str:
    """`Return the sum.` becomes `does this: return the sum.`"""
    return f"does this: {docstring[0].lower()}{docstring[1:]}"


def many_task(rng: Random, split: Split, low: int, high: int, category: str) -> Task:
    """Several functions, in the order of the prompt, in one fence."""
    functions, descriptions = _distinct_functions(rng, split, rng.randint(low, high))
    signatures = [f"{f.name}({f.arguments})" for f in functions]
    u = rng.random()
    if u < 0.4 and all(f.family in all_families() for f in functions):
        functions = [Function(f.family, f.family.names[0], f.family.params[0]) for f in functions]
        signatures = [f"{f.name}({f.arguments})" for f in functions]
        prompt = lead(rng, MANY_LEADS, split).format(names=joined(signatures))
    elif u < 0.75:
        marks = rng.choice(("- ", "* ", "{n}. ", "{n}) "))
        glue = rng.choice((": it {d}", " {d}", ": {i}", " that {d}"))
        lines = [
            marks.replace("{n}", str(k + 1)) + s + glue.replace("{d}", d).replace("{i}", imperative(d))
            for k, (s, d) in enumerate(zip(signatures, descriptions, strict=True))
        ]
        prompt = lead(rng, LIST_LEADS, split) + "\n" + "\n".join(lines)
    else:
        parts = [f"{s} that {d}" for s, d in zip(signatures, descriptions, strict=True)]
        count = NUMBER_WORDS[len(parts)] if rng.random() < 0.6 else str(len(parts))
        prompt = lead(rng, INLINE_LEADS, split).format(parts=joined(parts), count=count)
    code = "\n\n\n".join(f.code(rng) for f in functions)
    check = Check(CheckKind.PYTHON, tuple(t for f in functions for t in f.tests))
    return single(category, prompt, f"```python\n{code}\n```", check)


def _distinct_functions(rng: Random, split: Split, count: int) -> tuple[list[Function], list[str]]:
    functions: list[Function] = []
    canonical = rng.random() < 0.55  # then the names alone may be enough
    while len(functions) < count:
        family = rng.choice(all_families()) if canonical else choose_family(rng, split)
        function = choose_function(rng, family, canonical=canonical)
        known = {f.name for f in functions} | {f.family.key for f in functions}
        if function.name not in known and family.key not in known:
            functions.append(function)
    return functions, [_description(rng, f, split) for f in functions]


def composed_code_word_lead(rng: Random) -> str:
    """Names the code word before or after the task and says where it goes."""
    kind = rng.choice(WORD_NAMES)
    given = rng.choice(WORD_GIVEN).replace("{k}", kind)
    it = rng.choice((f"the {kind}", f"the {kind}", f"this {kind}", "it", f"that {kind}"))
    placed = rng.choice(WORD_PLACED)
    verb = rng.choice(WORD_VERBS)
    placed = placed.replace("{v}", verb if placed.startswith("{v}") else verb.lower()).replace("{it}", it)
    glue = rng.choice((" ", " ", "\n"))
    if rng.random() < 0.3:
        placed = placed.replace(it, f"the {kind} {{w}}", 1)
        return glue.join(("{task}", placed))
    order = (given, "{task}", placed) if rng.random() < 0.8 else ("{task}", given, placed)
    return glue.join(order)


def code_word_task(rng: Random, split: Split, word: str) -> Task:
    """A coding task whose answer must carry a code word in its first line."""
    function = choose_function(rng, choose_family(rng, split))
    description = _description(rng, function, split)
    plain = f"{function.name}({function.arguments})"
    template = composed_lead(rng, split) if rng.random() < 0.4 else lead(rng, ONE_LINE_LEADS, split)
    inner = fill_lead(template, plain, description, function)
    outer = composed_code_word_lead(rng) if rng.random() < 0.4 else lead(rng, CODE_WORD_LEADS, split)
    prompt = outer.format(w=word, task=inner)
    answer = f"```python\n# {word}\n{function.code(rng)}\n```"
    check = Check(CheckKind.PYTHON, function.tests, first_line=word)
    return single("code+nonce", prompt, answer, check, tags=(function.family.key,))


def explain_task(rng: Random, split: Split) -> Task:
    """Says what a function does; any of the family's descriptions is right."""
    family = rng.choice(all_families())
    function = choose_function(rng, family, canonical=rng.random() < 0.7)
    code = function.code(rng)
    code = f"```python\n{code}\n```" if rng.random() < 0.5 else code
    answers = [f"The function `{function.name}` {function.fill(d)}." for d in family.descriptions]
    answer = rng.choice(answers[:-1])
    prompt = lead(rng, EXPLAIN_LEADS, split).format(code=code)
    return single("explain", prompt, answer, Check(CheckKind.EXACT, tuple(answers)))


def class_task(rng: Random, split: Split) -> Task:
    """A small class from its name, fields and methods."""
    name, fields = rng.choice(RECORDS), rng.sample(FIELDS, rng.randint(2, 4))
    methods = rng.sample(range(5), rng.randint(1, 4))
    values = [rng.randrange(1, 30) for _ in fields]
    made = f"{name}({', '.join(map(str, values))})"
    init = "\n".join(f"        self.{f} = {f}" for f in fields)
    code = f"class {name}:\n    def __init__(self, {', '.join(fields)}):\n{init}"
    phrases, tests = [], [f"{made}.{f} == {v}" for f, v in zip(fields, values, strict=True)]
    own = [f"self.{f}" for f in fields]
    for method in methods:
        first, body, phrase, expected = _method(method, fields, own, values, rng)
        code += f"\n\n    def {first}:\n        return {body}"
        phrases.append(phrase)
        tests.append(f"{made}.{first.split('(')[0]}({'3' if method == 4 else ''}) == {expected}")
    parts = f"the attributes {joined(fields)} and " + ("the method " if len(phrases) == 1 else "the methods ")
    prompt = lead(rng, CLASS_LEADS, split).format(c=name, f=parts + joined(phrases))
    return single("class", prompt, f"```python\n{code}\n```", Check(CheckKind.PYTHON, tuple(tests)))


def _method(which: int, fields: list[str], own: list[str], values: list[int], rng: Random) -> tuple[str, str, str, object]:
    """(signature, returned expression, phrase for the prompt, value for the test with argument 3)."""
    a = rng.randrange(len(fields))
    match which:
        case 0:
            return ("total(self)", " + ".join(own), f"total() that returns the sum of {joined(fields)}", sum(values))
        case 1:
            text = f"as_tuple() that returns a tuple of {joined(fields)}"
            return ("as_tuple(self)", f"({', '.join(own)})", text, tuple(values))
        case 2:
            pairs = ", ".join(f"'{f}': {o}" for f, o in zip(fields, own, strict=True))
            text = "as_dict() that returns a dictionary of the attributes"
            return ("as_dict(self)", f"{{{pairs}}}", text, dict(zip(fields, values, strict=True)))
        case 3:
            text = f"double_{fields[a]}() that returns twice the {fields[a]}"
            return (f"double_{fields[a]}(self)", f"2 * {own[a]}", text, 2 * values[a])
        case _:
            text = f"scaled(factor) that returns {fields[a]} times factor"
            return ("scaled(self, factor)", f"{own[a]} * factor", text, 3 * values[a])
