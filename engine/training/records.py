"""Short structured answers from values in the prompt: JSON objects, tool calls, and reading one fact."""

from __future__ import annotations

import json
from random import Random

from training.copying import code_word, opaque_ids
from training.tasks import Check, CheckKind, Split, Task, pick, single, words
from training.wording import joined, lead, vary

FIRST = words(
    "Alice Bob Carla David Elena Farid Greta Hugo Ines Jonas Karim Lena Marta Nils Olga Pavel Quentin Rosa Samir "
         "Tara Ulf Vera Wanda Xavier Yara Zoe Amara Boris Chloe Dmitri Emil Fiona Goran Hana Ivan Julia Kofi Luca "
         "Mina Noor Otto Priya Ravi Sofia Tomas Uma Viktor Wei Yusuf Zara"
)  # fmt: skip
CITIES = words(
    "Oslo Paris Berlin Madrid Rome Vienna Prague Warsaw Lisbon Dublin Athens Cairo Lima Quito Tokyo Seoul Delhi "
          "Hanoi Perth Sydney Toronto Boston Denver Austin Nairobi Lagos Accra Tunis Riga Tallinn Vilnius Bern Zurich "
          "Geneva Milan Naples Porto Seville Krakow Malmo Bergen Turku"
)  # fmt: skip
SYLLABLES = words(
    "ar bel cor dan el fen gor hal is jor kal lor mar nor os pel quin ros sel tor ul ves wen yor zan bri cla "
             "dro fla gri kra mi pra sto tri vo sa lu ne ra"
)  # fmt: skip
FIELDS = words(
    "name age city email id price count status color country score level size title author year language active "
          "total currency unit date priority owner version host port region team role quantity category width height "
          "weight user item code type rating duration speed product amount street phone department"
)  # fmt: skip
WORDS = words(
    "red green blue open closed pending done high low small large metric daily weekly fast slow admin guest new "
         "old draft final public private north south east west coffee tea book lamp chair table pencil"
)  # fmt: skip

Value = str | int | float | bool


def invented(rng: Random) -> str:
    """A made-up proper name such as `Veskamar`."""
    name = "".join(rng.choices(SYLLABLES, k=rng.choice((2, 2, 3))))
    return name[:9].capitalize()


def _value(rng: Random, field: str) -> Value:
    if field in ("name", "author", "owner", "user"):
        return rng.choice(FIRST) if rng.random() < 0.7 else invented(rng)
    if field in ("city", "country", "region"):
        return rng.choice(CITIES) if rng.random() < 0.7 else invented(rng)
    if field == "active":
        return rng.random() < 0.5
    if field in ("age", "count", "score", "level", "size", "year", "total", "port", "quantity", "width", "height",
                 "weight", "amount", "duration", "speed", "priority"):  # fmt: skip
        return rng.randrange(rng.choice((10, 100, 100, 1000, 10000)))
    if field in ("price", "rating"):
        return rng.choice((rng.randrange(1, 100), rng.randrange(100, 9999) / 100))
    return rng.choice((rng.choice(WORDS), rng.choice(WORDS), invented(rng), code_word(rng)))


def _shown(value: Value) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _literal(value: Value) -> str:
    return json.dumps(value, ensure_ascii=False)


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


OBJECT_LEADS = (
    "Return a JSON object with the keys {keys} for: {values}.",
    "Return a JSON object with the keys {keys} for: {values}.",
    "Return a JSON object with the keys {keys} for {values}.",
    "Return JSON with the keys {keys} for: {values}",
    "Give me a JSON object with the keys {keys} and the values {values}.",
    "Write a JSON object with the keys {keys} for: {values}.",
    "Write the JSON object with keys {keys} for {values}.",
    "Create a JSON object with the keys {keys} for: {values}.",
    "Make a JSON object with the keys {keys} from: {values}.",
    "Convert this to JSON with the keys {keys}: {values}",
    "Turn this into a JSON object with the keys {keys}: {values}",
    "Output a JSON object with the keys {keys}. Values: {values}",
    "JSON object, keys {keys}, values {values}.",
    "Put {values} into a JSON object with the keys {keys}.",
    "As JSON with the keys {keys}: {values}",
    "I need a JSON object with the keys {keys} for: {values}.",
    "Please return a JSON object with the keys {keys} for: {values}.",
    "Format {values} as a JSON object with the keys {keys}.",
    "Answer with a JSON object that has the keys {keys} for: {values}.",
    "Please write JSON with the keys {keys} for: {values}.",
    "Create JSON that has the keys {keys} and the values {values}.",
    "Give the JSON object with the keys {keys} for: {values}.",
)
PAIR_LEADS = (
    "Write this as a JSON object:\n{pairs}",
    "Convert to JSON:\n{pairs}",
    "Convert these fields to a JSON object:\n{pairs}",
    "Return the following as a JSON object.\n{pairs}",
    "Turn these lines into JSON:\n{pairs}",
    "Make a JSON object from these fields:\n{pairs}",
    "Please convert these lines to a JSON object:\n{pairs}",
)
JSON_ENDS = ("", "", "", " Answer with JSON only.", " Only JSON.", " No explanation.", " Reply with JSON only.",
             " Return only the JSON.")  # fmt: skip


