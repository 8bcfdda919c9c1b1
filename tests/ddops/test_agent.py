"""A connection that breaks under several threads: the blip is ridden out by all of them, a host that is gone by none."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from ddops import agent as agents
from ddops.agent import Agent
from ddops.errors import ConnectionLost, Unreachable
from ddops.inventory import HostConfig, load
from ddops.journal import Collector, Journal

INVENTORY = "version: 1\nhosts: {one: {address: 10.0.0.1, engine: {release: r1, model: m, drafter: d}}}\n"


class Flaky:
    """A host whose connection is down; logging in takes a while, or never works."""

    def __init__(self, *, back_after: float | None) -> None:
        self.up = threading.Event()
        self.back_after = back_after
        self.logins = 0

    def alive(self, timeout: float) -> bool:
        return self.up.is_set()

    def reconnect(self, deadline: float) -> None:
        self.logins += 1
        if self.back_after is None or self.back_after > deadline:
            time.sleep(deadline)
            raise Unreachable("one is not reachable")
        time.sleep(self.back_after)
        self.up.set()

    def ask(self) -> str:
        if not self.up.is_set():
            raise ConnectionLost("there is no connection to one")
        return "answer"


@pytest.fixture
def config() -> HostConfig:
    return load(INVENTORY, "f").hosts["one"]


def agent_of(host: Any, config: HostConfig) -> Agent:
    return Agent(host, config, "run-1", Journal("run-1", [Collector()]))


def test_a_thread_that_asks_while_another_reconnects_waits_for_it(config: HostConfig) -> None:
    host = Flaky(back_after=0.5)
    agent = agent_of(host, config)
    with ThreadPoolExecutor(6) as pool:
        # The heartbeat notices first; the others come while it is logging in.
        first = pool.submit(agent.patiently, host.ask)
        time.sleep(0.1)
        others = [pool.submit(agent.patiently, host.ask) for _ in range(5)]
        assert [done.result(timeout=10) for done in (first, *others)] == ["answer"] * 6
    assert host.logins == 1


def test_a_host_that_has_stayed_away_is_not_waited_for_a_second_time(
    config: HostConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agents, "RECONNECT_SECONDS", 0.5)
    host = Flaky(back_after=None)
    agent = agent_of(host, config)
    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(agent.patiently, host.ask) for _ in range(2)]:
            with pytest.raises(Unreachable):
                done.result(timeout=10)
    begun = time.monotonic()
    with pytest.raises(Unreachable):
        agent.patiently(host.ask)  # such as to give the lease back
    assert time.monotonic() - begun < 0.3
    host.up.set()
    assert agent.patiently(host.ask) == "answer"
    host.up.clear()
    host.back_after = 0.1
    assert agent.patiently(host.ask) == "answer", "once it was back, it is waited for again"
