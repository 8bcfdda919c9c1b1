"""`ddops probe`: the battery against a host or any endpoint. Nothing is changed, held or recorded."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ddops import twins
from ddops.endpoint import Address, connected
from ddops.errors import DdopsError, Exit, Refused, Unreachable, UsageError
from ddops.journal import SECRETS, redact
from ddops.journal.events import plain
from ddops.journal.outputs import check_writable

if TYPE_CHECKING:
    from ddops.agent import Agent
    from ddops.prove.client import EngineClient
    from ddops.prove.evidence import Evidence, Verdict
    from ddops.prove.golden import Golden
    from ddops.prove.replay import Replayed
    from ddops.session import Session

_EXITS = {"pass": Exit.OK, "inconclusive": Exit.INCONCLUSIVE}


@dataclass(frozen=True, slots=True)
class Asked:
    """What the command line wants of the battery."""

    level: str
    only: tuple[str, ...]
    replay: str | None
    save: str | None
    reference: str | None
    as_json: bool
    on_host: bool = True  # False: only an address is known

    def __post_init__(self) -> None:
        from ddops.proof import restricted

        if self.replay and (self.only or self.save or self.reference or self.as_json):
            raise UsageError("--replay goes with none of --only, --save, --reference and --json", means="nothing was probed")
        if self.save is not None:
            check_writable("--save", self.save)
        if self.reference is not None:
            Address(self.reference, option="--reference").base  # noqa: B018 (checked before anything is sent)
        restricted(self.only, "--only", means="nothing was probed", on_host=self.on_host)


def exit_of(verdict: Verdict) -> Exit:
    """The code of a verdict nobody acts on: anything but a pass needs a person, or a better look."""
    return _EXITS.get(str(verdict.kind), Exit.RESTORE_FAILED)


def endpoint(address: Address, asked: Asked) -> int:
    """Probe an address without SSH: a pipeline's side-car, a colleague's server."""
    with connected(address) as client:
        click.echo(f"{address.url} speaks {client.dialect.kind}, model {client.model}", err=True)
        return int(_probe(Target(address.url, address.base, client), asked))


@dataclass(frozen=True, slots=True)
class Target:
    """What is probed, and what else is known of it where it is a host's engine."""

    where: str
    address: str
    client: EngineClient
    applied: Evidence | None = None
    golden: Golden | None = None


def _probe(target: Target, asked: Asked) -> Exit:
    if asked.replay:
        return _replay(target.client, asked.replay)
    verdict = _ask(target, asked)
    _show(target.where, verdict, asked)
    return exit_of(verdict)


def hosts(run: Session, asked: Asked) -> int:
    """Probe the engines of the named hosts over their one SSH connection each."""
    from ddops import proof

    code = Exit.OK
    for config in run.hosts:
        try:
            with run.connected(config) as agent, proof.client(agent) as client:
                _reach(config.name, client)
                code = max(code, _probe(_target(agent, client, asked), asked))
        except UsageError:
            raise
        except DdopsError as problem:
            click.echo(redact(str(problem)), err=True)
            code = max(code, problem.exit)
    return int(code)


def _target(agent: Agent, client: EngineClient, asked: Asked) -> Target:
    """Raises Refused when `applied` is asked for by name and cannot be told."""
    from ddops import proof

    name, address = agent.config.name, proof.address(agent.config)
    try:
        applied, golden = proof.standing(agent, client)
    except Refused as problem:
        if "applied" in asked.only:
            raise
        agent.warn(f"whether what runs is what the unit says cannot be told: {problem.what}")
        return Target(name, address, client)
    if applied is None and "applied" in asked.only:
        raise Refused(
            f"{name} has no {agent.unit}", means="there is nothing to compare with", hint=f"ddops doctor --host {name}"
        )
    return Target(name, address, client, applied, golden)


def _reach(where: str, client: EngineClient) -> None:
    """Nothing that listens is not an engine that died: it is said before anything is probed.

    Raises:
        Unreachable: no HTTP server answers there. Refused: one does, and it is no engine.
    """
    import httpx

    from ddops import greeting

    who = greeting.Greeted(where, client.dialect.kind, option="engine.port")
    try:
        greeting.check(client.http, who)
    except UsageError as problem:
        hint = f"engine.port in the inventory names another port, or ddops status --host {where}"
        raise Refused(problem.what, means=problem.means, hint=hint) from problem
    except httpx.RequestError as problem:
        raise Unreachable(
            f"{where}: nothing answers there ({problem})",
            means="nothing was probed",
            hint=f"ddops status --host {where} says what became of the engine",
        ) from problem


