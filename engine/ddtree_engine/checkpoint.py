"""Hugging Face folders on disk: reads and checks configurations, streams tensors, and hashes the weight files.

Safetensors only (one file, or shards with an index). Everything that this engine would compute wrongly is refused with the
field or tensor named: nothing is guessed and nothing is dropped. No device and no arithmetic here.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddtree_engine.config import ConfigError

if TYPE_CHECKING:
    import torch

WEIGHT_DTYPES = ("F32", "BF16", "F16")


@dataclass(frozen=True, slots=True)
class StackConfig:
    """The sizes of a Qwen3 decoder stack; target and drafter share the layout."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ff: int
    vocab: int
    eps: float
    theta: float
    max_positions: int


@dataclass(frozen=True, slots=True)
class TargetConfig:
    stack: StackConfig
    tied: bool
    eos_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DrafterConfig:
    stack: StackConfig
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]  # 0-based; the outputs of these target layers are the features


def read_target(folder: Path) -> TargetConfig:
    """Raises ConfigError for anything but a dense Qwen3."""
    raw = _read_config(folder, "model_path")
    where = f"{folder.name}/config.json"
    if raw.get("model_type") != "qwen3":
        raise ConfigError("model_type", f"{where} says {raw.get('model_type')!r}; only dense 'qwen3' is served")
    stack = _stack(raw, where)
    eos = _eos_ids(folder, raw, stack.vocab)
    return TargetConfig(stack, tied=bool(raw.get("tie_word_embeddings", False)), eos_ids=eos)


def read_drafter(folder: Path, target: TargetConfig) -> DrafterConfig:
    """Raises ConfigError when the drafter was not made for this target."""
    raw = _read_config(folder, "speculative_draft_model_path")
    where = f"{folder.name}/config.json"
    if raw.get("model_type", "qwen3") not in ("qwen3", "dflash"):
        raise ConfigError("model_type", f"{where} says {raw.get('model_type')!r}; a DFlash drafter is 'qwen3'")
    dflash = raw.get("dflash_config")
    if not isinstance(dflash, dict):
        raise ConfigError("dflash_config", f"{where} has none: this is not a DFlash drafter")
    if unknown := set(dflash) - {"mask_token_id", "target_layer_ids"}:
        raise ConfigError(f"dflash_config.{sorted(unknown)[0]}", f"{where}: not known to this engine")
    stack = _stack(raw, where)
    _same("hidden_size", stack.hidden, target.stack.hidden, where)
    _same("vocab_size", stack.vocab, target.stack.vocab, where)
    if "num_target_layers" in raw:
        _same("num_target_layers", raw["num_target_layers"], target.stack.layers, where)
    block = raw.get("block_size")
    if not _is_int(block) or block < 2:
        raise ConfigError("block_size", f"{where} says {block!r}; at least 2 is needed (the root and one draft)")
    mask = dflash.get("mask_token_id")
    if not _is_int(mask) or not 0 <= mask < stack.vocab:
        raise ConfigError("dflash_config.mask_token_id", f"{where} says {mask!r}; vocabulary: {stack.vocab}")
    return DrafterConfig(stack, block, mask, _layer_ids(dflash, target.stack.layers, where))


def _layer_ids(dflash: Mapping[str, Any], layers: int, where: str) -> tuple[int, ...]:
    field, ids = "dflash_config.target_layer_ids", dflash.get("target_layer_ids")
    if not isinstance(ids, list) or not ids or not all(_is_int(i) for i in ids):
        raise ConfigError(field, f"{where} needs a list of layer numbers, not {ids!r}")
    if any(not 0 <= i < layers for i in ids) or sorted(set(ids)) != ids:
        raise ConfigError(field, f"{where}: {ids} are not ascending layers of a target with {layers}")
    return tuple(ids)


def _stack(raw: Mapping[str, Any], where: str) -> StackConfig:
    _refuse_unsupported(raw, where)
    sizes = {key: _positive(raw, key, where) for key in _SIZES}
    head_dim = raw.get("head_dim") or sizes["hidden_size"] // sizes["num_attention_heads"]
    if not _is_int(head_dim) or head_dim % 2:
        raise ConfigError("head_dim", f"{where} says {head_dim!r}; an even whole number is needed")
    if sizes["num_attention_heads"] % sizes["num_key_value_heads"]:
        raise ConfigError("num_key_value_heads", f"{where}: does not divide num_attention_heads")
    return StackConfig(
        hidden=sizes["hidden_size"],
        layers=sizes["num_hidden_layers"],
        heads=sizes["num_attention_heads"],
        kv_heads=sizes["num_key_value_heads"],
        head_dim=head_dim,
        ff=sizes["intermediate_size"],
        vocab=sizes["vocab_size"],
        eps=_real(raw, "rms_norm_eps", where),
        theta=_rope_theta(raw, where),
        max_positions=sizes["max_position_embeddings"],
    )


