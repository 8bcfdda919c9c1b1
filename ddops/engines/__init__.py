"""What differs between the engines ddops drives: flags and fatal log lines. Pure.

One module per engine; `PROFILES` is the front door. Nothing here talks to an engine or renders a unit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddops.engines.argv import ArgvError, normalise_argv
from ddops.engines.ddtree import DDTREE
from ddops.engines.logs import FatalLine, Finding
from ddops.engines.profile import Profile
from ddops.engines.settings import AUTO as AUTO_BUDGET
from ddops.engines.settings import Settings
from ddops.engines.sglang import SGLANG
from ddops.engines.vllm import VLLM

if TYPE_CHECKING:
    from ddops.inventory import EngineSection

PROFILES: dict[str, Profile] = {profile.kind: profile for profile in (DDTREE, SGLANG, VLLM)}


def profile_of(engine: EngineSection) -> Profile:
    """The engine's profile with the inventory's own flag names (`engine.flags`) in it."""
    given = {name: flag for name, flag in engine.flags.model_dump().items() if flag}
    return PROFILES[engine.kind].with_flags(given)


__all__ = [
    "AUTO_BUDGET",
    "PROFILES",
    "ArgvError",
    "FatalLine",
    "Finding",
    "Profile",
    "Settings",
    "normalise_argv",
    "profile_of",
]
