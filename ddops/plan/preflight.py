"""Reasons not to start: each says what is wrong, what it means and what to do. Pure; nothing is touched."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddops import commands
from ddops.engines import AUTO_BUDGET, Profile, Settings, profile_of
from ddops.errors import Refused
from ddops.plan import memory
from ddops.state import Kind, Observed
from ddops.units import FENCE_NAME, is_ours, parse

if TYPE_CHECKING:
    from ddops.inventory import HostConfig

OLDEST_SYSTEMD = 250  # 252 is tried; before 250 a trial in system.control and verify's failing mode are not there


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a plan may not be carried out."""

    what: str
    means: str = "nothing was changed"
    hint: str = ""


# ---------------------------------------------------------------- limits
def rows_limit(config: HostConfig, observed: Observed) -> tuple[str, int] | None:
    """(architecture, most rows of one verify pass); the strictest where inventory and host disagree."""
    limits = config.limits.verify_rows
    found = [(limits[arch], arch) for arch in {observed.arch, config.arch} if arch in limits]
    return (min(found)[1], min(found)[0]) if found else None


def largest_power_of_two(most: int) -> int:
    """The largest power of two that is at most `most` (at least 1)."""
    return 1 << (most.bit_length() - 1)


def product(config: HostConfig, settings: Settings, observed: Observed) -> Refusal | None:
    """max_running x rows a request must stay within the architecture's limit."""
    limit = rows_limit(config, observed)
    profile = profile_of(config.engine)
    running = settings.max_running or (profile.default_max_running if settings.drafts else None)
    if limit is None or running is None:
        return None
    arch, most = limit
    width = profile.verify_width(settings)
    if running * width <= most:
        return None
    assumed = "" if settings.max_running else f" (max-running is not set, so {profile.kind} takes {running})"
    return Refusal(
        f"max-running {running} x {_width(settings, width)} = {running * width} rows a verify pass, above the limit"
        f" {most} of {arch}{assumed}",
        "above it batched matrix products failed on this architecture, in part without an error; nothing was changed",
        _way_out(profile, settings, running, width, most),
    )


def _width(settings: Settings, width: int) -> str:
    if settings.tree and settings.budget is not None:
        return f"(budget {settings.budget if settings.budget != AUTO_BUDGET else width - 1} + 1)"
    return f"{width} rows a request"


def _way_out(profile: Profile, settings: Settings, running: int, width: int, most: int) -> str:
    ways = []
    if width <= most:
        fits = most // width
        exact = f" ({fits} at most)" if fits != largest_power_of_two(fits) else ""
        ways.append(f"--max-running {largest_power_of_two(fits)}{exact}")
    if settings.budget is not None and most // running >= 2:
        ways.append(f"--budget {most // running - 1} at most")
    return ", or ".join(ways) or "neither one request nor the smallest tree fits; is limits.verify_rows right?"


# ---------------------------------------------------------------- the host
def host(config: HostConfig, observed: Observed) -> Iterator[Refusal]:
    """What must be so before anything is written to the host."""
    name = config.name
    if observed.systemd < OLDEST_SYSTEMD:
        yield Refusal(
            f"{name} has systemd {observed.systemd}",
            f"a trial that a reboot undoes needs {OLDEST_SYSTEMD} or later (252 is tried); nothing was changed",
            "update the host's operating system",
        )
    if observed.script_digest != commands.script_digest():
        what = "another version of the ddops host script" if observed.script_digest else "no ddops host script"
        yield Refusal(f"{name} has {what}", hint=f"ddops install --host {name}")
    if observed.trial is not None and observed.trial.open:
        trial = observed.trial
        yield Refusal(
            f"run {trial.run} has an open trial on {name}",
            f"unless that run goes on, its guard undoes it in {max(0.0, trial.guard_in_seconds):.0f} s; nothing was changed",
            f"ddops wait --host {name} --until verified, or ddops resume --host {name}",
        )


def room(config: HostConfig, observed: Observed) -> Iterator[Refusal]:
    """What a new start needs."""
    engine, limits, name = config.engine, config.limits, config.name
    if engine.kind == "ddtree" and engine.release not in observed.releases:
        known = ", ".join(observed.releases) or "none"
        yield Refusal(
            f"release {engine.release} is not on {name} (there: {known})",
            hint=f"ddops install --host {name}, or set engine.release",
        )
    for path, free in sorted(observed.disk_free_mib.items()):
        if free < limits.disk_free_mib:
            yield Refusal(
                f"{path} on {name} has {free} MiB free, below limits.disk_free_mib {limits.disk_free_mib}",
                "evidence and units could not be written safely; nothing was changed",
                f"make room below {path}",
            )
    if observed.gpu is not None and limits.gpu_memory_free_mib:
        yield from _gpu(config, observed)
    if observed.port_owner is not None:
        who = f"process {observed.port_owner}" if observed.port_owner else "another process"
        yield Refusal(
            f"port {engine.port} on {name} is taken by {who}, which is not of {engine.unit}",
            "the engine could not listen; nothing was changed",
            "end that process, or set another engine.port",
        )


