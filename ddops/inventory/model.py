"""The sections of an inventory, a resolved host and the fleet. Pure data with their checks."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from ddops.errors import UsageError
from ddops.inventory.values import (
    AbsolutePath,
    Address,
    Amount,
    Arch,
    AsTuple,
    Auto,
    Count,
    FlagName,
    Listen,
    ModelPath,
    Network,
    Plain,
    Port,
    Ratio,
    Release,
    Seconds,
    Share,
    Text,
    UnitName,
    User,
    Variable,
    VariableText,
    WholeSeconds,
)


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, validate_default=False)


class Ssh(Section):
    """How to log in: one hop, keys only."""

    user: User = "root"
    port: Port = 22
    identity_file: Plain | None = None
    known_hosts: Annotated[tuple[Plain, ...], AsTuple] = ("~/.ssh/known_hosts",)
    config: Plain | None = None
    connect_timeout_seconds: Seconds = 10
    sudo: Literal["auto", "always", "never"] = "auto"


class FlagNames(Section):
    """A fork's own names for the flags ddops sets; what is not named keeps the engine's usual name."""

    algorithm: FlagName | None = None
    draft_model: FlagName | None = None
    budget: FlagName | None = None
    topk_cap: FlagName | None = None
    block_size: FlagName | None = None
    max_running: FlagName | None = None
    cuda_graph_max_bs: FlagName | None = None


class EngineSection(Section):
    """The engine program: which one, where it lies and what it serves."""

    kind: Literal["ddtree", "sglang", "vllm"] = "ddtree"
    unit: UnitName = "ddtree-engine.service"
    release: Release = ""
    releases_dir: AbsolutePath = "/opt/ddtree/releases"
    python: AbsolutePath = "/usr/bin/python3"
    model: ModelPath = ""
    drafter: ModelPath = ""
    user: User | None = None
    listen: Listen = "0.0.0.0"
    port: Port = 30000
    served_model_name: Plain | None = None
    context_length: Count | None = None
    dtype: Plain | None = None
    device: Plain | None = None
    extra_args: Annotated[tuple[Text, ...], AsTuple] = ()
    environment: dict[Variable, VariableText] = Field(default_factory=dict)
    api_key_file: AbsolutePath | None = None
    source: Plain | None = None
    flags: FlagNames = FlagNames()

    @property
    def release_folder(self) -> str:
        return f"{self.releases_dir.rstrip('/')}/{self.release}"


class SpecSection(Section):
    """Speculation as the inventory wants it; what is None comes from the host or from the engine."""

    algorithm: Literal["DDTREE", "DFLASH", "NONE"] = "DDTREE"
    budget: Count | Auto | None = None
    topk_cap: Count | None = None
    max_running_requests: Count | Auto | None = None
    block_size: Annotated[int, Field(ge=2, le=1024)] | None = None
    cuda_graph_max_bs: Count | None = None


class Ready(Section):
    timeout_seconds: WholeSeconds = 1200
    probe_timeout_seconds: Seconds = 10


class Guard(Section):
    """The host's own undo: `seconds` after the last heartbeat, `cap_seconds` after the start whatever happens."""

    seconds: WholeSeconds = 180
    cap_seconds: WholeSeconds = 3600


class Gates(Section):
    """Limits of a pass: shares of what was asked, and ratios to the last known-good."""

    # The key is `copy`; BaseModel has a method of that name, so the attribute is copy_ids.
    model_config = ConfigDict(serialize_by_alias=True)

    coding: Share = 1.0  # share of coding problems solved
    copy_ids: Share = Field(default=1.0, alias="copy")  # share of ids repeated exactly
    answers: Share = 1.0  # share of short questions answered right
    throughput: Ratio = 0.9  # of the last known-good, at least
    acceptance: Ratio = 0.8  # of the last known-good, at least
    ttft: Ratio = 2.0  # of the last known-good, at most
    inter_token: Ratio = 2.0  # of the last known-good, at most
    gap: Annotated[float, Field(gt=0, le=20, allow_inf_nan=False)] | None = None  # nats; None: measured on the host


