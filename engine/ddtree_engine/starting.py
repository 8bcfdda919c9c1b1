"""What an engine needs before its first request: what computes, what decides, and rounds that no user waits for.

Not here: reading checkpoints (`loading.py`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from ddtree_engine import rehearsal
from ddtree_engine.auto import Auto
from ddtree_engine.budget import Fixed, Policy
from ddtree_engine.config import AUTO, SpecMode
from ddtree_engine.corruption import CorruptionPoints
from ddtree_engine.costs import Costs
from ddtree_engine.forest import Sizes
from ddtree_engine.loading import Checked, Loaded
from ddtree_engine.requests import Request, Sampling
from ddtree_engine.runner import Runner

if TYPE_CHECKING:
    from ddtree_engine.engine import Engine

log = logging.getLogger("ddtree_engine")

PROMPT_ROWS = 256  # of prompts that ride along in captured rounds; longer chunks run without graphs


def runner(
    checked: Checked,
    loaded: Loaded,
    progress: Callable[[str, float], None],
    faults: CorruptionPoints | None,
) -> Runner:
    """What computes: eager on CPU; on CUDA with Triton, and graphs where they serve."""
    if checked.device.type == "cpu":
        return Runner(loaded.target, loaded.drafter, loaded.cache, checked.device)
    from ddtree_engine import attention_kernel, graphs, tiles, tree_kernel

    config, sizes = checked.config, checked.sizes
    made = graphs.CudaRunner(
        loaded.target, loaded.drafter, loaded.cache, checked.device, attention_kernel.TileAttention, tree_kernel.grow_into
    )
    if config.disable_cuda_graph or faults is not None:  # corruption points are on the host, between the steps
        return made
    if sizes.budget > tiles.MAX_NODES:
        log.warning("trees above %d nodes run without CUDA graphs and Triton attention", tiles.MAX_NODES)
        return made
    shape = graphs.Shape(
        max_requests=min(config.max_running_requests, config.cuda_graph_max_bs or config.max_running_requests),
        max_nodes=sizes.window - 1,
        block=sizes.block,
        k=min(config.speculative_ddtree_topk_cap, checked.target.stack.vocab),
        prompt_rows=min(config.chunked_prefill_size, PROMPT_ROWS),
    )
    made.capture(shape, lambda share: progress("capturing graphs", share))
    return made


def policy(checked: Checked, device: Runner, progress: Callable[[str, float], None]) -> Policy:
    """What decides how much to draft; `auto` knows what passes cost here."""
    if checked.config.speculative_ddtree_budget != AUTO or checked.drafter is None:
        return Fixed()
    from ddtree_engine import measuring

    sizes, running = checked.sizes, checked.config.max_running_requests
    rows = measuring.sizes_up_to(running * (sizes.budget + 1), device.row_sizes or measuring.ROW_SIZES)
    requests = measuring.sizes_up_to(running, device.request_sizes or (1, 2, 4, 8, 16))
    trees = Sizes(sizes.window, sizes.block - 1)
    verify = measuring.measure_verify(device, rows, trees, sizes.context, lambda share: progress("measuring costs", share))
    k = min(checked.config.speculative_ddtree_topk_cap, checked.target.stack.vocab)
    draft = measuring.measure_draft(device, requests, sizes.context, k, trees)
    return Auto(Costs(verify, draft), depth=sizes.block - 1)


def warm_up(engine: Engine, progress: Callable[[str, float], None]) -> None:
    """One short answer per mode; for `auto` also rounds of every kind, which it learns the costs from."""
    progress("warming up", 0.0)
    room = min(engine.info.context_length, 32)
    for mode in dict.fromkeys((SpecMode.OFF, engine.config.speculative_algorithm.mode)):
        sampling = Sampling(max_new_tokens=max(1, room // 2), ignore_eos=True)
        engine.generate([[0] * max(1, room // 2)], sampling, mode)
    if isinstance(auto := engine.policy, Auto):
        most, largest = engine.config.max_running_requests, engine.tree_budget
        rehearsal.rehearse(
            _Stage(engine),
            auto.costs,
            most=most,
            depth=auto.depth,
            largest=largest,
            progress=lambda share: progress("warming up", share),
        )
        engine.policy = auto
    progress("warming up", 1.0)


class _Stage:
    """Rounds of an engine that serves nobody yet."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._ids = engine, list[str]()

    def begin(self, requests: int, prompt: int, give_up: float) -> bool:
        engine = self._engine
        room = engine.info.context_length
        prompt = max(1, min(prompt, room // 4))
        sampling = Sampling(max_new_tokens=room - prompt, ignore_eos=True)
        self._ids = [f"rehearsal-{i}" for i in range(requests)]
        for request_id in self._ids:
            engine.submit(Request(request_id, (0,) * prompt, sampling, SpecMode.TREE))
        engine.policy = Fixed()
        while engine.prefilling:
            if time.perf_counter() >= give_up:
                return False
            engine.step()
        return True

    def play(self, policy: Policy, rounds: int) -> bool:
        self._engine.policy = policy
        return not any(update.finish for _ in range(rounds) for update in self._engine.step())

    def end(self) -> None:
        for request_id in self._ids:
            self._engine.cancel(request_id)
        while self._engine.busy:
            self._engine.step()
