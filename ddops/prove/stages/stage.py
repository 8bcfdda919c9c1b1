"""What a stage of the battery is, and the small things stages share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ddops.prove.evidence import Evidence, Fault, Outcome
from ddops.prove.judging import Bench
from ddops.prove.prompts import Item


@dataclass(frozen=True, slots=True)
class Stage:
    """A piece of the battery: the probes it yields evidence for, and how it runs."""

    name: str
    probes: tuple[str, ...]
    run: Callable[[Bench], list[Evidence]]
    tells: bool = True  # False: another stage answers for its probes
    gross: bool = False  # quick to run and quick to show gross damage: after it the battery may end early


def not_scored(probe: str, why: str) -> Evidence:
    return Evidence(probe, Outcome.NOT_SCORED, detail=why)


def unready(bench: Bench, probe: str) -> Evidence:
    if bench.why_broken:
        return Evidence(probe, Outcome.ERROR, fault=Fault.DETECTOR, detail=bench.why_broken)
    return not_scored(probe, bench.why_unscored or "the engine gives no scores")


def several(count: int, *makers: Callable[[], Item]) -> list[Item]:
    """`count` items, from each maker in turn."""
    return [makers[i % len(makers)]() for i in range(count)]
