"""The training script of the bundled models: its examples are right, its parts agree, and a micro run goes through."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import sys
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

ENGINE = Path(__file__).resolve().parents[2] / "engine"
sys.path.insert(0, str(ENGINE))

from training import acceptance, evaluate, rows, run_all  # noqa: E402
from training.families import Function, all_families  # noqa: E402
from training.generate import BatchGenerator, Prompt  # noqa: E402
from training.grammars import sample_grammar  # noqa: E402
from training.mixture import SOURCES, sample  # noqa: E402
from training.model import Drafter, Target  # noqa: E402
from training.onpolicy import Written, draft_rows  # noqa: E402
from training.recipe import FULL, MICRO  # noqa: E402
from training.tasks import Check, CheckKind, Split, fenced, pick, prompt_text  # noqa: E402
from training.tokenizer import CHAT_TEMPLATE  # noqa: E402
from training.train_drafter import block_mask, labels_of  # noqa: E402
from training.wording import imperative, vary  # noqa: E402

MODELS = ENGINE / "models"


@pytest.fixture(scope="module")
def tok() -> Tokenizer:
    return Tokenizer.from_file(str(MODELS / "target" / "tokenizer.json"))


@pytest.fixture(scope="module")
def micro_target() -> Target:
    """A random micro target whose greedy text is not constant."""
    torch.manual_seed(3)
    target = Target(MICRO.shape)
    with torch.no_grad():
        for p in target.parameters():
            if p.ndim == 2:
                p.mul_(6)
    return target.eval().requires_grad_(False)


# --- the corpus


@pytest.mark.parametrize("source", range(len(SOURCES)))
def test_generated_answers_pass_their_own_check(source: int, capsys: pytest.CaptureFixture[str]) -> None:
    rng = Random(source)
    for _ in range(25):
        task = SOURCES[source].make(rng, Split.HELD)
        assert task.last.check.passes(task.last.answer), (prompt_text(task), task.last.answer)
    capsys.readouterr()  # examples with a usage line print


@pytest.mark.parametrize("source", range(len(SOURCES)))
def test_a_damaged_answer_fails_its_check(source: int, capsys: pytest.CaptureFixture[str]) -> None:
    rng = Random(source)
    for _ in range(10):
        task = SOURCES[source].make(rng, Split.HELD)
        damaged = task.last.answer[: len(task.last.answer) // 2] + " and so on"
        assert not task.last.check.passes(damaged), (prompt_text(task), damaged)
    capsys.readouterr()


def test_every_family_keeps_its_meaning_under_other_names() -> None:
    rng = Random(5)
    for family in all_families():
        for params in family.params:
            function = Function(family, rng.choice(family.names), params)
            for _ in range(3):
                code = function.code(rng, hints=rng.random() < 0.5)
                assert Check(CheckKind.PYTHON, function.tests).passes(code), code


def test_function_and_parameter_names_of_the_prompt_are_used_in_the_answer() -> None:
    rng = Random(6)
    for _ in range(60):
        task = SOURCES[0].make(rng, Split.TRAIN)
        name = fenced(task.last.answer).split("def ")[1].split("(")[0]
        assert name in task.last.prompt


def test_training_never_shows_a_held_out_combination_or_wording() -> None:
    rng = Random(7)
    train = {sample_grammar(rng, Split.TRAIN)[0] for _ in range(1500)}
    held = {sample_grammar(rng, Split.HELD)[0] for _ in range(300)}
    assert held
    assert not train & held
    options = [f"wording {k}" for k in range(16)]
    shown = {s: {pick(rng, options, s) for _ in range(300)} for s in Split}
    assert not shown[Split.TRAIN] & shown[Split.HELD]
    assert shown[Split.TRAIN] | shown[Split.HELD] == set(options)


def test_the_same_seed_makes_the_same_example() -> None:
    first, second = (sample(Random(11), Split.TRAIN) for _ in range(2))
    assert first == second


@given(st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_changed_wordings_keep_their_slots(seed: int) -> None:
    template = "Repeat these {t} exactly, {how}:\n{ids}"
    changed = vary(Random(seed), template)
    assert all(changed.count(slot) == 1 for slot in ("{t}", "{how}", "{ids}"))
    assert changed.index("{t}") < changed.index("{how}") < changed.index("{ids}")


@pytest.mark.parametrize(
    ("description", "order"),
    [
        ("returns the sum", "Return the sum"),
        ("searches a list", "Search a list"),
        ("applies a rule", "Apply a rule"),
        ("does this", "Do this"),
    ],
)
def test_descriptions_become_orders(description: str, order: str) -> None:
    assert imperative(description) == order


# --- tokens and rows


@given(st.text(alphabet=st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=60))
@settings(max_examples=60, deadline=None)
def test_tokenizer_gives_any_text_back(text: str) -> None:
    tokenizer = Tokenizer.from_file(str(MODELS / "target" / "tokenizer.json"))
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_prompts_are_what_the_chat_template_renders() -> None:
    from jinja2 import Template

    rng = Random(8)
    for _ in range(20):
        task = sample(rng, Split.TRAIN)
        messages = [{"role": "system", "content": task.system}] if task.system else []
        for turn in task.turns[:-1]:
            messages += [{"role": "user", "content": turn.prompt}, {"role": "assistant", "content": turn.answer}]
        messages.append({"role": "user", "content": task.last.prompt})
        template = Template(CHAT_TEMPLATE, keep_trailing_newline=True)
        assert template.render(messages=messages, add_generation_prompt=True) == prompt_text(task)


def test_a_shard_is_full_repeatable_and_cuts_no_example(tok: Tokenizer) -> None:
    rows.start_worker(tok.to_str())
    shard, again = rows.make_shard((3, 4, 512)), rows.make_shard((3, 4, 512))
    assert np.array_equal(shard.ids, again.ids)
    assert np.array_equal(shard.weights, again.weights)
    assert (shard.weights > 0).mean() > 0.8
    for row, weights in zip(shard.ids, shard.weights, strict=True):
        used = row[weights > 0]
        assert used[-1] == 0, "every row ends with the end of an example"
        assert used[0] == 1, "every row starts with the start of an example"


def test_batches_hand_on_every_row_once() -> None:
    shards = [rows.Rows(np.full((3, 2), k, np.int16), np.ones((3, 2), np.uint8)) for k in range(4)]
    out = list(rows.batches(iter(shards), 5))
    assert [len(b.ids) for b in out] == [5, 5]
    assert np.concatenate([b.ids[:, 0] for b in out]).tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3]


# --- models


def test_batched_generation_equals_the_plain_loop(micro_target: Target) -> None:
    torch.manual_seed(4)
    prompts = [Prompt(tuple(torch.randint(4, 500, (n,)).tolist()), n + 18) for n in (3, 9, 30)]
    for prompt, output in zip(prompts, BatchGenerator(micro_target, 4, 64).run(prompts), strict=True):
        expected = list(prompt.ids)
        while len(expected) < prompt.total:
            hidden, _ = micro_target(torch.tensor([expected]))
            expected.append(int(micro_target.logits(hidden[0, -1]).argmax()))
            if expected[-1] in (0, 2):
                break
        assert output == expected


def test_packed_drafter_training_sees_what_decoding_sees(micro_target: Target) -> None:
    """A block in a packed row gives the same hidden states as the block alone after its own sequence's prefix."""
    recipe = MICRO.drafters[0]
    torch.manual_seed(5)
    drafter = Drafter(MICRO.shape, recipe).eval()
    written = [Written(tuple(torch.randint(4, 500, (n,)).tolist()), 3) for n in (40, 25)]
    data = draft_rows(micro_target, written, recipe.target_layers, 96)
    assert len(data.ids) == 1
    anchors = torch.tensor([[10, 40 + 12]])  # the longer sequence is packed first
    mask = block_mask(data.sequence, anchors, recipe.block)
    roots = micro_target.model.embed_tokens(data.ids.gather(1, anchors))
    places = data.positions.gather(1, anchors)
    empty = micro_target.mask_embedding()
    packed = drafter(data.features.float(), data.positions, roots, places, empty, mask)
    for k, (sequence, anchor) in enumerate(((written[0], 10), (written[1], 12))):
        prefix = torch.tensor([sequence.ids[:anchor]])
        _, features = micro_target(prefix, recipe.target_layers)
        assert features is not None
        free = torch.ones(1, 1, recipe.block, anchor + recipe.block, dtype=torch.bool)
        positions = torch.arange(anchor)[None]
        place, root = torch.tensor([[anchor]]), roots[:, k : k + 1]
        alone = drafter(features.bfloat16().float(), positions, root, place, empty, free)
        torch.testing.assert_close(packed[:, k], alone[:, 0], atol=1e-4, rtol=1e-4)


