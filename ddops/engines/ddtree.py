"""The ddtree engine that comes with ddops. Pure."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ddops.engines.logs import COMMON, fatal
from ddops.engines.profile import Acceptance, Endpoints, Profile
from ddops.engines.settings import Settings

if TYPE_CHECKING:
    from ddops.inventory import EngineSection

DECODE_LINE = re.compile(  # the accept fields are left out when nothing speculated
    r"Decode batch.*?#running-req: (?P<running>\d+)(?:.*?accept len: (?P<length>[\d.]+))?"
    r"(?:.*?accept rate: (?P<rate>[\d.]+))?(?:.*?cuda graph: (?P<graph>True|False))?"
    r".*?gen throughput \(token/s\): (?P<throughput>[\d.]+)"
)
CREDENTIAL = "api-key"


def credential_path(unit: str) -> str:
    """Where systemd puts a system unit's credential (systemd.exec(5), LoadCredential=)."""
    return f"/run/credentials/{unit}/{CREDENTIAL}"


def below(folder: str, path: str) -> str:
    """`path` as it is when absolute, else below the release folder."""
    return path if path.startswith("/") else f"{folder}/{path}"


class _Ddtree(Profile):
    def argv(self, engine: EngineSection, settings: Settings) -> list[str]:
        folder = engine.release_folder
        out = [engine.python, "-m", self.module, "--model-path", below(folder, engine.model)]
        if engine.served_model_name:
            out += ["--served-model-name", engine.served_model_name]
        out += ["--host", engine.listen, "--port", str(engine.port)]
        for flag, value in (
            ("--dtype", engine.dtype),
            ("--device", engine.device),
            ("--context-length", engine.context_length),
        ):
            out += [flag, str(value)] if value is not None else []
        out += self.speculation(settings, below(folder, engine.drafter) if engine.drafter else "")
        out.append("--enable-metrics")
        if engine.api_key_file:
            out += ["--api-key-file", credential_path(engine.unit)]
        return [*out, *engine.extra_args]

    def _default_budget(self, settings: Settings) -> int:
        return settings.block_size or self.default_block_size


DDTREE = _Ddtree(
    kind="ddtree",
    module="ddtree_engine",
    commands=("ddtree-engine",),
    notify=True,
    flags={
        "algorithm": ("--speculative-algorithm",),
        "draft_model": ("--speculative-draft-model-path",),
        "budget": ("--speculative-ddtree-budget",),
        "topk_cap": ("--speculative-ddtree-topk-cap",),
        "block_size": ("--speculative-dflash-block-size",),
        "max_running": ("--max-running-requests",),
        "cuda_graph_max_bs": ("--cuda-graph-max-bs",),
    },
    owned=(
        "--model-path",
        "--served-model-name",
        "--host",
        "--port",
        "--dtype",
        "--device",
        "--context-length",
        "--enable-metrics",
        "--api-key-file",
        "--api-key",
    ),
    default_max_running=16,
    # The unit says everything that matters, so nothing of a configuration hides in a build's defaults.
    defaults=Settings(algorithm="DDTREE", budget=16, topk_cap=8, max_running=16),
    writes_none=True,
    takes_auto_budget=True,
    max_budget=1024,
    max_budget_gpu=64,  # a row's ancestors are one 64-bit mask there
    endpoints=Endpoints(
        health_generate="/health_generate",
        info=("/server_info", "/get_server_info"),
        generate="/generate",
        flush_cache="/flush_cache",
    ),
    acceptance=Acceptance(
        length_metrics=("sglang:spec_accept_length",),
        verify_total=("ddtree:verify_passes_total",),
        committed_total=("ddtree:committed_tokens_total",),
        running_metrics=("sglang:num_running_reqs",),
        log_line=DECODE_LINE,
    ),
    fatal_lines=(
        *COMMON,
        fatal(r"device thread (is dead|died|ended)", "the engine's device thread died", consequence=True),
        fatal(r"^ddtree-engine: error: \S+ lacks ", "the engine's Python lacks packages it always needs", environment=True),
        fatal(r"\bConfigError\b|^(ddtree-engine: )?error: ", "the engine refuses its configuration", consequence=True),
    ),
)