def _quoted(rng: Random, words: list[str]) -> str:
    style = rng.random()
    if style < 0.65:
        return joined([f'"{w}"' for w in words])
    return joined([f"`{w}`" for w in words]) if style < 0.8 else joined(words)


def json_task(rng: Random, split: Split) -> Task:
    """A JSON object (now and then a list of two or three) from keys and values in the prompt."""
    fields = rng.sample(FIELDS, rng.choice((1, 2, 2, 2, 3, 3, 4, 5, 6)))
    values = [_value(rng, f) for f in fields]
    record = dict(zip(fields, values, strict=True))
    if rng.random() < 0.3:
        sign = rng.choice((": ", " = ", "="))
        prompt = lead(rng, PAIR_LEADS, split).format(pairs="\n".join(f"{k}{sign}{_shown(v)}" for k, v in record.items()))
    else:
        shown = [_shown(v) for v in values]
        listed = ", ".join(shown) if rng.random() < 0.7 else joined(shown)
        prompt = lead(rng, OBJECT_LEADS, split).format(keys=_quoted(rng, fields), values=listed) + rng.choice(JSON_ENDS)
    answer = _json({k: _typed(v) for k, v in record.items()})
    return single("json", prompt, answer, Check(CheckKind.JSON, (answer,)))


def _typed(value: Value) -> Value:
    """What a reader of the bare prompt would take the value for: digits alone are a number."""
    if isinstance(value, str) and value.isascii() and value.isdigit() and not value.startswith("0"):
        return int(value)
    return value


VERBS = words("get set find list create delete update send search open close start stop read write check book")
NOUNS = words(
    "weather time user order file message ticket event price route stock note room job host report invoice "
         "calendar reminder email translation alarm light song device"
)  # fmt: skip
CALL_LEADS = (
    "Call the tool {t} with {args}. Answer with JSON only.",
    "Call the tool {t} with {args}. Answer with JSON only.",
    "Call the tool {t} with {args}.",
    "Call {t} with {args}. Answer with JSON only.",
    "Call the function {t} with {args}. Reply with JSON only.",
    "Use the tool {t} with {args}. Answer with JSON only.",
    "Use {t} with {args}. Only output the tool call as JSON.",
    "Make a tool call to {t} with {args}.",
    "Write the tool call for {t} with {args}. JSON only.",
    "Write a JSON tool call: {t} with {args}.",
    "Invoke the tool {t} with {args}. Answer with JSON only.",
    "Tool: {t}. Arguments: {args}. Answer with the JSON tool call only.",
    "I want to call {t} with {args}. Give me the JSON tool call.",
    "Please call the tool {t} with {args}. Answer with JSON only.",
    "Call the tool {t} and pass {args}. Answer with JSON only.",
    "Please use the tool {t} with {args}. Reply with JSON only.",
    "Use the function {t} with {args}. Answer in JSON only.",
)


def tool_task(rng: Random, split: Split) -> Task:
    """A tool call {"name", "arguments"} from a name and arguments in the prompt."""
    name = f"{rng.choice(VERBS)}_{rng.choice(NOUNS)}"
    fields = rng.sample(FIELDS, rng.choice((1, 1, 2, 2, 2, 3, 4)))
    arguments = {f: _value(rng, f) for f in fields}
    if rng.random() < 0.15:
        arguments[fields[-1]] = rng.choice(CITIES)
    glue = rng.choice((" ", " ", " ", "=", " = ", ": "))
    shown = joined([f"{k}{glue}{_literal(v)}" for k, v in arguments.items()])
    tool = f"`{name}`" if rng.random() < 0.15 else name
    prompt = lead(rng, CALL_LEADS, split).format(t=tool, args=shown)
    answer = _json({"name": name, "arguments": arguments})
    return single("tool", prompt, answer, Check(CheckKind.JSON, (answer,)))


