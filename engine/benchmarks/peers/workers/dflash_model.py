"""Oracle: z-lab's DFlash model code, from a checkout outside this repository, with random weights.

Writes a checkpoint in the published layout, then answers hidden states of blocks. Run with a Python that has transformers.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import torch
import wire
from transformers import DynamicCache, Qwen3Config


def load() -> dict[str, wire.Handler]:
    s = wire.settings()
    spec = importlib.util.spec_from_file_location("dflash_checkout", Path(s["checkout"]) / "dflash" / "model.py")
    assert spec is not None
    assert spec.loader is not None
    code = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = code
    spec.loader.exec_module(code)
    torch.manual_seed(s["seed"])
    config = Qwen3Config(**s["config"], attn_implementation="sdpa")
    model = code.DFlashDraftModel(config).float().eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(1 + 0.2 * torch.randn_like(weight) if weight.dim() == 1 else 0.1 * torch.randn_like(weight))
            del name

    def save(call: dict[str, Any]) -> list[str]:
        from safetensors.torch import save_file

        tensors = {name: t.contiguous() for name, t in model.state_dict().items()}
        save_file(tensors, call["path"])
        return sorted(tensors)

    @torch.inference_mode()
    def hidden(call: dict[str, Any]) -> list[Any]:
        """Rounds of (tapped target states, block embeddings) -> their hidden states of every block, as lists."""
        cache, outs, start = DynamicCache(config=config), [], 0
        for tapped, block in zip(call["tapped"], call["blocks"], strict=True):
            context, noise = torch.tensor([tapped]), torch.tensor([block])
            end = start + context.shape[1] + noise.shape[1]
            positions = torch.arange(start, end)[None]
            out = model(
                position_ids=positions,
                noise_embedding=noise,
                target_hidden=context,
                past_key_values=cache,
                use_cache=True,
                is_causal=False,
            )
            start += context.shape[1]
            cache.crop(start)
            outs.append(out[0].tolist())
        return outs

    return {"save": save, "hidden": hidden}


wire.serve(load)
