"""Recorded acceptance: what the drafter proposed at every token of the target's own answers, and which of it was right.

    cd engine && python -m benchmarks.texts            # records data/texts*.json anew with the bundled models

An earlier policy was made with `texts.json` alone and lost on `texts_other.json`; the present one was made with both before
the eyes, and is reported on the latter.

With it any tree can be replayed without a model: after i tokens the candidates of every depth are known, and so is the rank
of the token that the target says there. Greedy answers; one token a round, so that there is a proposal at every position.
"""

from __future__ import annotations

import base64
import json
import random
import sys
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ddtree_engine.budget import Fixed
from ddtree_engine.config import Algorithm, EngineConfig, SpecMode
from ddtree_engine.engine import Engine
from ddtree_engine.forest import Forest
from ddtree_engine.requests import Request, Sampling

HERE = Path(__file__).parent
MODELS = HERE.parent / "models"
FILE, OTHER = HERE / "data" / "texts.json", HERE / "data" / "texts_other.json"
TOKENS, SCALE, MISSED = 128, 1000, 255

PROMPTS = {
    "coding": (
        "Write the Python functions is_palindrome(s), fib(n) and gcd(a, b).",
        "Write a Python function merge_sorted(a, b) that merges two sorted lists into one sorted list.",
        "Write a Python function word_count(text) that returns a dictionary mapping each word to its count.",
        "Write the Python functions is_prime(n), factorial(n) and count_vowels(s).",
    ),
    "copy": tuple(
        "Repeat these ids exactly, one per line:\n"
        + "\n".join(f"{random.Random(seed * 97 + i).randrange(16**8):08x}" for i in range(9))
        for seed in range(3)
    ),
    "chat": (
        "Tell me a short story about a lighthouse keeper who finds a map.",
        "Explain to a child why the sky is blue.",
        "What should I pack for three days in the mountains?",
        "The capital of Norland is Veska. The capital of Surland is Tomar. Describe both in a few sentences.",
    ),
}

OTHER_PROMPTS = {
    "coding": (
        "Write a Python function is_anagram(a, b) that returns True if a and b are anagrams.",
        "Write a Python function flatten(items) that flattens a nested list.",
        "Write the Python functions is_even(n), max_of(items) and reverse(s).",
        "Write a Python function fib(n) that returns the n-th Fibonacci number, with fib(0) = 0 and fib(1) = 1.",
        "Write the Python functions sum_digits(n), power(a, b) and lcm(a, b).",
        "Write a Python function binary_search(items, x) that returns the index of x, or -1.",
        "Write a Python function remove_duplicates(items) that keeps the first of equal items.",
        "Write the Python functions clamp(x, low, high), average(items) and is_sorted(items).",
    ),
    "copy": tuple(
        "Repeat these ids exactly, one per line:\n"
        + "\n".join(f"{random.Random(seed * 89 + i + 1000).randrange(16**8):08x}" for i in range(count))
        for seed, count in enumerate((3, 6, 12, 12, 9))
    ),
    "chat": (
        "Tell me about a gardener who talks to the moon.",
        "Explain to a friend how bread is made.",
        "What can one do on a rainy Sunday?",
        "Describe an old bridge at night in a few sentences.",
        "Write a letter to a neighbour about a lost cat.",
        "Why do leaves fall in autumn?",
        "Give three reasons to learn to swim.",
        "Tell me a joke about a tired robot.",
    ),
}


@dataclass(frozen=True, slots=True, eq=False)
class Text:
    """One answer. After token i, depth d is token i + 1 + d of the answer."""

    kind: str
    logprobs: np.ndarray  # float32 [positions, depths, k], best first
    ranks: np.ndarray  # uint8 [positions, depths]: where the right token stands among the k; MISSED when it does not

    def __len__(self) -> int:
        return len(self.ranks)


def load(path: Path = FILE) -> list[Text]:
    found = []
    for text in json.loads(path.read_text())["texts"]:
        shape = text["positions"], text["depths"], text["k"]
        logprobs = _unpacked(text["logprobs"], np.uint16).reshape(shape).astype(np.float32) / -SCALE
        found.append(Text(text["kind"], logprobs, _unpacked(text["ranks"], np.uint8).reshape(shape[:2])))
    return found


