"""What a probe found and what the battery concluded, as plain data that survives a trip through JSON. Pure.

It decides nothing: `verdicts.decide` does.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any, TypeVar

VERSION = 1

_E = TypeVar("_E", bound=StrEnum)


class Outcome(StrEnum):
    """How one probe ended. Only `pass`, `fail` and `degraded` are measurements."""

    PASS = "pass"
    FAIL = "fail"
    DEGRADED = "degraded"
    NOT_SCORED = "not_scored"  # the engine cannot answer this, or there is nothing to compare with
    ERROR = "error"  # the probe itself could not come to a result

    @property
    def executed(self) -> bool:
        return self in (Outcome.PASS, Outcome.FAIL, Outcome.DEGRADED)


class Fault(StrEnum):
    """What kind of thing was wrong, where the outcome alone does not tell."""

    NONE = ""
    OUTPUT = "output"  # wrong tokens or text: corruption
    CRASH = "crash"  # the engine died, hung or failed requests
    SPEED = "speed"  # slower, or the drafter does not help; the text is right
    IDENTITY = "identity"  # what runs is not what was meant to run
    DETECTOR = "detector"  # the detector contradicted itself: its word counts neither way


class Level(StrEnum):
    """How long the battery may take: about a minute, five minutes, or as long as deep evidence needs."""

    QUICK = "quick"
    STANDARD = "standard"
    DEEP = "deep"


class VerdictKind(StrEnum):
    PASS = "pass"
    CORRUPT = "corrupt"
    CRASHED = "crashed"
    DEGRADED = "degraded"
    INCONCLUSIVE = "inconclusive"


@dataclass(frozen=True, slots=True)
class Evidence:
    """One probe's result: what was expected, what came, what the limit was, over how many samples.

    `replay` holds the requests and replies the result rests on (replay.py sends them again); `values` are the numbers
    that later runs compare with (tok/s, acceptance, ...).
    """

    probe: str
    outcome: Outcome
    expected: str = ""
    got: str = ""
    threshold: str = ""
    sample: int = 0
    seconds: float = 0.0
    detail: str = ""
    fault: Fault = Fault.NONE
    values: dict[str, float] = field(default_factory=dict)
    replay: tuple[dict[str, Any], ...] = ()

    def to_dict(self) -> dict[str, Any]:
        found = {f.name: getattr(self, f.name) for f in fields(self)}
        return found | {"outcome": str(self.outcome), "fault": str(self.fault), "replay": list(self.replay)}

    @classmethod
    def from_dict(cls, raw: Any) -> Evidence:
        """Raises ValueError, naming the key, for anything `to_dict` would not write."""
        known = _checked(raw, cls, "evidence")
        known["outcome"] = _enum(Outcome, known.get("outcome"), "outcome")
        known["fault"] = _enum(Fault, known.get("fault", ""), "fault")
        known["replay"] = tuple(_list(known.get("replay", []), "replay"))
        known["values"] = _numbers(known.get("values", {}))
        return cls(**known)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the battery concluded, bound to the unit (digest) and the start (invocation) it was reached for."""

    kind: VerdictKind
    evidence: tuple[Evidence, ...] = ()
    level: Level = Level.QUICK
    seconds: float = 0.0
    power: str = ""
    why: str = ""
    digest: str = ""
    invocation: str = ""
    policy: dict[str, Any] = field(default_factory=dict)  # the gates it was judged by

    def about(self, digest: str, invocation: str) -> bool:
        """Whether this verdict still speaks of what runs: void when either has changed."""
        return bool(digest) and self.digest == digest and self.invocation == invocation

    def find(self, probe: str) -> Evidence | None:
        return next((e for e in self.evidence if e.probe == probe), None)

    @property
    def not_scored(self) -> tuple[str, ...]:
        return tuple(e.probe for e in self.evidence if e.outcome is Outcome.NOT_SCORED)

    def to_dict(self, *, replay: bool = True) -> dict[str, Any]:
        """`replay=False` leaves prompts and replies out (a ledger line)."""
        items = [e.to_dict() | ({} if replay else {"replay": []}) for e in self.evidence]
        return {
            "v": VERSION,
            "kind": str(self.kind),
            "why": self.why,
            "level": str(self.level),
            "power": self.power,
            "seconds": self.seconds,
            "digest": self.digest,
            "invocation": self.invocation,
            "policy": self.policy,
            "evidence": items,
        }

    def to_json(self, *, replay: bool = True) -> str:
        return json.dumps(self.to_dict(replay=replay), ensure_ascii=False, allow_nan=False)

    @classmethod
    def from_dict(cls, raw: Any) -> Verdict:
        """Raises ValueError for another version, a missing or unknown key, or a value of the wrong kind."""
        if not isinstance(raw, Mapping) or raw.get("v") != VERSION:
            raise ValueError(f"not a verdict of version {VERSION}")
        known = _checked({k: v for k, v in raw.items() if k != "v"}, cls, "verdict")
        known["kind"] = _enum(VerdictKind, known.get("kind"), "kind")
        known["level"] = _enum(Level, known.get("level", "quick"), "level")
        known["evidence"] = tuple(Evidence.from_dict(e) for e in _list(known.get("evidence", []), "evidence"))
        return cls(**known)

    @classmethod
    def from_json(cls, text: str) -> Verdict:
        return cls.from_dict(json.loads(text))


@dataclass(frozen=True, slots=True)
class Baseline:
    """The numbers of a past verdict that relative gates compare with, and the answers recorded then."""

    values: dict[str, float] = field(default_factory=dict)
    source: str = ""  # digest it was measured on

    @classmethod
    def of(cls, verdict: Verdict) -> Baseline:
        """Only measurements count: numbers of probes that passed (or were degraded) in that verdict."""
        merged: dict[str, float] = {}
        for item in verdict.evidence:
            if item.outcome in (Outcome.PASS, Outcome.DEGRADED):
                merged |= item.values
        return cls(values=merged, source=verdict.digest)

    def get(self, name: str) -> float | None:
        value = self.values.get(name)
        return value if value is not None and math.isfinite(value) and value > 0 else None


def plain(value: Any) -> Any:
    """A value as it is after a trip through JSON: tuples are lists, keys are text."""
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    return str(value) if isinstance(value, StrEnum) else value


def _checked(raw: Any, cls: type, what: str) -> dict[str, Any]:
    if not isinstance(raw, Mapping):
        raise ValueError(f"{what} is not an object")
    types = {f.name: str(f.type) for f in fields(cls)}
    unknown = set(raw) - set(types)
    if unknown:
        raise ValueError(f"{what} has an unknown key {sorted(map(str, unknown))[0]!r}")
    for name, kind in types.items():
        if name in raw and not _fits(raw[name], kind):
            raise ValueError(f"{what}: {name} is not a {kind}")
    return dict(raw)


def _fits(value: Any, kind: str) -> bool:
    if kind == "str":
        return isinstance(value, str)
    if kind == "int":
        return isinstance(value, int) and not isinstance(value, bool)
    if kind == "float":
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if kind.startswith("dict"):
        return isinstance(value, Mapping)
    return True


def _enum(kind: type[_E], value: Any, key: str) -> _E:
    try:
        return kind(value)
    except ValueError:
        raise ValueError(f"{key}: {value!r} is not one of {', '.join(map(str, kind))}") from None


def _list(value: Any, key: str) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{key} is not a list")
    return value


def _numbers(value: Any) -> dict[str, float]:
    if not isinstance(value, Mapping) or not all(_fits(v, "float") for v in value.values()):
        raise ValueError("values is not an object of numbers")
    return dict(value)
