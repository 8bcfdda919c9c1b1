"""The command line: parse, call one function, render, exit. It decides nothing.

Heavy libraries are imported only by what uses them, so that `--help` stays instant.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import click

from ddops import __version__
from ddops.endpoint import AUTO, KINDS
from ddops.errors import DdopsError, Exit, UsageError
from ddops.options import (
    COUNT,
    LEVEL,
    POSITIVE,
    any_host_option,
    check_probes,
    host_option,
    json_option,
    level_option,
    output_options,
    read_inventory,
    session,
    yes_option,
)  # fmt: skip


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option("--inventory", "-i", metavar="FILE", envvar="DDOPS_INVENTORY", help="The fleet (else DDOPS_INVENTORY, "
              "./inventory.yaml, ./inventories/default.yaml, ~/.config/ddops/inventory.yaml).")  # fmt: skip
@click.version_option(__version__, prog_name="ddops")
def main(inventory: str | None) -> None:
    """Change the speculative-decoding configuration of inference hosts, and prove every change.

    A change that is not proven is taken back, and what was restored is proven too.
    """


# ---------------------------------------------------------------- changing
@main.command()
@host_option
@click.option("--budget", type=COUNT, help="Nodes of the draft tree.")
@click.option("--topk-cap", type=POSITIVE, help="Widest branching of the tree.")
@click.option(
    "--max-running-requests", "--max-running", "max_running", type=COUNT, help="auto: the largest power of two that fits."
)
@click.option(
    "--algorithm", type=click.Choice(["DDTREE", "DFLASH", "NONE"], case_sensitive=False), help="NONE: no speculation."
)
@level_option
@click.option("--dry-run", is_flag=True, help="Look, plan, show the difference; touch nothing.")
@click.option("--detailed-exitcode", is_flag=True, help="With --dry-run: exit 10 when there are changes.")
@yes_option
@click.option("--retry-known-bad", is_flag=True, help="Try a configuration that has failed here before.")
@click.option("--force-restart", is_flag=True, help="Restart and prove even when nothing changes.")
@click.option("--from-broken", is_flag=True, help="Go on although the running configuration is not proven.")
@output_options
def reconfig(
    hosts: tuple[str, ...],
    budget: int | str | None,
    topk_cap: int | None,
    max_running: int | str | None,
    algorithm: str | None,
    level: str | None,
    dry_run: bool,
    detailed_exitcode: bool,
    yes: bool,
    retry_known_bad: bool,
    force_restart: bool,
    from_broken: bool,
    **outputs: Any,
) -> None:
    """Change the configuration, prove it, and otherwise put the host back and prove that.

    What is not named stays as it is on the host.
    """
    from ddops.ground import Options
    from ddops.plan import Request
    from ddops.transaction import Transaction

    request = Request(
        budget=budget,
        topk_cap=topk_cap,
        max_running=max_running,
        algorithm=algorithm,
        retry_known_bad=retry_known_bad,
        force_restart=force_restart,
        from_broken=from_broken,
    )
    if detailed_exitcode and not dry_run:
        raise UsageError("--detailed-exitcode goes with --dry-run", means="nothing was done")
    run = session(hosts, **outputs)
    options = Options(run.command, level, dry_run)
    if not (dry_run or yes):
        run.ask("change")
    run.over(lambda agent: Transaction(agent, run.journal, options).reconfigure(request))
    run.finish(changes_exit=detailed_exitcode)


@main.command()
@host_option
@click.option("--to", metavar="DIGEST", help="A verified configuration by (the start of) its digest; see history.")
@level_option
@yes_option
@output_options
def rollback(hosts: tuple[str, ...], to: str | None, level: str | None, yes: bool, **outputs: Any) -> None:
    """Revoke what is there and go back to the configuration that was verified before it."""
    from ddops.ground import Options
    from ddops.transaction import Transaction

    run = session(hosts, **outputs)
    if not yes:
        run.ask("roll back")
    options = Options(run.command, level)
    run.over(lambda agent: Transaction(agent, run.journal, options).rollback(to))
    run.finish()


@main.command()
@host_option
@click.option("--release", "source", metavar="PATH", help="The engine's folder or wheel.")
@click.option("--level", type=LEVEL, help="How thoroughly to prove the first unit.")
@yes_option
@output_options
def install(hosts: tuple[str, ...], source: str | None, level: str | None, yes: bool, **outputs: Any) -> None:
    """Put the host script and an engine release on a host, and make its first unit a proven one."""
    from ddops.ground import Options
    from ddops.install import install_host

    run = session(hosts, **outputs)
    if not yes:
        run.ask("install")
    options = Options(run.command, level)
    run.over(lambda agent: install_host(agent, run.journal, options, source))
    run.finish()


@main.command()
@host_option
@level_option
@output_options
def adopt(hosts: tuple[str, ...], level: str | None, **outputs: Any) -> None:
    """Take a hand-written unit as it is, once what it runs is proven. Nothing is restarted."""
    from ddops import standing
    from ddops.ground import Ground, Options

    run = session(hosts, **outputs)
    options = Options(run.command, level)
    run.each(lambda agent: standing.adopt(Ground(agent, run.journal, options)))
    run.finish()


@main.command()
@host_option
@level_option
@output_options
def verify(hosts: tuple[str, ...], level: str | None, **outputs: Any) -> None:
    """Prove what runs again, without a restart, and renew or void its verdict."""
    from ddops import standing
    from ddops.ground import Ground, Options

    run = session(hosts, **outputs)
    options = Options(run.command, level)
    run.each(lambda agent: standing.verify(Ground(agent, run.journal, options)))
    run.finish()


@main.command()
@host_option
@output_options
def resume(hosts: tuple[str, ...], **outputs: Any) -> None:
    """Finish what an interrupted run left behind: wait for the host to settle, then prove what runs."""
    from ddops import standing
    from ddops.ground import Ground, Options

    run = session(hosts, **outputs)
    options = Options(run.command)
    run.each(lambda agent: standing.resume(Ground(agent, run.journal, options)))
    run.finish()


@main.command()
@host_option
@yes_option
@output_options
def unlock(hosts: tuple[str, ...], yes: bool, **outputs: Any) -> None:
    """Take the lease from a run whose controller is gone. An open trial is never cut short by it."""
    from ddops import looking

    run = session(hosts, **outputs)
    if not yes:
        run.ask("unlock")
    run.each(looking.unlock)
    run.finish()


# ---------------------------------------------------------------- looking
@main.command()
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


@main.command()
@any_host_option
@json_option
def status(hosts: tuple[str, ...], as_json: bool) -> None:
    """What is on disk, loaded, running and verified, host by host."""
    from ddops import looking

    run = session(hosts or ("all",), quiet=True)
    raise SystemExit(looking.status(run, as_json))


@main.command()
@any_host_option
@json_option
@click.option("--limit", type=POSITIVE, default=20, show_default=True, help="The newest entries of each host.")
def history(hosts: tuple[str, ...], as_json: bool, limit: int) -> None:
    """Every attempt and verdict on record: who, when, why, what came of it."""
    from ddops import looking

    run = session(hosts or ("all",), quiet=True)
    raise SystemExit(looking.history(run, as_json, limit))


@main.command()
@any_host_option
@json_option
def known(hosts: tuple[str, ...], as_json: bool) -> None:
    """Configurations proven good and found bad, merged over the fleet, with their evidence."""
    from ddops import known as memories

    run = session(hosts or ("all",), quiet=True)
    raise SystemExit(memories.show(run, as_json))


@main.command()
@host_option
@click.option("--lines", type=click.IntRange(1, 10000), default=100, show_default=True)
def logs(hosts: tuple[str, ...], lines: int) -> None:
    """The journal of the engine's current start, and of no other."""
    from ddops import looking

    run = session(hosts, quiet=True)
    raise SystemExit(looking.logs(run, lines))