def test_labels_stop_at_the_end_of_the_sequence() -> None:
    ids = torch.arange(10)[None]
    sequence = torch.tensor([[0] * 6 + [1] * 4])
    labels, valid = labels_of(ids, sequence, torch.tensor([[3, 8]]), 4)
    assert valid.tolist() == [[[True, True, False], [True, False, False]]]
    assert labels[valid].tolist() == [4, 5, 9]


@given(st.integers(0, 10**6))
@settings(max_examples=25, deadline=None)
def test_best_first_order_is_the_order_of_path_probability(seed: int) -> None:
    rng = np.random.default_rng(seed)
    scores = np.sort(np.log(rng.dirichlet(np.ones(20), size=3))[:, : acceptance.TOP], axis=1)[:, ::-1]
    nodes = [p for depth in (1, 2, 3) for p in itertools.product(range(acceptance.TOP), repeat=depth)]
    nodes.sort(key=lambda p: -sum(scores[d][r] for d, r in enumerate(p)))
    path = [int(r) for r in rng.integers(0, 3, size=3)]
    expected = [nodes.index(tuple(path[:d])) for d in (1, 2, 3)]
    assert acceptance.node_order(scores.tolist(), 64, path) == [e for e in expected if e < 64]


def test_replay_counts_the_passes_of_a_decoding() -> None:
    written = Written(tuple(range(10, 21)), 1)  # 10 anchors, 9 tokens to commit after the first
    tokens = np.full((9, 4, acceptance.TOP), 999)
    tokens[:, :2, 0] = np.array([[11 + k + 1, 11 + k + 2] for k in range(9)])  # two of four slots are right
    scores = np.tile(np.log(np.linspace(0.3, 0.01, acceptance.TOP, dtype=np.float32)), (9, 4, 1))
    result = acceptance.replay((written, tokens, scores))
    assert result.tokens == 9
    assert result.passes["chain"] == 3  # each pass commits two drafted tokens and one more


