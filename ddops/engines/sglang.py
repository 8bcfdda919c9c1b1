"""SGLang: DFLASH from its main branch, DDTREE from forks (whose flag names differ: `engine.flags`). Pure.

The first name of a flag is today's, as of 0.5.23; those after it are read and changed where a unit has them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddops.engines import argv as words
from ddops.engines.logs import COMMON, fatal
from ddops.engines.profile import FLAGS, OWNED, Profile
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
        more = (("--dtype", engine.dtype), ("--device", engine.device), ("--context-length", engine.context_length))
        out = self.command(engine, engine.model, *more)
        return [*out, *self.speculation(settings, engine.drafter), "--enable-metrics", *engine.extra_args]


SGLANG = _Sglang(
    kind="sglang",
    module="sglang.launch_server",
    commands=("sglang",),
    notify=False,
    flags={
        **FLAGS,
        "algorithm": ("--speculative-algorithm", "--speculative-algo"),
        "draft_model": ("--speculative-draft-model-path", "--speculative-draft-model"),
        "block_size": ("--speculative-dflash-block-size", "--speculative-num-draft-tokens"),
        "cuda_graph_max_bs": ("--cuda-graph-max-bs-decode", "--cuda-graph-max-bs"),
    },
    owned=(*OWNED, "--model", "--admin-api-key"),
    default_max_running=48,  # what DFLASH and DDTREE reset an absent --max-running-requests to
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
