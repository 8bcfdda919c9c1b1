"""Writes checkpoints in the layouts others load: Hugging Face Qwen3 for the target, DFlash's for the drafters."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from training.model import Drafter, Target
from training.recipe import END_OF_TEXT, IM_END, MASK, DrafterRecipe, ModelShape


def _qwen3_config(shape: ModelShape, layers: int, architecture: str) -> dict[str, object]:
    return {
        "architectures": [architecture],
        "model_type": "qwen3",
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.intermediate,
        "hidden_act": "silu",
        "rms_norm_eps": shape.eps,
        "rope_theta": shape.rope_theta,
        "rope_scaling": None,
        "max_position_embeddings": shape.max_positions,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": True,
        "use_cache": True,
        "use_sliding_window": False,
        "sliding_window": None,
        "bos_token_id": None,
        "eos_token_id": IM_END,
        "pad_token_id": END_OF_TEXT,
        "torch_dtype": "bfloat16",
    }


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf8")


def _save_weights(module: nn.Module, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {k: v.detach().to(torch.bfloat16).cpu().contiguous() for k, v in module.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)


def save_target(model: Target, folder: Path) -> None:
    _save_weights(model, folder)
    _write_json(folder / "config.json", _qwen3_config(model.shape, model.shape.layers, "Qwen3ForCausalLM"))
    stops = {"eos_token_id": [IM_END, END_OF_TEXT], "pad_token_id": END_OF_TEXT, "do_sample": False}
    _write_json(folder / "generation_config.json", stops)


def save_drafter(drafter: Drafter, folder: Path) -> None:
    recipe = drafter.recipe
    _save_weights(drafter, folder)
    config = _qwen3_config(drafter.shape, recipe.layers, "DFlashDraftModel") | {
        "block_size": recipe.block,
        "num_target_layers": drafter.shape.layers,
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": list(recipe.target_layers)},
    }
    _write_json(folder / "config.json", config)


def load_target(folder: Path, shape: ModelShape) -> Target:
    """A target in float32 with the exported (bfloat16-rounded) weights."""
    model = Target(shape)
    model.load_state_dict({k: v.float() for k, v in load_file(folder / "model.safetensors").items()}, strict=True)
    return model.eval().requires_grad_(False)


def load_drafter(folder: Path, shape: ModelShape, recipe: DrafterRecipe) -> Drafter:
    drafter = Drafter(shape, recipe)
    drafter.load_state_dict({k: v.float() for k, v in load_file(folder / "model.safetensors").items()}, strict=True)
    return drafter.eval().requires_grad_(False)
