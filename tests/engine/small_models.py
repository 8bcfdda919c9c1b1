"""Small random checkpoints in the published layouts, and a plain Qwen3 and DFlash to compare the engine with.

The reference is written for being obviously right: unfused, one sequence, no cache, the whole prefix every time.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from ddtree_engine.config import Algorithm, EngineConfig
from ddtree_engine.engine import Engine
from safetensors.torch import load_file, save_file

TARGET = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "intermediate_size": 96,
    "vocab_size": 101,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
}
DRAFTER = TARGET | {
    "architectures": ["DFlashDraftModel"],
    "num_hidden_layers": 2,
    "num_target_layers": 4,
    "block_size": 8,
    "dflash_config": {"mask_token_id": 3, "target_layer_ids": [0, 1, 3]},
}


def _layer(config: dict[str, Any], prefix: str, draw: Any) -> dict[str, torch.Tensor]:
    h, d, ff = config["hidden_size"], config["head_dim"], config["intermediate_size"]
    q, kv = config["num_attention_heads"] * d, config["num_key_value_heads"] * d
    return {
        f"{prefix}input_layernorm.weight": 1 + 0.2 * draw(h),
        f"{prefix}post_attention_layernorm.weight": 1 + 0.2 * draw(h),
        f"{prefix}self_attn.q_proj.weight": draw(q, h) * 0.2,
        f"{prefix}self_attn.k_proj.weight": draw(kv, h) * 0.2,
        f"{prefix}self_attn.v_proj.weight": draw(kv, h) * 0.2,
        f"{prefix}self_attn.o_proj.weight": draw(h, q) * 0.2,
        f"{prefix}self_attn.q_norm.weight": 1 + 0.2 * draw(d),
        f"{prefix}self_attn.k_norm.weight": 1 + 0.2 * draw(d),
        f"{prefix}mlp.gate_proj.weight": draw(ff, h) * 0.2,
        f"{prefix}mlp.up_proj.weight": draw(ff, h) * 0.2,
        f"{prefix}mlp.down_proj.weight": draw(h, ff) * 0.2,
    }


def random_tensors(config: dict[str, Any], seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator)

    h = config["hidden_size"]
    if "dflash_config" in config:
        taps = len(config["dflash_config"]["target_layer_ids"])
        tensors = {
            "fc.weight": draw(h, taps * h) * 0.1,
            "hidden_norm.weight": 1 + 0.2 * draw(h),
            "norm.weight": 1 + 0.2 * draw(h),
        }
        prefix = ""
    else:
        tensors = {
            "model.embed_tokens.weight": draw(config["vocab_size"], h),
            "model.norm.weight": 1 + 0.2 * draw(h),
        }
        if not config["tie_word_embeddings"]:
            tensors["lm_head.weight"] = draw(config["vocab_size"], h) * 0.3
        prefix = "model."
    for i in range(config["num_hidden_layers"]):
        tensors |= _layer(config, f"{prefix}layers.{i}.", draw)
    return tensors


def write_checkpoint(folder: Path, config: dict[str, Any], seed: int, *, shards: int = 1) -> Path:
    """A folder as published: config.json and safetensors, in one file or in shards with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = random_tensors(config, seed)
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    names = sorted(tensors)
    weight_map = {}
    for i in range(shards):
        part = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        mine = names[i::shards]
        save_file({name: tensors[name] for name in mine}, folder / part)
        weight_map |= dict.fromkeys(mine, part)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


@dataclass
class Pair:
    """A target and its drafter on disk, and engines over them."""

    root: Path
    target_config: dict[str, Any] = field(default_factory=lambda: dict(TARGET))
    drafter_config: dict[str, Any] = field(default_factory=lambda: dict(DRAFTER))
    seed: int = 0

    def __post_init__(self) -> None:
        self.target = write_checkpoint(self.root / "target", self.target_config, self.seed)
        self.drafter = write_checkpoint(self.root / "drafter", self.drafter_config, self.seed + 1)

    def config(self, **changes: Any) -> EngineConfig:
        settings: dict[str, Any] = {
            "model_path": str(self.target),
            "device": "cpu",
            "dtype": "float32",
            "num_threads": 1,
            "random_seed": 7,
            "max_running_requests": 4,
            "speculative_ddtree_topk_cap": 4,
            "speculative_algorithm": Algorithm.DDTREE,
            "speculative_draft_model_path": str(self.drafter),
        } | changes
        if settings["speculative_algorithm"] is Algorithm.NONE:
            settings["speculative_draft_model_path"] = None
        return EngineConfig(**settings)

    def engine(self, **changes: Any) -> Engine:
        return Engine.load(self.config(**changes))


# The reference ---------------------------------------------------------------------------------------------------


