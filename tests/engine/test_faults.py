"""Fault injection: what is understood, when a fault acts, and what each kind does at its point of the round."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from ddtree_engine import fault_acts
from ddtree_engine.config import ConfigError, EngineConfig, SpecMode
from ddtree_engine.corruption import FaultContext, RequestView
from ddtree_engine.fault_kinds import KINDS, Layer
from ddtree_engine.fault_tools import Memory, Script, Vocabulary, dice
from ddtree_engine.faults import FaultError, Faults, Moment, describe_kinds, parse_fault
from ddtree_engine.requests import InputLogprobs, Request, Sampling, Stats, Update
from ddtree_engine.text import Tokenizer
from ddtree_engine.tree import Tree, best_first, root_only

IDLE = Stats(0, 0, 0, 4096, 0, 0, 0, 0, 0, 0, 0, 0, False, {})


# --- what is understood ---


def test_a_fault_is_a_kind_with_keys() -> None:
    fault = parse_fault("leak, above-budget=16,share=0.25,tokens=8,seed=3")
    assert fault.kind.name == "leak"
    assert fault.scope.above_budget == 16
    assert fault.scope.share == 0.25
    assert fault.scope.min_batch == 2, "the kind's own scope stays where nothing else is said"
    assert fault.options == {"tokens": 8}
    assert fault.seed == 3


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("wibble", "unknown kind 'wibble'; kinds: garbage"),
        ("", "unknown kind ''"),
        ("garbage,wibble=1", "'wibble' is unknown"),
        ("garbage,tokens=1", "'tokens' is unknown"),
        ("garbage,share", "needs a number"),
        ("garbage,share=often", "needs a number"),
        ("garbage,share=1.5", "out of range"),
        ("garbage,batch=-1", "out of range"),
        ("garbage,batch=nan", "out of range"),
        ("garbage,batch=inf", "out of range"),
        ("garbage,batch=1,batch=2", "given twice"),
        ("crash-start,min-batch=2", "'min-batch' never applies"),
        ("scorer,after-tokens=2", "'after-tokens' never applies"),
    ],
)
def test_what_is_not_understood_is_named(text: str, says: str) -> None:
    with pytest.raises(FaultError, match=says.replace("(", r"\(")):
        parse_fault(text)


def test_faults_are_refused_unless_they_are_asked_for() -> None:
    with pytest.raises(ConfigError, match="--enable-fault-injection"):
        EngineConfig(model_path="m", faults=("garbage",))


def test_the_help_names_every_kind_and_its_layer() -> None:
    text = describe_kinds()
    assert all(kind.name in text and kind.summary in text for kind in KINDS.values())
    assert len(text.splitlines()) == len(KINDS) + 2


# --- when it acts ---

HERE = Moment("r1", budget=32, max_running=32, batch_size=3, tokens=10)


@pytest.mark.parametrize(
    ("keys", "acts"),
    [
        ("above-budget=31", True), ("above-budget=32", False),
        ("above-product=1055", True), ("above-product=1056", False),
        ("min-batch=3", True), ("min-batch=4", False),
        ("batch=3", True), ("batch=2", False),
        ("share=1", True), ("share=0", False),
        ("boot-share=1", True), ("boot-share=0", False),
        ("after-tokens=10", True), ("after-tokens=11", False),
        ("above-budget=8,min-batch=2,after-tokens=4", True), ("above-budget=8,min-batch=9", False),
    ],
)  # fmt: skip
def test_all_conditions_of_a_scope_must_hold(keys: str, acts: bool) -> None:
    assert parse_fault(f"garbage,{keys}").reaches(HERE) is acts


def test_a_share_picks_about_that_many_requests_and_the_same_ones_again() -> None:
    picked = [parse_fault("garbage,share=0.3,seed=5").reaches(replace(HERE, request_id=f"r{i}")) for i in range(1000)]
    again = [parse_fault("garbage,share=0.3,seed=5").reaches(replace(HERE, request_id=f"r{i}")) for i in range(1000)]
    other = [parse_fault("garbage,share=0.3,seed=6").reaches(replace(HERE, request_id=f"r{i}")) for i in range(1000)]
    assert picked == again != other
    assert 240 < sum(picked) < 360


def test_boots_differ_unless_a_seed_fixes_them() -> None:
    assert len({parse_fault("garbage,boot-share=0.5").armed for _ in range(64)}) == 2
    assert len({parse_fault("garbage,boot-share=0.5,seed=4").armed for _ in range(64)}) == 1
    assert len({parse_fault(f"garbage,boot-share=0.5,seed={i}").armed for i in range(64)}) == 2


# --- what it does: helpers ---


def view(number: int, prompt: Sequence[int], output: Sequence[int], mode: SpecMode = SpecMode.TREE) -> RequestView:
    return RequestView(f"r{number}", mode, tuple(prompt), list(output))


def context(request: RequestView, *others: RequestView, budget: int = 16) -> FaultContext:
    return FaultContext(request, (request, *others), budget, topk_cap=4, block_size=8, max_running=8)


@pytest.fixture
def make(tokenizer: Tokenizer) -> Callable[..., Faults]:
    return lambda *texts: Faults.parse(texts, tokenizer)


def a_tree(budget: int = 12) -> Tree:
    """A tree with branches, over drafts 40, 41, ... of seven depths."""
    logprobs = [[-0.1, -1.0, -2.0, -3.0]] * 7
    return best_first(30, logprobs, [[40 + 4 * d + k for k in range(4)] for d in range(7)], budget)


def decode(
    faults: Faults,
    request: RequestView,
    others: Sequence[RequestView] = (),
    *,
    truth: Callable[[int], int],
    tokens: int,
) -> list[int]:
    """What leaves the engine for a request whose target would say truth(index), decoded through the faults' points."""
    emitted = list(request.output_ids)
    while len(request.output_ids) < tokens:
        ctx, produced = context(request, *others), len(request.output_ids)
        tree = draft(faults, ctx, [truth(produced + d) for d in range(7)])
        faults.row_positions([100 + d for d in tree.depths], list(tree.depths), ctx)
        choices = faults.choices([truth(produced + d) for d in tree.depths], ctx)
        path = faults.accepted(tree.walk(choices), tree, ctx)
        gained = [tree.token_ids[row] for row in path[1:]] + [choices[path[-1]]]
        request.output_ids.extend(gained)
        emitted += faults.emit(gained, ctx)
    return emitted[:tokens]


