"""The ddtree engine that comes with ddops. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddops.engines.logs import COMMON, fatal
from ddops.engines.profile import FLAGS, OWNED, Profile
from ddops.engines.settings import Settings

if TYPE_CHECKING:
    from ddops.inventory import EngineSection

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
        more = (("--dtype", engine.dtype), ("--device", engine.device), ("--context-length", engine.context_length))
        out = self.command(engine, below(folder, engine.model), *more)
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
    flags=FLAGS,
    owned=(*OWNED, "--api-key-file"),
    default_max_running=16,
    # The unit says everything that matters, so nothing of a configuration hides in a build's defaults.
    defaults=Settings(algorithm="DDTREE", budget=16, topk_cap=8, max_running=16),
    writes_none=True,
    takes_auto_budget=True,
    max_budget=1024,
    max_budget_gpu=64,  # a row's ancestors are one 64-bit mask there
    fatal_lines=(
        *COMMON,
        fatal(r"device thread (is dead|died|ended)", "the engine's device thread died", consequence=True),
        fatal(r"^ddtree-engine: error: \S+ lacks ", "the engine's Python lacks packages it always needs", environment=True),
        fatal(r"\bConfigError\b|^(ddtree-engine: )?error: ", "the engine refuses its configuration", consequence=True),
    ),
)
