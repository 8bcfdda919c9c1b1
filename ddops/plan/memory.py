"""What a host's ledger says: what is verified, what is known bad, what can be gone back to. Pure.

The latest word about a digest counts. Verification is a state, not an event: it is bound to the unit's bytes,
to one start of it, to one boot and to the driver it was proven under.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ddops.engines import PROFILES, Settings, normalise_argv
from ddops.errors import Refused, UsageError
from ddops.state import Entry, Kind, Observed
from ddops.units import UnitError, parse

if TYPE_CHECKING:
    from ddops.inventory import HostConfig

_GOOD = (Kind.CONFIRMED, Kind.VERIFIED, Kind.ADOPTED)
_BAD_VERDICTS = ("corrupt", "crashed")
SHORTEST_DIGEST = 4


@dataclass(frozen=True, slots=True)
class Verification:
    """Whether what runs is proven, since when or why not; `entry` is the record that says so."""

    verified: bool
    text: str
    entry: Entry | None = None

    @property
    def state(self) -> str:
        return "verified" if self.verified else "unverified"


def digest_of(text: bytes | None) -> str:
    return hashlib.sha256(text).hexdigest() if text is not None else ""


# ---------------------------------------------------------------- good and bad
def condemns(entry: Entry) -> bool:
    """Whether this entry says that the configuration itself is bad (and not that nothing could be told)."""
    if entry.kind is not Kind.FAILED or entry.extra.get("environment"):
        return False
    return bool(entry.extra.get("known_bad")) or entry.verdict.get("kind") in _BAD_VERDICTS


def standing_good(observed: Observed) -> dict[str, Entry]:
    """Digests that are verified configurations now -> the record, oldest first.

    A revoked or condemned digest is out until it is proven again; a failed proof that says nothing of the
    configuration (inconclusive, out of memory) takes nothing away.
    """
    good: dict[str, Entry] = {}
    for entry in observed.ledger:
        if entry.kind in _GOOD:
            good.pop(entry.digest, None)  # so that the newest word comes last
            good[entry.digest] = entry
        elif entry.kind is Kind.REVOKED or condemns(entry):
            good.pop(entry.digest, None)
    return good


def last_verified(observed: Observed) -> Entry | None:
    """The last known-good configuration of this host."""
    good = list(standing_good(observed).values())
    return good[-1] if good else None


def previous_verified(observed: Observed) -> Entry | None:
    """What `ddops rollback` goes to: the latest verified configuration that is not the current one."""
    current = digest_of(observed.etc_unit)
    others = [entry for digest, entry in standing_good(observed).items() if digest != current]
    return others[-1] if others else None


def rollback_target(observed: Observed, to: str | None = None) -> Entry:
    """The configuration to go back to.

    Args:
        to: the beginning of a digest, that of the current one included; None takes the previous verified one.

    Raises:
        Refused: there is none, or the named one is not (or no longer) verified.
        UsageError: `to` names none, or several.
    """
    name = observed.host
    if to is None:
        found = previous_verified(observed)
        if found is None:
            raise _nowhere(observed)
        return found
    known = {entry.digest for entry in observed.ledger if entry.digest.startswith(to.lower())}
    if len(to) < SHORTEST_DIGEST or len(known) != 1:
        what = "is too short" if len(to) < SHORTEST_DIGEST else f"names {len(known) or 'no'} configurations of {name}"
        raise UsageError(f"digest {to!r} {what}", means="nothing was changed", hint=f"ddops history --host {name}")
    digest = known.pop()
    good = standing_good(observed).get(digest)
    if good is None:
        last = [entry for entry in observed.ledger if entry.digest == digest][-1]
        raise Refused(
            f"{digest[:12]} is not a verified configuration of {name}: {last.kind} at {last.time}",
            means="nothing was changed",
            hint="ddops reconfig with its settings proves it again",
        )
    return good


def _nowhere(observed: Observed) -> Refused:
    name, unit = observed.host, observed.unit
    what, hint = f"{name} has no other verified configuration", f"ddops history --host {name}; ddops reconfig proves a new one"
    if not unit.running and last_verified(observed) is not None:
        what += f", and the engine of the one it has is {unit.active_state}"
        hint = (
            f"ddops logs --host {name}; ddops reconfig --force-restart --from-broken --host {name} starts and proves it again"
        )
    return Refused(what, means="nothing was changed", hint=hint)


def lost_attempt(observed: Observed) -> Entry | None:
    """The last attempt, when nothing says how it ended: the host was booted (or lost power) in mid-trial.

    One whose proof is on record and whose unit is in /etc was confirmed; only the last line is missing.
    """
    attempts = [entry for entry in observed.ledger if entry.kind is Kind.ATTEMPT]
    if not attempts or (observed.trial is not None and observed.trial.open):
        return None
    last = attempts[-1]
    kinds = {entry.kind for entry in observed.ledger if entry.run == last.run}
    if Kind.CONFIRMED in kinds or Kind.UNDONE in kinds:
        return None
    return None if Kind.PROVEN in kinds and digest_of(observed.etc_unit) == last.digest else last


# ---------------------------------------------------------------- verification
def verification(observed: Observed) -> Verification:
    """Whether the running engine is the one that was proven, in this start."""
    obstacle = _obstacle(observed)
    if obstacle:
        return Verification(False, f"unverified: {obstacle}")
    current = digest_of(observed.etc_unit)
    entry = _last_word(observed, current)
    if entry is None:
        return Verification(False, "unverified: this configuration was never proven here")
    if entry.kind is Kind.REVOKED:
        return Verification(False, f"unverified: revoked at {entry.time}")
    if entry.kind is Kind.FAILED:
        verdict = entry.verdict.get("kind", "failed")
        return Verification(False, f"unverified: {verdict} at {entry.time}", entry)
    since = _voided(observed, entry)
    if since:
        return Verification(False, f"unverified: {since} since it was proven at {entry.time}")
    return Verification(True, f"verified since {entry.time}", entry)


def _obstacle(observed: Observed) -> str:
    unit = observed.unit
    if observed.trial is not None and observed.trial.open:
        return f"a trial of run {observed.trial.run} is open"
    if observed.etc_unit is None:
        return "there is no unit"
    if not unit.running:
        return f"the engine is {unit.active_state}" + ("" if unit.result == "success" else f" ({unit.result})")
    if unit.need_daemon_reload or digest_of(observed.loaded_fragment or observed.etc_unit) != digest_of(observed.etc_unit):
        return "the unit on disk is not the one that was loaded"
    return ""


def _last_word(observed: Observed, digest: str) -> Entry | None:
    """The latest entry that judges this digest (an attempt and an undo say nothing about it)."""
    judging = (*_GOOD, Kind.PROVEN, Kind.FAILED, Kind.REVOKED)
    about = [entry for entry in observed.ledger if entry.digest == digest and entry.kind in judging]
    return about[-1] if about else None


def _voided(observed: Observed, entry: Entry) -> str:
    if entry.boot and entry.boot != observed.boot:
        return "the host was booted"
    if not entry.invocation or entry.invocation != observed.unit.invocation_id:
        return "the engine was restarted"
    driver = entry.key.get("driver")
    if driver and observed.gpu is not None and driver != observed.gpu.driver:
        return f"the GPU driver changed from {driver} to {observed.gpu.driver}"
    return ""


def drift(observed: Observed) -> list[str]:
    """Where on disk, loaded, running and verified differ, pair by pair; empty when they are one."""
    found = stale(observed)
    disk, good = digest_of(observed.etc_unit), last_verified(observed)
    if disk and good is not None and good.digest != disk:
        found.append(f"on disk ({disk[:12]}) is not the last verified configuration ({good.digest[:12]})")
    return found


def stale(observed: Observed) -> list[str]:
    """In what the running engine is not the one that the unit in /etc would start; empty when it is."""
    found: list[str] = []
    disk, loaded = digest_of(observed.etc_unit), digest_of(observed.loaded_fragment)
    trial_open = observed.trial is not None and observed.trial.open
    if observed.unit.need_daemon_reload:
        found.append("on disk is newer than loaded (daemon-reload is missing)")
    elif loaded and disk and loaded != disk and not trial_open:
        found.append(f"loaded is {observed.unit.fragment_path}, not the unit in /etc")
    running = observed.loaded_fragment or observed.etc_unit
    if running is not None and observed.argv:
        try:
            wanted = parse(running).argv
        except UnitError as problem:
            found.append(f"running can't be compared: {problem.what}")
        else:
            if normalise_argv(wanted, observed.argv) != list(wanted):
                found.append("running arguments are not those of the loaded unit")
    if names := observed.other_environment:
        found.append(f"running was started with other values of {', '.join(names)} than the loaded unit sets")
    return found


def settings_text(observed: Observed) -> str:
    """The settings on disk in one line; "" when there is no unit, "?" when it can't be read."""
    if observed.etc_unit is None:
        return ""
    recorded = standing_good(observed).get(digest_of(observed.etc_unit))
    if recorded is not None and recorded.settings:
        return Settings.from_dict(recorded.settings).describe()
    try:
        argv = parse(observed.etc_unit).argv
        profile = next((p for p in PROFILES.values() if p.runs_in(argv)), None)
        return profile.parse_argv(argv).describe() if profile else "?"
    except Refused:
        return "?"


