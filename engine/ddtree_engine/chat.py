"""The model folder's chat template: messages to one prompt text.

Templates come with a checkpoint, so they are untrusted code: they run in jinja2's immutable sandbox, and what they
raise reaches the client as a 400. Not here: what a message may look like (schemas.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

_CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class ChatTemplateError(Exception):
    """The template is absent, broken or refused these messages."""


class ChatTemplate:
    """A compiled chat template; `render` gives the prompt text that ends where the assistant's turn begins."""

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        env.filters["tojson"] = _tojson
        env.globals["raise_exception"] = _raise_exception
        env.globals["strftime_now"] = lambda fmt: datetime.now().strftime(fmt)
        self._special_tokens = dict(special_tokens or {})
        try:
            self._template = env.from_string(source)
        except TemplateError as exc:
            raise ChatTemplateError(f"the chat template does not compile: {exc}") from exc

    @classmethod
    def load(cls, folder: str | Path) -> ChatTemplate:
        """Read chat_template.jinja, else tokenizer_config.json's chat_template, else plain ChatML."""
        config = _read_json(Path(folder) / "tokenizer_config.json")
        file = Path(folder) / "chat_template.jinja"
        source = file.read_text(encoding="utf-8") if file.is_file() else _default_template(config.get("chat_template"))
        special = {key: _token_text(config[key]) for key in ("bos_token", "eos_token", "pad_token") if config.get(key)}
        return cls(source, special)

    def render(self, messages: Sequence[Mapping[str, str]], arguments: Mapping[str, Any] | None = None) -> str:
        """The prompt for `messages`; `arguments` are a request's chat_template_kwargs."""
        values = self._special_tokens | {"add_generation_prompt": True} | dict(arguments or {})
        try:
            return self._template.render(values | {"messages": [dict(m) for m in messages]})
        except ChatTemplateError:
            raise
        except Exception as exc:  # a sandboxed template may raise anything
            raise ChatTemplateError(f"the chat template failed on these messages: {exc}") from exc


def _default_template(value: object) -> str:
    """`chat_template` is a string, or a list of named ones of which `default` is the one for chatting."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        named = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}
        if isinstance(named.get("default"), str):
            return str(named["default"])
    return _CHATML


def _token_text(value: object) -> str:
    return str(value.get("content", "")) if isinstance(value, dict) else str(value)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except ValueError as exc:
        raise ChatTemplateError(f"{path} is not JSON: {exc}") from exc
    return found if isinstance(found, dict) else {}


def _tojson(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> NoReturn:
    raise ChatTemplateError(message)
