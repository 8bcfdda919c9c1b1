"""Rules over several fields of one resolved host. Pure; each names the field to change."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ddops.engines import profile_of
from ddops.engines.settings import Settings
from ddops.inventory.yaml_lines import Path

if TYPE_CHECKING:
    from ddops.inventory.model import HostConfig

Rule = tuple[Path, str, str]  # field, what, hint
_OWN_VARIABLES = ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE", "XDG_CACHE_HOME", "TRITON_CACHE_DIR")


def broken(host: HostConfig) -> Iterator[Rule]:
    """What is wrong with this host as a whole."""
    yield from _engine(host)
    yield from _speculation(host)
    yield from _arguments(host)
    yield from _waits(host)


def _engine(host: HostConfig) -> Iterator[Rule]:
    engine = host.engine
    if not engine.model:
        yield ("engine", "model"), "is missing", "name the target model's folder"
    if engine.kind == "ddtree" and not engine.release:
        yield (
            ("engine", "release"),
            "is missing",
            f"name the release's folder below {engine.releases_dir}; ddops install puts it there",
        )
    if engine.kind != "ddtree" and (engine.release or engine.source):
        field = "release" if engine.release else "source"
        yield ("engine", field), "only the ddtree engine is installed as a release", "remove it for this host"
    if engine.kind != "sglang" and any(engine.flags.model_dump().values()):
        yield ("engine", "flags"), f"{engine.kind} has no forks with other flag names", "remove it for this host"
    if engine.kind == "ddtree" and engine.dtype not in (None, "auto", "float32", "bfloat16"):
        yield ("engine", "dtype"), f"{engine.dtype!r} is not one of auto, float32, bfloat16", ""
    if engine.kind == "ddtree" and engine.device not in (None, "auto", "cpu", "cuda"):
        yield ("engine", "device"), f"{engine.device!r} is not one of auto, cpu, cuda", ""
    if engine.kind == "vllm" and engine.device is not None:
        yield ("engine", "device"), "vLLM's device comes with its build", "remove it for this host"
    if any(char in engine.python for char in " \t\"'\\$%;"):
        yield ("engine", "python"), "a program's path must not hold blanks, quotes, \\, $, % or ;", ""


def _speculation(host: HostConfig) -> Iterator[Rule]:
    spec = host.spec
    if spec.algorithm != "NONE" and not host.engine.drafter:
        yield ("engine", "drafter"), f"is missing: {spec.algorithm} drafts", "name it, or set spec.algorithm: NONE"
    settings = Settings(spec.algorithm, spec.budget, spec.topk_cap, None, spec.block_size, spec.cuda_graph_max_bs)
    profile = profile_of(host.engine)
    for what, hint in profile.unsupported(settings):
        yield ("spec", _named(what)), what, hint
    if profile.max_budget and isinstance(spec.budget, int) and spec.budget > profile.max_budget:
        yield ("spec", "budget"), f"{spec.budget} is above the engine's own limit {profile.max_budget}", ""


def _named(what: str) -> str:
    words = (("algorithm", "algorithm"), ("budget", "budget"), ("topk-cap", "topk_cap"), ("block-size", "block_size"))
    return next((field for word, field in words if word in what), "cuda_graph_max_bs")


def _arguments(host: HostConfig) -> Iterator[Rule]:
    owned = profile_of(host.engine).owned_flags()
    for index, word in enumerate(host.engine.extra_args):
        flag = word.partition("=")[0].replace("_", "-") if word.startswith("--") else word
        if "api-key" in flag or flag.endswith(("-token", "-password", "-secret")):
            yield (
                ("engine", "extra_args", index),
                f"{flag} would put a secret where every user of the host can read it",
                "use engine.api_key_file",
            )
        elif flag in owned or flag.startswith("--speculative-config."):
            yield (
                ("engine", "extra_args", index),
                f"{flag} is set by ddops itself",
                "use the inventory's own field for it",
            )
    for name in host.engine.environment:
        if host.engine.kind == "ddtree" and name in _OWN_VARIABLES:
            yield ("engine", "environment", name), "is set by ddops itself for this engine", "remove it"


def _waits(host: HostConfig) -> Iterator[Rule]:
    guard, ready = host.guard, host.ready
    if guard.seconds > guard.cap_seconds:
        yield ("guard", "seconds"), f"{guard.seconds:g} is above guard.cap_seconds {guard.cap_seconds:g}", ""
    # The guard must outlast the wait, or a healthy but slow engine would be undone while it still loads.
    if guard.cap_seconds <= ready.timeout_seconds:
        yield (
            ("guard", "cap_seconds"),
            f"{guard.cap_seconds:g} is not above ready.timeout_seconds {ready.timeout_seconds:g}, so the"
            " guard would undo an engine that is still allowed to load",
            "leave room for the proof as well: ready.timeout_seconds plus ten minutes or more",
        )
    if ready.probe_timeout_seconds > ready.timeout_seconds:
        yield ("ready", "probe_timeout_seconds"), "is above ready.timeout_seconds", ""
