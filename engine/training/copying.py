"""Copying tasks: lists of opaque ids, code words, and selecting or converting what the prompt holds."""

from __future__ import annotations

import json
import string
from collections.abc import Callable
from random import Random

from training.tasks import Check, CheckKind, Split, Task, Turn, pick, single, words
from training.wording import lead

LOWER, UPPER, DIGITS = string.ascii_lowercase, string.ascii_uppercase, string.digits
LOWER_DIGITS, MIXED = LOWER + DIGITS, LOWER + UPPER + DIGITS
OTHER_LETTERS = "αβγδεζηθλμξπρστφψωбгджзилпфцчшщыэюяäöüßñçéøåłžșığ"
ANIMALS = words(
    "zebra otter falcon tiger maple cedar comet amber delta raven lotus ember onyx quartz basil panda heron "
           "walrus gecko bison lynx coral topaz cobalt violet indigo saffron willow aspen birch orbit nova pulse "
           "echo sierra tango foxtrot bravo kilo lima oscar romeo victor whiskey"
)  # fmt: skip


def _some(rng: Random, alphabet: str, length: int) -> str:
    return "".join(rng.choices(alphabet, k=length))


def _uuid(rng: Random) -> str:
    hexes = "0123456789abcdef"
    return "-".join(_some(rng, hexes, n) for n in (8, 4, 4, 4, 12))


def _dashed(rng: Random) -> str:
    alphabet = rng.choice((LOWER_DIGITS, LOWER_DIGITS, UPPER + DIGITS, MIXED))
    return rng.choice("--_.:").join(_some(rng, alphabet, rng.randint(2, 5)) for _ in range(rng.randint(2, 3)))


def _word_number(rng: Random) -> str:
    word = rng.choice((rng.choice(ANIMALS), _some(rng, LOWER, rng.randint(3, 6))))
    word = rng.choice((word.upper(), word.upper(), word, word.capitalize()))
    return f"{word}{rng.choice('--_')}{_some(rng, DIGITS, rng.randint(2, 5))}"


def _region(rng: Random) -> str:
    return rng.choice(("east", "west", "north"))


STYLES: tuple[Callable[[Random], str], ...] = (
    lambda r: f"{_some(r, LOWER_DIGITS, 4)}-{_some(r, LOWER_DIGITS, 4)}",
    lambda r: f"{_some(r, LOWER_DIGITS, 4)}-{_some(r, LOWER_DIGITS, 4)}",
    _dashed,
    _dashed,
    _word_number,
    lambda r: _some(r, "0123456789abcdef", r.choice((6, 8, 8, 12, 16))),
    lambda r: _some(r, "0123456789ABCDEF", r.choice((4, 6, 8))),
    lambda r: _some(r, LOWER_DIGITS, r.randint(5, 12)),
    lambda r: _some(r, UPPER + DIGITS, r.randint(4, 10)),
    lambda r: _some(r, MIXED, r.randint(5, 12)),
    lambda r: _some(r, UPPER, r.randint(3, 7)),
    lambda r: _some(r, LOWER, r.randint(4, 9)),
    lambda r: _some(r, DIGITS, r.randint(4, 9)),
    lambda r: f"{_some(r, UPPER, 1)}{_some(r, DIGITS, 2)}-{_some(r, UPPER, 1)}{_some(r, DIGITS, 2)}",
    lambda r: f"{_some(r, UPPER + DIGITS, 4)}-{_some(r, UPPER, 2)}",
    lambda r: ".".join(str(r.randrange(256)) for _ in range(4)),
    lambda r: f"v{r.randrange(20)}.{r.randrange(100)}.{r.randrange(500)}",
    lambda r: f"{r.choice(('usr', 'ord', 'srv', 'node', 'job', 'evt', 'key', 'tx'))}_{_some(r, MIXED, r.randint(4, 9))}",
    lambda r: f"{_some(r, LOWER, 2)}-{_region(r)}-{r.randrange(9)}{_some(r, LOWER, 1)}/{_some(r, LOWER_DIGITS, 3)}",
    lambda r: _some(r, MIXED + "+/", r.randint(6, 14)) + "=",
    lambda r: _some(r, OTHER_LETTERS, r.randint(3, 6)) + _some(r, DIGITS, r.randint(0, 3)),
    lambda r: "0x" + _some(r, "0123456789abcdef", r.choice((4, 6, 8))),
    _uuid,
)


def opaque_ids(rng: Random, count: int) -> list[str]:
    """`count` random ids, of one style or of several."""
    styles = [rng.choice(STYLES)] if rng.random() < 0.65 else rng.sample(STYLES, 4)
    if count > 24:
        styles = [s for s in styles if s is not _uuid] or [STYLES[0]]
    return [rng.choice(styles)(rng) for _ in range(count)]


def code_word(rng: Random) -> str:
    style = rng.random()
    if style < 0.4:
        return _word_number(rng)
    if style < 0.6:
        return f"{_some(rng, UPPER + DIGITS, 4)}-{_some(rng, UPPER, 2)}"
    return rng.choice(STYLES[:-2])(rng)


