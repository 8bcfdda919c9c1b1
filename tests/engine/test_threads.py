"""How many threads a pass on CPU runs with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from ddtree_engine import threads as rules
from ddtree_engine.checkpoint import StackConfig
from ddtree_engine.config import SpecMode
from ddtree_engine.requests import Sampling
from ddtree_engine.threads import BYTES, Crowd, Threads, numbers_per_product, slowest_wake

from tests.engine.small_models import Pair

SMALL = StackConfig(256, 8, 4, 2, 64, 768, 3072, 1e-6, 1e4, 4096)  # the bundled model
LARGE = replace(SMALL, hidden=4096, layers=36, heads=32, kv_heads=8, head_dim=128, ff=12288)  # 8 B


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@dataclass
class Machine:
    """Seconds that passes and wakes take on it."""

    now: float = 0.0
    wake: float = 1e-5
    wakes: int = 0
    one: float = 4e-3
    all: float = 2e-3

    def woken(self) -> float:
        self.wakes += 1
        self.now += self.wake
        return self.wake

    def crowd(self) -> Crowd:
        return Crowd(self.woken, lambda: self.now)

    def run(self, threads: Threads, rows: int, count: int = 1) -> list[bool]:
        """Passes one after another; for each whether it ran on all threads."""
        ways = []
        for _ in range(count):
            threads.start(rows)
            everyone = torch.get_num_threads() > 1
            self.now += self.all if everyone else self.one
            threads.stop()
            ways.append(everyone)
        return ways


def threads(stack: StackConfig, machine: Machine | None = None, most: int = 2, itemsize: int = 2) -> Threads:
    return Threads(most, numbers_per_product(stack), itemsize, (machine or Machine()).crowd())


def test_numbers_per_product_count_every_weight_of_a_layer_once() -> None:
    weights = [(512, 256), (256, 256), (1536, 256), (256, 768)]
    assert numbers_per_product(SMALL) == sum(a * b for a, b in weights) / 4


def test_prefill_of_a_small_model_runs_on_all_threads_from_the_first_pass() -> None:
    machine = Machine(wake=1.0)
    assert machine.run(threads(SMALL, machine), 512, 3) == [True] * 3
    assert machine.wakes == 0


def test_a_large_model_runs_on_all_threads_even_for_one_row() -> None:
    assert numbers_per_product(LARGE) * 2 > BYTES
    assert Machine().run(threads(LARGE), 1) == [True]


def test_more_rows_never_get_fewer_threads() -> None:
    for stack in (SMALL, LARGE):
        large = [threads(stack).large(rows) for rows in range(1, 2049, 7)]
        assert large == sorted(large)


def test_one_thread_stays_one_thread() -> None:
    machine = Machine()
    for rows in (1, 5000):
        assert not any(machine.run(threads(LARGE, machine, most=1), rows, 9))
    assert machine.wakes == 0


def test_small_passes_get_all_threads_where_that_is_faster() -> None:
    machine = Machine(one=4e-3, all=2e-3)
    ways = machine.run(threads(SMALL, machine), 16, 200)
    assert ways.count(True) > 190


def test_small_passes_stay_on_one_thread_where_all_are_slower() -> None:
    machine = Machine(one=2e-3, all=3e-3)
    ways = machine.run(threads(SMALL, machine, most=8), 16, 200)
    assert ways.count(True) < 10


def test_each_number_of_rows_is_judged_by_itself() -> None:
    machine = Machine(one=4e-3, all=2e-3)
    both = threads(SMALL, machine)
    machine.run(both, 16, 20)
    machine.one, machine.all = 1e-3, 2e-3
    machine.run(both, 1, 20)
    assert machine.run(both, 1, 9) == [False] * 9
    machine.one, machine.all = 4e-3, 2e-3
    assert machine.run(both, 16, 9) == [True] * 9


def test_what_is_faster_later_is_found_later() -> None:
    machine = Machine(one=2e-3, all=3e-3)
    small = threads(SMALL, machine)
    machine.run(small, 16, 100)
    machine.one = 9e-3
    assert machine.run(small, 16, 300)[-50:].count(True) >= 49


def test_where_waking_is_slow_no_pass_tries_it() -> None:
    machine = Machine(wake=8e-3)
    ways = machine.run(threads(SMALL, machine), 16, 5000)
    assert not any(ways)
    assert machine.wakes * 8e-3 < 0.02 * machine.now  # asking costs next to nothing


def test_after_a_stall_passes_run_on_one_thread_and_come_back_when_the_machine_is_free() -> None:
    machine = Machine()
    small = threads(SMALL, machine)
    machine.run(small, 16, 50)
    machine.all, machine.wake = 0.3, 8e-3  # other work comes
    assert machine.run(small, 16, 300).count(True) == 1
    machine.all, machine.wake = 2e-3, 1e-5  # and goes
    assert machine.run(small, 16, 6000)[-50:].count(True) >= 49


def test_a_pass_that_stalls_goes_on_with_one_thread() -> None:
    machine = Machine()
    small = threads(SMALL, machine)
    machine.run(small, 16, 50)
    counts = []

    def attend(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        counts.append(torch.get_num_threads())
        machine.now += 0.06 if counts[-1] > 1 else 0.5e-3
        return queries

    small.start(16)
    layer = small.watched(attend)
    for _ in range(8):
        layer(*[torch.zeros(1)] * 3)
    small.stop()
    assert counts == [2] + 7 * [1]
    assert machine.run(small, 16, 5) == [False] * 5


def test_a_stall_of_one_size_spares_the_others() -> None:
    machine = Machine()
    small = threads(SMALL, machine)
    for rows in (8, 16):
        machine.run(small, rows, 50)
    machine.all, machine.wake = 0.3, 8e-3
    assert machine.run(small, 16, 1) == [True]
    assert machine.run(small, 8, 20) == [False] * 20


def test_stalls_that_no_wake_foretells_cost_little_all_the_same() -> None:
    machine = Machine(all=0.3)  # a hundred times the pass
    small = threads(SMALL, machine)
    ways = machine.run(small, 16, 20_000)
    assert ways.count(True) * 0.3 < 0.1 * machine.now


def test_a_rare_stall_is_forgotten_after_a_calm_time() -> None:
    machine = Machine()
    small = threads(SMALL, machine)
    for _ in range(9):
        machine.run(small, 16, 3000)
        machine.all = 0.05
        while not machine.run(small, 16)[0]:
            pass
        machine.all = 2e-3
        paused = machine.run(small, 16, 100).count(False)
        assert paused * machine.one < 0.2


def test_wakes_are_timed_and_leave_the_number_of_threads_alone() -> None:
    torch.set_num_threads(1)
    assert 0.0 < slowest_wake(2) < 10.0
    assert torch.get_num_threads() == 1


@pytest.mark.parametrize("mode", [SpecMode.OFF, SpecMode.CHAIN, SpecMode.TREE])
def test_answers_do_not_depend_on_the_number_of_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: SpecMode
) -> None:
    pair, said = Pair(tmp_path), set()
    for most, work in ((1, rules.WORK), (2, rules.WORK), (2, 0.0)):  # the last: two threads for every pass
        monkeypatch.setattr(rules, "WORK", work)
        engine = pair.engine(num_threads=most)
        answer = engine.generate([[5, 0, 17, 99]], Sampling(max_new_tokens=30, ignore_eos=True), mode)[0]
        said.add(answer.token_ids)
        if work == 0.0:
            assert torch.get_num_threads() == 2
    assert len(said) == 1