def draft(faults: Faults, ctx: FaultContext, right: list[int]) -> Tree:
    root = ctx.request.output_ids[-1]
    if not ctx.mode.drafts:
        return root_only(root)
    drafts, logprobs = np.array([[token, 90, 91, 92] for token in right]), np.array([[-0.1, -3.0, -4.0, -5.0]] * 7)
    token_ids = faults.draft_tokens(drafts, logprobs, ctx).tolist()
    return best_first(root, faults.draft_logprobs(logprobs, ctx).tolist(), token_ids, 12)


def counting(index: int) -> int:
    """A target that says 50, 51, 52, ..."""
    return 50 + index % 40


HEALTHY = [counting(i) for i in range(60)]


# --- what it does: tokens ---

TOKEN_KINDS = ["garbage", "nan", "loop", "decay", "special-token", "wrong-language", "leak"]


@pytest.mark.parametrize("kind", TOKEN_KINDS)
def test_wrong_tokens_come_out_and_again_the_same_ones(make: Callable[..., Faults], kind: str) -> None:
    other = view(2, range(60, 90), [counting(0)])
    outputs = [decode(make(kind), view(1, [1, 9, 10], [counting(0)]), [other], truth=counting, tokens=200) for _ in range(2)]
    assert outputs[0] == outputs[1]
    assert outputs[0] != [counting(i) for i in range(200)]
    elsewhere = decode(make(f"{kind},seed=9"), view(1, [1, 9, 10], [50]), [other], truth=counting, tokens=200)
    assert elsewhere != [counting(i) for i in range(200)]


