"""The device thread: order, deadlines, cancellation, and what happens when it dies or hangs."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from ddtree_engine import tickets
from ddtree_engine import worker as worker_module
from ddtree_engine.config import SpecMode
from ddtree_engine.requests import Finish, Request, RequestError, Sampling, Update
from ddtree_engine.tickets import Busy, EngineDead, NotReady, Stalled, Ticket
from ddtree_engine.worker import State, queue_limit

Serve = Callable[..., Any]


def request(number: int = 1, prompt: tuple[int, ...] = (10, 11, 12, 13), **sampling: Any) -> Request:
    return Request(f"r{number}", prompt, Sampling(**sampling), SpecMode.TREE)


def on_loop(served: Any, work: Callable[[], Any], timeout_s: float = 10.0) -> Any:
    """Run `work()`, a coroutine, on the served app's own event loop."""
    loop = served.service.worker._loop
    return asyncio.run_coroutine_threadsafe(work(), loop).result(timeout_s)


async def collect(served: Any, one: Request) -> list[Update]:
    return [update async for update in served.service.worker.submit(one).updates()]


# --- the fake engine that these tests stand on ---


def test_the_fake_engine_answers_with_the_prompt_and_an_end(serve: Serve) -> None:
    served = serve()
    updates = on_loop(served, lambda: collect(served, request()))
    assert [i for u in updates for i in u.token_ids] == [10, 11, 12, 13, 2]
    assert updates[-1].finish is Finish.STOP
    assert updates[-1].matched_token == 2


def test_the_fake_engine_keeps_to_max_new_tokens(serve: Serve) -> None:
    served = serve()
    updates = on_loop(served, lambda: collect(served, request(max_new_tokens=3)))
    assert [i for u in updates for i in u.token_ids] == [10, 11, 12]
    assert updates[-1].finish is Finish.LENGTH


# --- the worker ---


def test_many_requests_at_once_get_their_own_answers(serve: Serve) -> None:
    served = serve()
    requests = [request(i, tuple(range(10 + i, 15 + i))) for i in range(40)]

    async def run() -> list[list[Update]]:
        return await asyncio.gather(*(collect(served, one) for one in requests))

    for one, updates in zip(requests, on_loop(served, run), strict=True):
        assert [i for u in updates for i in u.token_ids] == [*one.prompt_ids, 2]


def test_a_full_queue_refuses_and_recovers(serve: Serve) -> None:
    gate = threading.Event()
    served = serve(engine={"on_step": lambda: gate.wait(10)}, max_running_requests=1)

    async def fill() -> list[Any]:
        tickets = [served.service.worker.submit(request(i)) for i in range(queue_limit(1))]
        with pytest.raises(Busy, match="the limit is"):
            served.service.worker.submit(request(999))
        gate.set()
        for ticket in tickets:
            async for _ in ticket.updates():
                pass
        return await collect(served, request(1000))

    assert on_loop(served, fill)[-1].finish is Finish.STOP


def test_a_cancelled_request_leaves_the_engine(serve: Serve, wait_until: Any) -> None:
    endless = {"answer": lambda r: [20] * 100_000, "on_step": lambda: time.sleep(0.005)}
    served = serve(engine=endless)

    async def start_and_leave() -> None:
        ticket = served.service.worker.submit(request(max_new_tokens=100_000))
        async for _ in ticket.updates():
            break
        ticket.cancel()
        ticket.cancel()

    on_loop(served, start_and_leave)
    wait_until(lambda: not served.engine.busy)
    assert served.service.worker.in_flight == 0


@pytest.mark.parametrize("turns", range(6))
def test_a_reader_that_is_cancelled_as_an_update_comes_lets_go_of_its_request(turns: int) -> None:
    """However many turns of the event loop lie between the two."""

    async def run() -> list[str]:
        forgotten: list[str] = []
        ticket = Ticket(request(), forgotten.append)

        async def read() -> None:
            try:
                async for _ in ticket.updates():
                    pass
            finally:
                ticket.cancel()

        reader = asyncio.ensure_future(read())
        for _ in range(3):
            await asyncio.sleep(0)
        ticket.deliver(Update("r1", (9,), None, None, 0, 0))
        for _ in range(turns):
            await asyncio.sleep(0)
        reader.cancel()
        await asyncio.wait({reader}, timeout=1.0)
        assert reader.cancelled()
        return forgotten

    assert asyncio.run(run()) == ["r1"]


def test_a_request_that_can_never_run_is_refused_at_once(serve: Serve) -> None:
    served = serve()

    async def bad() -> None:
        served.service.worker.submit(request(prompt=(300,)))

    with pytest.raises(RequestError):
        on_loop(served, bad)
    assert served.service.worker.in_flight == 0


