"""Is what runs what was meant to run? The unit on disk, the loaded one, the running arguments, the engine's word. Pure.

It compares facts that others have read. A difference is not corruption: it means that whatever the other probes find is
about something else.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ddops.engines import ArgvError, Profile, Settings, normalise_argv
from ddops.prove.evidence import Evidence, Fault, Outcome
from ddops.state import Observed

if TYPE_CHECKING:
    from ddops.units import Unit


def compare(
    unit: Unit,
    observed: Observed,
    server_info: Mapping[str, Any] | None,
    profile: Profile,
    settings: Settings,
    expected_invocation: str,
) -> Evidence:
    """Hold every layer between the rendered unit and the running engine against the one above it.

    Args:
        server_info: what the engine reports about itself; None where it has no such endpoint.
        settings: what the unit was rendered for.
        expected_invocation: systemd's InvocationID of the start that is being proven.
    """
    checks = [
        *_identity(observed, expected_invocation),
        *_unit(unit, observed),
        *_arguments(unit, observed, profile, settings),
        *_report(server_info, profile, settings),
    ]
    wrong = [f"{name}: {got}, expected {want}" for name, want, got, same in checks if not same]
    notes = [] if profile.reported(server_info) is not None else ["the engine does not report its settings"]
    notes += [f"restarted {observed.unit.n_restarts} times"] if observed.unit.n_restarts else []
    return Evidence(
        "applied",
        Outcome.FAIL if wrong else Outcome.PASS,
        expected=f"{settings.describe()}, unit {unit.digest[:12]}, start {expected_invocation[:12]}",
        got="; ".join(wrong) if wrong else "unit, arguments and report agree",
        threshold="all equal",
        sample=len(checks),
        detail="; ".join(notes),
        fault=Fault.IDENTITY if wrong else Fault.NONE,
    )


_Check = tuple[str, object, object, bool]  # what, expected, got, whether they agree


def _equal(name: str, want: object, got: object) -> _Check:
    return name, want, got, want == got


def _identity(observed: Observed, invocation: str) -> Iterator[_Check]:
    state = observed.unit
    yield _equal("running", True, state.running)
    yield _equal("invocation", invocation, state.invocation_id)
    if observed.trial_unit is not None:  # a trial is started once, with Restart=no
        yield _equal("restarts", 0, state.n_restarts)


def _unit(unit: Unit, observed: Observed) -> Iterator[_Check]:
    yield _equal("daemon-reload needed", False, observed.unit.need_daemon_reload)
    loaded = observed.loaded_fragment
    digest = hashlib.sha256(loaded).hexdigest() if loaded is not None else "no unit file"
    yield _equal("loaded unit", unit.digest, digest)


def _arguments(unit: Unit, observed: Observed, profile: Profile, settings: Settings) -> Iterator[_Check]:
    running = normalise_argv(unit.argv, observed.argv)
    want = list(unit.argv)
    yield _equal("variables of another value", "none", ", ".join(observed.other_environment) or "none")
    yield "arguments", _first_difference(want, running), _first_difference(running, want), running == want
    try:
        parsed = profile.parse_argv(observed.argv)
    except ArgvError as exc:
        yield "settings in the arguments", settings.describe(), exc.what, False
        return
    yield from _settings("argument", settings, parsed)


def _report(info: Mapping[str, Any] | None, profile: Profile, settings: Settings) -> Iterator[_Check]:
    reported = profile.reported(info)
    if reported is not None:
        yield from _settings("reported", settings, reported)


def _settings(where: str, want: Settings, got: Settings) -> Iterator[_Check]:
    """Settings that were given must be there; what the engine filled in by itself is its own business."""
    yield _equal(f"{where} algorithm", want.algorithm, got.algorithm)
    names = ["max_running", "cuda_graph_max_bs"]
    names += ["block_size"] if want.drafts else []
    names += ["budget", "topk_cap"] if want.tree else []
    for name in names:
        value = getattr(want, name)
        if value is not None and value != "auto":  # an engine may report what `auto` became
            yield _equal(f"{where} {name.replace('_', '-')}", value, getattr(got, name))


def _first_difference(one: list[str], other: list[str]) -> str:
    """The words from where the lists part, a few of them."""
    at = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return " ".join(one[max(0, at - 1) : at + 3]) or "nothing"