def _gpu(config: HostConfig, observed: Observed) -> Iterator[Refusal]:
    gpu, floor = observed.gpu, config.limits.gpu_memory_free_mib
    assert gpu is not None
    if gpu.memory_total_mib < floor:
        yield Refusal(
            f"a GPU of {config.name} has {gpu.memory_total_mib} MiB in all, below limits.gpu_memory_free_mib {floor}",
            hint="correct the limit in the inventory",
        )
    elif not observed.unit.main_pid and gpu.memory_free_mib < floor:
        yield Refusal(
            f"a GPU of {config.name} has {gpu.memory_free_mib} MiB free, below limits.gpu_memory_free_mib {floor}",
            "the engine is not running, so somebody else holds that memory; nothing was changed",
            "nvidia-smi on the host shows who",
        )


# ---------------------------------------------------------------- the unit that is there
def adopted(observed: Observed) -> bool:
    """Whether the unit in /etc is ddops' to change: adopted, or confirmed by it, in just these bytes."""
    digest = memory.digest_of(observed.etc_unit)
    kinds = (Kind.ADOPTED, Kind.CONFIRMED)
    return any(entry.digest == digest and entry.kind in kinds for entry in observed.ledger)


def ownership(config: HostConfig, observed: Observed) -> Iterator[Refusal]:
    """A unit that a person wrote is theirs until it is adopted."""
    name, unit = config.name, config.engine.unit
    state = observed.unit
    adopt = f"ddops adopt --host {name}"
    if state.load_state == "masked":
        yield Refusal(f"{unit} on {name} is masked", hint=f"systemctl unmask {unit} on the host, if that is meant")
    elif observed.etc_unit is None and state.load_state == "loaded" and state.fragment_path:
        yield Refusal(
            f"{unit} on {name} comes from {state.fragment_path}, not from /etc/systemd/system",
            "a unit in /etc would hide it for good; nothing was changed",
            f"copy it to /etc/systemd/system, then {adopt}; or set another engine.unit",
        )
    elif observed.etc_unit is not None and not is_ours(observed.etc_unit) and not adopted(observed):
        yield Refusal(
            f"{unit} on {name} was written by hand and is not adopted",
            "its settings are not known to be good; nothing was changed",
            adopt,
        )
    yield from foreign_drop_ins(config, observed)


def foreign_drop_ins(config: HostConfig, observed: Observed) -> Iterator[Refusal]:
    """Drop-ins for this unit would make it run something else than its bytes say."""
    foreign = [
        path
        for path in observed.unit.drop_in_paths
        if not path.endswith("/" + FENCE_NAME) and "/service.d/" not in path  # the distribution's own, for every service
    ]
    if foreign:
        yield Refusal(
            f"{config.engine.unit} on {config.name} has drop-ins of somebody else: {', '.join(foreign)}",
            "they change what the unit does, so its digest would not say what runs; nothing was changed",
            "move what they set into the unit itself and remove them",
        )


def adoptable(config: HostConfig, observed: Observed) -> None:
    """Whether `ddops adopt` may record the unit that is there.

    Raises:
        Refused: no unit, one of another origin, a drop-in, a unit that can't be understood, or not the one that runs.
    """
    name, unit = config.name, config.engine.unit
    refusals = [*host(config, observed)]
    if observed.etc_unit is None:
        where = observed.unit.fragment_path
        refusals.append(
            Refusal(
                f"{name} has no /etc/systemd/system/{unit}",
                "there is nothing to adopt",
                f"copy {where} there" if where else f"ddops install --host {name}, or set engine.unit",
            )
        )
    refusals += foreign_drop_ins(config, observed)
    if refusals:
        raise Refused(refusals[0].what, means=refusals[0].means, hint=refusals[0].hint)
    assert observed.etc_unit is not None
    profile = profile_of(config.engine)
    argv = parse(observed.etc_unit, unit).argv
    if not profile.runs_in(argv):
        raise Refused(
            f"{unit} on {name} does not start {profile.kind}: {' '.join(argv[:4])[:120]}",
            means="it was left as it is",
            hint="set engine.kind or engine.unit in the inventory",
        )
    profile.parse_argv(argv)
    if observed.unit.running and (stale := memory.stale(observed)):
        raise Refused(
            f"{unit} on {name} was edited and not restarted: {stale[0]}",
            means="what runs is not what the unit says, so its proof would say nothing of the unit; nothing was recorded",
            hint=f"on the host: systemctl daemon-reload && systemctl restart {unit}; then ddops adopt --host {name}",
        )


# ---------------------------------------------------------------- what is remembered
def remembered(config: HostConfig, settings: Settings, observed: Observed) -> Refusal | None:
    """A configuration that failed here before is not tried again by itself."""
    entry = memory.known_bad(memory.key(config, settings, observed, None), observed)
    if entry is None:
        return None
    kind = entry.verdict.get("kind") or "failed"
    why = entry.verdict.get("why") or entry.why or "no reason was recorded"
    return Refusal(
        f"{settings.describe()} is known to be bad on {config.name}: {kind} at {entry.time} (run {entry.run}): {why}",
        "a configuration that failed is not tried again by itself; nothing was changed",
        f"ddops history --host {config.name}; --retry-known-bad tries it again",
    )


def engine_limits(config: HostConfig, settings: Settings, observed: Observed) -> Iterator[Refusal]:
    """Limits of the engine's own code."""
    profile = profile_of(config.engine)
    if not isinstance(settings.budget, int):
        return
    most = profile.max_budget_gpu if observed.gpu is not None and config.engine.device != "cpu" else profile.max_budget
    if most is not None and settings.budget > most:
        yield Refusal(
            f"budget {settings.budget} is above {profile.kind}'s own limit {most} here",
            hint=f"--budget {most} at most",
        )