def _ask(target: Target, asked: Asked) -> Verdict:
    from ddops import report
    from ddops.prove import battery
    from ddops.prove.evidence import Level

    told: set[str] = set()

    def on_event(evidence: Evidence) -> None:
        if why := report.not_run(evidence.to_dict()):
            if why not in told:
                click.echo(f"not_scored {evidence.probe} and others: {why}", err=True)
            told.add(why)
            return
        said = report.one_line(redact(evidence.got or evidence.detail))
        click.echo(f"{evidence.outcome!s:<10} {evidence.probe:<14} {said}", err=True)

    with ExitStack() as stack:
        reference = _reference(target, asked, stack)
        return battery.run(
            target.client,
            level=Level(asked.level),
            applied=target.applied,
            golden=target.golden,
            reference=reference,
            only=asked.only or None,
            on_event=on_event,
        )


def _reference(target: Target, asked: Asked, stack: ExitStack) -> EngineClient | None:
    """Raises Refused when it is the probed engine itself."""
    if asked.reference is None:
        return None
    named = Address(asked.reference, option="--reference")
    if not twins.same_place(named.base, target.address):
        found = stack.enter_context(connected(named))
        if not twins.same_process(target.client, found):
            return found
    raise Refused(
        f"--reference {asked.reference} is the engine that is probed ({target.where})",
        means="nothing was probed: an engine that scores itself proves nothing",
        hint="name another engine with the same weights, started with speculation off; or leave --reference out",
    )


def _replay(client: EngineClient, file: str) -> Exit:
    """Send a saved verdict's requests again: 0 when every reply is the same, 11 when some differ, 5 when some are wrong."""
    from ddops.prove import replay

    try:
        evidence = replay.load(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError) as problem:
        raise UsageError(f"{file} is no saved verdict: {problem}", means="nothing was probed") from problem
    found = replay.replay(client, evidence)
    for one in found:
        click.echo(f"{_word(one):<8} {one.probe:<14} {one.label}  {one.error or one.now[:60]!r}")
    if not found:
        raise UsageError(f"{file} keeps no requests", means="nothing was probed")
    words = Counter(_word(one) for one in found)
    told = ", ".join(f"{count} {'differ' if word == 'differs' and count > 1 else word}" for word, count in words.most_common())
    right = sum(one.right is True for one in found)
    click.echo(f"{len(found)} requests sent again: {told}; {right} of those that can be checked are right")
    if ties := _near_ties(evidence):
        click.echo(f"near ties in the saved verdict: {ties}; where two tokens are so close, rounding may choose either")
    if any(one.error or one.right is False for one in found):
        return Exit.RESTORE_FAILED
    return Exit.OK if all(one.same for one in found) else Exit.INCONCLUSIVE


def _near_ties(evidence: Sequence[Evidence]) -> str:
    """`modes 2, rescore 5`, as each probe has counted them; "" when there were none."""
    counted = [(item.probe, re.search(r"(\d+) near ties", item.got)) for item in evidence]
    return ", ".join(f"{probe} {found[1]}" for probe, found in counted if found and int(found[1]))


def _word(one: Replayed) -> str:
    return "error" if one.error else "wrong" if one.right is False else "same" if one.same else "differs"


def _show(where: str, verdict: Verdict, asked: Asked) -> None:
    if asked.save:
        Path(asked.save).write_text(verdict.to_json(), encoding="utf-8")
    if asked.as_json:
        click.echo(json.dumps({"v": 1, "at": where, "verdict": verdict.to_dict(replay=False)}))
        return
    from ddops import report

    # Masked before anything is shortened: half of a secret is one too.
    told = plain(verdict.to_dict(), SECRETS)
    click.echo(report.one_line(f"{where}: {told['kind']}: {told['why']}", 600))
    for line in report.wrong(report.not_passed(told)) if verdict.kind != "pass" else ():
        click.echo("  " + report.for_ci(line))
    if verdict.power:
        click.echo(verdict.power)
