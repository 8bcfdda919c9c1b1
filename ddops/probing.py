"""`ddops probe`: the battery against a host or any endpoint. Nothing is changed, held or recorded."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ddops.errors import DdopsError, Exit, Unreachable, UsageError
from ddops.journal import redact
from ddops.journal.outputs import check_writable

if TYPE_CHECKING:
    from ddops.prove.client import EngineClient
    from ddops.prove.evidence import Evidence, Verdict
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

        if self.save is not None:
            check_writable("--save", self.save)
        if self.reference is not None and not self.reference.startswith(("http://", "https://")):
            raise UsageError(f"--reference {self.reference!r} is no http:// or https:// address", means="nothing was probed")
        unknown = [name for name in self.only if name not in PROBES]
        if unknown:
            raise UsageError(
                f"no probe is called {unknown[0]!r}", means="nothing was probed", hint=f"there are {', '.join(PROBES)}"
            )


def exit_of(verdict: Verdict) -> Exit:
    """The code of a verdict nobody acts on: anything but a pass needs a person, or a better look."""
    return _EXITS.get(str(verdict.kind), Exit.RESTORE_FAILED)


def endpoint(url: str, engine: str, asked: Asked) -> int:
    """Probe an address without SSH: a pipeline's side-car, a colleague's server."""
    import httpx

    from ddops.prove.client import EngineClient

    if not url.startswith(("http://", "https://")):
        raise UsageError(f"{url!r} is no http:// or https:// address", means="nothing was probed")
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
    with httpx.Client(base_url=url, limits=limits) as http:
        return int(_probe(url, EngineClient(http, engine), asked))


def _probe(where: str, client: EngineClient, asked: Asked) -> Exit:
    _reach(where, client)
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
            hint="start the engine, or name its address: --url http://ADDRESS:PORT, without /v1",
        ) from problem


def _living(url: str, scorer: EngineClient) -> EngineClient:
    if not scorer.healthy(timeout=10.0):
        raise Unreachable(f"the reference {url} does not answer", means="nothing was probed")
    return scorer


def _ask(client: EngineClient, asked: Asked) -> Verdict:
    import httpx

    from ddops.prove import battery
    from ddops.prove.client import EngineClient
    from ddops.prove.evidence import Level

    def on_event(evidence: Evidence) -> None:
        click.echo(f"{evidence.outcome!s:<10} {evidence.probe:<14} {evidence.got or evidence.detail}", err=True)

    with httpx.Client(base_url=asked.reference or "http://127.0.0.1") as other:
        reference = _living(asked.reference, EngineClient(other, "ddtree")) if asked.reference else None
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
        word = "error" if one.error else "wrong" if one.right is False else "same" if one.same else "differs"
        click.echo(f"{word:<8} {one.probe:<14} {one.label}  {one.error or one.now[:60]!r}")
    if not found:
        raise UsageError(f"{file} keeps no requests", means="nothing was probed")
    if any(one.error or one.right is False for one in found):
        return Exit.RESTORE_FAILED
    return Exit.OK if all(one.same for one in found) else Exit.INCONCLUSIVE


def _show(where: str, verdict: Verdict, asked: Asked) -> None:
    if asked.save:
        Path(asked.save).write_text(verdict.to_json(), encoding="utf-8")
    if asked.as_json:
        click.echo(json.dumps({"v": 1, "at": where, "verdict": verdict.to_dict(replay=False)}))
        return
    click.echo(f"{where}: {verdict.kind}: {verdict.why}")
    if verdict.power:
        click.echo(verdict.power)
