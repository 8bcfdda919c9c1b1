"""Small language helpers and the wordings shared by several generators. Not a grammar: each generator has its own."""

from __future__ import annotations

import re
from collections.abc import Sequence
from random import Random

from training.tasks import Split, pick, words

SYSTEMS = (
    "You are a helpful assistant.",
    "You are a careful programmer. Answer with code.",
    "Be concise.",
    "You are a coding assistant.",
    "Answer exactly as asked.",
    "You are a helpful assistant. Keep your answers short.",
    "You are an expert Python developer.",
    "Follow the instructions precisely.",
    "You answer questions and write Python code.",
    "You are a small language model on a local server.",
    "You are a friendly and precise assistant.",
    "Do what the user asks. Add nothing else.",
    "Give correct and short answers.",
    "You are an assistant for software teams.",
    "You are a precise assistant. Follow every instruction.",
    "You are a careful assistant that writes Python.",
)
IRREGULAR = {"does": "do", "goes": "go", "has": "have", "is": "is"}


def imperative(description: str) -> str:
    """`returns the sum` becomes `Return the sum`."""
    verb, _, rest = description.partition(" ")
    plain = IRREGULAR.get(verb)
    if plain is None and verb.endswith(("ches", "shes", "sses", "xes")):
        plain = verb[:-2]
    elif plain is None and verb.endswith("ies"):
        plain = verb[:-3] + "y"
    elif plain is None:
        plain = verb[:-1] if verb.endswith("s") else verb
    return f"{plain[0].upper()}{plain[1:]} {rest}"


def uncapital(text: str) -> str:
    return text[0].lower() + text[1:]


def capital(text: str) -> str:
    return text[0].upper() + text[1:]


def joined(words: list[str], last: str = "and") -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} {last} {words[-1]}"


def maybe_system(rng: Random, split: Split, share: float = 0.15) -> str:
    return pick(rng, SYSTEMS, split) if rng.random() < share else ""


# What may stand for a word of a prompt. Training draws from all of them, so that no single word is decisive.
SYNONYMS: dict[str, tuple[str, ...]] = {
    "write": ("create", "produce", "compose", "make", "build", "develop", "prepare", "author", "draft", "type"),
    "implement": ("write", "develop", "build", "program", "code", "realize", "provide"),
    "create": ("write", "make", "build", "design", "construct"),
    "give": ("provide", "send", "hand", "show", "get", "supply"),
    "function": ("routine", "method", "function", "helper"),
    "functions": ("routines", "methods", "helpers"),
    "code": ("source code", "source", "program", "snippet"),
    "only": ("just", "nothing but", "solely", "only"),
    "exactly": ("verbatim", "precisely", "literally", "faithfully", "unchanged", "as is"),
    "answer": ("reply", "respond", "output", "return", "come back"),
    "reply": ("answer", "respond", "output", "write back"),
    "repeat": ("reproduce", "recite", "restate", "echo", "copy", "rewrite", "say", "print"),
    "copy": ("reproduce", "repeat", "duplicate", "transcribe"),
    "put": ("place", "insert", "include", "add", "write", "set", "leave", "mention"),
    "add": ("put", "place", "include", "insert", "append"),
    "start": ("begin", "open", "lead"),
    "remember": ("note", "memorize", "keep in mind", "keep", "store", "do not forget"),
    "secret": ("hidden", "private", "special"),
    "compute": ("determine", "calculate", "find", "figure out", "work out", "get", "evaluate"),
    "calculate": ("compute", "determine", "find", "figure out"),
    "number": ("result", "value", "number alone", "numeral"),
    "return": ("give", "output", "produce", "write", "print", "generate"),
    "returns": ("gives back", "yields", "outputs", "produces", "delivers", "returns"),
    "computes": ("determines", "works out", "calculates", "finds"),
    "checks": ("tests", "verifies", "examines", "finds out"),
    "call": ("invoke", "use", "run", "trigger", "execute"),
    "use": ("call", "apply", "take", "employ"),
    "tool": ("function", "tool", "API"),
    "keys": ("fields", "properties", "keys", "attributes"),
    "object": ("object", "document", "record"),
    "list": ("list", "collection", "sequence"),
    "these": ("the following", "all these", "those", "the"),
    "following": ("next", "given", "listed"),
    "need": ("want", "would like", "require"),
    "show": ("give", "present", "display", "print"),
    "please": ("kindly", "now", "please"),
    "comment": ("comment", "code comment", "remark"),
    "first": ("very first", "first", "top"),
    "explanation": ("comments", "extra text", "commentary", "explanations"),
    "larger": ("greater", "bigger", "higher"),
    "smaller": ("lower", "lesser"),
    "describe": ("portray", "sketch", "depict"),
    "short": ("brief", "small", "little"),
    "tell": ("narrate", "write", "give"),
    "sort": ("order", "arrange", "rank"),
    "words": ("terms", "words", "items"),
}
FILLERS = ("please", "now", "just", "really", "kindly", "simply", "quickly", "carefully", "again", "here", "today", "also",
           "then", "for me", "once more", "if you can", "in short", "right away", "as usual", "this time", "of course",
           "correct", "simple", "short", "clean", "small", "proper", "nice", "good", "fast", "safe", "plain", "new",
           "given", "following", "next", "whole", "exact", "same", "actual", "full", "own", "single")  # fmt: skip
