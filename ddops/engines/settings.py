"""The settings ddops tunes, the same for every engine. Pure data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

AUTO = "auto"
Budget = int | str  # a number of tree nodes below the root, or "auto" (ddtree only)


@dataclass(frozen=True, slots=True)
class Settings:
    """One speculative configuration; None: not given, the engine decides.

    budget: nodes of the draft tree below its root (vLLM: draft tokens a pass).
    topk_cap: alternatives a tree position may have. max_running: requests decoded together.
    block_size: tokens the drafter proposes at once, its known first one included.
    """

    algorithm: str = "DDTREE"
    budget: Budget | None = None
    topk_cap: int | None = None
    max_running: int | None = None
    block_size: int | None = None
    cuda_graph_max_bs: int | None = None

    @property
    def drafts(self) -> bool:
        return self.algorithm != "NONE"

    @property
    def tree(self) -> bool:
        return self.algorithm == "DDTREE"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Settings:
        """From a ledger entry; keys of other versions and values of the wrong kind are left out."""
        found: dict[str, Any] = {}
        for field in fields(cls):
            value = raw.get(field.name)
            number = isinstance(value, int) and not isinstance(value, bool) and value > 0
            if field.name == "algorithm":
                usable = isinstance(value, str) and bool(value)
            else:
                usable = number or (field.name == "budget" and value == AUTO)
            if usable:
                found[field.name] = value
        return cls(**found)

    def describe(self) -> str:
        """`DDTREE budget 32 topk-cap 8 max-running 16`, without what is not given."""
        parts = [self.algorithm]
        for name, value in asdict(self).items():
            if name != "algorithm" and value is not None:
                parts.append(f"{name.replace('_', '-')} {value}")
        return " ".join(parts)
