"""`ddops probe`: the battery against a host or any endpoint. Nothing is changed, held or recorded."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ddops.endpoint import Address, connected
from ddops.errors import DdopsError, Exit, Unreachable, UsageError
from ddops.journal import SECRETS, redact
from ddops.journal.events import plain
from ddops.journal.outputs import check_writable

if TYPE_CHECKING:
    from ddops.prove.client import EngineClient
    from ddops.prove.evidence import Evidence, Verdict
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

    def __post_init__(self) -> None:
        from ddops.prove.battery import PROBES

        if self.replay and (self.only or self.save or self.reference or self.as_json):
            raise UsageError("--replay goes with none of --only, --save, --reference and --json", means="nothing was probed")
        if self.save is not None:
            check_writable("--save", self.save)
        if self.reference is not None:
            Address(self.reference, option="--reference").base  # noqa: B018 (checked before anything is sent)
        unknown = [name for name in self.only if name not in PROBES]
        if unknown:
            raise UsageError(
                f"no probe is called {unknown[0]!r}", means="nothing was probed", hint=f"there are {', '.join(PROBES)}"
            )


def exit_of(verdict: Verdict) -> Exit:
    """The code of a verdict nobody acts on: anything but a pass needs a person, or a better look."""
    return _EXITS.get(str(verdict.kind), Exit.RESTORE_FAILED)


def endpoint(address: Address, asked: Asked) -> int:
    """Probe an address without SSH: a pipeline's side-car, a colleague's server."""
    with connected(address) as client:
        click.echo(f"{address.url} speaks {client.dialect.kind}, model {client.model}", err=True)
        return int(_probe(address.url, client, asked))


def _probe(where: str, client: EngineClient, asked: Asked) -> Exit:
    if asked.replay:
        return _replay(client, asked.replay)
    verdict = _ask(client, asked)
    _show(where, verdict, asked)
    return exit_of(verdict)


def hosts(run: Session, asked: Asked) -> int:
    """Probe the engines of the named hosts over their one SSH connection each."""
    from ddops import proof

    code = Exit.OK
    for config in run.hosts:
        try:
            with run.connected(config) as agent, proof.client(agent) as client:
                _reach(config.name, client)
                code = max(code, _probe(config.name, client, asked))
        except UsageError:
            raise
        except DdopsError as problem:
            click.echo(redact(str(problem)), err=True)
            code = max(code, problem.exit)
    return int(code)


def _reach(where: str, client: EngineClient) -> None:
    """Nothing that listens is not an engine that died: it is said before anything is probed.

    Raises:
        Unreachable: no HTTP server answers there.
    """
    import httpx

    try:
        client.http.get("/health", timeout=10.0)
    except httpx.TransportError as problem:
        raise Unreachable(
            f"{where}: nothing answers there ({problem})",
            means="nothing was probed",
            hint=f"ddops status --host {where} says what became of the engine",
        ) from problem


def _ask(client: EngineClient, asked: Asked) -> Verdict:
    from ddops import report
    from ddops.prove import battery
    from ddops.prove.evidence import Level

    def on_event(evidence: Evidence) -> None:
        said = report.one_line(redact(evidence.got or evidence.detail))
        click.echo(f"{evidence.outcome!s:<10} {evidence.probe:<14} {said}", err=True)

    with ExitStack() as stack:
        named = Address(asked.reference, option="--reference") if asked.reference else None
        reference = stack.enter_context(connected(named)) if named else None
        return battery.run(client, level=Level(asked.level), reference=reference, only=asked.only or None, on_event=on_event)


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
    told = ", ".join(f"{count} {word}" for word, count in words.most_common())
    right = sum(one.right is True for one in found)
    click.echo(f"{len(found)} requests sent again: {told}; {right} of those that can be checked are right")
    if any(one.error or one.right is False for one in found):
        return Exit.RESTORE_FAILED
    return Exit.OK if all(one.same for one in found) else Exit.INCONCLUSIVE


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
