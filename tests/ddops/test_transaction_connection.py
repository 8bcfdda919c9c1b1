"""Before anything is armed the connection is tried: one that breaks is made anew, one that is too narrow is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest

from ddops.agent import Agent
from ddops.errors import ConnectionLost, DdopsError, Refused, RemoteTimeout
from ddops.ground import Options
from ddops.inventory import load
from ddops.journal import Collector, Journal
from ddops.transaction import Transaction

INVENTORY = "version: 1\nhosts: {one: {address: 10.0.0.1, engine: {release: r1, model: m, drafter: d}}}\n"
LOST = ConnectionLost("the connection to one is lost")
NARROW = RemoteTimeout("one opens no further session", hint="raise MaxSessions in the host's sshd_config")


class Host:
    """Each look at it meets the next of `troubles`; `up`: whether the connection itself still answers."""

    def __init__(self, http: list[DdopsError], commands: list[DdopsError], *, up: bool) -> None:
        self.troubles = {"http": http, "command": commands}
        self.up = up
        self.logins = 0

    def http(self, port: int) -> httpx.Client:
        def answer(request: httpx.Request) -> httpx.Response:
            self._meet("http")
            return httpx.Response(200)

        return httpx.Client(base_url="http://one", transport=httpx.MockTransport(answer))

    def run(self, argv: Any, **_: Any) -> None:
        self._meet("command")

    def _meet(self, what: str) -> None:
        if self.troubles[what]:
            raise self.troubles[what].pop(0)

    def alive(self, timeout: float) -> bool:
        return self.up

    def reconnect(self, deadline: float) -> None:
        self.logins += 1


@pytest.fixture
def check() -> Callable[[Host], None]:
    def checked(host: Host) -> None:
        config = load(INVENTORY, "f").hosts["one"]
        journal = Journal("run-1", [Collector()])
        agent = Agent(host, config, "run-1", journal)  # type: ignore[arg-type]
        Transaction(agent, journal, Options("ddops"))._check_connection()

    return checked


@pytest.mark.parametrize(
    ("http", "commands"),
    [([LOST], []), ([], [LOST]), ([], [RemoteTimeout("no answer")]), ([LOST], [LOST, RemoteTimeout("no answer")])],
)
def test_a_connection_that_breaks_while_it_is_tried_is_ridden_out(
    check: Callable[[Host], None], http: list[DdopsError], commands: list[DdopsError]
) -> None:
    host = Host(http[:], commands[:], up=False)
    check(host)
    assert host.logins == len(http) + len(commands)
    assert host.troubles == {"http": [], "command": []}


def test_a_connection_that_holds_and_takes_no_command_is_refused_and_the_lease_can_be_given_back(
    check: Callable[[Host], None],
) -> None:
    host = Host([], [NARROW], up=True)
    with pytest.raises(Refused, match="no further session") as caught:
        check(host)
    assert "MaxSessions" in caught.value.hint
    assert host.logins == 1
