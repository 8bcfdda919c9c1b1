"""Arm: this engine, in process, with one mode and one budget. Run with the engine's own Python."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import wire

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from ddtree_engine.config import Algorithm, EngineConfig, SpecMode
from ddtree_engine.engine import Engine
from ddtree_engine.requests import Request, Sampling

ALGORITHMS = {SpecMode.OFF: Algorithm.NONE, SpecMode.CHAIN: Algorithm.DFLASH, SpecMode.TREE: Algorithm.DDTREE}


def load() -> dict[str, wire.Handler]:
    s = wire.settings()
    mode = SpecMode(s["mode"])
    engine = Engine.load(
        EngineConfig(
            model_path=s["target"],
            dtype=s["dtype"],
            device=s.get("device", "cpu"),
            speculative_algorithm=ALGORITHMS[mode],
            speculative_draft_model_path=s["drafter"] if mode.drafts else None,
            speculative_ddtree_budget=s.get("budget"),
            max_running_requests=s["max_running"],
            context_length=s["context"],
            num_threads=s["threads"],
            disable_radix_cache=True,
            random_seed=1,
        )
    )

    def generate(call: dict[str, Any]) -> dict[str, Any]:
        sampling = Sampling(max_new_tokens=call["max_new_tokens"])
        prompts, step = call["prompts"], 1 if call["clients"] == 1 else len(call["prompts"])
        begun, answers = time.perf_counter(), []
        for i in range(0, len(prompts), step):
            answers += engine.generate(prompts[i : i + step], sampling, mode)
        seconds = time.perf_counter() - begun
        passes = sum(a.verify_passes for a in answers)
        return {"outputs": [list(a.token_ids) for a in answers], "seconds": seconds, "passes": passes}

    def gap(call: dict[str, Any]) -> float:
        """How far `other` lies below the best next token, in nats; at least the distance of the 64th when further."""
        request = Request("gap", tuple(call["prefix"]), Sampling(max_new_tokens=1), SpecMode.OFF, True, -1, 64)
        engine.submit(request)
        top = next(t for u in engine.drain(["gap"])["gap"] for t in u.top_logprobs)
        scores = {token: logprob for logprob, token in top}
        return top[0][0] - min(scores.get(t, top[-1][0]) for t in (call["one"], call["other"]))

    return {"generate": generate, "gap": gap}


wire.serve(load)
