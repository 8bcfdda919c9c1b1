"""Any engine at an address, without a host behind it: what it speaks is found out, and what is missing is said.

The front door of `ddops probe --url` and `--reference`. Engines on hosts are reached over their SSH connection (proof.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ddops import greeting
from ddops.errors import UsageError

if TYPE_CHECKING:
    import httpx

    from ddops.prove.client import EngineClient

AUTO = "auto"
KINDS = (AUTO, "ddtree", "sglang", "vllm", "openai")
_NOTHING = "nothing was probed"


@dataclass(frozen=True, slots=True)
class Address:
    """Where an engine is and what is known of it. `option`: what named it, for messages."""

    url: str
    engine: str = AUTO
    model: str | None = None
    api_key: str | None = None
    option: str = "--url"

    @property
    def base(self) -> str:
        """The address less a trailing /v1. Raises UsageError."""
        from ddops.prove.transport import base_of

        try:
            return base_of(self.url)
        except ValueError as problem:
            raise UsageError(f"{self.option}: {problem}", means=_NOTHING) from None


def read_key(file: str | None) -> str | None:
    """The key in a file, masked from now on wherever events go. Raises UsageError."""
    if file is None:
        return None
    from ddops.journal import mask

    try:
        key = Path(file).read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as problem:
        raise UsageError(f"--api-key-file {file} cannot be read: {problem}", means=_NOTHING) from problem
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise UsageError(f"--api-key-file {file} holds no key", means=_NOTHING, hint="one line, the key and nothing else")
    mask(key)
    return key


@contextmanager
def connected(address: Address) -> Iterator[EngineClient]:
    """A client of the engine there, which has answered.

    Raises:
        Unreachable: nothing answers.
        UsageError: what answers is no engine; the address, the key or the model's name is missing or wrong.
    """
    import httpx

    from ddops.prove.client import EngineClient

    limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
    with httpx.Client(base_url=address.base, limits=limits) as http:
        _greet(address, http)
        kind = _kind(address, http)
        client = EngineClient(http, kind, api_key=address.api_key, model=address.model)
        _check_model(address, client)
        yield client


def _greet(address: Address, http: httpx.Client) -> None:
    """Nothing that listens is not an engine that died, nor is a web server: it is said before anything is probed."""
    import httpx

    try:
        greeting.check(http, _who(address))
    except httpx.RequestError as problem:
        raise greeting.unheard(_who(address), problem) from problem


def _who(address: Address) -> greeting.Greeted:
    kind = "" if address.engine == AUTO else address.engine
    return greeting.Greeted(address.url, kind, address.option, address.api_key, address.model)


def _kind(address: Address, http: httpx.Client) -> str:
    """What it speaks."""
    from ddops.prove.client import identify
    from ddops.prove.wire import Denied, EngineError

    try:
        found = identify(http, api_key=address.api_key)
    except Denied as problem:
        hint = "the key in --api-key-file is another one" if address.api_key else _key_hint(address)
        raise UsageError(f"{address.url} wants an API key ({problem})", means=_NOTHING, hint=hint) from problem
    except EngineError as problem:
        raise greeting.unheard(_who(address), problem) from problem
    if address.engine not in (AUTO, found):
        click.echo(f"warning: {address.url} looks like {found}; it is asked as {address.engine}", err=True)
    return found if address.engine == AUTO else address.engine


def _key_hint(address: Address) -> str:
    return "give it one: --api-key-file FILE" if address.option == "--url" else f"{address.option} takes no key"


def _check_model(address: Address, client: EngineClient) -> None:
    from ddops.prove.wire import EngineError, Unsupported

    try:
        client.model  # noqa: B018 (asked for its errors)
    except Unsupported as problem:
        hint = "name it: --model NAME" if address.option == "--url" else "serve one model there"
        raise UsageError(f"{address.url}: {problem}", means=_NOTHING, hint=hint) from problem
    except EngineError:
        return  # the battery will say what the engine does wrong
