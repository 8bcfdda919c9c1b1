"""SGLang: DFLASH from its main branch, DDTREE from forks (whose flag names differ: `engine.flags`). Pure.

The first name of a flag is today's, as of 0.5.23; those after it are read and changed where a unit has them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddops.engines import argv as words
from ddops.engines.ddtree import DECODE_LINE
from ddops.engines.logs import COMMON, fatal
from ddops.engines.profile import Acceptance, Endpoints, Profile
from ddops.engines.settings import Settings

if TYPE_CHECKING:
    from ddops.inventory import EngineSection


class _Sglang(Profile):
    def _put(self, argv: list[str], setting: str, value: object) -> list[str]:
        out = super()._put(argv, setting, value)
        if setting == "block_size" and value is not None:  # said by both names, they must agree
            for name in self.flags[setting]:
                if words.last(out, (name,)) is not None:
                    out = words.put(out, (name,), str(value))
        return out

    def argv(self, engine: EngineSection, settings: Settings) -> list[str]:
        out = [engine.python, "-m", self.module, "--model-path", engine.model]
        if engine.served_model_name:
            out += ["--served-model-name", engine.served_model_name]
        out += ["--host", engine.listen, "--port", str(engine.port)]
        for flag, value in (
            ("--dtype", engine.dtype),
            ("--device", engine.device),
            ("--context-length", engine.context_length),
        ):
            out += [flag, str(value)] if value is not None else []
        return [*out, *self.speculation(settings, engine.drafter), "--enable-metrics", *engine.extra_args]


SGLANG = _Sglang(
    kind="sglang",
    module="sglang.launch_server",
    commands=("sglang",),
    notify=False,
    flags={
        "algorithm": ("--speculative-algorithm", "--speculative-algo"),
        "draft_model": ("--speculative-draft-model-path", "--speculative-draft-model"),
        "budget": ("--speculative-ddtree-budget",),
        "topk_cap": ("--speculative-ddtree-topk-cap",),
        "block_size": ("--speculative-dflash-block-size", "--speculative-num-draft-tokens"),
        "max_running": ("--max-running-requests",),
        "cuda_graph_max_bs": ("--cuda-graph-max-bs-decode", "--cuda-graph-max-bs"),
    },
    owned=(
        "--model-path",
        "--model",
        "--served-model-name",
        "--host",
        "--port",
        "--dtype",
        "--device",
        "--context-length",
        "--enable-metrics",
        "--api-key",
        "--admin-api-key",
    ),
    default_max_running=48,  # what DFLASH and DDTREE reset an absent --max-running-requests to
    endpoints=Endpoints(
        health_generate="/health_generate",
        info=("/server_info", "/get_server_info"),
        generate="/generate",
        flush_cache="/flush_cache",
    ),
    acceptance=Acceptance(
        verify_passes=("spec_verify_ct",),
        accepted=("spec_num_correct_drafts", "spec_accept_token_num"),
        drafted=("spec_num_proposed_drafts", "spec_draft_token_num"),
        length_metrics=("sglang:spec_accept_length",),
        verify_total=("sglang:spec_verify_calls_total",),
        running_metrics=("sglang:num_running_reqs",),
        log_line=DECODE_LINE,
    ),
    fatal_lines=(
        *COMMON,
        fatal(r"ambiguous option:", "this version of SGLang has another flag for what the unit says (engine.flags)"),
        fatal(r"Not enough memory\. Please try", "SGLang found too little GPU memory for its cache", environment=True),
        fatal(
            r"Scheduler hit an exception|Received sigquit from a child|Rank \d+ scheduler died|detokenizer.{0,20}died",
            "a worker process of SGLang died",
            consequence=True,
        ),
    ),
)