_SIZES = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "vocab_size",
    "max_position_embeddings",
)


def _refuse_unsupported(raw: Mapping[str, Any], where: str) -> None:
    """Features that change the arithmetic and that this engine does not have."""
    if raw.get("quantization_config") or raw.get("quantisation_config"):
        raise ConfigError("quantization_config", f"{where}: quantised weights are not served; use SGLang or vLLM")
    if raw.get("use_sliding_window"):
        raise ConfigError("use_sliding_window", f"{where}: sliding-window attention is not served")
    if any(kind != "full_attention" for kind in raw.get("layer_types") or ()):
        raise ConfigError("layer_types", f"{where}: only full_attention layers are served")
    if raw.get("attention_bias"):
        raise ConfigError("attention_bias", f"{where}: biases in attention are not served")
    if raw.get("hidden_act", "silu") != "silu":
        raise ConfigError("hidden_act", f"{where} says {raw['hidden_act']!r}; only silu is served")
    if raw.get("num_experts"):
        raise ConfigError("num_experts", f"{where}: mixtures of experts are not served")


def _rope_theta(raw: Mapping[str, Any], where: str) -> float:
    """`rope_theta`, or inside `rope_parameters` as newer files have it; every scaling is refused."""
    for key in ("rope_scaling", "rope_parameters"):
        rope = raw.get(key)
        if not rope:
            continue
        kind = rope.get("rope_type", rope.get("type", "default")) if isinstance(rope, dict) else rope
        if kind != "default":
            raise ConfigError(key, f"{where}: RoPE scaling {kind!r} is not served")
        if isinstance(rope, dict) and "rope_theta" in rope:
            return _real(rope, "rope_theta", where)
    return _real(raw, "rope_theta", where)


def _eos_ids(folder: Path, raw: Mapping[str, Any], vocab: int) -> tuple[int, ...]:
    """generation_config.json wins over config.json, as it does elsewhere; both may give one id or a list."""
    value = raw.get("eos_token_id")
    path = folder / "generation_config.json"
    if path.is_file():
        value = _read_json(path, "generation_config.json").get("eos_token_id", value)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(not _is_int(i) or not 0 <= i < vocab for i in ids):
        raise ConfigError("eos_token_id", f"{folder.name}: {value!r} lies outside the vocabulary of {vocab}")
    return tuple(ids)


def _read_config(folder: Path, flag: str) -> dict[str, Any]:
    if not folder.is_dir():
        raise ConfigError(flag, f"{folder} is not a folder")
    if not (folder / "config.json").is_file():
        raise ConfigError(flag, f"{folder} has no config.json")
    return _read_json(folder / "config.json", flag)


def _read_json(path: Path, field: str) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as exc:
        raise ConfigError(field, f"{path} cannot be read as JSON: {exc}") from exc
    if not isinstance(value, dict):
        raise ConfigError(field, f"{path} is not a JSON object")
    return value


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _positive(raw: Mapping[str, Any], key: str, where: str) -> int:
    value = raw.get(key)
    if not _is_int(value) or value < 1:
        raise ConfigError(key, f"{where} says {value!r}; a positive whole number is needed")
    return int(value)


def _real(raw: Mapping[str, Any], key: str, where: str) -> float:
    value = raw.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise ConfigError(key, f"{where} says {value!r}; a positive number is needed")
    return float(value)


def _same(field: str, drafter: object, target: object, where: str) -> None:
    if drafter != target:
        raise ConfigError(field, f"{where} says {drafter}, the target has {target}: not a drafter of this target")


# Tensor names ---------------------------------------------------------------------------------------------------


