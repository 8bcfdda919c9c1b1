"""A stop is never lost, wherever in the program the signal happens to come."""

from __future__ import annotations

import os
import signal
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from ddops import stops
from ddops.errors import Exit, Interrupted
from ddops.ground import Ground, Options
from ddops.journal import Journal

SIGNALS = list(stops.SIGNALS)


def ask(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


def in_a_finalizer(number: signal.Signals) -> None:
    class Dying:
        def __del__(self) -> None:
            ask(number)

    Dying()


def in_a_weak_callback(number: signal.Signals) -> None:
    class Watched:
        pass

    watched = Watched()
    _kept = weakref.ref(watched, lambda _: ask(number))
    del watched


class Gone:
    """A terminal that has gone while it was written on."""

    name = "the terminal"

    def __init__(self, number: signal.Signals) -> None:
        self.number = number

    def write(self, _: Any) -> None:
        try:
            ask(self.number)
        finally:
            raise OSError(5, "Input/output error")

    def close(self) -> None: ...


def under_a_clean_up_that_fails(number: signal.Signals) -> None:
    Journal("r", [Gone(number)]).emit("phase")


@pytest.fixture
def ground() -> Ground:
    config = SimpleNamespace(name="a", prove=SimpleNamespace(level="quick", probes=()))
    agent: Any = SimpleNamespace(config=config)
    return Ground(agent, Journal("r"), Options("ddops"))


@contextmanager
def own_signals() -> Iterator[None]:
    """Whatever the tests were started under (nohup), these arrive."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in SIGNALS}
    try:
        with stops.stoppable():
            yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("where", [in_a_finalizer, in_a_weak_callback, under_a_clean_up_that_fails])
def test_a_stop_that_python_has_lost_is_met_at_the_next_step(
    ground: Ground, where: Callable[[signal.Signals], None], number: signal.Signals
) -> None:
    with own_signals():
        where(number)  # raises nothing: that is the trouble
        with pytest.raises(Interrupted) as stop, ground.step("confirm"):
            pytest.fail("went on")
        assert stop.value.exit == stops.SIGNALS[number]


def test_a_stop_that_comes_while_a_step_begins_keeps_the_step_from_being_done(ground: Ground) -> None:
    ground.journal = Journal("r", [Gone(signal.SIGHUP)])
    with own_signals(), pytest.raises(Interrupted), ground.step("prove"):
        pytest.fail("went on")


def test_a_stop_is_met_once_and_the_way_back_goes_on() -> None:
    with own_signals():
        for number in (signal.SIGINT, signal.SIGTERM):
            with pytest.raises(Interrupted):
                ask(number)
        stop = stops.meet()
        assert stop is not None
        assert stop.exit is Exit.SIGTERM
        assert stops.meet() is None
        stops.check()


def test_a_run_leaves_no_stop_to_the_next_one() -> None:
    with own_signals(), pytest.raises(Interrupted):
        ask(signal.SIGINT)
    stops.check()
