"""Small language helpers and the wordings shared by several generators. Not a grammar: each generator has its own."""

from __future__ import annotations

from random import Random

from training.tasks import Split, pick

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
    elif plain is None:
        plain = verb[:-1] if verb.endswith("s") else verb
    return f"{plain[0].upper()}{plain[1:]} {rest}"


def capital(text: str) -> str:
    return text[0].upper() + text[1:]


def joined(words: list[str], last: str = "and") -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} {last} {words[-1]}"


def maybe_system(rng: Random, split: Split, share: float = 0.15) -> str:
    return pick(rng, SYSTEMS, split) if rng.random() < share else ""
