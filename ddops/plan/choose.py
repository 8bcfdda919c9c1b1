"""Which value each setting gets, and from where: the request, what is verified on the host, the inventory,
or the engine. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ddops.engines import Profile, Settings, profile_of
from ddops.engines.settings import AUTO
from ddops.errors import UsageError
from ddops.plan import memory
from ddops.state import Observed
from ddops.units import UnitError, parse

if TYPE_CHECKING:
    from ddops.inventory import HostConfig

REQUEST, VERIFIED, INVENTORY, ENGINE = "request", "verified on the host", "inventory", "engine default"
FIELDS = ("algorithm", "budget", "topk_cap", "max_running", "block_size", "cuda_graph_max_bs")
_TREE_ONLY = ("topk_cap",)


@dataclass(frozen=True, slots=True)
class Request:
    """What the operator asked for; None: not asked."""

    budget: int | str | None = None  # a number, or "auto"
    topk_cap: int | None = None
    max_running: int | str | None = None  # a number, or "auto"
    algorithm: str | None = None
    retry_known_bad: bool = False
    force_restart: bool = False
    from_broken: bool = False


@dataclass(frozen=True, slots=True)
class Choice:
    """The settings, where each came from, and what the host has verified now (None: nothing)."""

    settings: Settings
    sources: dict[str, str]
    verified: Settings | None
    auto_running: bool  # max_running is still to be computed from the limit


def checked(request: Request, profile: Profile) -> Request:
    """The request, or a UsageError naming what can't be carried out as written."""
    for name, flag in (("budget", "--budget"), ("topk_cap", "--topk-cap"), ("max_running", "--max-running")):
        value = getattr(request, name)
        if value is None or (value == AUTO and name != "topk_cap"):
            continue
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 1_000_000:
            raise UsageError(f"{flag} {value!r} is no positive number", means="no host was changed")
    algorithm = (request.algorithm or "").upper() or None
    if algorithm and algorithm not in profile.algorithms:
        raise UsageError(
            f"{profile.kind} has no algorithm {request.algorithm!r}",
            means="no host was changed",
            hint=f"it has {', '.join(profile.algorithms)}",
        )
    return replace(request, algorithm=algorithm)


def verified_settings(config: HostConfig, observed: Observed) -> Settings | None:
    """Settings of the last verified configuration: read from its unit where that is in /etc, else as recorded."""
    entry = memory.last_verified(observed)
    if entry is None:
        return None
    if observed.etc_unit is not None and memory.digest_of(observed.etc_unit) == entry.digest:
        try:
            return profile_of(config.engine).parse_argv(parse(observed.etc_unit, config.engine.unit).argv)
        except UnitError:
            pass  # fall back on what was recorded with the proof
    return Settings.from_dict(entry.settings) if entry.settings else None


def choose(config: HostConfig, request: Request, observed: Observed) -> Choice:
    """Raises UsageError for a request that has no effect or no meaning on this engine."""
    profile = profile_of(config.engine)
    request = checked(request, profile)
    verified = verified_settings(config, observed)
    picked: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for name in FIELDS:
        algorithm = picked.get("algorithm")
        picked[name], sources[name] = _pick(name, algorithm, config, request, verified, profile)
    auto_running = picked["max_running"] == AUTO
    if auto_running:
        picked["max_running"] = None
    settings = _only_what_counts(Settings(**picked), request, profile)
    for what, hint in profile.unsupported(settings):
        raise UsageError(what, means="no host was changed", hint=hint)
    return Choice(settings, sources, verified, auto_running)


def _pick(
    name: str,
    algorithm: str | None,
    config: HostConfig,
    request: Request,
    verified: Settings | None,
    profile: Profile,
) -> tuple[Any, str]:
    asked = getattr(request, name, None)
    if asked is not None:
        return asked, REQUEST
    # What another algorithm left out is no choice that anybody made.
    if verified is not None and (name == "algorithm" or _counts(name, verified, profile)):
        value = getattr(verified, name)
        return (value, VERIFIED) if value is not None else _engine(name, profile)
    inventory = config.spec.max_running_requests if name == "max_running" else getattr(config.spec, name)
    if name == "algorithm":
        return inventory, INVENTORY if name in config.spec.model_fields_set else ENGINE
    if inventory is not None:
        return inventory, INVENTORY
    return _engine(name, profile)


def _engine(name: str, profile: Profile) -> tuple[Any, str]:
    """ddtree's defaults are written into its unit; other engines' stay theirs (None)."""
    return getattr(profile.defaults, name) if name != "algorithm" else None, ENGINE


def _counts(name: str, settings: Settings, profile: Profile) -> bool:
    """Whether a setting has any effect with this algorithm on this engine."""
    if name == "budget":
        return settings.tree or (settings.drafts and "DDTREE" not in profile.algorithms)
    if name in _TREE_ONLY:
        return settings.tree
    return settings.drafts if name == "block_size" else True


def _only_what_counts(settings: Settings, request: Request, profile: Profile) -> Settings:
    """Leave out what has no effect; what was asked for in so many words is refused instead."""
    gone: dict[str, Any] = {}
    for name, flag in (("budget", "--budget"), ("topk_cap", "--topk-cap"), ("block_size", "")):
        if _counts(name, settings, profile):
            continue
        if flag and getattr(request, name) is not None:
            raise UsageError(
                f"{flag} has no effect with {settings.algorithm} on {profile.kind}",
                means="no host was changed",
                hint="leave it out" + (", or add --algorithm DDTREE" if "DDTREE" in profile.algorithms else ""),
            )
        gone[name] = None
    return replace(settings, **gone) if gone else settings