def test_a_refusal_on_the_device_thread_reaches_the_request(serve: Serve, monkeypatch: Any) -> None:
    served = serve()
    monkeypatch.setattr(served.engine, "submit", _refusing)
    with pytest.raises(RequestError, match="no room"):
        on_loop(served, lambda: collect(served, request()))
    assert served.service.worker.state is State.READY


def _refusing(request: Request) -> None:
    raise RequestError("prompt", "no room")


def test_when_the_thread_dies_every_request_hears_of_it(serve: Serve, wait_until: Any) -> None:
    gate = threading.Event()

    def die() -> None:
        assert gate.wait(10)
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    served = serve(engine={"on_step": die}, max_running_requests=2)

    async def run() -> list[Any]:
        waiting = [asyncio.ensure_future(collect(served, request(i))) for i in range(5)]
        await asyncio.sleep(0.1)
        gate.set()
        return await asyncio.gather(*waiting, return_exceptions=True)

    results = on_loop(served, run)
    assert all(isinstance(result, EngineDead) for result in results)
    assert "illegal memory access" in str(results[0])
    [death] = served.observer.deaths
    assert death.reason.startswith("RuntimeError: CUDA error")

    async def late() -> None:
        served.service.worker.submit(request(77))

    with pytest.raises(EngineDead):
        on_loop(served, late)


def test_a_failure_while_loading_is_a_death_too(serve: Serve, wait_until: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(worker_module, "warm_up", _failing)
    served = serve()
    wait_until(lambda: served.observer.deaths)
    assert served.service.worker.state is State.DEAD
    assert "no token" in served.observer.deaths[0].reason


def _failing(engine: Any) -> None:
    raise RuntimeError("the warm-up generation gave no token")


def test_before_the_engine_is_ready_requests_are_told_so(serve: Serve) -> None:
    gate = threading.Event()
    served = serve(load_gate=gate, wait=False)

    async def early() -> None:
        served.service.worker.submit(request())

    with pytest.raises(NotReady, match="starting"):
        on_loop(served, early)
    gate.set()


def test_progress_is_told_while_loading(serve: Serve) -> None:
    assert serve().observer.said == ["loading weights 41 %", "warming up", "ready"]


def test_no_progress_on_a_request_ends_it(serve: Serve, monkeypatch: Any) -> None:
    monkeypatch.setattr(tickets, "STALL_S", 0.2)
    gate = threading.Event()
    served = serve(engine={"on_step": lambda: gate.wait(10)})
    with pytest.raises(Stalled, match="no progress"):
        on_loop(served, lambda: collect(served, request()))
    assert served.service.worker.in_flight == 0
    gate.set()


def test_a_step_that_does_not_come_back_is_noticed(serve: Serve, wait_until: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(worker_module, "HANG_S", 0.1)
    gate = threading.Event()
    served = serve(engine={"on_step": lambda: gate.wait(10)})
    assert served.service.worker.hung_for() == 0

    async def hang() -> Any:
        waiting = asyncio.ensure_future(collect(served, request()))
        while served.service.worker.hung_for() == 0:
            await asyncio.sleep(0.02)
        served.service.worker.declare_dead("watchdog: it hangs")
        return await asyncio.gather(waiting, return_exceptions=True)

    [result] = on_loop(served, hang)
    assert isinstance(result, EngineDead)
    gate.set()


def test_draining_finishes_what_runs_and_takes_nothing_new(serve: Serve) -> None:
    gate = threading.Event()
    served = serve(engine={"on_step": lambda: gate.wait(10)})

    async def drain() -> list[Update]:
        running = asyncio.ensure_future(collect(served, request(1)))
        await asyncio.sleep(0.05)
        served.service.worker.drain()
        with pytest.raises(NotReady, match="draining"):
            served.service.worker.submit(request(2))
        gate.set()
        return await running

    assert on_loop(served, drain)[-1].finish is Finish.STOP


def test_when_draining_takes_too_long_requests_still_get_an_answer(serve: Serve) -> None:
    gate = threading.Event()
    served = serve(engine={"on_step": lambda: gate.wait(10)})

    async def abandon() -> Any:
        running = asyncio.ensure_future(collect(served, request(1)))
        await asyncio.sleep(0.05)
        served.service.worker.drain()
        served.service.worker.abandon()
        return await asyncio.gather(running, return_exceptions=True)

    [result] = on_loop(served, abandon)
    assert isinstance(result, NotReady)
    gate.set()


def test_flushing_reaches_the_engine_while_it_is_busy(serve: Serve) -> None:
    served = serve(engine={"answer": lambda r: [20] * 500, "on_step": lambda: time.sleep(0.002)})

    async def flush() -> None:
        ticket = served.service.worker.submit(request(max_new_tokens=500))
        await served.service.worker.flush()
        ticket.cancel()

    before = served.engine.flushes
    on_loop(served, flush)
    assert served.engine.flushes == before + 1
