"""Whether two engines are one and the same: a reference that is the suspect proves nothing.

Two addresses may lead to one process. Where they do not give it away, its own counters do.
"""

from __future__ import annotations

import socket
import time
from ipaddress import ip_address
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from ddops.prove.client import EngineClient

_PORTS = {"http": 80, "https": 443}
_REQUESTS = ("sglang:num_requests_total", "vllm:request_success_total")  # ddtree counts under SGLang's names
_ROUNDS = 3  # one user's request at the right moment must not make twins of two engines
_COUNTED_SECONDS = 0.5  # within which a request that was answered has been counted


def same_place(one: str, other: str) -> bool:
    """Whether two http addresses lead to one socket, as far as names and addresses tell.

    Two names for one address may be two engines behind one proxy; a bare address and a name for it are one.
    """
    first, second = urlsplit(one), urlsplit(other)
    if _port(first.scheme, first.port) != _port(second.scheme, second.port):
        return False
    if first.path.rstrip("/").removesuffix("/v1") != second.path.rstrip("/").removesuffix("/v1"):
        return False
    names = first.hostname or "", second.hostname or ""
    if names[0] == names[1]:
        return True
    return any(map(_bare, names)) and bool(_addresses(names[0]) & _addresses(names[1]))


def same_process(engine: EngineClient, reference: EngineClient) -> bool:
    """Whether a request to one is counted by the other, and nothing is while none is sent: time after time.

    False as well where the engine has no such counter or others use it meanwhile: nothing is claimed then.
    """
    return all(_counts(engine, reference) for _ in range(_ROUNDS))


def _counts(engine: EngineClient, reference: EngineClient) -> bool:
    before = _requests(engine)
    if before is None or not reference.answers():
        return False
    give_up = time.monotonic() + _COUNTED_SECONDS
    while (after := _requests(engine)) == before and time.monotonic() < give_up:
        time.sleep(0.05)
    return after == before + 1 and _quiet(engine, after)


def _quiet(engine: EngineClient, count: float) -> bool:
    time.sleep(0.1)
    return _requests(engine) == count


def _requests(engine: EngineClient) -> float | None:
    """How many requests it has answered; None where it does not say."""
    from ddops.prove.wire import EngineError

    try:
        counted = engine.metrics()
    except EngineError:
        return None
    return next((counted[name] for name in _REQUESTS if name in counted), None)


def _port(scheme: str, port: int | None) -> int:
    return port or _PORTS.get(scheme, 0)


def _bare(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return name == "localhost"
    return True


def _addresses(name: str) -> set[str]:
    """Where a name leads; the address that means any leads to this machine."""
    try:
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(name, None)}
    except OSError:
        return set()
    return {{"0.0.0.0": "127.0.0.1", "::": "::1"}.get(address, address) for address in found}
