"""What every engine profile has: its flags, and how settings go into an argument list and come back. Pure."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ddops.engines import argv as words
from ddops.engines.argv import ArgvError
from ddops.engines.logs import COMMON, FatalLine, Finding, classify
from ddops.engines.settings import AUTO, Settings

if TYPE_CHECKING:
    from ddops.inventory import EngineSection

Flags = Mapping[str, tuple[str, ...]]  # setting -> its flag's names; the first is the one we write
_SPECULATIVE = ("algorithm", "draft_model", "budget", "topk_cap", "block_size")


# SGLang's names, which the ddtree engine shares.
FLAGS: Flags = {
    "algorithm": ("--speculative-algorithm",),
    "draft_model": ("--speculative-draft-model-path",),
    "budget": ("--speculative-ddtree-budget",),
    "topk_cap": ("--speculative-ddtree-topk-cap",),
    "block_size": ("--speculative-dflash-block-size",),
    "max_running": ("--max-running-requests",),
    "cuda_graph_max_bs": ("--cuda-graph-max-bs",),
}
OWNED = (
    "--model-path", "--served-model-name", "--host", "--port", "--dtype", "--device", "--context-length", "--enable-metrics",
    "--api-key",
)  # fmt: skip


@dataclass(frozen=True)
class Profile(ABC):
    """One kind of engine.

    Attributes:
        notify: the engine tells systemd when it is ready (Type=notify, else Type=exec).
        default_max_running: what the engine assumes when the flag is absent (None: not known).
        defaults: what ddops passes explicitly when nobody gave a value.
        max_budget: the engine's own limit; max_budget_gpu: that of its GPU kernels.
    """

    kind: str
    module: str
    notify: bool
    flags: Flags
    fatal_lines: tuple[FatalLine, ...] = COMMON
    default_max_running: int | None = None
    default_block_size: int = 16
    defaults: Settings = field(default_factory=Settings)
    algorithms: tuple[str, ...] = ("DDTREE", "DFLASH", "NONE")
    writes_none: bool = False  # `--speculative-algorithm NONE` is a value the engine knows
    takes_auto_budget: bool = False
    max_budget: int | None = None
    max_budget_gpu: int | None = None
    owned: tuple[str, ...] = OWNED  # flags ddops sets from other inventory fields; the first names the model
    commands: tuple[str, ...] = ()  # console scripts that are this engine

    # ------------------------------------------------------------ flags
    def with_flags(self, names: Mapping[str, str]) -> Profile:
        """This profile with a fork's own flag names; the usual ones are no longer looked for."""
        return replace(self, flags={**self.flags, **{key: (flag,) for key, flag in names.items()}})

    def owned_flags(self) -> frozenset[str]:
        """Flags that ddops sets itself, so that `extra_args` must not."""
        return frozenset(self.owned).union(*self.flags.values())

    def flag(self, setting: str) -> str:
        """The flag's name as ddops writes it; "" when the engine has none."""
        return self.flags.get(setting, ("",))[0]

    def _others(self, setting: str) -> tuple[str, ...]:
        return tuple(self.owned_flags() - set(self.flags[setting]))

    def _pair(self, setting: str, value: object) -> list[str]:
        return [self.flag(setting), str(value)] if value is not None and self.flag(setting) else []

    def speculation(self, settings: Settings, drafter: str) -> list[str]:
        """The flags of the settings, in a fixed order."""
        out: list[str] = []
        if settings.drafts or self.writes_none:
            out += self._pair("algorithm", settings.algorithm)
        if settings.drafts:
            out += self._pair("draft_model", drafter or None)
            if settings.tree:
                out += self._pair("budget", settings.budget) + self._pair("topk_cap", settings.topk_cap)
            out += self._pair("block_size", settings.block_size)
        out += self._pair("max_running", settings.max_running)
        return out + self._pair("cuda_graph_max_bs", settings.cuda_graph_max_bs)

    def command(self, engine: EngineSection, model: str, *more: tuple[str, object]) -> list[str]:
        """The start of a command, as far as the model and the address; of `more`, the flags that have a value."""
        pairs = [(self.owned[0], model), ("--served-model-name", engine.served_model_name)]
        pairs += [("--host", engine.listen), ("--port", str(engine.port))]
        given = [(flag, value) for flag, value in (*pairs, *more) if value not in (None, "")]
        return [engine.python, "-m", self.module, *(str(word) for pair in given for word in pair)]

    @abstractmethod
    def argv(self, engine: EngineSection, settings: Settings) -> list[str]:
        """The whole command of a rendered unit."""

    # ------------------------------------------------------------ back from an argument list
    def runs_in(self, argv: Sequence[str]) -> bool:
        """Whether this argument list starts this engine, straight or through an interpreter or wrapper."""
        for index, word in enumerate(argv):
            if word == "-m" and index + 1 < len(argv):
                return argv[index + 1] == self.module or argv[index + 1].startswith(self.module + ".")
            if word.rsplit("/", 1)[-1] in self.commands:
                return True
            if word.startswith("--") and index:
                break
        return False

    def parse_argv(self, argv: Sequence[str]) -> Settings:
        """Settings an engine with this argument list was started with; what is absent is None.

        Raises:
            ArgvError: a flag without a value, or a value that is no number where one is needed.
        """
        raw = {name: self._last(argv, name) for name in self.flags}
        algorithm = (raw.get("algorithm") or "NONE").upper()
        return Settings(
            algorithm=algorithm,
            budget=self._number("budget", raw.get("budget"), auto=self.takes_auto_budget),
            topk_cap=_whole(self._number("topk_cap", raw.get("topk_cap"))),
            max_running=_whole(self._number("max_running", raw.get("max_running"))),
            block_size=_whole(self._number("block_size", raw.get("block_size"))),
            cuda_graph_max_bs=_whole(self._number("cuda_graph_max_bs", raw.get("cuda_graph_max_bs"))),
        )

    def _last(self, argv: Sequence[str], setting: str) -> str | None:
        found = words.last(argv, self.flags[setting], self._others(setting))
        return found.value if found else None

    def _number(self, setting: str, value: str | None, *, auto: bool = False) -> int | str | None:
        if value is None or (auto and value == AUTO):
            return value
        if not re.fullmatch(r"[1-9][0-9]{0,9}", value):
            raise ArgvError(f"{self.flag(setting)} {value!r} is no positive number", "correct it by hand first")
        return int(value)

    def amend(self, argv: Sequence[str], settings: Settings, drafter: str = "") -> list[str]:
        """`argv` with these settings: only the words of changed flags differ; None leaves a flag alone.

        Raises:
            ArgvError: speculation is switched on where no drafter is named.
        """
        out = list(argv)
        if not settings.drafts:
            for name in _SPECULATIVE:
                if name == "algorithm" and self.writes_none:
                    out = self._put(out, name, settings.algorithm)
                else:
                    out = self._drop(out, name)
        else:
            out = self._put(out, "algorithm", settings.algorithm)
            if self._last(out, "draft_model") is None:
                if not drafter:
                    raise ArgvError("the unit names no drafter", "set engine.drafter in the inventory")
                out = self._put(out, "draft_model", drafter)
            if settings.tree:
                out = self._put(out, "budget", settings.budget)
                out = self._put(out, "topk_cap", settings.topk_cap)
            out = self._put(out, "block_size", settings.block_size)
        out = self._put(out, "max_running", settings.max_running)
        return self._put(out, "cuda_graph_max_bs", settings.cuda_graph_max_bs)

    def _put(self, argv: list[str], setting: str, value: object) -> list[str]:
        if value is None or not self.flag(setting):
            return argv
        return words.put(argv, self.flags[setting], str(value), self._others(setting))

    def _drop(self, argv: list[str], setting: str) -> list[str]:
        return words.drop(argv, self.flags[setting], self._others(setting)) if self.flag(setting) else argv

    # ------------------------------------------------------------ what the engine says and what follows
    def reported(self, info: Mapping[str, Any] | None) -> Settings | None:
        """Settings as `/server_info` reports them; None where the engine does not report any."""
        if not info:
            return None
        args = info.get("server_args") if isinstance(info.get("server_args"), Mapping) else None
        found = {name: self._reported(info, args or {}, name) for name in self.flags}
        if found.get("algorithm") is None and not any(_key(self.flag("algorithm")) in d for d in (info, args or {})):
            return None
        algorithm = str(found.get("algorithm") or "NONE").upper()
        return Settings.from_dict({**found, "algorithm": algorithm})

    def _reported(self, info: Mapping[str, Any], args: Mapping[str, Any], setting: str) -> Any:
        for name in self.flags[setting]:
            for source in (info, args):
                value = source.get(_key(name))
                if value is not None:
                    return int(value) if isinstance(value, str) and value.isdigit() else value
        return None

    def verify_width(self, settings: Settings) -> int:
        """Rows one request takes in a verify pass: the tree's nodes and its root, or the chain."""
        block = settings.block_size or self.default_block_size
        if not settings.drafts:
            return 1
        if not settings.tree:
            return block
        if settings.budget is None:
            return self._default_budget(settings) + 1
        if settings.budget == AUTO:
            return (self.max_budget_gpu or block) + 1  # it may use that much for one request
        return int(settings.budget) + 1

    def _default_budget(self, settings: Settings) -> int:
        """What the engine takes for a budget nobody gave."""
        return (settings.block_size or self.default_block_size) - 1

    def unsupported(self, settings: Settings) -> list[tuple[str, str]]:
        """(what, hint) for each setting this engine can't have."""
        out: list[tuple[str, str]] = []
        if settings.algorithm not in self.algorithms:
            known = ", ".join(self.algorithms)
            out.append((f"{self.kind} has no speculative algorithm {settings.algorithm}", f"it has {known}"))
        if settings.budget == AUTO and not self.takes_auto_budget:
            out.append((f"{self.kind} takes no budget auto", "give a number; only the ddtree engine tunes it itself"))
        for name in ("topk_cap", "block_size", "cuda_graph_max_bs"):
            if getattr(settings, name) is not None and not self.flag(name):
                out.append((f"{self.kind} has no {name.replace('_', '-')}", "leave it out for this engine"))
        return out

    def classify_log(self, lines: Sequence[str]) -> list[Finding]:
        """Fatal lines with their meaning, in order; consequences only when no cause is among them."""
        return classify(lines, self.fatal_lines)


def _key(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def _whole(value: int | str | None) -> int | None:
    return value if isinstance(value, int) else None
