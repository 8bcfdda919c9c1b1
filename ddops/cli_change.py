"""The commands that change a host, or settle what was changed. Each parses, calls one function and leaves."""

from __future__ import annotations

from typing import Any

import click

from ddops.errors import UsageError
from ddops.options import COUNT, LEVEL, POSITIVE, host_option, level_option, output_options, session, yes_option


@click.command()
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


@click.command()
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


@click.command()
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


@click.command()
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


@click.command()
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


@click.command()
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


@click.command()
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


COMMANDS = (reconfig, rollback, install, adopt, verify, resume, unlock)
