"""Keyed noise: what is drawn depends on the logits, the seed and the position, and on nothing else."""

from __future__ import annotations

import pytest
import torch
from ddtree_engine.requests import Sampling
from ddtree_engine.sampling import (
    RowSampling,
    best,
    best_few,
    choose,
    gumbel,
    logprobs_of,
    reference_gumbel,
    request_seed,
    row_key,
)
from hypothesis import given, settings
from hypothesis import strategies as st

NUMBERS = st.floats(width=32, allow_nan=False)

keys = st.integers(-(2**63), 2**63 - 1)


@given(keys, st.integers(1, 300))
def test_noise_equals_its_definition_in_plain_integers(key: int, vocab: int) -> None:
    fast = gumbel(torch.tensor([key]), vocab)[0]
    assert torch.allclose(fast, torch.from_numpy(reference_gumbel(key, vocab)), rtol=1e-5, atol=1e-5)


def test_noise_is_gumbel_distributed() -> None:
    noise = gumbel(torch.tensor([row_key(3, i) for i in range(50)]), 20_000).flatten().double()
    assert noise.isfinite().all()
    for x in (-1.0, 0.0, 1.0, 3.0):
        expected = torch.exp(-torch.exp(torch.tensor(-x, dtype=torch.float64)))
        assert abs((noise <= x).double().mean() - expected) < 0.002


@given(st.integers(0, 2**63), st.integers(0, 10**6), st.integers(0, 2**63), st.integers(0, 10**6))
def test_keys_differ_when_seed_or_position_differ(seed: int, position: int, seed2: int, position2: int) -> None:
    assert (row_key(seed, position) == row_key(seed2, position2)) == ((seed, position) == (seed2, position2))


def test_requests_without_a_seed_draw_different_ones_that_repeat_with_the_engine() -> None:
    seeds = [request_seed(5, i) for i in range(100)]
    assert len(set(seeds)) == 100
    assert seeds == [request_seed(5, i) for i in range(100)]
    assert request_seed(6, 0) != seeds[0]


def _rows(count: int, **settings_: float) -> list[RowSampling]:
    return [RowSampling(Sampling(**settings_), seed=1, position=i) for i in range(count)]


@given(st.integers(0, 2**32), st.integers(1, 12), st.data())
@settings(max_examples=50)
def test_choice_of_a_row_does_not_depend_on_the_rows_beside_it(seed: int, count: int, data: st.DataObject) -> None:
    logits = torch.randn(count, 40, generator=torch.Generator().manual_seed(seed))
    kinds = [Sampling(), Sampling(temperature=0.7), Sampling(temperature=1.3, top_p=0.8, top_k=9)]
    rows = [RowSampling(data.draw(st.sampled_from(kinds)), seed, i // 2) for i in range(count)]
    together = choose(logits, rows).tolist()
    assert together == [int(choose(logits[i : i + 1], rows[i : i + 1])) for i in range(count)]


def test_sampling_keeps_the_distribution_of_the_logits() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -6.0])
    n = 40_000
    drawn = choose(logits.expand(n, -1), _rows(n, temperature=0.7))
    share = torch.bincount(drawn, minlength=5) / n
    expected = (logits / 0.7).softmax(-1)
    # Five standard deviations of a share of n draws.
    assert ((share - expected).abs() < 5 * (expected * (1 - expected) / n).sqrt() + 1e-4).all()


def test_top_k_and_top_p_draw_from_what_they_keep() -> None:
    logits = torch.log(torch.tensor([0.5, 0.3, 0.15, 0.05]))
    n = 4000
    assert set(choose(logits.expand(n, -1), _rows(n, temperature=1.0, top_k=2)).tolist()) == {0, 1}
    assert set(choose(logits.expand(n, -1), _rows(n, temperature=1.0, top_p=0.7)).tolist()) == {0, 1}
    assert set(choose(logits.expand(n, -1), _rows(n, temperature=1.0, top_p=0.81)).tolist()) == {0, 1, 2}
    assert set(choose(logits.expand(n, -1), _rows(n, temperature=1.0, top_p=1e-6)).tolist()) == {0}
    assert set(choose(logits.expand(n, -1), _rows(n, temperature=5.0)).tolist()) == {0, 1, 2, 3}


def test_greedy_rows_take_the_best_token_beside_sampled_ones() -> None:
    logits = torch.randn(6, 30, generator=torch.Generator().manual_seed(2))
    rows = [RowSampling(Sampling(temperature=2.0 * (i % 2)), 1, i) for i in range(6)]
    chosen = choose(logits, rows)
    assert chosen[::2].tolist() == logits[::2].argmax(-1).tolist()
    assert chosen[1::2].tolist() != logits[1::2].argmax(-1).tolist()


def test_top_k_of_one_is_greedy_at_any_temperature() -> None:
    logits = torch.randn(20, 30, generator=torch.Generator().manual_seed(2))
    assert choose(logits, _rows(20, temperature=9.0, top_k=1)).tolist() == logits.argmax(-1).tolist()


def test_logprobs_are_of_the_models_own_distribution() -> None:
    logits = torch.randn(3, 11, generator=torch.Generator().manual_seed(4))
    own, top = logprobs_of(logits, [4, 0, 10], 3)
    logp = logits.log_softmax(-1)
    assert own == pytest.approx([float(logp[0, 4]), float(logp[1, 0]), float(logp[2, 10])])
    assert [t for _, t in top[1]] == logp[1].topk(3).indices.tolist()
    assert logprobs_of(logits, [], 3) == ((), ())


@given(st.integers(1, 5).flatmap(lambda n: st.lists(st.lists(NUMBERS, min_size=n, max_size=n), min_size=1, max_size=4)))
def test_best_is_the_first_of_the_largest(rows: list[list[float]]) -> None:
    logits = torch.tensor(rows)
    assert best(logits).tolist() == [row.index(max(row)) for row in logits.tolist()]
    assert best(logits.t()).tolist() == [column.index(max(column)) for column in logits.t().tolist()]


@given(st.integers(0, 2**32 - 1), st.integers(1, 5), st.sampled_from((100, 128, 384, 3072)), st.integers(1, 40), st.booleans())
def test_the_best_few_are_the_largest_whatever_ties(seed: int, rows: int, vocab: int, k: int, coarse: bool) -> None:
    rows *= 20
    scores = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))
    if coarse:  # a few values only, as bfloat16 logits near each other have
        scores = scores.round()
    values, ids = best_few(scores, k)
    assert torch.equal(values, scores.topk(k, dim=-1)[0])
    assert torch.equal(scores.gather(1, ids), values)
    assert all(len(set(row)) == k for row in ids.tolist())


def test_the_one_best_is_the_first_of_the_largest() -> None:
    scores = torch.zeros(2, 256)
    scores[1, 200:] = 3.0
    assert best_few(scores, 1)[1].tolist() == [[0], [200]]