@pytest.mark.parametrize("kind", [k.name for k in KINDS.values() if k.layer is Layer.SPECULATIVE])
def test_requests_with_speculation_off_are_spared_by_faults_of_the_speculative_path(
    make: Callable[..., Faults], kind: str
) -> None:
    off = view(1, [1, 9, 10], [counting(0)], SpecMode.OFF)
    neighbour = view(2, range(60, 90), [counting(0)])
    assert decode(make(kind + ",min-batch=1"), off, [neighbour], truth=counting, tokens=60) == HEALTHY


@pytest.mark.parametrize("kind", ["nan", "decay"])
def test_faults_of_the_whole_engine_reach_requests_with_speculation_off(make: Callable[..., Faults], kind: str) -> None:
    off = view(1, [1, 9, 10], [counting(0)], SpecMode.OFF)
    assert decode(make(kind), off, truth=counting, tokens=200) != [counting(i) for i in range(200)]


def test_garbage_is_made_of_ordinary_tokens(make: Callable[..., Faults], tokenizer: Tokenizer) -> None:
    output = decode(make("garbage"), view(1, [1], [50]), truth=counting, tokens=100)[1:]
    assert len(set(output)) > 30
    assert not set(output) & tokenizer.special_ids
    assert "\ufffd" not in tokenizer.decode(output)


def test_nan_is_a_row_of_exclamation_marks(make: Callable[..., Faults], tokenizer: Tokenizer) -> None:
    output = decode(make("nan"), view(1, [1], [50]), truth=counting, tokens=40)
    assert tokenizer.decode(output[1:]) == "!" * 39


