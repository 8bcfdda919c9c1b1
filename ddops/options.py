"""What the commands share: their options, the inventory they read, and the session they become.

Heavy libraries are imported only by what uses them, so that `--help` stays instant.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ddops.errors import DdopsError, Fault, InventoryError, UsageError

if TYPE_CHECKING:
    from ddops.inventory import Fleet, HostConfig
    from ddops.session import Session

SEARCHED = ("inventory.yaml", "inventories/default.yaml", "~/.config/ddops/inventory.yaml")


class _Count(click.ParamType[int | str]):
    """A whole number of at least 1, or "auto"."""

    name = "N|auto"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        if value == "auto" or (isinstance(value, int) and value > 0):
            return value  # type: ignore[no-any-return]
        text = str(value).strip()
        if not (text.isascii() and text.isdigit()) or int(text) < 1:
            self.fail(f"{value!r} is not a whole number of at least 1, nor auto", param, ctx)
        return int(text)


COUNT = _Count()
POSITIVE = click.IntRange(min=1)
LEVEL = click.Choice(["quick", "standard", "deep"])


def _hosts_of(ctx: click.Context, _: click.Parameter, incomplete: str) -> list[str]:
    """Host and group names for shell completion, from the inventory alone."""
    try:
        fleet = read_inventory(ctx.find_root().params.get("inventory"))
    except DdopsError:
        return []
    return [name for name in (*fleet.hosts, *fleet.groups, "all") if name.startswith(incomplete)]


Command = Callable[..., Any]


def host_option(command: Command) -> Command:
    return _hosts("Not needed when there is only one host.")(command)


def any_host_option(command: Command) -> Command:
    """For commands that look at every host when none is named."""
    return _hosts("All of them when none is named.")(command)


def _hosts(unnamed: str) -> Callable[[Command], Command]:
    text = f"A host or a group of the inventory, or all; may be repeated. {unnamed}"
    return click.option("--host", "hosts", multiple=True, metavar="HOST", shell_complete=_hosts_of, help=text)


def level_option(command: Command) -> Command:
    return click.option("--level", type=LEVEL, help="How thoroughly to prove.")(command)


def yes_option(command: Command) -> Command:
    return click.option("--yes", "-y", is_flag=True, help="Do not ask on a terminal.")(command)


def json_option(command: Command) -> Command:
    """For commands whose only output is what they print."""
    return click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout instead of text.")(command)


def output_options(command: Command) -> Command:
    for option in (
        json_option,
        click.option("--events", metavar="FILE", help="Write every event as NDJSON to FILE (- is stdout)."),
        click.option("--junit", metavar="FILE", help="Write a JUnit report to FILE."),
        click.option("--report", metavar="FILE", help="Write a report to FILE (.md or .html)."),
    ):
        command = option(command)
    return command


def find_inventory(named: str | None) -> Path:
    """The inventory file; UsageError when there is none."""
    if named:
        return Path(named).expanduser()
    for candidate in SEARCHED:
        path = Path(candidate).expanduser()
        if path.is_file():
            return path
    raise UsageError(
        "no inventory was found",
        means=f"looked at DDOPS_INVENTORY and {', '.join(SEARCHED)}",
        hint="name one with --inventory, or start from: ddops inventory --example",
    )


def read_inventory(named: str | None) -> Fleet:
    from ddops import inventory

    path = find_inventory(named)
    try:
        content = path.read_bytes()
    except OSError as problem:
        raise InventoryError(Fault(problem.strerror or str(problem), str(path))) from problem
    return inventory.load(content, str(path))


def session(named: tuple[str, ...] | list[str], **outputs: Any) -> Session:
    """The run this command is: its hosts, its journal and where its outputs go."""
    from ddops.session import Session

    ctx = click.get_current_context()
    fleet = read_inventory(ctx.find_root().params.get("inventory"))
    if not named and len(fleet.hosts) == 1:
        named = list(fleet.hosts)
    if not named:
        raise UsageError("no host named", means="nothing was done", hint="name one: --host NAME (or --host all)")
    chosen = fleet.select(named)
    check_probes(chosen)
    return Session(fleet, chosen, _typed(), **outputs)


def check_probes(hosts: Iterable[HostConfig]) -> None:
    """A probe that does not exist is found before any host is contacted."""
    named = [host for host in hosts if host.prove.probes]
    if named:
        from ddops import proof

        for host in named:
            proof.only(host)


def _typed() -> str:
    """The command as typed, for the ledger."""
    return shlex.join(["ddops", *sys.argv[1:]])
