"""One request's reply as it grows: updates (token ids) become text, stop strings end it, figures add up.

Pure. Streaming and whole replies both go through `Reply`, token by token, so they cannot differ.
Not here: the JSON that clients see (api_native.py, api_openai.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ddtree_engine.requests import Finish, InputLogprobs, TopLogprobs, Update
from ddtree_engine.text import Detokenizer, StopScanner, Tokenizer


@dataclass(frozen=True, slots=True)
class Token:
    """One token of a reply, with its score when scores were asked for."""

    id: int
    logprob: float | None = None
    top: TopLogprobs = ()


@dataclass(frozen=True, slots=True)
class Piece:
    """What one update added: text that may be shown now (perhaps none yet) and the tokens behind it."""

    text: str
    tokens: tuple[Token, ...]


@dataclass(frozen=True, slots=True)
class FinishReason:
    kind: Finish
    matched: int | str | None = None  # the stop token or stop string
    error: str | None = None  # with ABORT: why


class Reply:
    """Everything known about a reply so far; `finish` is None until it is complete."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = (), *, skip_special: bool = True) -> None:
        self._detokenizer = Detokenizer(tokenizer, skip_special=skip_special)
        self._scanner = StopScanner(stops)
        self._committed = 0
        self.text = ""
        self.tokens: list[Token] = []
        self.finish: FinishReason | None = None
        self.verify_passes = 0
        self.accepted_drafts = 0
        self.proposed_drafts = 0
        self.cached_tokens = 0
        self.input_logprobs: InputLogprobs | None = None

    def push(self, update: Update) -> Piece:
        """Take in one update. After a stop string nothing more is taken: the caller cancels the request."""
        self._note_figures(update)
        before = len(self.tokens)
        tokens = _tokens(update)
        stop_token = tokens.pop() if update.finish is Finish.STOP and tokens else None
        text = "".join(self._push_token(token) for token in tokens)
        if stop_token is not None and self.finish is None:
            self.tokens.append(stop_token)  # a stop token's own text is never part of the reply
        if self.finish is None and update.finish is not None:
            text += self._end(update)
        self.text += text
        return Piece(text, tuple(self.tokens[before:]))

    @property
    def output_ids(self) -> list[int]:
        return [token.id for token in self.tokens]

    @property
    def accept_length(self) -> float | None:
        """Tokens committed per verify pass. The prompt's pass gives the first token and is not a verify pass."""
        return (self._committed - 1) / self.verify_passes if self.verify_passes else None

    def _note_figures(self, update: Update) -> None:
        if self.finish is not None:
            return
        self._committed += len(update.token_ids)
        self.verify_passes = update.verify_passes
        self.accepted_drafts = update.accepted_drafts
        self.proposed_drafts = update.proposed_drafts
        self.cached_tokens = update.cached_tokens
        self.input_logprobs = update.input_logprobs or self.input_logprobs

    def _push_token(self, token: Token) -> str:
        if self.finish is not None:
            return ""
        self.tokens.append(token)
        scanned = self._scanner.push(self._detokenizer.push(token.id))
        if scanned.matched is not None:
            self.finish = FinishReason(Finish.STOP, scanned.matched)
        return scanned.text

    def _end(self, update: Update) -> str:
        assert update.finish is not None
        scanned = self._scanner.push(self._detokenizer.finish())
        if scanned.matched is not None:
            self.finish = FinishReason(Finish.STOP, scanned.matched)
            return scanned.text
        self.finish = FinishReason(update.finish, update.matched_token, update.error)
        return scanned.text + self._scanner.finish()


def _tokens(update: Update) -> list[Token]:
    logprobs = update.logprobs or (None,) * len(update.token_ids)
    tops = update.top_logprobs or ((),) * len(update.token_ids)
    return [Token(i, lp, top) for i, lp, top in zip(update.token_ids, logprobs, tops, strict=True)]
