"""Arm: Hugging Face transformers `generate`, greedy, eager, with its default (growing) cache.

Run with a Python that has transformers. Several clients are one left-padded batch at a time, which is what `generate` offers.
"""

from __future__ import annotations

import time
from typing import Any

import torch
import wire
from transformers import AutoModelForCausalLM

PAD = 0


def load() -> dict[str, wire.Handler]:
    s = wire.settings()
    torch.set_num_threads(s["threads"])
    model = AutoModelForCausalLM.from_pretrained(
        s["target"], dtype=getattr(torch, s["dtype"]), attn_implementation="sdpa"
    ).eval()

    @torch.inference_mode()
    def batch(prompts: list[list[int]], new: int) -> list[list[int]]:
        width = max(map(len, prompts))
        ids = torch.tensor([[PAD] * (width - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
        out = model.generate(ids, attention_mask=mask, max_new_tokens=new, do_sample=False, pad_token_id=PAD)
        return [wire.cut(row, s["stops"]) for row in out[:, width:].tolist()]

    def generate(call: dict[str, Any]) -> dict[str, Any]:
        prompts, clients, outputs = call["prompts"], call["clients"], []
        begun = time.perf_counter()
        for i in range(0, len(prompts), clients):
            outputs += batch(prompts[i : i + clients], call["max_new_tokens"])
        seconds = time.perf_counter() - begun
        return {"outputs": outputs, "seconds": seconds, "passes": sum(len(o) - 1 for o in outputs)}

    generate({"prompts": [[5] * 16], "clients": 1, "max_new_tokens": 16})
    return {"generate": generate}


wire.serve(load)
