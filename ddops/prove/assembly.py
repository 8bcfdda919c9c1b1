"""Puts a streamed reply together, event by event, in every dialect. Pure; the events come from transport.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ddops.prove import dialects
from ddops.prove.replies import extensions_of, finish_of, mapping_of, text_of
from ddops.prove.wire import Ask, Chunk, Malformed, Reply


class Assembler:
    """Puts a streamed reply together. SGLang sends the text so far (or, started so, what is new), OpenAI what is new."""

    def __init__(self, started: float) -> None:
        self.started = started
        self._at = 0.0
        self.text = ""
        self.reasoning = ""
        self.finish = ""
        self.ids: list[int] = []
        self.sources: list[Mapping[str, Any]] = []
        self.chunks: list[Chunk] = []
        self.whole_ids: tuple[int, ...] | None = None

    def take(self, event: Mapping[str, Any], at: float) -> None:
        """One event, `at` seconds after the request was sent."""
        self._at = at
        if isinstance(event.get("choices"), list):
            self._openai(event)
        else:
            self._native(event)

    def _native(self, event: Mapping[str, Any]) -> None:
        info = mapping_of(event, "meta_info")
        found = dialects.ids(event)
        new = self._new_text(event.get("text"), self._only_new(found, info))
        if found is not None:
            self._merge_ids(found)
        self.finish = finish_of(info) or self.finish
        self._note(new, info, bool(new) or found is not None)

    def _only_new(self, found: tuple[int, ...] | None, info: Mapping[str, Any]) -> bool:
        """Whether this event holds only what is new: fewer ids than the request has tokens by now."""
        told = dialects.meta(info).completion_tokens
        return found is not None and told is not None and len(found) < told

    def _new_text(self, shown: Any, only_new: bool) -> str:
        if not isinstance(shown, str):
            return ""
        if only_new or not shown.startswith(self.text):
            self.text += shown
            return shown
        new, self.text = shown[len(self.text) :], shown
        return new

    def _merge_ids(self, found: tuple[int, ...]) -> None:
        if list(found[: len(self.ids)]) == self.ids and len(found) >= len(self.ids):
            self.ids = list(found)
        else:
            self.ids += found

    def _openai(self, event: Mapping[str, Any]) -> None:
        # vLLM names the prompt's ids once, on an event; SGLang adds its own facts to one event near the end.
        self.sources += [mapping_of(event, "usage"), {"prompt_token_ids": event.get("prompt_token_ids")}, *extensions_of(event)]
        self.whole_ids = dialects.ids(extensions_of(event)[0], ("output_ids",)) or self.whole_ids
        for choice in event["choices"][:1]:
            if not isinstance(choice, Mapping):
                raise Malformed("a stream event's choice is not an object")
            self._choice(choice)

    def _choice(self, choice: Mapping[str, Any]) -> None:
        delta = mapping_of(choice, "delta") or choice
        new = text_of(delta, ("content", "text"))
        self.reasoning += text_of(delta, ("reasoning_content", "reasoning"))
        self.text += new
        info = mapping_of(choice, "meta_info")
        self.whole_ids = dialects.ids(info, ("output_ids", "output_token_ids")) or self.whole_ids
        self.ids += dialects.ids(choice, ("token_ids",)) or ()
        self.sources.append({"prompt_token_ids": choice.get("prompt_token_ids")})
        self.finish = finish_of(choice) or self.finish
        self._note(new, info, bool(new))

    def _note(self, new: str, info: Mapping[str, Any], counts: bool) -> None:
        if info:
            self.sources.append(info)
        found = dialects.meta(info)
        if counts:
            self.chunks.append(Chunk(self._at, new, found.completion_tokens, found.verify_passes))

    def reply(self, ask: Ask, seconds: float, *, cancelled: bool) -> Reply:
        found = dialects.meta(*reversed(self.sources))
        ids = self.whole_ids or (tuple(self.ids) if self.ids else found.output_ids)
        first = self.chunks[0].at if self.chunks else None
        return Reply(
            ask,
            self.text,
            self.finish,
            replace(found, output_ids=ids),
            seconds,
            self.reasoning,
            first,
            tuple(self.chunks),
            self.started,
            cancelled=cancelled,
        )