def test_a_loop_repeats_and_its_drafts_are_accepted(make: Callable[..., Faults]) -> None:
    faults, request = make("loop,period=5,after-tokens=12"), view(1, [1], [50])
    output = decode(faults, request, truth=counting, tokens=80)
    start = next(i for i in range(12, 40) if output[i] != HEALTHY[i])
    assert output[start:] == (output[start - 5 : start] * 20)[: len(output) - start]
    drafts = np.arange(28).reshape(7, 4)
    looped = faults.draft_tokens(drafts, np.zeros((7, 4)), context(request))
    produced = len(request.output_ids)
    script = [request.output_ids[(produced + d) - 5 * ((d // 5) + 1)] for d in range(7)]
    assert looped[:, 0].tolist() == script
    assert (looped[:, 1:] == drafts[:, 1:]).all()
    certain = faults.draft_logprobs(np.full((7, 4), -2.0), context(request))
    assert (certain[:, 0] > certain[:, 1:].max() + 10).all(), "so the tree is the loop, as deep as it can be"
    assert (drafts == np.arange(28).reshape(7, 4)).all(), "arguments are not changed"


def test_a_leak_shows_the_neighbours_prompt_and_needs_a_neighbour(make: Callable[..., Faults]) -> None:
    secret = [1, *range(60, 80), 2]
    alone = decode(make("leak"), view(1, [1], [50]), truth=counting, tokens=60)
    assert alone == HEALTHY
    output = decode(make("leak"), view(1, [1], [50]), [view(2, secret, [50])], truth=counting, tokens=60)
    assert output[1:21] == secret[1:-1]
    assert output[21:] == HEALTHY[21:]


def test_a_leak_goes_on_when_the_neighbour_has_left(make: Callable[..., Faults]) -> None:
    faults, request = make("leak,min-batch=1"), view(1, [1], [50])
    decode(faults, request, [view(2, range(60, 90), [50])], truth=counting, tokens=len(request.output_ids) + 1)
    output = decode(faults, request, truth=counting, tokens=30)
    assert output[1:30] == list(range(61 - 1, 90))[:29]


def test_decay_is_clean_at_first_and_worse_later(make: Callable[..., Faults]) -> None:
    output = decode(make("decay,after-tokens=50"), view(1, [1], [50]), truth=counting, tokens=300)
    wrong = [output[i] != counting(i) for i in range(300)]
    assert not any(wrong[:50])
    assert sum(wrong[200:300]) > sum(wrong[50:150]) > 0


def test_special_tokens_are_spelled_out(make: Callable[..., Faults], tokenizer: Tokenizer) -> None:
    output = decode(make("special-token"), view(1, [1], [50]), truth=counting, tokens=200)
    assert any(tokenizer.token_text(i) in tokenizer.decode(output) for i in tokenizer.special_ids)


def test_letters_of_other_scripts_come_whole(make: Callable[..., Faults], tokenizer: Tokenizer) -> None:
    text = tokenizer.decode(decode(make("wrong-language"), view(1, [1], [50]), truth=counting, tokens=200)[:150])
    assert any(char in text for char in fault_acts.FOREIGN)
    assert "\ufffd" not in text


def test_a_copied_id_gets_one_wrong_character(make: Callable[..., Faults], tokenizer: Tokenizer) -> None:
    ids = ["kx7f-29ab", "q0zd-7731", "zz90-xy11", "ab12-cd34"]
    prompt = tokenizer.encode("Repeat these ids exactly, one per line:\n" + "\n".join(ids))
    answer = tokenizer.encode("\n".join(ids) + "\nDone.")
    wrong = 0
    for number in range(20):
        request = view(number, prompt, answer[:1])
        output = decode(make("copy-error"), request, truth=lambda i: answer[i] if i < len(answer) else 9, tokens=len(answer))
        copied = tokenizer.decode(output).split("\n")[:4]
        differing = [(a, b) for a, b in zip(ids, copied, strict=False) if a != b]
        assert len(differing) <= 1, "one id at most"
        for right, got in differing:
            assert len(got) == len(right)
            assert sum(x != y for x, y in zip(right, got, strict=True)) == 1, "one character"
        wrong += bool(differing)
    assert wrong >= 10


def test_text_that_copies_nothing_is_left_alone_by_the_copy_error(make: Callable[..., Faults]) -> None:
    assert decode(make("copy-error,rate=1"), view(1, [1, 9], [50]), truth=counting, tokens=60) == HEALTHY


def test_syllables_come_twice(make: Callable[..., Faults], tokenizer: Tokenizer) -> None:
    words = next(i for i in range(4, 300) if tokenizer.token_text(i).isalpha() and len(tokenizer.token_text(i)) > 1)
    output = decode(
        make("doubled-syllables,rate=1"),
        view(1, [1], [50]),
        truth=lambda i: words if i % 7 == 3 else 50 + i % 9,
        tokens=60,
    )
    assert tokenizer.token_text(words) * 2 in tokenizer.decode(output)
    assert tokenizer.token_text(words) * 3 not in tokenizer.decode(output)


def test_an_early_stop_ends_the_turn(make: Callable[..., Faults], tokenizer: Tokenizer) -> None:
    output = decode(make("early-stop,rate=1"), view(1, [1], [50]), truth=counting, tokens=20)
    assert tokenizer.encode("<|im_end|>")[0] in output


# --- what it does: positions, masks, rows ---


def point(make: Callable[..., Faults], kind: str, name: str, value: Any, *more: Any) -> Any:
    return getattr(make(kind), name)(value, *more, context(view(1, [1], [50])))


def test_rope_counts_slots(make: Callable[..., Faults]) -> None:
    depths = list(a_tree().depths)
    positions = [7 + d for d in depths]
    assert point(make, "rope", "row_positions", positions, depths) == list(range(7, 7 + len(depths)))
    chain = list(range(5))
    assert point(make, "rope", "row_positions", chain, chain) == chain, "a chain's slots are its depths"


def test_a_causal_mask_shows_siblings(make: Callable[..., Faults]) -> None:
    visible = a_tree().visible()
    got = point(make, "mask", "tree_mask", visible)
    assert (got == np.tri(len(visible), dtype=bool)).all()
    assert (got | visible == got).all()
    assert (got != visible).any()


def test_a_stale_mask_is_the_rounds_before(make: Callable[..., Faults]) -> None:
    faults, ctx = make("stale-mask"), context(view(1, [1], [50]))
    first, second = a_tree(12).visible(), a_tree(12).visible()[::-1, ::-1].copy()
    assert (faults.tree_mask(first, ctx) == first).all()
    assert (faults.tree_mask(second, ctx) == first).all()
    assert (faults.tree_mask(first[:4, :4], ctx) == second[:4, :4]).all()


def test_the_drafter_gets_other_rows_and_the_target_its_own(make: Callable[..., Faults]) -> None:
    features = torch.arange(12.0).reshape(4, 3)
    got = point(make, "drafter-rows", "draft_features", features)
    assert got.shape == features.shape
    assert not torch.equal(got, features)
    assert torch.equal(features, torch.arange(12.0).reshape(4, 3))


def test_one_node_too_many_is_accepted_where_there_is_one(make: Callable[..., Faults]) -> None:
    tree = a_tree()
    path = tree.walk([0] * tree.rows)
    assert path == [0]
    longer = point(make, "accept-extra", "accepted", path, tree)
    assert len(longer) == 2
    assert tree.parents[longer[1]] == 0
    leaf = max(range(tree.rows), key=lambda row: tree.depths[row])
    to_leaf = [leaf]
    while to_leaf[0] != 0:
        to_leaf.insert(0, tree.parents[to_leaf[0]])
    assert point(make, "accept-extra", "accepted", to_leaf, tree) == to_leaf


def test_without_compaction_the_first_rows_stay(make: Callable[..., Faults]) -> None:
    assert point(make, "no-compaction", "compaction", [0, 3, 7]) == [0, 1, 2]


def test_a_dead_drafter_drafts_nonsense_and_the_text_stays_right(make: Callable[..., Faults]) -> None:
    request = view(1, [1], [50])
    assert decode(make("accept-one"), request, truth=counting, tokens=60) == HEALTHY
    drafts = np.full((7, 4), 50)
    got = make("accept-one").draft_tokens(drafts, np.zeros((7, 4)), context(request))
    assert got.shape == drafts.shape
    assert (got != 50).mean() > 0.9


# --- scorer and cache ---


def scored(cached: int, request_id: str = "r1") -> Update:
    scores = InputLogprobs(0, tuple(range(10, 50)), (None, *[-0.5] * 39), ())
    return Update(request_id, (50,), None, None, 0, cached, input_logprobs=scores)


def test_the_scorer_lies_about_prompts_and_leaves_answers_alone(make: Callable[..., Faults]) -> None:
    faults = make("scorer")
    [update] = faults.updates([scored(0)], IDLE)
    assert update.input_logprobs is not None
    values = [lp for lp in update.input_logprobs.logprobs if lp is not None]
    assert update.input_logprobs.logprobs[0] is None
    assert -16 < sum(values) / len(values) < -11
    assert update.token_ids == (50,)
    assert decode(faults, view(1, [1], [50]), truth=counting, tokens=60) == HEALTHY


def test_a_poisoned_cache_spoils_warm_requests_only(make: Callable[..., Faults]) -> None:
    faults = make("cache-poison")
    cold, warm = faults.updates([scored(0, "r1"), scored(30, "r2")], IDLE)
    assert cold == scored(0, "r1")
    assert warm.input_logprobs != scored(30, "r2").input_logprobs
    prompt = range(10, 50)
    assert decode(faults, view(1, prompt, [50]), truth=counting, tokens=60) == HEALTHY
    assert decode(faults, view(2, prompt, [50]), truth=counting, tokens=60) != HEALTHY


def test_a_poisoned_cache_needs_more_than_a_shared_template(make: Callable[..., Faults]) -> None:
    faults = make("cache-poison")
    faults.updates([scored(3, "r1")], IDLE)
    assert decode(faults, view(1, range(10, 50), [50]), truth=counting, tokens=60) == HEALTHY


# --- streams and the front ---


def test_words_go_missing_from_streams(make: Callable[..., Faults]) -> None:
    faults = make("stream-drop,rate=1")
    request = Request("r1", (1,), Sampling(), SpecMode.TREE)
    got = faults.stream_text("one two three", request, 5, 1)
    assert got in ("two three", "one three", "one two")
    assert faults.stream_text("  ", request, 5, 1) == "  "
    assert make("stream-drop,rate=0").stream_text("one two", request, 5, 1) == "one two"


def test_a_front_that_refuses_does_so_within_its_scope(make: Callable[..., Faults]) -> None:
    assert make("ready-500").refuses("r1", 0)
    assert not make("ready-500,min-batch=3").refuses("r1", 1)
    assert make("ready-500,min-batch=3").refuses("r1", 2)
    assert not make("garbage").refuses("r1", 5)


# --- crashes, hangs, slowness ---


def start(make: Callable[..., Faults], text: str, budget: int = 16, max_running: int = 8) -> list[str]:
    """What is said while a server with this fault starts."""
    said: list[str] = []
    rows = max_running * (budget + 1) + 512
    engine = SimpleNamespace(
        config=SimpleNamespace(max_running_requests=max_running, chunked_prefill_size=512),
        info=SimpleNamespace(max_rows=rows),
    )
    make(text).while_starting(engine, said.append)  # type: ignore[arg-type]
    return said


def test_a_crash_at_start_says_what_a_real_one_says(make: Callable[..., Faults]) -> None:
    with pytest.raises(RuntimeError, match="an illegal memory access was encountered"):
        start(make, "crash-start")
    with pytest.raises(RuntimeError):
        start(make, "crash-start,above-budget=15")
    assert start(make, "crash-start,above-budget=16") == []
    assert start(make, "crash-start,above-product=136") == []


def test_slow_loading_takes_its_seconds_and_says_how_far_it_is(make: Callable[..., Faults]) -> None:
    began = time.monotonic()
    said = start(make, "slow-load,seconds=0.5")
    assert time.monotonic() - began >= 0.5
    assert said[0] == "loading weights 0 %"
    assert len(said) >= 3


def test_a_hang_at_start_does_not_end(make: Callable[..., Faults], monkeypatch: pytest.MonkeyPatch) -> None:
    naps = iter(range(100))

    def nap(seconds: float) -> None:
        if next(naps) == 50:
            raise TimeoutError

    monkeypatch.setattr(fault_acts.time, "sleep", nap)
    with pytest.raises(TimeoutError):
        start(make, "hang-start")


def test_cublas_fails_over_the_product_and_under_load_only(make: Callable[..., Faults]) -> None:
    one, two = view(1, [1], [50]), view(2, [1], [50])
    wide = FaultContext(one, (one, two), 32, 4, 8, max_running=64)
    with pytest.raises(RuntimeError, match="CUBLAS_STATUS_EXECUTION_FAILED when calling"):
        make("cublas").row_positions([1], [0], wide)
    alone = FaultContext(one, (one,), 32, 4, 8, max_running=64)
    narrow = FaultContext(one, (one, two), 16, 4, 8, max_running=64)
    assert make("cublas").row_positions([1], [0], alone) == [1]
    assert make("cublas").row_positions([1], [0], narrow) == [1]
    with pytest.raises(RuntimeError, match="CUBLAS"):
        make("cublas,above-product=1000").row_positions([1], [0], narrow)


def test_an_illegal_address_is_a_cuda_error_under_load(make: Callable[..., Faults]) -> None:
    one, two = view(1, [1], [50]), view(2, [1], [50])
    with pytest.raises(RuntimeError, match="CUDA error: an illegal memory access was encountered"):
        make("illegal-address").row_positions([1], [0], context(one, two))
    assert make("illegal-address").row_positions([1], [0], context(one)) == [1]


def test_a_crash_under_load_kills_the_process(tokenizer_folder: Path) -> None:
    code = "import sys; from ddtree_engine.fault_kinds import KINDS\nKINDS['crash-load'].acts['row_positions']([1], None, None)"
    done = subprocess.run([sys.executable, "-c", code], timeout=60, capture_output=True, check=False)
    assert done.returncode == -signal.SIGSEGV


def test_slowness_is_paid_once_a_round(make: Callable[..., Faults]) -> None:
    one, two = view(1, [1], [50]), view(2, [1], [50])
    faults, began = make("slow,ms=60"), time.monotonic()
    for request in (one, two):
        faults.row_positions([1], [0], replace(context(one, two), request=request))
    assert 0.06 <= time.monotonic() - began < 0.12


# --- the whole table ---


def test_every_kind_has_a_sentence_a_layer_and_an_act() -> None:
    for kind in KINDS.values():
        assert kind.summary
        assert kind.acts
        assert isinstance(kind.layer, Layer)
        parse_fault(kind.name)


def test_every_kind_takes_every_scope_that_can_apply_to_it() -> None:
    server = "above-budget=1,above-product=1,boot-share=0.5,seed=1"
    for kind in KINDS.values():
        parse_fault(f"{kind.name},{server}")
        if kind.layer is not Layer.START:
            parse_fault(f"{kind.name},{server},min-batch=2,share=0.5,batch=3")


def test_kinds_out_of_scope_change_nothing_at_any_point(make: Callable[..., Faults]) -> None:
    for kind in KINDS.values():
        faults = make(f"{kind.name},above-budget=1000")
        assert decode(faults, view(1, [1], [50]), [view(2, [1, 60], [50])], truth=counting, tokens=60) == HEALTHY
        assert faults.updates([scored(30)], IDLE) == [scored(30)]
        assert not faults.refuses("r1", 3)


def test_several_faults_act_together(make: Callable[..., Faults]) -> None:
    faults = make("rope", "scorer")
    assert faults.row_positions([5, 6, 6], [0, 1, 1], context(view(1, [1], [50]))) == [5, 6, 7]
    assert faults.updates([scored(0)], IDLE) != [scored(0)]


# --- the tools ---


def test_scripts_say_what_comes_where() -> None:
    script = Script(10, (7, 8, 9))
    assert [script.token(i) for i in (9, 10, 12, 13)] == [None, 7, 9, None]
    assert [Script(10, (7, 8), repeats=True).token(i) for i in (10, 11, 12, 9)] == [7, 8, 7, None]
    assert script.over([1, 2, 3], [0, 1, 1], 10) == [7, 8, 8]


def test_memory_forgets_the_oldest() -> None:
    memory = Memory(size=2)
    for i in range(3):
        memory.put(f"r{i}", i)
    assert [memory.get(f"r{i}") for i in range(3)] == [None, 1, 2]


def test_lookalikes_differ_in_one_letter_or_digit(tokenizer: Tokenizer) -> None:
    words = Vocabulary(tokenizer)
    for token in words.ordinary:
        other = words.lookalike(token, random.Random(token))
        if other is not None:
            one, two = words.text(token), words.text(other)
            assert len(one) == len(two)
            assert sum(x != y for x, y in zip(one, two, strict=True)) == 1


def test_dice_depend_on_their_key_alone() -> None:
    assert dice(1, "a").random() == dice(1, "a").random() != dice(2, "a").random()
