"""Arm: vLLM in process (its `LLM` class), plain or with its `dflash` speculation. Run with a Python that has vLLM.

Prefix caching is off, as it is in every arm. Compiled unless asked for eager. vLLM 0.32.0 on CPU normalises the drafter's
context keys of every layer with the weights of the first (its kernel ignores that the weights come stacked, one row a layer),
which halves the acceptance of the bundled drafter; asked to, this arm corrects that, so that vLLM is compared at its best.
"""

from __future__ import annotations

import time
from typing import Any

import wire


def normalise_layer_by_layer() -> None:
    """The same sum with one kernel call a layer; changes this process only."""
    import torch
    from vllm import _custom_ops as ops
    from vllm.model_executor.models import qwen3_dflash

    def normalise(self: Any, keys: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(keys)
        for layer, weight in enumerate(self._k_norm_weights):
            ops.rms_norm(out[layer], keys[layer], weight, self._rms_norm_eps)
        return out

    qwen3_dflash.DFlashQwen3Model._normalize_context_k = normalise


def load() -> dict[str, wire.Handler]:
    from vllm import LLM, SamplingParams

    s = wire.settings()
    if s.get("correct_keys"):
        normalise_layer_by_layer()
    speculation = {"method": "dflash", "model": s["drafter"], "num_speculative_tokens": s["draft_tokens"]}
    llm = LLM(
        model=s["target"],
        dtype=s["dtype"],
        max_model_len=s["context"],
        max_num_seqs=s["max_running"],
        enable_prefix_caching=False,
        enforce_eager=s["eager"],
        disable_log_stats=False,
        speculative_config=speculation if s["mode"] == "dflash" else None,
    )

    def drafts() -> int | None:
        for metric in llm.get_metrics():
            if metric.name == "vllm:spec_decode_num_drafts":
                return int(metric.value)
        return None

    def generate(call: dict[str, Any]) -> dict[str, Any]:
        sampling = SamplingParams(temperature=0.0, max_tokens=call["max_new_tokens"], detokenize=False)
        prompts = [{"prompt_token_ids": p} for p in call["prompts"]]
        step = 1 if call["clients"] == 1 else len(prompts)
        before, begun, answers = drafts(), time.perf_counter(), []
        for i in range(0, len(prompts), step):
            answers += llm.generate(prompts[i : i + step], sampling, use_tqdm=False)
        seconds, after = time.perf_counter() - begun, drafts()
        outputs = [list(a.outputs[0].token_ids) for a in answers]
        plain = sum(len(o) - 1 for o in outputs)
        return {"outputs": outputs, "seconds": seconds, "passes": plain if before is None else after - before}

    generate({"prompts": [[5] * 16], "clients": 1, "max_new_tokens": 16})
    return {"generate": generate}


if __name__ == "__main__":
    wire.serve(load)
