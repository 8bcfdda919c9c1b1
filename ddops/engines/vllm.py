"""vLLM: the DFlash drafter as a chain; its settings are one JSON value, `--speculative-config`. Pure.

The budget is the number of draft tokens a pass (at most the drafter's block less one). vLLM has no tree
drafting, so there is no topk-cap.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ddops.engines import argv as words
from ddops.engines.argv import ArgvError
from ddops.engines.logs import COMMON, fatal
from ddops.engines.profile import Profile
from ddops.engines.settings import Settings

if TYPE_CHECKING:
    from ddops.inventory import EngineSection

CONFIG = ("--speculative-config", "-sc")
_DOTTED = "--speculative-config."
_SHORT = {"method": ("--spec-method",), "model": ("--spec-model",), "num_speculative_tokens": ("--spec-tokens",)}


class _Vllm(Profile):
    def argv(self, engine: EngineSection, settings: Settings) -> list[str]:
        out = self.command(engine, engine.model, ("--dtype", engine.dtype), ("--max-model-len", engine.context_length))
        if settings.drafts:
            config = {"method": settings.algorithm.lower(), "model": engine.drafter}
            out += [CONFIG[0], _dump(_with_tokens(config, settings))]
        out += self._pair("max_running", settings.max_running)
        out += self._pair("cuda_graph_max_bs", settings.cuda_graph_max_bs)
        return [*out, *engine.extra_args]

    def owned_flags(self) -> frozenset[str]:
        return super().owned_flags() | set(CONFIG).union(*_SHORT.values())

    def parse_argv(self, argv: Sequence[str]) -> Settings:
        base = super().parse_argv(argv)
        config = self._config(argv)
        tokens = config.get("num_speculative_tokens")
        if tokens is not None and (not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 1):
            raise ArgvError(f"num_speculative_tokens {tokens!r} is no positive number", "correct it by hand first")
        return Settings(
            algorithm=str(config.get("method", "draft_model")).upper() if config else "NONE",
            budget=tokens,
            max_running=base.max_running,
            cuda_graph_max_bs=base.cuda_graph_max_bs,
        )

    def amend(self, argv: Sequence[str], settings: Settings, drafter: str = "") -> list[str]:
        out, config = list(argv), self._config(argv)
        if not settings.drafts:
            out = words.drop(_bare(out), CONFIG)
        elif self.parse_argv(argv) != settings or not config:
            changed = dict(config)
            changed.setdefault("model", drafter)
            if not changed["model"]:
                raise ArgvError("the unit names no drafter", "set engine.drafter in the inventory")
            changed["method"] = settings.algorithm.lower()
            changed = _with_tokens(changed, settings)
            if changed != config:  # the other spellings are folded into the one value, so that nothing is said twice
                out = words.put(_bare(out), CONFIG, _dump(changed))
        out = self._put(out, "max_running", settings.max_running)
        return self._put(out, "cuda_graph_max_bs", settings.cuda_graph_max_bs)

    def _config(self, argv: Sequence[str]) -> dict[str, Any]:
        found = words.last(argv, CONFIG, tuple(super().owned_flags()))
        # vLLM takes the keys with dashes as well.
        config: dict[str, Any] = {k.replace("-", "_"): v for k, v in _load(found.value).items()} if found else {}
        for word, value in _dotted(argv):
            config[word.removeprefix(_DOTTED).replace("-", "_")] = _scalar(value)
        for key, flag in _SHORT.items():
            short = words.last(argv, flag)
            if short is not None:
                config[key] = _scalar(short.value) if key == "num_speculative_tokens" else short.value
        return config

    def reported(self, info: Mapping[str, Any] | None) -> Settings | None:
        return None  # a production vLLM does not tell its arguments; the running argv does

    def verify_width(self, settings: Settings) -> int:
        if not settings.drafts:
            return 1
        return (int(settings.budget) if settings.budget is not None else self.default_block_size - 1) + 1


def _dotted(argv: Sequence[str]) -> list[tuple[str, str]]:
    pairs = []
    for index, word in enumerate(argv):
        if not word.startswith(_DOTTED):
            continue
        flag, equals, value = word.partition("=")
        if not equals and index + 1 >= len(argv):
            raise ArgvError(f"{flag} has no value", "give it one, or remove it")
        pairs.append((flag, value if equals else argv[index + 1]))
    return pairs


def _bare(argv: Sequence[str]) -> list[str]:
    """Without the spellings of the configuration that are not the one value."""
    out = _without_dotted(argv)
    for flag in _SHORT.values():
        out = words.drop(out, flag)
    return out


def _without_dotted(argv: Sequence[str]) -> list[str]:
    out: list[str] = []
    skip = False
    for word in argv:
        if skip or word.startswith(_DOTTED):
            skip = not skip and "=" not in word
            continue
        out.append(word)
    return out


def _load(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise ArgvError(f"--speculative-config {text[:80]!r} is no JSON object", "correct it by hand first")
    return value


def _scalar(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _with_tokens(config: dict[str, Any], settings: Settings) -> dict[str, Any]:
    return config if settings.budget is None else config | {"num_speculative_tokens": settings.budget}


def _dump(config: Mapping[str, Any]) -> str:
    return json.dumps(config, ensure_ascii=False, separators=(",", ":"))


VLLM = _Vllm(
    kind="vllm",
    module="vllm.entrypoints.openai.api_server",
    commands=("vllm",),
    notify=False,
    flags={
        "max_running": ("--max-num-seqs",),
        "cuda_graph_max_bs": ("--max-cudagraph-capture-size",),
    },
    owned=("--model", "--served-model-name", "--host", "--port", "--dtype", "--max-model-len", "--api-key"),
    algorithms=("DFLASH", "NONE"),
    default_max_running=1024,  # the larger of its defaults (256 on smaller GPUs): a limit must hold for both
    fatal_lines=(
        *COMMON,
        fatal(
            r"less than (desired|requested)|No available memory for the cache blocks",
            "vLLM found too little memory for its cache",
            environment=True,
        ),
        fatal(r"greater than the derived max_model_len", "the context length is above the model's own"),
        fatal(r"ValidationError", "vLLM refuses its configuration"),
        fatal(
            r"EngineDeadError|Engine core initialization failed|EngineCore encountered a fatal error"
            r"|Worker proc \S+ died unexpectedly|engine core exited unexpectedly",
            "vLLM's engine process died",
            consequence=True,
        ),
    ),
)