# ---------------------------------------------------------------- what a configuration is remembered by
def key(config: HostConfig, settings: Settings, observed: Observed, server_info: Mapping[str, Any] | None) -> dict[str, Any]:
    """What known-good and known-bad are keyed by; digests and builds only where the engine reported them."""
    engine = config.engine
    found: dict[str, Any] = {
        "arch": observed.gpu.arch if observed.gpu else observed.arch,
        "driver": observed.gpu.driver if observed.gpu else "",
        "gpus": observed.gpu.count if observed.gpu else 0,
        "engine": engine.kind,
        "release": engine.release,
        "target": engine.model,
        "drafter": engine.drafter if settings.drafts else "",
        "dtype": engine.dtype or "",
        "extra_args": list(engine.extra_args),
        **settings.to_dict(),
    }
    info = server_info or {}
    own = info.get("ddtree") if isinstance(info.get("ddtree"), Mapping) else {}
    assert isinstance(own, Mapping)
    reported = {
        "version": info.get("version"),
        "build": own.get("build"),
        "target_digest": own.get("target_digest"),
        "drafter_digest": own.get("drafter_digest") if settings.drafts else None,
    }
    return found | {name: value for name, value in reported.items() if value}


_REPORTED = ("version", "build", "target_digest", "drafter_digest")


def known_bad(wanted: Mapping[str, Any], observed: Observed) -> Entry | None:
    """The latest evidence against exactly this configuration, unless it was proven since.

    What only a running engine can report (build, digests) is compared where both sides have it; everything else
    must be equal. Nothing is inferred from a neighbouring budget.
    """
    found: Entry | None = None
    for entry in observed.ledger:
        if not entry.key or not _same(wanted, entry.key):
            continue
        if condemns(entry):
            found = entry
        elif entry.kind in (*_GOOD, Kind.PROVEN):
            found = None
    return found


def _same(wanted: Mapping[str, Any], recorded: Mapping[str, Any]) -> bool:
    for name in {*wanted, *recorded}:
        mine, theirs = wanted.get(name), recorded.get(name)
        if name in _REPORTED and (mine is None or theirs is None):
            continue
        if mine != theirs:
            return False
    return True