def target_tensors(config: TargetConfig) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor that the target needs."""
    s = config.stack
    names = {"model.embed_tokens.weight": (s.vocab, s.hidden), "model.norm.weight": (s.hidden,)}
    if not config.tied:
        names["lm_head.weight"] = (s.vocab, s.hidden)
    return names | _layer_tensors(s, "model.")


def drafter_tensors(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    s = config.stack
    names = {
        "fc.weight": (s.hidden, len(config.target_layer_ids) * s.hidden),
        "hidden_norm.weight": (s.hidden,),
        "norm.weight": (s.hidden,),
    }
    return names | _layer_tensors(s, "")


def _layer_tensors(s: StackConfig, prefix: str) -> dict[str, tuple[int, ...]]:
    q, kv = s.heads * s.head_dim, s.kv_heads * s.head_dim
    shapes = {
        "input_layernorm.weight": (s.hidden,),
        "post_attention_layernorm.weight": (s.hidden,),
        "self_attn.q_proj.weight": (q, s.hidden),
        "self_attn.k_proj.weight": (kv, s.hidden),
        "self_attn.v_proj.weight": (kv, s.hidden),
        "self_attn.o_proj.weight": (s.hidden, q),
        "self_attn.q_norm.weight": (s.head_dim,),
        "self_attn.k_norm.weight": (s.head_dim,),
        "mlp.gate_proj.weight": (s.ff, s.hidden),
        "mlp.up_proj.weight": (s.ff, s.hidden),
        "mlp.down_proj.weight": (s.hidden, s.ff),
    }
    return {f"{prefix}layers.{i}.{name}": shape for i in range(s.layers) for name, shape in shapes.items()}


# Weight files ---------------------------------------------------------------------------------------------------


class Weights:
    """The safetensors of one folder, checked against the names and shapes that the model needs before any is read."""

    def __init__(self, folder: Path, flag: str, needed: Mapping[str, tuple[int, ...]], ignored: tuple[str, ...] = ()):
        self.files = _weight_files(folder, flag)
        self._headers = {path: _header(path, flag) for path in self.files}
        self._file_of = {name: path for path, header in self._headers.items() for name in header}
        self.needed = needed
        self._check(flag, ignored)

    def _check(self, flag: str, ignored: tuple[str, ...]) -> None:
        for name, shape in self.needed.items():
            path = self._file_of.get(name)
            if path is None:
                raise ConfigError(name, f"missing from the weights given by {flag}")
            entry = self._headers[path][name]
            if tuple(entry["shape"]) != shape:
                raise ConfigError(name, f"has shape {entry['shape']}, config.json makes it {list(shape)}")
            if entry["dtype"] not in WEIGHT_DTYPES:
                raise ConfigError(name, f"has dtype {entry['dtype']}; {', '.join(WEIGHT_DTYPES)} are served")
        unknown = sorted(set(self._file_of) - set(self.needed) - set(ignored))
        if unknown:
            raise ConfigError(unknown[0], f"a tensor that this engine does not know, in the weights given by {flag}")

    @property
    def nbytes(self) -> int:
        return sum(path.stat().st_size for path in self.files)

    def read(self, progress: Callable[[float], None] = lambda share: None) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every needed tensor, in file order, reporting the share that was read."""
        from safetensors import SafetensorError, safe_open

        total, done = len(self.needed), 0
        for path in self.files:
            try:
                with safe_open(path, framework="pt") as handle:
                    for name in handle.keys():  # noqa: SIM118 (not a mapping)
                        if name in self.needed:
                            yield name, handle.get_tensor(name)
                            done += 1
                            progress(done / total)
            except (OSError, SafetensorError) as exc:
                raise ConfigError(path.name, f"{path} cannot be read: {exc}") from exc

    def digest(self) -> str:
        """ "sha256:..." over the weight files' bytes, in name order."""
        total = hashlib.sha256()
        for path in self.files:
            with path.open("rb") as handle:
                while block := handle.read(1 << 20):
                    total.update(block)
        return f"sha256:{total.hexdigest()}"


def _weight_files(folder: Path, flag: str) -> list[Path]:
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if index.is_file():
        shards = _read_json(index, "model.safetensors.index.json").get("weight_map")
        if not isinstance(shards, dict) or not shards:
            raise ConfigError("weight_map", f"{index} has none")
        names = sorted({str(name) for name in shards.values()})
        if any(Path(name).name != name for name in names):
            raise ConfigError("weight_map", f"{index} points outside its folder")
        paths = [folder / name for name in names]
    else:
        paths = [single]
    for path in paths:
        if not path.is_file():
            others = "; only safetensors are read, no .bin or .pt" if not index.is_file() else ""
            raise ConfigError(flag, f"{path} is missing{others}")
    return paths


def _header(path: Path, flag: str) -> dict[str, dict[str, Any]]:
    """The header of one safetensors file: name -> {dtype, shape}."""
    size = path.stat().st_size
    try:
        with path.open("rb") as handle:
            length = int.from_bytes(handle.read(8), "little")
            if not 0 < length <= size - 8:
                raise ValueError("its header is longer than the file")
            header = json.loads(handle.read(length))
    except (OSError, ValueError) as exc:
        raise ConfigError(flag, f"{path} is not a whole safetensors file: {exc}") from exc
    entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
    end = max((entry["data_offsets"][1] for entry in entries.values()), default=0)
    if 8 + length + end != size:
        raise ConfigError(flag, f"{path} has {size} bytes, its header makes it {8 + length + end}: cut off?")
    return entries