# How a list is laid out: the name used in prompts, and how it is written.
LAYOUTS: tuple[tuple[str, Callable[[list[str]], str]], ...] = (
    ("one per line", "\n".join),
    ("as a comma-separated list", ", ".join),
    ("separated by spaces", " ".join),
    ("as a bulleted list", lambda ids: "\n".join(f"- {i}" for i in ids)),
    ("as a numbered list", lambda ids: "\n".join(f"{k}. {i}" for k, i in enumerate(ids, 1))),
    ("as a JSON list", lambda ids: json.dumps(ids, ensure_ascii=False)),
    ("separated by semicolons", "; ".join),
)
THINGS = ("ids", "ids", "identifiers", "keys", "codes", "tokens", "strings", "values", "lines", "entries")
COPY_LEADS = (
    "Repeat these {t} exactly, {how}:\n{ids}",
    "Repeat these {t} exactly, {how}:\n{ids}",
    "Repeat the following {t} exactly, {how}:\n{ids}",
    "Repeat the {t} below, {how}.\n\n{ids}",
    "Repeat these {n} {t} {how}:\n{ids}",
    "Copy these {t} exactly, {how}:\n{ids}",
    "Copy the following {t}, {how}, without any change:\n{ids}",
    "Copy the {t} below exactly, {how}.\n{ids}",
    "Echo these {t} {how}:\n{ids}",
    "Print these {t} again, {how}:\n{ids}",
    "Write down these {t}, {how}:\n{ids}",
    "Write these {t} again {how}:\n{ids}",
    "List these {t} {how}, unchanged:\n{ids}",
    "List the following {t}, {how}:\n{ids}",
    "Output these {t} exactly as they are, {how}:\n{ids}",
    "Return these {t} {how}, exactly as written:\n{ids}",
    "Give back the following {t} {how}:\n{ids}",
    "Please repeat these {t} exactly, {how}:\n{ids}",
    "Please copy the following {t} {how}:\n{ids}",
    "Here are {n} {t}:\n{ids}\n\nRepeat them exactly, {how}.",
    "Here are some {t}:\n{ids}\nCopy them {how}.",
    "{ids}\n\nRepeat the {t} above, {how}.",
    "These are the {t}:\n{ids}\nRepeat all of them, {how}. Change nothing.",
    "I have {n} {t}. Repeat them exactly, {how}:\n{ids}",
    "Repeat exactly, {how}:\n{ids}",
    "Please repeat all of these {t} exactly as given, {how}:\n{ids}",
    "Copy these {n} {t} character by character, {how}:\n{ids}",
    "Here is a list of {t}:\n{ids}\n\nWrite it out again exactly, {how}.",
    "Please list the following {n} {t} exactly, {how}:\n{ids}",
)
PLAIN_LEADS = (
    "Repeat this text exactly:\n{ids}",
    "Repeat exactly:\n{ids}",
    "Copy this exactly:\n{ids}",
    "Say this again, word for word:\n{ids}",
    "Echo the following:\n{ids}",
    "Repeat the following text without changes:\n{ids}",
)


def _how_many(rng: Random) -> int:
    u = rng.random()
    if u < 0.25:
        return rng.randint(1, 6)
    return rng.randint(4, 24) if u < 0.75 else rng.randint(20, 60)


def copy_task(rng: Random, split: Split) -> Task:
    """Repeat a list of ids exactly, in the layout asked for."""
    ids = opaque_ids(rng, _how_many(rng))
    shown = LAYOUTS[0] if rng.random() < 0.6 else rng.choice(LAYOUTS)
    asked = shown if rng.random() < 0.75 else rng.choice(LAYOUTS[:5])
    thing = pick(rng, THINGS, split)
    if asked is shown and rng.random() < 0.12:
        prompt = lead(rng, PLAIN_LEADS, split).format(ids=shown[1](ids))
        return single("copy", prompt, asked[1](ids))
    prompt = lead(rng, COPY_LEADS, split).format(t=thing, n=len(ids), how=asked[0], ids=shown[1](ids))
    return single("copy", prompt, asked[1](ids))


ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")
SELECT_LEADS = (
    "Here are some ids:\n{ids}\n\nWhat is the {o} id? Answer with the id only.",
    "{ids}\n\nGive me only the {o} id of this list.",
    "Return the {o} id in this list and nothing else:\n{ids}",
    "Which id is the {o} one?\n{ids}\nAnswer with the id only.",
    "From this list, repeat only the {o} id:\n{ids}",
    "Here is a list of ids:\n{ids}\n\nRepeat the {o} one only.",
    "Copy only the {o} id of this list:\n{ids}",
    "Repeat just the {o} of these lines:\n{ids}",
    "Write only the {o} id:\n{ids}",
    "Only the {o} of these ids, please:\n{ids}",
    "Out of these ids, give me the {o}:\n{ids}",
    "Answer with the {o} of the following ids and nothing else:\n{ids}",
    "Take the {o} id of the list below and repeat it.\n{ids}",
    "Say the {o} id. Only that one.\n{ids}",
    "Print the {o} entry of this list only:\n{ids}",
    "Repeat only the {o} of these ids:\n{ids}",
    "Which one is the {o} id in the list? Reply with this id only.\n{ids}",
)


