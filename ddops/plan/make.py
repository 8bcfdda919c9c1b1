"""Desired and observed into a plan: what happens to the unit, why each value, and why it may not be done. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from ddops import units
from ddops.engines import Settings, normalise_argv, profile_of
from ddops.engines.settings import AUTO
from ddops.plan import memory, preflight
from ddops.plan.choose import Choice, Request, choose
from ddops.plan.preflight import Refusal
from ddops.state import Observed
from ddops.units import Unit

if TYPE_CHECKING:
    from ddops.inventory import HostConfig

__all__ = ["Action", "Plan", "Request", "make"]


class Action(StrEnum):
    """What has to happen on the host."""

    UNCHANGED = "unchanged"  # it runs this, and its proof stands
    VERIFY = "verify"  # it runs this, but is not proven in this start: prove, without a restart
    SWITCH = "switch"  # another unit, or a restart

    @property
    def changes_host(self) -> bool:
        return self is Action.SWITCH


@dataclass(frozen=True, slots=True)
class Plan:
    """What would be done to one host, and everything a person needs to judge it.

    sources: setting -> request | verified on the host | inventory | engine default.
    restore: digest of the unit in /etc, which an undo goes back to; None: there is none.
    """

    host: str
    action: Action
    settings: Settings
    sources: dict[str, str]
    unit: Unit
    restore: str | None
    diff: str
    argv_diff: str
    refusals: tuple[Refusal, ...] = ()
    warnings: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """For events and --json; holds no secret (diffs are masked)."""
        return {
            "action": str(self.action),
            "settings": self.settings.to_dict(),
            "sources": dict(self.sources),
            "digest": self.unit.digest,
            "restore": self.restore,
            "diff": self.diff,
            "argv_diff": self.argv_diff,
            "refusals": [asdict(refusal) for refusal in self.refusals],
            "warnings": list(self.warnings),
        }


def make(config: HostConfig, request: Request, observed: Observed, *, own_run: str | None = None) -> Plan:
    """Plan one change on one host.

    Args:
        own_run: this run's id; a lease of any other run is then mentioned.

    Raises:
        UsageError: the request can't be carried out as written on this engine.
        UnitError, ArgvError: the adopted unit can't be understood or changed.
    """
    choice = choose(config, request, observed)
    settings = _with_auto_running(config, choice, observed)
    unit = _unit(config, settings, observed)
    action = _action(unit, request, observed)
    return Plan(
        host=config.name,
        action=action,
        settings=settings,
        sources=choice.sources,
        unit=unit,
        restore=memory.digest_of(observed.etc_unit) or None,
        diff=units.diff(observed.etc_unit, unit.text, config.engine.unit),
        argv_diff=units.argv_diff(normalise_argv(unit.argv, observed.argv), unit.argv) if observed.argv else "",
        refusals=tuple(_refusals(action, config, request, settings, observed)),
        warnings=tuple(_warnings(action, config, choice, settings, observed, own_run)),
    )


def _with_auto_running(config: HostConfig, choice: Choice, observed: Observed) -> Settings:
    """max-running auto: the largest power of two within the limit; without a limit, the engine's own default."""
    settings = choice.settings
    if not choice.auto_running:
        return settings
    profile = profile_of(config.engine)
    limit = preflight.rows_limit(config, observed)
    if limit is None:
        return replace(settings, max_running=profile.defaults.max_running)
    fits = limit[1] // profile.verify_width(settings)
    # With no room for even one request, 1 is left for the product rule to refuse with its numbers.
    return replace(settings, max_running=preflight.largest_power_of_two(max(1, fits)))


def _unit(config: HostConfig, settings: Settings, observed: Observed) -> Unit:
    """Rendered from the template, or the adopted unit with only its flags changed."""
    current, name = observed.etc_unit, config.engine.unit
    if current is None or units.is_ours(current) or not preflight.adopted(observed):
        return units.render(config, settings)
    profile = profile_of(config.engine)
    argv = units.parse(current, name).argv
    return units.amend(current, profile.amend(argv, settings, config.engine.drafter), name)


def _action(unit: Unit, request: Request, observed: Observed) -> Action:
    if request.force_restart or not _runs(unit, observed):
        return Action.SWITCH
    return Action.UNCHANGED if memory.verification(observed).verified else Action.VERIFY


def _runs(unit: Unit, observed: Observed) -> bool:
    """/etc = rendered = loaded = running."""
    loaded = observed.loaded_fragment if observed.loaded_fragment is not None else observed.etc_unit
    return (
        memory.digest_of(observed.etc_unit) == unit.digest
        and memory.digest_of(loaded) == unit.digest
        and not observed.unit.need_daemon_reload
        and observed.unit.running
        and normalise_argv(unit.argv, observed.argv) == list(unit.argv)
    )