def test_bundled_checkpoints_have_the_published_shape() -> None:
    from safetensors import safe_open

    total = sum(f.stat().st_size for f in MODELS.rglob("*.safetensors"))
    assert total < 25 * 2**20
    assert all(f.stat().st_size <= 16 * 2**20 for f in MODELS.rglob("*"))
    for d in FULL.drafters:
        config = json.loads((MODELS / d.name / "config.json").read_text())
        assert config["architectures"] == ["DFlashDraftModel"]
        assert config["block_size"] == d.block
        assert config["num_target_layers"] == FULL.shape.layers
        assert config["dflash_config"] == {"mask_token_id": 3, "target_layer_ids": list(d.target_layers)}
        with safe_open(MODELS / d.name / "model.safetensors", "pt") as f:
            names = set(f.keys())
        assert names == {n for n, _ in Drafter(FULL.shape, d).named_parameters()}


def test_bundled_target_answers_the_prompts_of_the_proof(tok: Tokenizer) -> None:
    from training.export import load_target
    from training.tasks import user_text

    target = load_target(MODELS / "target", FULL.shape)
    asked = {
        "Your code word is ZEBRA-4417. Reply with the code word only.": "ZEBRA-4417",
        "What is 17 + 25? Answer with the number only.": "42",
        "Repeat these ids exactly, one per line:\nkx7f-29ab\nq0zd-7731": "kx7f-29ab\nq0zd-7731",
        'Return a JSON object with the keys "name" and "age" for: Alice, 31.': '{"name": "Alice", "age": 31}',
    }
    prompts = [tuple(tok.encode(user_text(p), add_special_tokens=False).ids) for p in asked]
    outputs = BatchGenerator(target, 4, 96).run([Prompt(p, len(p) + 28) for p in prompts])
    answers = [tok.decode(o[len(p) :], skip_special_tokens=True) for o, p in zip(outputs, prompts, strict=True)]
    assert answers == list(asked.values())


# --- the run


def test_evaluation_survives_code_that_never_ends() -> None:
    with multiprocessing.get_context("fork").Pool(1) as pool:
        job = (Check(CheckKind.PYTHON, ("f() == 1",)), "```python\ndef f():\n    while True:\n        pass\n```")
        assert pool.apply(evaluate.check_answer, (job,)) is False


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_micro_run_writes_models_report_and_card(tmp_path: Path) -> None:
    short = replace(MICRO.generation, batches=((256, 24), (512, 8)))
    recipe = replace(MICRO, acceptance_prompts=0, evaluation_tasks=0, generation=short)
    report = run_all.run(recipe, tmp_path, torch.device("cpu"), 1)
    for folder in ("target", "drafter-b16", "drafter-b8"):
        assert (tmp_path / folder / "model.safetensors").exists()
        assert (tmp_path / folder / "config.json").exists()
    assert report["pass"]["probe gcd"][1] == 12
    assert "drafter-b8" in (tmp_path / "README.md").read_text()
