"""The wordings of coding requests: whole leads, and parts that coding.py puts together.

In leads: {s} signature, {d} "returns ...", {i} "Return ...", {u} "return ...", {n} name, {a} parameters, {p} "a and b".
"""

from __future__ import annotations

from training.tasks import words

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