@main.command()
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

    asked = probing.Asked(level, only, replay, save, reference, as_json)
    if url:
        if hosts:
            raise UsageError("--url and --host exclude each other", means="nothing was probed")
        address = endpoint.Address(url, engine, model, endpoint.read_key(api_key_file))
        raise SystemExit(probing.endpoint(address, asked))
    if model or api_key_file:
        raise UsageError("--model and --api-key-file go with --url", means="nothing was probed")
    raise SystemExit(probing.hosts(session(hosts, quiet=True), asked))


@main.command()
@any_host_option
def doctor(hosts: tuple[str, ...]) -> None:
    """Check what ddops needs on a host, one line each; changes nothing."""
    from ddops import looking

    run = session(hosts or ("all",), quiet=True)
    raise SystemExit(looking.doctor(run))


@main.command("inventory")
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


@main.command()
@click.option("--keep", is_flag=True, help="Leave the lab running and say how to reach it.")
def demo(keep: bool) -> None:
    """The main job on three real hosts on this machine, as a transcript. Needs root."""
    from ddops import demonstration

    raise SystemExit(demonstration.run(keep=keep))


def run() -> None:
    """The console script: every expected error is three lines and an exit code, never a traceback."""
    try:
        main(standalone_mode=False)
    except DdopsError as problem:
        _leave(str(problem), problem.exit)
    except click.exceptions.Exit as done:
        raise SystemExit(done.exit_code) from None
    except click.Abort:
        _leave("error: stopped\n       nothing was changed", Exit.SIGINT)
    except click.exceptions.NoArgsIsHelpError as problem:
        problem.show()
        raise SystemExit(Exit.USAGE) from None
    except click.UsageError as problem:
        _leave(str(_usage(problem)), Exit.USAGE)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(Exit.OK) from None


def _usage(problem: click.UsageError) -> UsageError:
    """What click says of a command line, in the same words and lines as every other error."""
    said = problem.format_message().rstrip(".")
    hint = f"{problem.ctx.command_path} --help" if problem.ctx else "ddops --help"
    return UsageError(said[:1].lower() + said[1:], means="nothing was done", hint=hint)


def _leave(text: str, code: int) -> None:
    click.echo(text, err=True)
    raise SystemExit(int(code)) from None
