"""Byte-level BPE for the bundled models: training it and writing its Hugging Face files.

Only a space may stick to a following word: `(x`, `.x` and ` x` then share the token `x` up to that space, which
makes copying names easier for a tiny model. Digits stand alone.
"""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from zlib import crc32

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from training.recipe import SPECIAL_TOKENS

SPLIT = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SKIPPED = ("site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "pydoc_data", "encodings", "__pycache__")


def library_texts(limit: int | None = None) -> tuple[list[str], list[str]]:
    """The running interpreter's standard library as (training files, held-out files)."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [
        f
        for f in sorted(root.rglob("*.py"))
        if not any(p in SKIPPED or p.startswith("config-") for p in f.relative_to(root).parts)
        and 200 < f.stat().st_size < 150_000
    ][:limit]
    kept: tuple[list[str], list[str]] = ([], [])
    for f in files:
        held = crc32(f.relative_to(root).as_posix().encode()) % 24 == 0
        kept[held].append(f.read_text(encoding="utf8", errors="ignore"))
    return kept


def train_tokenizer(texts: Iterable[str], vocab: int) -> Tokenizer:
    tok = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(SPLIT), "isolated")
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tok.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_])
    tok.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tok.train_from_iterator(texts, trainer)
    return tok


def save_tokenizer(tok: Tokenizer, folder: Path, max_positions: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tok.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIAL_TOKENS[2],
        "pad_token": SPECIAL_TOKENS[0],
        "model_max_length": max_positions,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf8")
