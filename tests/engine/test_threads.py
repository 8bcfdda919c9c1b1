"""How many threads a pass on CPU runs with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from ddtree_engine.checkpoint import StackConfig
from ddtree_engine.config import SpecMode
from ddtree_engine.requests import Sampling
from ddtree_engine.threads import BYTES, WORK, Threads, numbers_per_product

from tests.engine.small_models import Pair

SMALL = StackConfig(256, 8, 4, 2, 64, 768, 3072, 1e-6, 1e4, 4096)  # the bundled model
LARGE = replace(SMALL, hidden=4096, layers=36, heads=32, kv_heads=8, head_dim=128, ff=12288)  # 8 B


def threads(stack: StackConfig, most: int = 8, itemsize: int = 2) -> Threads:
    return Threads(most, numbers_per_product(stack), itemsize)


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_numbers_per_product_count_every_weight_of_a_layer_once() -> None:
    weights = [(512, 256), (256, 256), (1536, 256), (256, 768)]
    assert numbers_per_product(SMALL) == sum(a * b for a, b in weights) / 4


def test_small_passes_of_a_small_model_run_on_one_thread_and_prefill_on_all() -> None:
    counts = [threads(SMALL).count(rows) for rows in (1, 17, 4 * 33, 512, 2048)]
    assert counts == [1, 1, 1, 8, 8]


def test_a_large_model_runs_on_all_threads_even_for_one_row() -> None:
    assert numbers_per_product(LARGE) * 2 > BYTES
    assert threads(LARGE).count(1) == 8


def test_more_rows_never_get_fewer_threads() -> None:
    for stack in (SMALL, LARGE):
        counts = [threads(stack).count(rows) for rows in range(1, 2049, 7)]
        assert counts == sorted(counts)


def test_one_thread_stays_one_thread() -> None:
    assert {threads(LARGE, most=1).count(rows) for rows in (1, 5000)} == {1}


def test_answers_do_not_depend_on_the_number_of_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair, said = Pair(tmp_path), set()
    for most, work in ((1, WORK), (2, WORK), (2, 0.0)):  # the last: two threads for every pass
        monkeypatch.setattr("ddtree_engine.threads.WORK", work)
        engine = pair.engine(num_threads=most)
        answer = engine.generate([[5, 0, 17, 99]], Sampling(max_new_tokens=30, ignore_eos=True), SpecMode.TREE)[0]
        said.add(answer.token_ids)
        assert torch.get_num_threads() == (2 if work == 0.0 else 1)
    assert len(said) == 1
