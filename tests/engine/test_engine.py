"""The engine's front: admission, cancellation, scoring, prefixes, counters, corruption points; everyone gets an answer."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from ddtree_engine.cache import Resident, Slabs
from ddtree_engine.config import Algorithm, SpecMode
from ddtree_engine.corruption import NoCorruption
from ddtree_engine.engine import Engine, collect
from ddtree_engine.requests import Finish, Request, RequestError, Sampling
from hypothesis import given
from hypothesis import strategies as st

from tests.engine.small_models import Pair, Reference, plant_drafts

S = Sampling(max_new_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture
def engine(pair: Pair) -> Engine:
    return pair.engine()


def request(request_id: str, prompt: list[int] | None = None, s: Sampling = S, **more: object) -> Request:
    more.setdefault("mode", SpecMode.TREE)
    return Request(request_id, tuple(prompt or [5, 6, 7]), s, **more)  # type: ignore[arg-type]


# Admission ------------------------------------------------------------------------------------------------------


def test_more_requests_than_slabs_are_all_answered_in_order(engine: Engine) -> None:
    ids = [str(i) for i in range(11)]
    for i in ids:
        engine.submit(request(i, [int(i) + 1, 2]))
    assert engine.stats().queued == 11
    first = engine.step()
    assert [u.request_id for u in first] == ids[:4]
    assert (engine.stats().running, engine.stats().queued) == (4, 7)
    runs = engine.drain(ids)
    assert all(runs[i][-1].finish is Finish.LENGTH for i in ids)
    assert not engine.busy
    assert engine.step() == []


def test_long_prompt_does_not_stop_those_who_decode(pair: Pair) -> None:
    engine = pair.engine(chunked_prefill_size=16)
    engine.submit(request("short", s=replace(S, max_new_tokens=100)))
    engine.step()
    engine.submit(request("long", [i % 101 for i in range(100)]))
    for _ in range(6):  # 96 tokens in six chunks
        assert [u.request_id for u in engine.step()] == ["short"]
    assert {u.request_id for u in engine.step()} == {"short", "long"}


@pytest.mark.parametrize(
    ("field", "bad"),
    [
        ("input_ids", {"prompt": [101]}),
        ("input_ids", {"prompt": [-1, 4]}),
        ("input_ids", {"prompt": [1] * 256}),
        ("input_ids", {"prompt": [1] * 300, "s": replace(S, max_new_tokens=0)}),
        ("max_new_tokens", {"prompt": [1] * 245}),
        ("max_new_tokens", {"s": replace(S, max_new_tokens=-1)}),
        ("temperature", {"s": replace(S, temperature=-0.1)}),
        ("temperature", {"s": replace(S, temperature=float("nan"))}),
        ("top_p", {"s": replace(S, top_p=0.0)}),
        ("top_p", {"s": replace(S, top_p=1.1)}),
        ("top_k", {"s": replace(S, top_k=0)}),
        ("stop_token_ids", {"s": replace(S, stop_token_ids=(101,))}),
        ("top_logprobs", {"top_logprobs": 65}),
        ("logprob_start_len", {"logprob_start": 4}),
    ],
)
def test_request_that_can_never_run_is_refused_with_its_field(engine: Engine, field: str, bad: dict) -> None:
    with pytest.raises(RequestError) as caught:
        engine.submit(request("x", **bad))
    assert caught.value.field == field
    assert not engine.busy


def test_empty_prompt_and_id_in_use_are_refused(engine: Engine) -> None:
    with pytest.raises(RequestError, match="empty"):
        engine.submit(Request("x", (), S, SpecMode.OFF))
    engine.submit(request("x"))
    with pytest.raises(RequestError, match="in use"):
        engine.submit(request("x"))
    engine.step()
    with pytest.raises(RequestError, match="in use"):
        engine.submit(request("x"))
    engine.drain(["x"])
    engine.submit(request("x"))


def test_speculation_without_a_drafter_is_refused(pair: Pair) -> None:
    engine = pair.engine(speculative_algorithm=Algorithm.NONE)
    for mode in (SpecMode.CHAIN, SpecMode.TREE):
        with pytest.raises(RequestError, match="drafter"):
            engine.submit(request("x", mode=mode))
    assert engine.generate([[4]], S, SpecMode.OFF)[0].finish is Finish.LENGTH


def test_prompt_and_answer_may_fill_the_context_exactly(engine: Engine) -> None:
    for mode in SpecMode:
        got = engine.generate([[9] * 200], replace(S, max_new_tokens=56), mode)[0]
        assert len(got.token_ids) == 56


# Cancellation ---------------------------------------------------------------------------------------------------


def test_cancelled_requests_are_reported_wherever_they_were(pair: Pair) -> None:
    engine = pair.engine(chunked_prefill_size=8)
    long = [i % 101 for i in range(60)]
    engine.submit(request("decoding"))
    engine.step()
    engine.submit(request("prefilling", long))
    engine.step()
    for i in range(4):
        engine.submit(request(f"waiting-{i}"))
    for gone in ("decoding", "prefilling", "waiting-0", "nobody"):
        engine.cancel(gone)
    aborted = [u.request_id for u in engine.step() if u.finish is Finish.ABORT]
    assert sorted(aborted) == ["decoding", "prefilling", "waiting-0"]
    runs = engine.drain([f"waiting-{i}" for i in range(1, 4)])
    assert all(collect(u).finish is Finish.LENGTH for u in runs.values())
    assert engine._slabs.free == 4


def test_cancelling_one_leaves_the_others_as_they_were(pair: Pair) -> None:
    prompts = [[5, 6, 7], [8, 9], [1, 2, 3, 4]]
    alone = [pair.engine().generate([p], S, SpecMode.TREE)[0].token_ids for p in prompts]
    engine = pair.engine()
    for i, p in enumerate(prompts):
        engine.submit(request(str(i), p))
    updates: dict[str, list] = {}
    for n in range(100):
        if n == 3:
            engine.cancel("1")
        for u in engine.step():
            updates.setdefault(u.request_id, []).append(u)
        if not engine.busy:
            break
    assert collect(updates["0"]).token_ids == alone[0]
    assert collect(updates["2"]).token_ids == alone[2]
    said = collect(updates["1"])
    assert said.finish is Finish.ABORT
    assert said.token_ids == alone[1][: len(said.token_ids)]


def test_cancelled_before_its_first_step_and_submitted_again(engine: Engine) -> None:
    engine.submit(request("x"))
    engine.cancel("x")
    assert [u.finish for u in engine.step()] == [Finish.ABORT]
    engine.submit(request("x"))
    assert collect(engine.drain(["x"])["x"]).finish is Finish.LENGTH


def test_long_random_life_leaks_nothing_and_answers_everyone(pair: Pair) -> None:
    engine, dice = pair.engine(chunked_prefill_size=24), random.Random(5)
    alive: set[str] = set()
    ended: list[str] = []
    for n in range(400):
        if len(alive) < 8 and dice.random() < 0.5:
            prompt = [dice.randrange(101) for _ in range(dice.choice((1, 3, 20, 60)))]
            s = Sampling(max_new_tokens=dice.randrange(0, 30), temperature=dice.choice((0.0, 1.0)))
            engine.submit(request(str(n), prompt, s, mode=dice.choice(list(SpecMode)), want_logprobs=dice.random() < 0.3))
            alive.add(str(n))
        if alive and dice.random() < 0.1:
            engine.cancel(dice.choice(sorted(alive)))
        if dice.random() < 0.05:
            engine.flush()
        for u in engine.step():
            if u.finish:
                alive.remove(u.request_id)
                ended.append(u.request_id)
    for _ in range(500):
        ended += [u.request_id for u in engine.step() if u.finish]
        if not engine.busy:
            break
    assert len(ended) == len(set(ended)) > 60
    assert engine._slabs.free == 4
    stats = engine.stats()
    assert (stats.running, stats.queued, stats.tokens_in_use) == (0, 0, 0)


@pytest.mark.parametrize("rounds", [1, 2, 4, 9])
def test_what_ran_while_the_cache_was_flushed_is_not_reused(pair: Pair, rounds: int) -> None:
    """Neither what it had computed, in whatever state it was, nor what it computes afterwards."""
    engine, prompt = pair.engine(chunked_prefill_size=5), list(range(1, 12))
    engine.submit(request("a", prompt, Sampling(max_new_tokens=20, ignore_eos=True)))
    for _ in range(rounds):
        engine.step()
    engine.flush()
    engine.drain(["a"])
    again = Sampling(max_new_tokens=2, ignore_eos=True)
    assert engine.generate([[*prompt, 7]], again, SpecMode.TREE)[0].cached_tokens == 0
    assert engine.generate([[*prompt, 7, 8]], again, SpecMode.TREE)[0].cached_tokens > 0


# Scoring --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [512, 5])
@pytest.mark.parametrize("start", [0, 1, 7, 12, 13])
def test_prompt_scores_are_those_of_the_reference(pair: Pair, chunk: int, start: int) -> None:
    engine, reference = pair.engine(chunked_prefill_size=chunk), Reference(pair.target)
    prompt = [5, 0, 17, 99, 3, 42, 42, 8, 61, 0, 12, 77, 30]
    expected = reference.logits(prompt).log_softmax(-1)
    for new in (0, 4):
        s = replace(S, max_new_tokens=new)
        engine.submit(request("x", prompt, s, want_logprobs=True, logprob_start=start, top_logprobs=2))
        updates = engine.drain(["x"])["x"]
        scores = updates[0].input_logprobs
        assert all(u.input_logprobs is None for u in updates[1:])
        assert scores is not None
        assert (scores.start, scores.token_ids) == (start, tuple(prompt[start:]))
        assert len(scores.logprobs) == len(scores.top) == len(prompt) - start
        for i, (own, top) in enumerate(zip(scores.logprobs, scores.top, strict=True)):
            at = start + i
            if at == 0:
                assert own is None
                assert top == ()
                continue
            assert own == pytest.approx(float(expected[at - 1, prompt[at]]), abs=1e-4)
            assert [t for _, t in top] == expected[at - 1].topk(2).indices.tolist()
        assert len(collect(updates).token_ids) == new


def test_scoring_takes_nothing_from_the_cache(engine: Engine) -> None:
    prompt = [i % 101 for i in range(50)]
    engine.generate([prompt], S, SpecMode.TREE)
    assert engine.generate([prompt], S, SpecMode.TREE)[0].cached_tokens == 49
    engine.submit(request("score", prompt, replace(S, max_new_tokens=0), want_logprobs=True))
    (update,) = engine.drain(["score"])["score"]
    assert (update.cached_tokens, update.token_ids, update.finish) == (0, (), Finish.LENGTH)
    assert len(update.input_logprobs.logprobs) == 50  # from the first token on, as nothing else was said
    engine.submit(request("partly", prompt, want_logprobs=True, logprob_start=30))
    assert collect(engine.drain(["partly"])["partly"]).cached_tokens == 29  # row 29 scores token 30
    engine.submit(request("outputs only", prompt, want_logprobs=True))
    updates = engine.drain(["outputs only"])["outputs only"]
    assert updates[0].input_logprobs is None
    assert updates[0].cached_tokens == 49


def test_pure_scoring_without_logprobs_ends_with_nothing_said(engine: Engine) -> None:
    got = engine.generate([[4, 5, 6]], replace(S, max_new_tokens=0), SpecMode.TREE)[0]
    assert (got.token_ids, got.finish, got.verify_passes) == ((), Finish.LENGTH, 0)


# Prefixes -------------------------------------------------------------------------------------------------------


def test_flush_forgets_every_prefix_also_of_those_who_run(engine: Engine) -> None:
    prompt = [i % 101 for i in range(50)]
    engine.generate([prompt], S, SpecMode.TREE)
    engine.submit(request("running", prompt))
    engine.step()
    engine.flush()
    assert engine.generate([prompt], S, SpecMode.TREE)[0].cached_tokens == 0


def test_answer_joins_the_prefix_of_the_next_turn(engine: Engine) -> None:
    prompt = [5, 6, 7, 8]
    said = engine.generate([prompt], S, SpecMode.TREE)[0].token_ids
    turn = engine.generate([[*prompt, *said, 9]], S, SpecMode.TREE)[0]
    assert turn.cached_tokens == len(prompt) + len(said) - 1  # the last token said has no keys yet


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[list[int], bool]]:
    prompt = st.lists(st.integers(0, 2), min_size=1, max_size=8)
    return draw(st.lists(st.tuples(prompt, st.booleans()), max_size=25))


@given(histories(), st.booleans())
def test_slabs_only_lend_what_they_hold(history: list[tuple[list[int], bool]], reuse: bool) -> None:
    slabs, holds, busy = Slabs(3, reuse=reuse), {}, []
    for prompt, keep in history:
        if len(busy) == 3:
            slabs.release(busy.pop(0))
        limit = len(prompt) - 1
        lease = slabs.acquire(prompt, limit, features=keep)
        assert lease.slab not in busy
        assert 0 <= lease.reused <= limit
        if lease.reused:
            assert reuse
            assert holds[lease.source][: lease.reused] == prompt[: lease.reused]
        longest = max((_common(held, prompt, limit) for held in holds.values()), default=0)
        assert lease.reused == (longest if reuse else 0)
        busy.append(lease.slab)
        holds[lease.slab] = []
        if keep:
            holds[lease.slab] = prompt
            slabs.hold(lease.slab, Resident(np.array(prompt), len(prompt), 0))


def _common(held: list[int], prompt: list[int], limit: int) -> int:
    n = 0
    while n < min(len(held), limit) and held[n] == prompt[n]:
        n += 1
    return n


def test_unused_and_oldest_slabs_go_first() -> None:
    slabs = Slabs(3, reuse=True)
    for token in (1, 2):
        lease = slabs.acquire([token, 9], 1, features=False)
        slabs.hold(lease.slab, Resident(np.array([token, 9]), 0, 0))
        slabs.release(lease.slab)
    assert slabs.acquire([3, 9], 1, features=False).slab == 2  # never used
    assert slabs.acquire([4, 9], 1, features=False).slab == 0  # the oldest
    lease = slabs.acquire([2, 9, 9], 2, features=False)
    assert (lease.slab, lease.source, lease.reused) == (1, 1, 2)  # in place


# Counters -------------------------------------------------------------------------------------------------------


def test_counters_speak_of_speculative_requests_only(engine: Engine) -> None:
    before = engine.stats()
    assert (before.rounds, before.verify_passes, before.prompt_tokens) == (0, 0, 0)  # the warm-up left no trace
    engine.generate([[4, 5]], S, SpecMode.OFF)
    assert engine.stats().verify_passes == 0
    answers = engine.generate([[4, 5]], S, SpecMode.OFF)
    plant_drafts(engine, {(4, 5): list(answers[0].token_ids)}, seed=1, sure=True)
    got = engine.generate([[4, 5]], S, SpecMode.TREE)[0]
    stats = engine.stats()
    assert stats.spec_requests == 1
    assert stats.prompt_tokens == 6
    assert stats.verify_passes == got.verify_passes == 2  # one token from the prompt, then 8 and 3
    assert stats.committed_tokens == 11
    assert stats.accepted_drafts == got.updates[-1].accepted_drafts == 9
    assert stats.proposed_drafts == got.updates[-1].proposed_drafts >= 9


def test_stage_times_are_off_unless_asked_for(engine: Engine) -> None:
    engine.generate([[4, 5]], S, SpecMode.TREE)
    assert engine.stats().stage_seconds == {}
    engine.measure_stages(True)
    engine.generate([[4, 5]], S, SpecMode.TREE)
    assert set(engine.stats().stage_seconds) == {"draft", "tree_build", "tree_compile", "verify", "commit"}


def test_tokens_in_use_follow_what_runs(engine: Engine) -> None:
    engine.submit(request("x", [4] * 30))
    engine.step()
    assert 30 <= engine.stats().tokens_in_use <= engine.stats().capacity_tokens == 4 * 256
    engine.drain(["x"])
    assert engine.stats().tokens_in_use == 0


# Corruption points ----------------------------------------------------------------------------------------------


class Watch(NoCorruption):
    """Changes nothing and notes who came by."""

    def __init__(self) -> None:
        self.seen: set[tuple[str, str]] = set()
        self.batches: set[int] = set()

    def __getattribute__(self, name: str):  # type: ignore[no-untyped-def]
        value = object.__getattribute__(self, name)
        if not callable(value):
            return value

        def note(*args):  # type: ignore[no-untyped-def]
            ctx = args[-1]
            self.seen.add((name, ctx.request.id))
            self.batches.add(ctx.batch_size)
            assert ctx.request in ctx.batch
            return value(*args)

        return note


ALL_POINTS = {
    "draft_tokens",
    "draft_logprobs",
    "row_positions",
    "tree_mask",
    "choices",
    "accepted",
    "compaction",
    "draft_features",
    "emit",
}


def test_every_decoding_round_passes_all_points_and_scoring_none(pair: Pair) -> None:
    watch = Watch()
    engine = Engine.load(pair.config(), faults=watch)
    assert not watch.seen  # the warm-up is not decoding for anyone
    clean = pair.engine()
    prompts = {"tree": [4, 5], "off": [6], "score": [7, 8, 9]}
    engine.submit(request("tree", prompts["tree"], s=replace(S, max_new_tokens=30)))
    engine.submit(request("off", prompts["off"], mode=SpecMode.OFF))
    engine.submit(request("score", prompts["score"], replace(S, max_new_tokens=0), want_logprobs=True))
    runs = engine.drain(["tree", "off", "score"])
    by_request = {i: {p for p, who in watch.seen if who == i} for i in prompts}
    assert by_request["tree"] == ALL_POINTS
    assert by_request["off"] == {"row_positions", "choices", "emit"}
    assert by_request["score"] == set()
    assert watch.batches == {1, 2}
    expected = clean.generate([[4, 5]], replace(S, max_new_tokens=30), SpecMode.TREE)[0]
    assert collect(runs["tree"]).token_ids == expected.token_ids


class Babble(NoCorruption):
    def choices(self, token_ids, ctx):  # type: ignore[no-untyped-def]
        return [77 for _ in token_ids]


def test_point_changes_what_is_said_but_not_what_is_scored(pair: Pair) -> None:
    engine = Engine.load(pair.config(), faults=Babble())
    got = engine.generate([[4, 5]], S, SpecMode.TREE)[0]
    assert set(got.token_ids[1:]) == {77}
    clean = pair.engine()
    scores = []
    for e in (engine, clean):
        e.submit(request("s", [4, 5, *got.token_ids], replace(S, max_new_tokens=0), want_logprobs=True))
        scores.append(e.drain(["s"])["s"][0].input_logprobs)
    assert scores[0] == scores[1]


class Blind(NoCorruption):
    def draft_features(self, features, ctx):  # type: ignore[no-untyped-def]
        return torch.zeros_like(features)


def test_wrong_drafter_features_leave_the_text_alone(pair: Pair) -> None:
    engine = Engine.load(pair.config(), faults=Blind())
    clean = pair.engine()
    a, b = (e.generate([[4, 5]], replace(S, max_new_tokens=30), SpecMode.TREE)[0] for e in (engine, clean))
    assert a.token_ids == b.token_ids
    tokens = 2 + 30 - 1
    slab = max(range(4), key=engine._slabs.resident_tokens)
    features = engine._cache.features[engine._cache.shape.base(slab) :][:tokens]
    assert features[:2].abs().sum() > 0  # the prompt's are as they should be
    assert features[2:].abs().sum() == 0


# Loading --------------------------------------------------------------------------------------------------------


def test_info_says_what_was_loaded(engine: Engine, pair: Pair) -> None:
    info = engine.info
    assert (info.vocab_size, info.context_length, info.block_size, info.eos_token_ids) == (101, 256, 8, (2,))
    assert info.kv_capacity_tokens == 4 * 256
    assert info.max_rows == 4 * 9 + 512
    assert info.device_name
    assert Path(engine.config.model_path) == pair.target


def test_seedless_requests_repeat_with_the_engines_seed(pair: Pair) -> None:
    warm = replace(S, temperature=1.5)
    runs = [pair.engine(random_seed=seed).generate([[4]] * 2, warm, SpecMode.TREE) for seed in (1, 1, 2)]
    said = [[g.token_ids for g in run] for run in runs]
    assert said[0] == said[1] != said[2]
    assert said[0][0] != said[0][1]
