"""Folders on disk: what loads, and that every mismatch is refused with the field named."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ddtree_engine.checkpoint import Weights, drafter_tensors, read_drafter, read_target, target_tensors
from ddtree_engine.config import Algorithm, ConfigError, EngineConfig, SpecMode
from ddtree_engine.engine import Engine
from ddtree_engine.requests import Sampling
from safetensors.torch import load_file, save_file

from tests.engine.small_models import DRAFTER, TARGET, Pair, write_checkpoint

GREEDY = Sampling(max_new_tokens=12)


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return Pair(tmp_path)


def edit(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def refused(pair: Pair, field: str, **settings: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        pair.engine(**settings)
    assert caught.value.field == field, str(caught.value)
    return caught.value


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model_type", "llama"),
        ("model_type", "qwen3_moe"),
        ("quantization_config", {"quant_method": "fp8"}),
        ("rope_scaling", {"rope_type": "yarn", "factor": 4.0}),
        ("rope_scaling", {"type": "linear", "factor": 2.0}),
        ("rope_parameters", {"rope_type": "llama3", "rope_theta": 1e6}),
        ("use_sliding_window", True),
        ("layer_types", ["full_attention", "sliding_attention"]),
        ("attention_bias", True),
        ("hidden_act", "gelu"),
        ("num_experts", 8),
        ("hidden_size", 0),
        ("hidden_size", "64"),
        ("num_hidden_layers", None),
        ("num_key_value_heads", 3),
        ("head_dim", 23),
        ("rms_norm_eps", 0),
        ("rope_theta", None),
        ("vocab_size", True),
        ("eos_token_id", 101),
        ("eos_token_id", [2, -1]),
        ("eos_token_id", "end"),
    ],
)
def test_target_that_would_be_computed_wrongly_is_refused(pair: Pair, field: str, value: object) -> None:
    edit(pair.target, **{field: value})
    refused(pair, field)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_size", 32),
        ("vocab_size", 100),
        ("num_target_layers", 5),
        ("block_size", 1),
        ("block_size", None),
        ("block_size", "8"),
        ("dflash_config", None),
        ("dflash_config.mask_token_id", {"mask_token_id": 101, "target_layer_ids": [0]}),
        ("dflash_config.mask_token_id", {"target_layer_ids": [0]}),
        ("dflash_config.target_layer_ids", {"mask_token_id": 3}),
        ("dflash_config.target_layer_ids", {"mask_token_id": 3, "target_layer_ids": []}),
        ("dflash_config.target_layer_ids", {"mask_token_id": 3, "target_layer_ids": [0, 4]}),
        ("dflash_config.target_layer_ids", {"mask_token_id": 3, "target_layer_ids": [-1, 2]}),
        ("dflash_config.target_layer_ids", {"mask_token_id": 3, "target_layer_ids": [1, 0]}),
        ("dflash_config.target_layer_ids", {"mask_token_id": 3, "target_layer_ids": [1, 1]}),
        ("dflash_config.causal", {"mask_token_id": 3, "target_layer_ids": [0], "causal": True}),
        ("use_sliding_window", True),
        ("quantization_config", {"bits": 4}),
        ("fc.weight", None),
    ],
)
def test_drafter_of_another_target_is_refused(pair: Pair, field: str, value: object) -> None:
    if field == "fc.weight":  # as many taps as config.json says
        edit(pair.drafter, dflash_config={"mask_token_id": 3, "target_layer_ids": [0, 1]})
    else:
        edit(pair.drafter, **{field.split(".")[0]: value})
    refused(pair, field)


def test_missing_unknown_and_misshapen_tensors_are_named(pair: Pair) -> None:
    name = "model.layers.2.self_attn.q_norm.weight"
    whole = load_file(pair.target / "model.safetensors")
    edit_weights(pair.target, lambda t: t.pop(name))
    assert "missing" in refused(pair, name).message
    save_file(whole | {"model.layers.2.self_attn.q_proj.bias": torch.zeros(3)}, pair.target / "model.safetensors")
    assert "does not know" in refused(pair, "model.layers.2.self_attn.q_proj.bias").message
    save_file(whole | {name: torch.zeros(25)}, pair.target / "model.safetensors")
    assert "[25]" in refused(pair, name).message
    save_file(whole | {name: torch.zeros(24, dtype=torch.int8)}, pair.target / "model.safetensors")
    assert "I8" in refused(pair, name).message


def test_cut_off_and_foreign_files_are_refused(pair: Pair) -> None:
    path = pair.target / "model.safetensors"
    whole = path.read_bytes()
    for broken in (b"", whole[:100], whole[:-1], b"\xff" * 200, whole + b"x"):
        path.write_bytes(broken)
        refused(pair, "model_path")
    path.unlink()
    (pair.target / "pytorch_model.bin").write_bytes(whole)
    assert "safetensors" in refused(pair, "model_path").message


def test_missing_folder_and_broken_config_are_refused(pair: Pair) -> None:
    (pair.target / "config.json").write_text("{")
    refused(pair, "model_path")
    (pair.target / "config.json").unlink()
    refused(pair, "model_path")
    refused(pair, "model_path", model_path=str(pair.root / "nowhere"))
    write_checkpoint(pair.target, TARGET, 0)
    shutil.rmtree(pair.drafter)
    refused(pair, "speculative_draft_model_path")


def test_shards_with_an_index_load_as_one(pair: Pair, tmp_path: Path) -> None:
    whole = pair.engine(speculative_algorithm=Algorithm.NONE)
    sharded_folder = write_checkpoint(tmp_path / "sharded", TARGET, pair.seed, shards=3)
    sharded = pair.engine(speculative_algorithm=Algorithm.NONE, model_path=str(sharded_folder))
    a, b = (e.generate([[4, 5]], GREEDY, SpecMode.OFF)[0].token_ids for e in (whole, sharded))
    assert a == b
    assert sharded.info.target_digest != whole.info.target_digest  # other files
    (sharded_folder / "model-00002-of-00003.safetensors").unlink()
    refused(pair, "model_path", speculative_algorithm=Algorithm.NONE, model_path=str(sharded_folder))


def test_index_that_points_outside_its_folder_is_refused(pair: Pair) -> None:
    index = {"weight_map": {"model.norm.weight": "../drafter/model.safetensors"}}
    (pair.target / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(pair, "weight_map")


def test_tied_target_may_carry_its_head_and_an_untied_one_must(pair: Pair) -> None:
    edit_weights(pair.target, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    pair.engine()
    edit(pair.target, tie_word_embeddings=False)
    pair.engine()
    edit_weights(pair.target, lambda t: t.pop("lm_head.weight"))
    refused(pair, "lm_head.weight")


def test_newer_and_older_ways_to_write_a_field_are_read(pair: Pair) -> None:
    config = json.loads((pair.target / "config.json").read_text())
    del config["rope_theta"], config["head_dim"]
    config |= {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}, "rope_scaling": None}
    (pair.target / "config.json").write_text(json.dumps(config))
    (pair.target / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 2]}))
    read = read_target(pair.target)
    assert (read.stack.theta, read.stack.head_dim, read.eos_ids) == (5e5, 16, (7, 2))


def test_weights_in_other_float_types_load(pair: Pair) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        edit_weights(pair.target, lambda t, d=dtype: t.update({k: v.to(d) for k, v in t.items()}))
        assert pair.engine().info.dtype == "float32"


def test_digest_is_the_sha256_of_the_weight_files(pair: Pair) -> None:
    engine = pair.engine()
    for digest, folder in ((engine.info.target_digest, pair.target), (engine.info.drafter_digest, pair.drafter)):
        assert digest == "sha256:" + hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    before = engine.info.target_digest
    edit_weights(pair.target, lambda t: t["model.norm.weight"].add_(1e-3))
    assert pair.engine().info.target_digest != before


def test_published_sizes_are_understood(tmp_path: Path) -> None:
    """Qwen3-8B and its published drafter, by configuration only."""
    big = TARGET | {
        "hidden_size": 4096,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 12288,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "rope_theta": 1000000,
        "rope_scaling": None,
        "tie_word_embeddings": False,
        "eos_token_id": [151645, 151643],
        "sliding_window": None,
        "use_sliding_window": False,
        "max_window_layers": 36,
    }
    drafter = big | {
        "num_hidden_layers": 5,
        "num_target_layers": 36,
        "block_size": 16,
        "layer_types": ["full_attention"] * 5,
        "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
    }
    for name, config in (("t", big), ("d", drafter)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    target = read_target(tmp_path / "t")
    read = read_drafter(tmp_path / "d", target)
    assert (read.block_size, read.target_layer_ids) == (16, (1, 9, 17, 25, 33))
    assert drafter_tensors(read)["fc.weight"] == (4096, 5 * 4096)
    assert target_tensors(target)["model.layers.35.mlp.down_proj.weight"] == (4096, 12288)


def test_progress_is_reported_from_nothing_to_everything(pair: Pair) -> None:
    seen: list[tuple[str, float]] = []
    Engine.load(pair.config(), progress=lambda stage, share: seen.append((stage, share)))
    loading = [share for stage, share in seen if stage == "loading weights"]
    assert loading == sorted(loading)
    assert loading[-1] == pytest.approx(1.0)
    assert seen[-1] == ("warming up", 1.0)


def test_only_needed_tensors_are_read(pair: Pair) -> None:
    config = read_target(pair.target)
    weights = Weights(pair.target, "model_path", target_tensors(config))
    assert {name for name, _ in weights.read()} == set(target_tensors(config))
    assert weights.nbytes == (pair.target / "model.safetensors").stat().st_size


# Settings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "settings"),
    [
        ("model_path", {"model_path": ""}),
        ("dtype", {"dtype": "float16"}),
        ("device", {"device": "tpu"}),
        ("port", {"port": 70000}),
        ("max_running_requests", {"max_running_requests": 0}),
        ("context_length", {"context_length": 1}),
        ("chunked_prefill_size", {"chunked_prefill_size": 0}),
        ("speculative_ddtree_topk_cap", {"speculative_ddtree_topk_cap": 0}),
        ("speculative_ddtree_budget", {"speculative_ddtree_budget": 0}),
        ("speculative_ddtree_budget", {"speculative_ddtree_budget": "many"}),
        (
            "speculative_ddtree_budget",
            {"speculative_algorithm": Algorithm.NONE, "speculative_draft_model_path": None, "speculative_ddtree_budget": 16},
        ),
        ("speculative_ddtree_budget", {"speculative_ddtree_budget": 5000}),
        ("speculative_dflash_block_size", {"speculative_dflash_block_size": 1}),
        ("speculative_draft_model_path", {"speculative_draft_model_path": None}),
        ("tp_size", {"tp_size": 2}),
        ("fault", {"faults": ("loop",)}),
        ("log_level", {"log_level": "loud"}),
    ],
)
def test_setting_that_can_never_be_right_is_refused(pair: Pair, field: str, settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        pair.config(**settings)
    assert caught.value.field == field


def test_drafter_without_speculation_is_refused() -> None:
    with pytest.raises(ConfigError, match="without --speculative-algorithm"):
        EngineConfig("x", speculative_draft_model_path="y")


def test_settings_that_do_not_fit_the_checkpoints_are_refused(pair: Pair) -> None:
    refused(pair, "context_length", context_length=257)
    refused(pair, "speculative_dflash_block_size", speculative_dflash_block_size=9)
    if not torch.cuda.is_available():
        refused(pair, "device", device="cuda")


def test_cache_that_does_not_fit_the_memory_is_refused(pair: Pair) -> None:
    error = refused(pair, "max_running_requests", max_running_requests=10**8)
    assert "GiB" in error.message


def test_resolved_settings_say_what_was_chosen(pair: Pair) -> None:
    config = pair.engine(random_seed=None).config
    assert config.speculative_ddtree_budget == 8  # the block size
    assert config.speculative_dflash_block_size == 8
    assert config.context_length == 256
    assert config.served_model_name == "target"
    assert config.random_seed is not None
    plain = pair.engine(speculative_algorithm=Algorithm.NONE).config
    assert plain.speculative_ddtree_budget is None
    assert plain.speculative_dflash_block_size is None


def test_budget_that_caps_the_depth_warns(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    pair.engine(speculative_ddtree_budget=7)
    assert not caplog.records
    pair.engine(speculative_ddtree_budget=6)
    assert "loses to it" in caplog.text
    assert DRAFTER["block_size"] - 1 == 7