def _rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def _rope(x: torch.Tensor, positions: torch.Tensor, theta: float) -> torch.Tensor:
    """x [rows, heads, dim]: rotate_half as Hugging Face writes it."""
    dim = x.shape[-1]
    inverse = 1.0 / theta ** (torch.arange(0, dim, 2).double() / dim)
    angles = positions.double()[:, None] * inverse
    angles = torch.cat([angles, angles], -1)[:, None]
    half = torch.cat([-x[..., dim // 2 :], x[..., : dim // 2]], -1)
    return x * angles.cos() + half * angles.sin()


class Reference:
    """float64, straight from the equations."""

    def __init__(self, target: Path, drafter: Path | None = None) -> None:
        self.config = json.loads((target / "config.json").read_text())
        self.tensors = {k: v.double() for k, v in load_file(target / "model.safetensors").items()}
        if drafter:
            self.drafter_config = json.loads((drafter / "config.json").read_text())
            self.drafter_tensors = {k: v.double() for k, v in load_file(drafter / "model.safetensors").items()}

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sees: torch.Tensor) -> torch.Tensor:
        groups = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
        weights = scores.masked_fill(~sees, -torch.inf).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, v).flatten(1)

    def hidden(self, token_ids: list[int]) -> list[torch.Tensor]:
        """Outputs of every layer, for a plain causal sequence."""
        c, t = self.config, self.tensors
        n, d, eps = len(token_ids), c["head_dim"], c["rms_norm_eps"]
        positions, x, outputs = torch.arange(n), t["model.embed_tokens.weight"][token_ids], []
        for i in range(c["num_hidden_layers"]):

            def w(name: str, i: int = i) -> torch.Tensor:
                return t[f"model.layers.{i}.{name}.weight"]

            h = _rms(x, w("input_layernorm"), eps)
            q, k, v = ((h @ w(f"self_attn.{p}_proj").T).view(n, -1, d) for p in "qkv")
            q = _rope(_rms(q, w("self_attn.q_norm"), eps), positions, c["rope_theta"])
            k = _rope(_rms(k, w("self_attn.k_norm"), eps), positions, c["rope_theta"])
            x = x + self._attend(q, k, v, torch.ones(n, n).tril().bool()) @ w("self_attn.o_proj").T
            h = _rms(x, w("post_attention_layernorm"), eps)
            gate, up = h @ w("mlp.gate_proj").T, h @ w("mlp.up_proj").T
            x = x + (torch.nn.functional.silu(gate) * up) @ w("mlp.down_proj").T
            outputs.append(x)
        return outputs

    def head(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.tensors.get("lm_head.weight", self.tensors["model.embed_tokens.weight"]).T

    def logits(self, token_ids: list[int]) -> torch.Tensor:
        """[tokens, vocab]"""
        x = self.hidden(token_ids)[-1]
        return self.head(_rms(x, self.tensors["model.norm.weight"], self.config["rms_norm_eps"]))

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(int(self.logits(tokens)[-1].argmax()))
        return tokens[len(prompt) :]

    def draft_logits(self, token_ids: list[int], block_size: int) -> torch.Tensor:
        """The drafter's logits [block_size - 1, vocab] after token_ids, whose last is the root."""
        c, t = self.drafter_config, self.drafter_tensors
        d, eps, context = c["head_dim"], c["rms_norm_eps"], len(token_ids) - 1
        outputs = self.hidden(token_ids[:-1])
        taps = torch.cat([outputs[i] for i in c["dflash_config"]["target_layer_ids"]], -1)
        features = _rms(taps @ t["fc.weight"].T, t["hidden_norm.weight"], eps)
        block = [token_ids[-1]] + [c["dflash_config"]["mask_token_id"]] * (block_size - 1)
        x, positions = self.tensors["model.embed_tokens.weight"][block], torch.arange(context + block_size)
        for i in range(c["num_hidden_layers"]):

            def w(name: str, i: int = i) -> torch.Tensor:
                return t[f"layers.{i}.{name}.weight"]

            h = _rms(x, w("input_layernorm"), eps)
            both = torch.cat([features, h])
            q = (h @ w("self_attn.q_proj").T).view(block_size, -1, d)
            k, v = ((both @ w(f"self_attn.{p}_proj").T).view(len(both), -1, d) for p in "kv")
            q = _rope(_rms(q, w("self_attn.q_norm"), eps), positions[context:], c["rope_theta"])
            k = _rope(_rms(k, w("self_attn.k_norm"), eps), positions, c["rope_theta"])
            sees = torch.ones(block_size, len(both)).bool()
            x = x + self._attend(q, k, v, sees) @ w("self_attn.o_proj").T
            h = _rms(x, w("post_attention_layernorm"), eps)
            gate, up = h @ w("mlp.gate_proj").T, h @ w("mlp.up_proj").T
            x = x + (torch.nn.functional.silu(gate) * up) @ w("mlp.down_proj").T
        return self.head(_rms(x[1:], t["norm.weight"], eps))


# Drafts that hit ------------------------------------------------------------------------------------------------


def plant_drafts(
    engine: Engine,
    expected: dict[tuple[int, ...], list[int]],
    seed: int,
    *,
    miss: float = 0.15,
    sure: bool = False,
) -> None:
    """Make a random drafter useful: its marginals hold the expected next token at a random rank, or (`miss`) not at all.

    Trees then branch, are unequal between requests, and are accepted along paths that are not the first choices.
    `sure`: the expected token is always the first choice, with nearly all the probability.
    """
    runner, random = engine._decoder.runner, torch.Generator().manual_seed(seed)
    vocab = engine.info.vocab_size

    def draft(rows: Any, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        of_slab = {s.base: s for s in engine._running.values()}
        logprobs, tokens = [], []
        for segment in rows.segments:
            s = of_slab[segment.base]
            future = expected[s.request.prompt_ids][len(s.output_ids) :]
            for depth in range(segment.rows - 1):
                weights = torch.rand(k, generator=random).sort(descending=True).values * 0.9
                weights = torch.tensor([0.95] + [0.01] * (k - 1)) if sure else weights
                logprobs.append((weights / weights.sum().clamp(min=1.0)).log())
                ids = torch.randperm(vocab, generator=random)[:k]
                if sure and depth < len(future):
                    ids = torch.tensor([future[depth], *(i for i in range(k) if i != future[depth])])[:k]
                hit = not sure and depth < len(future) and float(torch.rand(1, generator=random)) >= miss
                if hit and future[depth] not in ids.tolist():
                    ids[int(torch.randint(k, (1,), generator=random))] = future[depth]
                tokens.append(ids)
        shape = (len(rows.segments), -1, k)
        return torch.stack(logprobs).view(shape), torch.stack(tokens).view(shape)

    runner.draft = draft  # type: ignore[method-assign]
