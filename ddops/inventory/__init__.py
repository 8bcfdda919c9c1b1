"""The fleet as a person wrote it: YAML in, checked and resolved hosts out. Pure; contacts nothing.

Every section may be set under `defaults`, under a group and under a host; they are merged key by key in
that order (lists are replaced whole). Everything that is wrong with it is told at once, each with
file, line and field.
"""

from ddops.inventory.model import (
    EngineSection,
    Fence,
    Fleet,
    Gates,
    Guard,
    HostConfig,
    Limits,
    Prove,
    Ready,
    Rollout,
    Sampling,
    SpecSection,
    Ssh,
)
from ddops.inventory.reader import load

__all__ = [
    "EngineSection",
    "Fence",
    "Fleet",
    "Gates",
    "Guard",
    "HostConfig",
    "Limits",
    "Prove",
    "Ready",
    "Rollout",
    "Sampling",
    "SpecSection",
    "Ssh",
    "load",
]
