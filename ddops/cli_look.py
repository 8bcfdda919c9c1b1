"""The commands that look, wait and probe. Each parses, calls one function and leaves; none changes an engine."""

from __future__ import annotations

from typing import Any

import click

from ddops.endpoint import AUTO, KINDS
from ddops.errors import UsageError
from ddops.options import (
    LEVEL,
    POSITIVE,
    any_host_option,
    check_probes,
    host_option,
    json_option,
    output_options,
    read_inventory,
    session,
)


@click.command()
@host_option
@click.option("--until", type=click.Choice(["ready", "verified"]), default="ready", show_default=True)
@click.option("--timeout", metavar="DURATION", default="20m", show_default=True, help="Such as 90s, 15m, 1h.")
@output_options
def wait(hosts: tuple[str, ...], until: str, timeout: str, **outputs: Any) -> None:
    """Wait until the engine is ready, or its configuration verified."""
    from ddops import looking

    seconds = looking.duration(timeout)
    run = session(hosts, **outputs)
    run.each(lambda agent: looking.wait(agent, run.journal, until, seconds))
    run.finish()


@click.command()
@any_host_option
@json_option
def status(hosts: tuple[str, ...], as_json: bool) -> None:
    """What is on disk, loaded, running and verified, host by host."""
    from ddops import looking

    run = session(hosts or ("all",), quiet=True)
    raise SystemExit(looking.status(run, as_json))


@click.command()
@any_host_option
@json_option
@click.option("--limit", type=POSITIVE, default=20, show_default=True, help="The newest entries of each host.")
def history(hosts: tuple[str, ...], as_json: bool, limit: int) -> None:
    """Every attempt and verdict on record: who, when, why, what came of it."""
    from ddops import looking

    run = session(hosts or ("all",), quiet=True)
    raise SystemExit(looking.history(run, as_json, limit))


@click.command()
@any_host_option
@json_option
def known(hosts: tuple[str, ...], as_json: bool) -> None:
    """Configurations proven good and found bad, merged over the fleet, with their evidence."""
    from ddops import known as memories

    run = session(hosts or ("all",), quiet=True)
    raise SystemExit(memories.show(run, as_json))


@click.command()
@host_option
@click.option("--lines", type=click.IntRange(1, 10000), default=100, show_default=True)
def logs(hosts: tuple[str, ...], lines: int) -> None:
    """The journal of the engine's current start, and of no other."""
    from ddops import looking

    run = session(hosts, quiet=True)
    raise SystemExit(looking.logs(run, lines))


@click.command()
@host_option
@click.option("--url", metavar="URL", help="Any endpoint, without SSH, instead of a host.")
@click.option("--engine", type=click.Choice(KINDS), default=AUTO,
              show_default=True, help="With --url: what it speaks; openai: any other server with OpenAI's chat.")  # fmt: skip
@click.option("--model", metavar="NAME", help="With --url: the served model, where there are several.")
@click.option("--api-key-file", metavar="FILE", help="With --url: a file with the engine's API key.")
@click.option("--reference", metavar="URL", help="An engine with speculation off that can score token ids.")
@click.option("--level", type=LEVEL, default="quick", show_default=True)
@click.option("--only", "only", multiple=True, metavar="PROBE", help="Run only this probe; may be repeated.")
@click.option("--replay", metavar="FILE", help="Send the requests of a saved verdict again.")
@click.option("--save", metavar="FILE", help="Keep the verdict with prompts and replies.")
@json_option
def probe(
    hosts: tuple[str, ...],
    url: str | None,
    engine: str,
    model: str | None,
    api_key_file: str | None,
    reference: str | None,
    level: str,
    only: tuple[str, ...],
    replay: str | None,
    save: str | None,
    as_json: bool,
) -> None:
    """Run the proof battery against a host or an endpoint; nothing is changed or recorded."""
    from ddops import endpoint, probing

    asked = probing.Asked(level, only, replay, save, reference, as_json, on_host=not url)
    if url:
        if hosts:
            raise UsageError("--url and --host exclude each other", means="nothing was probed")
        address = endpoint.Address(url, engine, model, endpoint.read_key(api_key_file))
        raise SystemExit(probing.endpoint(address, asked))
    if model or api_key_file:
        raise UsageError("--model and --api-key-file go with --url", means="nothing was probed")
    raise SystemExit(probing.hosts(session(hosts, quiet=True), asked))


@click.command()
@any_host_option
def doctor(hosts: tuple[str, ...]) -> None:
    """Check what ddops needs on a host, one line each; changes nothing."""
    from ddops import looking

    run = session(hosts or ("all",), quiet=True)
    raise SystemExit(looking.doctor(run))


@click.command("inventory")
@click.option("--example", is_flag=True, help="Print a documented example instead.")
def show_inventory(example: bool) -> None:
    """Check the inventory and list its hosts."""
    if example:
        from ddops.units import inventories_dir

        click.echo((inventories_dir() / "example.yaml").read_text(encoding="utf-8"), nl=False)
        return
    fleet = read_inventory(click.get_current_context().find_root().params.get("inventory"))
    check_probes(fleet.hosts.values())
    width = max(len(name) for name in fleet.hosts)
    for name, host in fleet.hosts.items():
        click.echo(f"{name:{width}}  {host.address}  {host.engine.kind}  {host.engine.unit}  {' '.join(host.groups)}")


@click.command()
@click.option("--keep", is_flag=True, help="Leave the lab running and say how to reach it.")
def demo(keep: bool) -> None:
    """The main job on three real hosts on this machine, as a transcript. Needs root."""
    from ddops import demonstration

    raise SystemExit(demonstration.run(keep=keep))


COMMANDS = (wait, status, history, known, logs, probe, doctor, show_inventory, demo)