# statement, question; {a} the subject, {b} the fact; every kind may have invented or common subjects
RELATIONS: tuple[tuple[str, str], ...] = (
    ("The capital of {a} is {b}.", "What is the capital of {a}?"),
    ("The capital of {a} is {b}.", "Which city is the capital of {a}?"),
    ("The river of {a} is called {b}.", "What is the river of {a} called?"),
    ("The king of {a} is {b}.", "Who is the king of {a}?"),
    ("The director of {a} is {b}.", "Who is the director of {a}?"),
    ("{a} lives in {b}.", "Where does {a} live?"),
    ("{a} works at {b}.", "Where does {a} work?"),
    ("{a} was born in {b}.", "Where was {a} born?"),
    ("{a} speaks {b}.", "Which language does {a} speak?"),
    ("The dog of {a} is called {b}.", "What is the dog of {a} called?"),
    ("The best friend of {a} is {b}.", "Who is the best friend of {a}?"),
    ("The currency of {a} is the {b}.", "What is the currency of {a}?"),
    ("The password of {a} is {b}.", "What is the password of {a}?"),
    ("The host {a} runs in {b}.", "Where does the host {a} run?"),
    ("The owner of {a} is {b}.", "Who is the owner of {a}?"),
    ("The color of {a} is {b}.", "What is the color of {a}?"),
    ("{a} is {b} years old.", "How old is {a}?"),
    ("{a} has {b} books.", "How many books does {a} have?"),
    ("The port of {a} is {b}.", "What is the port of {a}?"),
    ("The price of {a} is {b}.", "What is the price of {a}?"),
)
QUESTION_ENDS = (" Answer with one word.", " Answer with one word.", " Reply with one word.", "", " Answer briefly.",
                 " One word only.", " Answer with the name only.", " Give only the answer.")  # fmt: skip


def fact_task(rng: Random, split: Split) -> Task:
    """Read a few statements with invented names and answer a question on one of them."""
    count = rng.choice((1, 2, 2, 3, 3, 4, 5, 6, 8, 12))
    statement, question = pick(rng, RELATIONS, split)
    numeric = "years old" in statement or "books" in statement or "port" in statement or "price" in statement
    subjects = _distinct(rng, count)
    facts = [str(rng.randrange(2, 9000)) if numeric else invented(rng) for _ in subjects]
    if "password" in statement or "host" in statement:
        facts = opaque_ids(rng, count)
    lines = [statement.format(a=a, b=b) for a, b in zip(subjects, facts, strict=True)]
    chosen = rng.randrange(count)
    asked, answer = vary(rng, question).format(a=subjects[chosen]), facts[chosen]
    if rng.random() < 0.3:
        # A second relation about the same names, so that the name alone does not decide.
        other = rng.choice([r for r in RELATIONS if r[0] != statement])
        lines += [other[0].format(a=a, b=invented(rng)) for a in subjects]
        rng.shuffle(lines)
    end = rng.choice(QUESTION_ENDS) if not numeric else rng.choice((" Answer with the number only.", ""))
    glue = rng.choice((" ", " ", "\n"))
    prompt = glue.join(lines) + rng.choice((" ", " ", "\n\n")) + asked + end
    if rng.random() < 0.2:
        prompt = f"{asked}{end}\n\n{glue.join(lines)}"
    return single("facts", prompt, answer, weight=3)


def _distinct(rng: Random, count: int) -> list[str]:
    names: dict[str, None] = {}
    common = rng.random() < 0.3
    while len(names) < count:
        names[rng.choice(FIRST) if common and len(names) < 30 else invented(rng)] = None
    return list(names)


LOOKUP_LEADS = (
    "Here is a configuration:\n{rows}\n\nWhat is the value of {k}? Answer with the value only.",
    "{rows}\n\nWhat is {k}? Answer with the value only.",
    "Settings:\n{rows}\nGive me only the value of {k}.",
    "What is the value of {k} in this file?\n{rows}\nAnswer with the value only.",
    "Look up {k}:\n{rows}\nAnswer with the value only.",
    "Give me only the value of {k} in this configuration:\n{rows}",
)


def lookup_task(rng: Random, split: Split) -> Task:
    """Read one value out of key = value lines."""
    fields = rng.sample(FIELDS, rng.randint(2, 10))
    sign = rng.choice((" = ", "=", ": "))
    rows = {f: _shown(_value(rng, f)) for f in fields}
    key = rng.choice(fields)
    text = "\n".join(f"{k}{sign}{v}" for k, v in rows.items())
    return single("facts", lead(rng, LOOKUP_LEADS, split).format(rows=text, k=key), rows[key], weight=3)