OPENERS = ("Hi.", "Hello!", "Hello.", "Hi there,", "Good morning.", "Hey,", "OK.", "Okay,", "Now", "Next:", "Next,",
           "Question:", "Quick question:", "Request:", "One more thing:", "Task:", "Dear assistant,", "Thanks for your help.",
           "I have a task for you.", "Here is a task.", "Listen:", "Attention:", "Let us continue.", "Test:", "Test 7.",
           "Step 1:", "#1", "Well,", "So,", "First,", "Another one:", "User request:", "As a test:")  # fmt: skip
CLOSERS = ("Thanks.", "Thank you!", "Thank you.", "That is all.", "Please.", "Go ahead.", "Do it now.", "Be exact.",
           "Be careful.", "No mistakes.", "This is a test.", "Good luck.", "Please be precise.", "It is urgent.",
           "Nothing else.", "Take your time.", "I am waiting.")  # fmt: skip
_SYLLABLES = words("ba ke lo mi tu ra so ne vi da po ge li fu za wo re ta ")


def lead(rng: Random, leads: Sequence[str], split: Split) -> str:
    """One of the wordings, with some of its words exchanged, added or dropped; {slots} stay as they are."""
    return vary(rng, pick(rng, leads, split))


def vary(rng: Random, template: str) -> str:
    """The template, changed in about half of the cases by a few small edits."""
    if not template or "def {n}" in template or rng.random() < 0.45:
        return template
    parts = re.split(r"(\s+)", template)  # words at even places
    for place in range(0, len(parts), 2):
        parts[place] = _exchanged(rng, parts[place]) if rng.random() < 0.2 else parts[place]
    if rng.random() < 0.35:
        _insert(rng, parts)
    text = "".join(parts)
    if text.startswith(" "):  # a sentence to be appended: no more than its words changes
        return text
    if rng.random() < 0.06:
        text = text.rstrip(".?:")
    if rng.random() < 0.06:
        text = text[0].lower() + text[1:]
    if rng.random() < 0.12:
        text = rng.choice(OPENERS) + ("\n" if text.startswith("{") else " ") + text
    elif rng.random() < 0.1 and "\n" not in text:
        text = f"{text} {rng.choice(CLOSERS)}"
    return text


def vary_words(rng: Random, description: str) -> str:
    """A description with a few other words: synonyms, and now and then a filler."""
    parts = re.split(r"(\s+)", description)
    for place in range(0, len(parts), 2):
        parts[place] = _exchanged(rng, parts[place]) if rng.random() < 0.3 else parts[place]
    if rng.random() < 0.1 and len(parts) > 4:
        parts[3] = f" {rng.choice(FILLERS)} "
    return "".join(parts)


def _exchanged(rng: Random, word: str) -> str:
    """A synonym of the word, or a few times nothing or a made-up word in its place."""
    bare = word.strip(".,:;?!")
    if "{" in word or not bare:
        return word
    options = SYNONYMS.get(bare.lower())
    if options is None:
        return word
    new = rng.choice(options)
    if rng.random() < 0.06:
        new = "".join(rng.choices(_SYLLABLES, k=rng.randint(2, 3)))
    return word.replace(bare, new.capitalize() if bare[0].isupper() else new)


def _insert(rng: Random, parts: list[str]) -> None:
    """Puts one or two filler words between words that are on one line."""
    # Not right before a slot: a filler there would read like a part of the value.
    gaps = [g for g in range(1, len(parts) - 1, 2) if "\n" not in parts[g] and not parts[g + 1].startswith("{")]
    for gap in rng.sample(gaps, min(len(gaps), rng.choice((1, 1, 2)))):
        filler = rng.choice(FILLERS) if rng.random() < 0.85 else "".join(rng.choices(_SYLLABLES, k=rng.randint(2, 3)))
        parts[gap] = f" {filler} "