def select_task(rng: Random, split: Split) -> Task:
    """Repeat one id, chosen by its place."""
    ids = opaque_ids(rng, rng.randint(2, 8))
    place = rng.randrange(len(ids))
    ordinal = "last" if place == len(ids) - 1 and rng.random() < 0.5 else ORDINALS[place]
    prompt = lead(rng, SELECT_LEADS, split).format(ids="\n".join(ids), o=ordinal)
    return single("select", prompt, ids[place], weight=2)


NONCE_LEADS = (
    "Your code word is {w}. Reply with the code word only.",
    "Your code word is {w}. Reply with the code word only.",
    "The code word is {w}. Reply with the code word only.",
    "The code word is {w}. Answer with the code word and nothing else.",
    "Remember the code word {w}. What is the code word?",
    "Remember this code word: {w}. Now repeat it.",
    "The password is {w}. What is the password? Answer with the password only.",
    "My code word is {w}. Repeat my code word.",
    "Say only this: {w}",
    "Reply with exactly this text: {w}",
    "Reply with {w} and nothing else.",
    "Reply only with the code word. The code word is {w}.",
    "Answer with the word {w} only.",
    "Repeat this code word: {w}",
    "Repeat after me: {w}",
    "Echo {w}",
    "Echo this token exactly: {w}",
    "Print the token {w} and nothing else.",
    "The secret token is {w}. Print the secret token.",
    "What is my code word? My code word is {w}. Answer with the code word only.",
    "The answer is {w}. Give the answer only.",
    "Here is a code word: {w}. Write it down exactly.",
    "Code word: {w}\nReply with the code word only.",
    "Please reply with the code word {w} only.",
    "Please repeat: {w}",
    "This is ticket {w}. Reply with the ticket number only.",
    "The session id is {w}. What is the session id? Reply with the id only.",
    "Remember {w}. What did I ask you to remember?",
    "Your code word is {w}. Please answer with only the code word.",
    "The code word for today is {w}. Reply with the code word only.",
    "Reply with the code word only. Your code word is {w}.",
    "My secret code word is {w}. Say only the code word.",
    "Code word of today: {w}. Reply with it.",
    "{w} is your code word. Reply with the code word only.",
    "{w} is the code word. What is the code word?",
    "Your code is {w}. Reply with your code only.",
    "Your token is {w}. Reply with the token only.",
    "Your id is {w}. What is your id? Answer with the id only.",
    "The keyword is {w}. Repeat the keyword only.",
    "This is the code word: {w}. Write only the code word.",
    "I give you a code word: {w}. Give it back and write nothing else.",
    "Just answer with {w}.",
    "The code word for this session is {w}. Answer with the code word only.",
    "We agreed on the code word {w}. Reply with it and nothing else.",
    "Take the code word {w} and reply with it only.",
)


def nonce_task(rng: Random, split: Split) -> Task:
    """Reply with a code word."""
    word = code_word(rng)
    return single("nonce", lead(rng, NONCE_LEADS, split).format(w=word), word, weight=3)


RECALL_GIVEN = (
    "Remember the code word {w}. Reply with OK.",
    "Your code word is {w}. Reply with OK.",
    "The code word is {w}. Just say OK.",
    "Keep the code word {w} in mind. Answer OK.",
    "My code word is {w}. I will ask for it later. Say OK.",
    "Please remember {w}. Reply with OK.",
    "Store the code word {w}. Answer with OK.",
)
RECALL_ASKED = (
    "What is the code word? Reply with the code word only.",
    "What is the code word?",
    "Now tell me the code word.",
    "Repeat the code word.",
    "What was the code word? Answer with the code word only.",
    "Give me the code word and nothing else.",
    "Which code word did I give you?",
    "Please repeat the code word.",
)


def recall_task(rng: Random, split: Split) -> Task:
    """A code word of the first turn is asked for in the last one, with copy tasks in between."""
    word = code_word(rng)
    given = Turn(lead(rng, RECALL_GIVEN, split).format(w=word), "OK", Check(CheckKind.EXACT, ("OK",)))
    between = [copy_task(rng, Split.TRAIN).last for _ in range(rng.choice((0, 0, 1, 1, 2)))]
    asked = Turn(lead(rng, RECALL_ASKED, split), word, Check(CheckKind.EXACT, (word,)))
    return Task("recall", (given, *between, asked), weight=2)


def word_list_task(rng: Random, split: Split) -> Task:
    """Repeat a few plain words, which looks like text but must be copied."""
    words = rng.choices(ANIMALS, k=rng.randint(3, 30))
    prompt = lead(rng, PLAIN_LEADS, split).format(ids=" ".join(words))
    return single("copy", prompt, " ".join(words), Check(CheckKind.EXACT, (" ".join(words),)))