def _refusals(
    action: Action, config: HostConfig, request: Request, settings: Settings, observed: Observed
) -> Iterator[Refusal]:
    if action is Action.UNCHANGED:
        return  # nothing is touched, so nothing stands in the way
    yield from preflight.host(config, observed)
    if action is Action.VERIFY:
        return
    yield from preflight.ownership(config, observed)
    yield from preflight.engine_limits(config, settings, observed)
    over = preflight.product(config, settings, observed)
    if over is not None:
        yield over
    bad = None if request.retry_known_bad else preflight.remembered(config, settings, observed)
    if bad is not None:
        yield bad
    yield from preflight.room(config, observed)


# ---------------------------------------------------------------- what is worth saying
def _warnings(
    action: Action, config: HostConfig, choice: Choice, settings: Settings, observed: Observed, own_run: str | None
) -> Iterator[str]:
    yield from _about_the_host(action, config, observed, own_run)
    yield from _about_the_tree(config, choice, settings)
    yield from _about_capacity(config, choice, settings, observed)
    yield from _about_the_inventory(config, choice)


def _about_the_host(action: Action, config: HostConfig, observed: Observed, own_run: str | None) -> Iterator[str]:
    lease = observed.lease
    if own_run is not None and lease is not None and lease.run != own_run and lease.expires_in_seconds > 0:
        left = f"{lease.expires_in_seconds:.0f} s at least"
        yield f"{config.name} is held by {lease.holder} ({lease.command}), for {left}"
    if action is not Action.SWITCH:
        return
    if observed.etc_unit is None:
        yield f"{config.name} has no unit yet: if this one is not proven, the engine is left stopped"
    elif not observed.unit.running:
        yield f"the engine on {config.name} is {observed.unit.active_state} ({observed.unit.result}) before the change"
    last = memory.last_verified(observed)
    if observed.etc_unit is not None and last is not None and memory.digest_of(observed.etc_unit) != last.digest:
        yield "the unit in /etc is not the last verified one; the diff shows what would be replaced"
    if config.arch and observed.arch != config.arch:
        yield f"the inventory says {config.arch}, the host shows {observed.arch}; the stricter limit is used"
    if not observed.fence_works and config.fence.enabled:
        yield "this host can't fence a trial: users may reach the engine before it is proven"


def _about_the_tree(config: HostConfig, choice: Choice, settings: Settings) -> Iterator[str]:
    if not settings.tree or not isinstance(settings.budget, int):
        return
    profile = profile_of(config.engine)
    block = settings.block_size or profile.default_block_size
    assumed = "" if settings.block_size else f" (if the drafter's block is {block})"
    if settings.budget < block - 1:
        yield (
            f"budget {settings.budget} is below block size - 1 = {block - 1}{assumed}: it caps the depth, so a"
            " plain chain (--algorithm DFLASH) commits more a pass"
        )
    before = choice.verified
    touched = before is None or (before.budget, before.topk_cap) != (settings.budget, settings.topk_cap)
    if touched and settings.topk_cap is not None and settings.topk_cap < settings.budget:
        yield (
            f"topk-cap {settings.topk_cap} is below the budget {settings.budget}: a position offers at most"
            f" {settings.topk_cap} alternatives, so the best tree of this size may be out of reach"
        )


def _about_capacity(config: HostConfig, choice: Choice, settings: Settings, observed: Observed) -> Iterator[str]:
    running, graphs = settings.max_running, settings.cuda_graph_max_bs
    profile = profile_of(config.engine)
    if choice.auto_running and preflight.rows_limit(config, observed) is None:
        taken = running if running is not None else profile.default_max_running
        yield f"max-running auto: no limit is known for {observed.arch}, so it is {profile.kind}'s own {taken}"
    if running is not None and graphs is not None and running > graphs:
        yield f"max-running {running} is above cuda-graph-max-bs {graphs}: larger batches run slower, without graphs"
    if running is None and settings.drafts and profile.default_max_running is not None:
        yield f"max-running is not set: {profile.kind} takes {profile.default_max_running}"
    before = choice.verified.max_running if choice.verified else None
    if running is not None and before is not None and running < before:
        yield f"max-running goes from {before} to {running}: {100 - 100 * running // before} % fewer requests at a time"


def _about_the_inventory(config: HostConfig, choice: Choice) -> Iterator[str]:
    """A value of the inventory that the verified one keeps out is easily taken for applied."""
    if choice.verified is None:
        return
    flags = {"algorithm": "--algorithm", "budget": "--budget", "topk_cap": "--topk-cap", "max_running": "--max-running"}
    for name, source in choice.sources.items():
        if source == "request":
            continue
        field = "max_running_requests" if name == "max_running" else name
        wanted = getattr(config.spec, field) if field in config.spec.model_fields_set else None
        kept = getattr(choice.settings, name)
        if wanted is not None and wanted != AUTO and wanted != kept and kept is not None:
            hint = f"; {flags[name]} {wanted} changes it" if name in flags else ""
            yield f"{name.replace('_', '-')} {kept} is kept as verified on the host; the inventory says {wanted}{hint}"
