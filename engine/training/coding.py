"""Coding tasks: one function, several functions in one answer, record classes, and explaining a function.

Answers are always one ```python fence; the names and parameters of the prompt are used in the answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from training.families import Family, Function, all_families, standard_families
from training.grammars import sample_grammar
from training.tasks import Check, CheckKind, Split, Task, pick, single, skewed, words
from training.wording import imperative, joined, lead, uncapital, vary, vary_words

# {s} signature, {d} "returns ...", {i} "Return ...", {n} name, {a} parameters
LEADS = (
    "Write a Python function {s} that {d}.",
    "Write a Python function {s} that {d}.",
    "Write a Python function {s} that {d}.",
    "Write a function {s} that {d}.",
    "Write a Python function {s} which {d}.",
    "Write Python code for {s}, a function that {d}.",
    "Write the Python function {s}. It {d}.",
    "Write the function {s} in Python. {i}.",
    "Write {s} in Python. It {d}.",
    "Write me a Python function {s} that {d}.",
    "Implement {s}, a Python function that {d}.",
    "Implement a function {s} that {d}.",
    "Implement the Python function {s} which {d}.",
    "Implement {s} in Python: {i}.",
    "Please write a Python function {s} that {d}.",
    "Please write {s} in Python. It {d}.",
    "Please implement {s}, which {d}.",
    "Please give me a Python function {s} that {d}.",
    "Create a Python function {s} that {d}.",
    "Create a function {s} which {d}.",
    "Define a Python function {s} that {d}.",
    "Define {s} in Python so that it {d}.",
    "I need a Python function {s} that {d}.",
    "I need {s} in Python. It {d}.",
    "I want a Python function {s} that {d}.",
    "Can you write a Python function {s} that {d}?",
    "Can you implement {s} in Python? It {d}.",
    "Could you write a function {s} that {d}?",
    "Could you please implement {s}? It {d}.",
    "Give me a Python function {s} that {d}.",
    "Give me the code of {s}, a function that {d}.",
    "Show me a Python function {s} that {d}.",
    "Show me how to write {s}, which {d}.",
    "Show the code of a Python function {s} that {d}.",
    "Code a Python function {s} that {d}.",
    "Code {s} in Python. {i}.",
    "Help me write {s}, which {d}.",
    "Help me with a Python function {s} that {d}.",
    "Generate a Python function {s} that {d}.",
    "Provide a Python function {s} that {d}.",
    "Make a Python function {s} that {d}.",
    "Complete the Python function {s}. It {d}.",
    "Task: write a Python function {s} that {d}.",
    "Task: {i}. Use the signature {s}.",
    "Problem: {i}.\nWrite the Python function {s}.",
    "Exercise: implement {s}. It {d}.",
    "Python: {s}. {i}.",
    "In Python, write a function {s} that {d}.",
    "In Python, implement {s}. It {d}.",
    "Using Python, write {s}, a function that {d}.",
    "{i}. Write this as a Python function {s}.",
    "{i}. Name the Python function {s}.",
    "{i} with a Python function {s}.",
    "How do I write a Python function {s} that {d}?",
    "What does a Python function {s} look like that {d}?",
    "A Python function {s} is needed that {d}. Write it.",
    'Complete this Python function:\n\ndef {n}({a}):\n    """{i}."""',
    'Complete this code:\n```python\ndef {n}({a}):\n    """{i}."""\n```',
    "Fill in the body of this function:\n\ndef {n}({a}):\n    # {i}",
    "The function {s} should do the following: {i}. Write it in Python.",
    # The last eighth is held out. Its first words all occur above.
    "Please create a Python function {s} that {d}.",
    "Write a short Python function {s} that {d}.",
    "I need you to write {s}. The function {d}.",
    "Could you show me a Python function {s} which {d}?",
    "Implement the following function in Python: {s}. It {d}.",
    "Give me Python code for {s}, which {d}.",
    "Define the function {s}. It {d}. Use Python.",
    "Can you give me {s} in Python? It {d}.",
)
ONE_LINE_LEADS = tuple(t for t in LEADS if "\n" not in t)

# The same request put together from parts; a part of each list is left to the held-out split.
ASKING = ("", "", "", "", "please ", "can you ", "could you ", "could you please ", "I need you to ", "I want you to ",
          "your task is to ", "your job is to ", "help me ", "now ", "you should ", "we need to ", "let us ", "try to ",
          "would you ", "go and ", "I would like you to ", "kindly ", "you must ", "today we ")  # fmt: skip
VERBS = ("write", "write", "write", "implement", "create", "define", "code", "make", "build", "develop", "produce",
         "provide", "give me", "show me", "design", "program", "construct", "write down", "prepare", "write me", "draft",
         "supply", "compose", "generate", "put together")  # fmt: skip
ADJECTIVES = ("a", "a", "a", "a", "the", "one", "a short", "a simple", "a small", "a clean", "a correct", "a new", "a fast",
              "a plain", "the following", "a little", "a working", "an efficient", "a complete", "a readable", "some",
              "a tidy", "a compact", "a basic")  # fmt: skip
KINDS = ("Python function", "Python function", "Python function", "function", "function in Python,", "Python 3 function",
         "Python routine", "Python method", "Python helper", "Python code for", "function (in Python)",
         "Python implementation of", "pure Python function", "Python procedure", "Python definition of",
         "Python utility function")  # fmt: skip
NAMINGS = ("{s}", "{s}", "{s}", "named {s}", "called {s}", "with the name {s}", "with the signature {s}",
           "named {n} that takes {p} and", "called {n} which takes {p} and", "{n} that takes {p} and",
           "named {n} with the parameters {p}", "{n} with arguments {p}", "`{n}`, taking {p},", "named `{n}`",
           "under the name {s}", "{n} with the inputs {p}", "named `{n}` that accepts {p} and")  # fmt: skip
JOINS = (" that {d}.", " that {d}.", " that {d}.", " which {d}.", ". It {d}.", ". It should {u}.", ": {i}.", " to {u}.",
         ". The function {d}.", ". The function should {u}.", ". {i}.", " so that it {d}.", "; it {d}.", " ({u}).",
         "; it should {u}.", ". It must {u}.", ", which {d}.", ". What it does: it {d}.", ". Purpose: {u}.",
         ". This function {d}.", ", one that {d}.", ". The task: {u}.", ". It has to {u}.")  # fmt: skip


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


NAME_ONLY = (
    "Write a Python function {s}.",
    "Write the Python function {s}.",
    "Implement {s} in Python.",
    "Please write {s} in Python.",
    "Give me a Python function {s}.",
    "Define {s} in Python.",
    "Python code for {s}, please.",
    "Show me the Python function {s}.",
)
SUFFIXES = (
    "",
    " Answer with code only.",
    " Only output the code.",
    " Answer with the code only, no explanation.",
    " No explanation, please.",
    " Return only the code.",
    " Just the function.",
    " Reply with a Python code block.",
    " Do not explain it.",
    " Use plain Python.",
    " Do not use any imports.",
    " Keep it simple.",
    " Keep it short.",
    " Thanks.",
    " Reply with the function only.",
    " Give only the code.",
)
DOCSTRING = (" Include a docstring.", " Add a docstring.", " Write a docstring too.", " Document it with a docstring.")
HINTS = (" Use type hints.", " Add type hints.", " Include type annotations.", " With type hints, please.")
EXAMPLE = (" Show an example call.", " Add an example call.", " Include a usage example.", " Print one example.")
EXPLAIN = (" Explain it in one sentence.", " Add a one-sentence explanation.", " Explain briefly.", " Then explain it.")
MADE_UP = ("my", "do", "run", "get", "make", "calc", "solve", "find", "helper", "task", "fast", "simple", "new", "old",
           "the", "main", "step", "try", "use", "handle", "apply", "job", "part", "check", "user", "data")  # fmt: skip
ANY_PARAMETERS = ("a b c d", "x y z w", "p q r t", "first second third fourth", "arg1 arg2 arg3 arg4", "u v w h",
                  "foo bar baz qux", "data other more extra", "input1 input2 input3 input4")  # fmt: skip


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


MANY_LEADS = (
    "Write the Python functions {names}.",
    "Write these Python functions: {names}.",
    "Write the following Python functions: {names}.",
    "Implement the Python functions {names}.",
    "Please write the Python functions {names} in one code block.",
    "Give me the Python functions {names}.",
    "I need the Python functions {names}.",
    "Implement {names} in Python.",
    "Write {names} in Python.",
    "Put the Python functions {names} in one file.",
    "Please implement these Python functions: {names}.",
)
LIST_LEADS = (
    "Write a Python module with these functions:",
    "Write the following Python functions:",
    "Implement these functions in one file:",
    "I need several Python functions:",
    "Write Python code with the functions below.",
    "Please write these functions in Python:",
    "Implement all of the following in Python:",
    "Write one Python code block with:",
    "Please implement the following Python functions:",
)
INLINE_LEADS = (
    "Write the Python functions {parts}.",
    "Write {count} Python functions: {parts}.",
    "Implement {parts} in Python.",
    "Write Python code for {parts}.",
    "I need {count} functions: {parts}.",
    "Please write {parts}.",
    "Please write the functions {parts} in Python.",
)
NUMBER_WORDS = words(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
                "sixteen seventeen eighteen nineteen twenty"
)  # fmt: skip


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


CODE_WORD_LEADS = (
    "Remember the code word {w}. {task} Put the code word in a comment on the first line.",
    "The code word is {w}. {task} Put the code word in a comment on the first line.",
    "Your code word is {w}. {task} Write the code word as a comment on the first line.",
    "Remember the code word {w}. {task} Start the code with a comment that holds the code word.",
    "{task} Put the code word {w} in a comment on the first line.",
    "{task} Begin with a comment that contains {w}.",
    "{task} The first line must be a comment with the code word {w}.",
    "Use the code word {w} as a comment on the first line. {task}",
    "Code word: {w}. {task} The first line of the code must be a comment with the code word.",
    "{task} Add the comment # {w} as the first line.",
    "Keep the code word {w} in mind. {task} Put it in a comment in the first line.",
    "The session code word is {w}.\n{task}\nPut the code word in a comment on the first line.",
    "Remember this code word: {w}.\n{task}\nThe code word goes into a comment at the top.",
    "Note the code word {w}. {task} Put the code word in a comment at the very top.",
    "Remember the code word {w}. {task} Write the code word in a comment on the first line of the code.",
    "The code word is {w}. {task} Place it in a comment on the first line.",
)


WORD_NAMES = ("code word", "code word", "code word", "code", "token", "password", "session id", "keyword", "marker",
              "secret word", "tag", "id")  # fmt: skip
WORD_GIVEN = ("The {k} is {w}.", "Your {k} is {w}.", "Remember the {k} {w}.", "Remember this {k}: {w}.", "{w} is the {k}.",
              "Note the {k} {w}.", "Here is a {k}: {w}.", "My {k} is {w}.", "Keep the {k} {w} in mind.",
              "Use the {k} {w}.")  # fmt: skip
WORD_PLACED = ("{v} {it} in a comment on the first line.", "{v} {it} in a comment in the first line of the code.",
               "{v} {it} into a comment at the top.", "{v} {it} as a comment on the first line.",
               "{v} {it} as the first line, in a comment.", "The first line must be a comment with {it}.",
               "The code must start with a comment that contains {it}.", "Start with a comment holding {it}.",
               "On the first line, {v} {it} in a comment.", "Begin the code with {it} in a comment.",
               "{v} {it} at the very top of the code as a comment.", "The first line of the code is a comment with {it}.",
               "Make the first line a comment that has {it}.", "{v} a comment with {it} before the function.")  # fmt: skip
WORD_VERBS = ("Put", "Write", "Place", "Add", "Insert", "Include", "Set", "Repeat", "Leave", "Mention", "Give")


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


EXPLAIN_LEADS = (
    "What does this function do?\n\n{code}",
    "Explain this Python function in one sentence:\n\n{code}",
    "Describe in one sentence what this code does:\n\n{code}",
    "Summarize this function in one sentence.\n\n{code}",
    "Tell me what this Python code does.\n\n{code}",
    "Explain what this function does.\n\n{code}",
    "What is this Python function good for?\n\n{code}",
    "Describe what this function does in one sentence.\n\n{code}",
)


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


RECORDS = ("Point", "Book", "Account", "Car", "Player", "Order", "Item", "Task", "User", "Box", "Sensor", "Invoice",
           "Ticket", "Robot", "Planet", "Shape", "Batch", "Node", "Vector", "Ship", "House", "Recipe")  # fmt: skip
FIELDS = ("x", "y", "z", "width", "height", "price", "count", "level", "score", "speed", "size", "weight", "age",
          "length", "rank", "cost", "amount", "points", "energy", "limit", "depth", "year")  # fmt: skip
CLASS_LEADS = (
    "Write a Python class {c} with {f}.",
    "Write a class {c} in Python with {f}.",
    "Implement a Python class {c} with {f}.",
    "Create a Python class {c} that has {f}.",
    "Define a Python class {c} with {f}.",
    "I need a Python class {c} with {f}.",
    "Please write a Python class {c} that has {f}.",
    "Please create a class {c} in Python with {f}.",
)


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