def _packed(values: np.ndarray) -> str:
    return base64.b64encode(zlib.compress(values.tobytes(), 9)).decode()


def _unpacked(text: str, dtype: type) -> np.ndarray:
    return np.frombuffer(zlib.decompress(base64.b64decode(text)), dtype=dtype)


# Recording ------------------------------------------------------------------------------------------------------


class Plodding(Fixed):
    """Drafts every round and verifies nothing of it: one token a round, and a proposal after each."""

    def fit(self, forest: Forest, sequences: object) -> Forest:
        return forest.cut(np.ones_like(forest.rows))


def record(engine: Engine, prompt: list[int], kind: str, *, ignore_eos: bool) -> Text:
    """One answer with the proposals of every round."""
    seen: list[tuple[int, np.ndarray, np.ndarray]] = []
    runner, request = engine._decoder.runner, Request("r", tuple(prompt), _sampling(ignore_eos), SpecMode.TREE)
    draft = runner.draft

    def watched(rows: object, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs, ids = draft(rows, k)  # type: ignore[arg-type]
        seen.append((len(engine._running["r"].output_ids), logprobs[0].numpy(), ids[0].numpy()))
        return logprobs, ids

    runner.draft = watched  # type: ignore[method-assign]
    engine.flush()
    engine.submit(request)
    said = [token for update in engine.drain(["r"])["r"] for token in update.token_ids]
    runner.draft = draft  # type: ignore[method-assign]
    logprobs = np.stack([lp for _, lp, _ in seen])
    ranks = np.full(logprobs.shape[:2], MISSED, dtype=np.uint8)
    for i, (count, _, ids) in enumerate(seen):
        for d, token in enumerate(said[count : count + ids.shape[0]]):
            where = np.flatnonzero(ids[d] == token)
            ranks[i, d] = where[0] if len(where) else MISSED
    return Text(kind, logprobs, ranks)


def _sampling(ignore_eos: bool) -> Sampling:
    return Sampling(max_new_tokens=TOKENS, ignore_eos=ignore_eos)


def main() -> int:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(MODELS / "target" / "tokenizer.json"))
    engine = Engine.load(
        EngineConfig(
            str(MODELS / "target"),
            device="cpu",
            dtype="float32",
            speculative_algorithm=Algorithm.DDTREE,
            speculative_draft_model_path=str(MODELS / "drafter-b16"),
            max_running_requests=1,
        )
    )
    engine.policy = Plodding()
    for path, prompts, seed, hostile in ((FILE, PROMPTS, 7, 4), (OTHER, OTHER_PROMPTS, 8, 8)):
        save(path, record_all(engine, tokenizer, prompts, random.Random(seed), hostile))
    return 0


def record_all(
    engine: Engine, tokenizer: Any, by_kind: dict[str, tuple[str, ...]], dice: random.Random, hostile: int
) -> list[Text]:
    texts = []
    for kind, prompts in by_kind.items():
        for prompt in prompts:
            chat = f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"
            ids = tokenizer.encode(chat, add_special_tokens=False).ids
            texts.append(record(engine, ids, kind, ignore_eos=kind == "chat"))
    for _ in range(hostile):  # nothing that a model was trained on: tokens at random, which it goes on with as it can
        ids = [dice.randrange(engine.info.vocab_size) for _ in range(48)]
        texts.append(record(engine, ids, "hostile", ignore_eos=True))
    return texts


def save(path: Path, texts: list[Text]) -> None:
    rows = [
        {
            "kind": t.kind,
            "positions": len(t),
            "depths": t.logprobs.shape[1],
            "k": t.logprobs.shape[2],
            "logprobs": _packed(np.minimum(np.round(t.logprobs * -SCALE), 65535).astype(np.uint16)),
            "ranks": _packed(t.ranks),
        }
        for t in texts
    ]
    path.write_text(json.dumps({"models": "bundled target and drafter-b16, float32", "texts": rows}) + "\n")
    for t in texts:
        print(f"{t.kind:<8} {len(t):4} positions, first choice right {np.mean(t.ranks[:, 0] == 0):.2f}", file=sys.stderr)


if __name__ == "__main__":
    raise SystemExit(main())
