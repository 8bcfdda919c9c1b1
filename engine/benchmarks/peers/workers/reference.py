"""Arm and oracle: the DDTree authors' code, called from a checkout outside this repository.

Run with a Python that has transformers. The checkout is adapted from outside only: packages that it imports for its data sets
and its log are replaced by empty ones, and its timer's CUDA synchronisation does nothing without CUDA. It serves one request
at a time, so several clients wait in line.
"""

from __future__ import annotations

import importlib.util
import sys
import time
import types
from importlib.machinery import ModuleSpec
from typing import Any

import torch
import wire
from transformers import AutoModelForCausalLM

UNUSED = {"datasets": ("load_dataset", "Features", "Sequence", "Value"), "loguru": ("logger",)}
"""What the checkout imports for its data sets and its log, and generation does not call."""


def stand_in(name: str) -> None:
    """An empty module under a name that is not installed."""
    if importlib.util.find_spec(name) is None:
        module = types.ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        for attribute in UNUSED[name]:
            setattr(module, attribute, None)
        sys.modules[name] = module


def load() -> dict[str, wire.Handler]:
    s = wire.settings()
    torch.set_num_threads(s["threads"])
    if not torch.cuda.is_available():
        torch.cuda.synchronize = lambda device=None: None
    for name in UNUSED:
        stand_in(name)
    sys.path.insert(0, s["checkout"])
    import ddtree  # the checkout's
    from model import DFlashDraftModel

    def build(call: dict[str, Any]) -> dict[str, Any]:
        """Their tree of given logits [depths, vocab] and budget, as (token, parent row) lists."""
        tokens, depths, parents, _children, _visible, _times = ddtree.build_ddtree_tree(
            torch.tensor(call["logits"]), call["budget"]
        )
        return {"token_ids": tokens.tolist(), "depths": depths.tolist(), "parents": list(parents)}

    if not s.get("target"):
        return {"build": build}
    dtype = getattr(torch, s["dtype"])
    target = AutoModelForCausalLM.from_pretrained(s["target"], dtype=dtype, attn_implementation="sdpa").eval()
    drafter = DFlashDraftModel.from_pretrained(s["drafter"], dtype=dtype, attn_implementation="sdpa").eval()

    def answer(prompt: list[int], new: int) -> types.SimpleNamespace:
        return ddtree.ddtree_generate(
            model=drafter,
            target=target,
            input_ids=torch.tensor([prompt]),
            mask_token_id=drafter.mask_token_id,
            max_new_tokens=new,
            block_size=drafter.block_size,
            stop_token_ids=s["stops"],
            tree_budget=s["budget"],
        )

    def generate(call: dict[str, Any]) -> dict[str, Any]:
        begun = time.perf_counter()
        answers = [answer(p, call["max_new_tokens"]) for p in call["prompts"]]
        seconds = time.perf_counter() - begun
        outputs = [a.output_ids[0, a.num_input_tokens :].tolist() for a in answers]
        return {"outputs": outputs, "seconds": seconds, "passes": sum(a.decode_rounds for a in answers)}

    generate({"prompts": [[5] * 16], "max_new_tokens": 16})
    return {"build": build, "generate": generate}


wire.serve(load)