class Sampling(Section):
    """How production samples; the sampled probe sends the same."""

    temperature: Annotated[float, Field(ge=0, le=10, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=1_000_000)] | None = None

    def keys(self) -> list[str]:
        """What was given, so that a sampling section can be passed on as keyword arguments."""
        return [name for name in type(self).model_fields if getattr(self, name) is not None]

    def __getitem__(self, name: str) -> float | int | None:
        return getattr(self, name)  # type: ignore[no-any-return]


class Prove(Section):
    level: Literal["quick", "standard", "deep"] = "quick"
    confirm_degraded: bool = False
    probes: Annotated[tuple[Plain, ...], AsTuple] = ()  # only these of the level's probes; none named: all
    gates: Gates = Gates()
    reference: Plain | None = None  # a host of this fleet, or http://... of an engine that can re-score
    sampling: Sampling = Sampling()


class Fence(Section):
    enabled: bool = True
    allow: Annotated[tuple[Network, ...], AsTuple] = ()


class Limits(Section):
    """What preflight refuses: rows of one verify pass per architecture, and room on the host (MiB)."""

    verify_rows: dict[Arch, Count] = Field(default_factory=lambda: {"sm_103": 1200})
    gpu_memory_free_mib: Amount = 0
    disk_free_mib: Amount = 1024


class Rollout(Section):
    """How a run over several hosts proceeds; see rollout.Policy."""

    canary: Amount = 1
    batch: Count | Annotated[tuple[Count, ...], AsTuple] = 1
    max_failed: Amount = 0
    max_unreachable: Amount = 0


class HostConfig(Section):
    """One host, fully resolved: defaults, then its groups in their order, then its own settings."""

    name: str
    address: Address
    arch: Arch | None = None
    groups: tuple[str, ...] = ()
    ssh: Ssh = Ssh()
    engine: EngineSection = EngineSection()
    spec: SpecSection = SpecSection()
    ready: Ready = Ready()
    guard: Guard = Guard()
    prove: Prove = Prove()
    fence: Fence = Fence()
    limits: Limits = Limits()


SECTIONS: dict[str, type[Section]] = {
    "ssh": Ssh, "engine": EngineSection, "spec": SpecSection, "ready": Ready, "guard": Guard,
    "prove": Prove, "fence": Fence, "limits": Limits,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Fleet:
    """All hosts of one inventory file, in its order."""

    file: str
    hosts: dict[str, HostConfig]
    groups: dict[str, tuple[str, ...]]
    rollout: Rollout

    def select(self, names: Sequence[str]) -> list[HostConfig]:
        """Hosts by host name, group name or `all`, each once, in the inventory's order.

        Raises:
            UsageError: nothing named, or a name that is neither (with near matches).
        """
        if not names:
            raise UsageError(
                "no host named",
                means="nothing was done",
                hint="name hosts or groups, or say all of them: all",
            )
        chosen: set[str] = set()
        for name in names:
            chosen.update(self._named(name))
        return [host for host in self.hosts.values() if host.name in chosen]

    def _named(self, name: str) -> Iterable[str]:
        if name == "all":
            return self.hosts
        if name in self.hosts:
            return (name,)
        if name in self.groups:
            if not self.groups[name]:
                raise UsageError(f"group {name} in {self.file} has no hosts", means="nothing was done")
            return self.groups[name]
        near = difflib.get_close_matches(name, [*self.hosts, *self.groups], n=3, cutoff=0.5)
        known = ", ".join(near or list(self.hosts)[:8])
        raise UsageError(
            f"no host or group {name!r} in {self.file}",
            means="no host was contacted",
            hint=f"did you mean {known}?" if near else f"it has {known}",
        )
