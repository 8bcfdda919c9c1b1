"""Text in and out: the tokenizer, detokenising one token at a time, and stop strings.

Not here: chat templates (chat.py) and what a whole reply looks like (reply.py).

Only byte-level BPE tokenizers are read (every Qwen3 folder has one). That makes the bytes of a token known by
themselves, so the text of a reply is exactly the UTF-8 decoding of its tokens' bytes, however it is cut into
pieces: a streamed reply and a whole one cannot differ.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from tokenizers import Tokenizer as BpeTokenizer


class TokenizerError(Exception):
    """The model folder's tokenizer cannot be used; the message says why and what to do."""


class Tokenizer:
    """A model folder's tokenizer.json: text to ids, ids to bytes. Safe to share between threads."""

    def __init__(self, bpe: BpeTokenizer) -> None:
        self._bpe = bpe
        self._added = dict(bpe.get_added_tokens_decoder().items())
        self.special_ids = frozenset(i for i, token in self._added.items() if token.special)
        self.vocab_size: int = bpe.get_vocab_size(with_added_tokens=True)

    @classmethod
    def load(cls, folder: str | Path) -> Tokenizer:
        """Read `folder`/tokenizer.json. Raises TokenizerError when it is absent, broken or not byte-level."""
        path = Path(folder) / "tokenizer.json"
        try:
            source = path.read_text(encoding="utf-8")
            decoder = json.loads(source).get("decoder") or {}
            bpe = BpeTokenizer.from_str(source)
        except OSError as exc:
            raise TokenizerError(f"cannot read {path}: {exc.strerror}; --model-path needs a Hugging Face folder") from exc
        except Exception as exc:  # tokenizers raises bare Exception for a malformed file
            raise TokenizerError(f"{path} is not a tokenizer file: {exc}") from exc
        if not _is_byte_level(decoder):
            kind = decoder.get("type", "none")
            raise TokenizerError(f"{path} decodes with {kind}; only byte-level BPE (as in Qwen3) is supported")
        return cls(bpe)

    def encode(self, text: str) -> tuple[int, ...]:
        """Ids of `text`. Special tokens written out in it (a rendered chat template has them) become one id each."""
        return tuple(self._bpe.encode(text, add_special_tokens=False).ids)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for; empty for an id the vocabulary does not name (padding rows)."""
        added = self._added.get(token_id)
        if added is not None:
            return added.content.encode()
        piece = self._bpe.id_to_token(token_id) if 0 <= token_id < 1 << 31 else None
        return _piece_bytes(piece) if piece else b""

    def token_text(self, token_id: int) -> str:
        """A token alone, as text for logprob listings (a lone half of a character reads as U+FFFD)."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def decode(self, token_ids: Iterable[int], *, skip_special: bool = True) -> str:
        """The text of `token_ids`, the same as feeding a Detokenizer with them."""
        skipped = self.special_ids if skip_special else frozenset()
        return b"".join(self.token_bytes(i) for i in token_ids if i not in skipped).decode("utf-8", "replace")


class Detokenizer:
    """Turns tokens into text one at a time; a character whose bytes are not all there yet is held back."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        return self._utf8.decode(self._tokenizer.token_bytes(token_id))

    def finish(self) -> str:
        """What is still held; bytes that never became a character read as U+FFFD, as in `Tokenizer.decode`."""
        return self._utf8.decode(b"", final=True)


@dataclass(frozen=True, slots=True)
class Scanned:
    """Text that may be shown now, and the stop string that ended it (None: go on)."""

    text: str
    matched: str | None = None


class StopScanner:
    """Looks for stop strings in text that arrives in pieces; text that may begin one is held back."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(s for s in stops if s)
        self._held = ""

    def push(self, text: str) -> Scanned:
        self._held += text
        found = self._first_stop()
        if found is not None:
            at, stop = found
            shown, self._held = self._held[:at], ""
            return Scanned(shown, stop)
        keep = max((_overlap(self._held, stop) for stop in self._stops), default=0)
        cut = len(self._held) - keep
        shown, self._held = self._held[:cut], self._held[cut:]
        return Scanned(shown)

    def finish(self) -> str:
        """The held-back text, once nothing more will come."""
        shown, self._held = self._held, ""
        return shown

    def _first_stop(self) -> tuple[int, str] | None:
        hits = [(self._held.find(stop), stop) for stop in self._stops]
        return min((hit for hit in hits if hit[0] >= 0), key=lambda hit: hit[0], default=None)


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[-length:]):
            return length
    return 0


def _is_byte_level(decoder: dict[str, object]) -> bool:
    if decoder.get("type") == "Sequence":
        parts = decoder.get("decoders")
        return isinstance(parts, list) and any(_is_byte_level(part) for part in parts)
    return decoder.get("type") == "ByteLevel"


@lru_cache(maxsize=1)
def _byte_of_char() -> dict[str, int]:
    """GPT-2's table: printable bytes stand for themselves, the other 68 for code points from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    table = {chr(b): b for b in printable}
    return table | {chr(256 + i): b for i, b in enumerate(others)}


def _piece_bytes(piece: str) -> bytes:
    table = _byte_of_char()
    if all(char in table for char in piece):
        return bytes(table[char] for char in piece)
    return piece.encode()
