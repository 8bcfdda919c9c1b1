"""Makes docs/reference/cli.md from the commands and docs/reference/inventory.md from the inventory's models.

    python -m ddops.reference --write    after a command or a field has changed
    python -m ddops.reference --check    exit 1 when the pages are not what the code says

It states nothing of its own: options and defaults come from click and pydantic, what a field is for from the
comments of inventories/example.yaml. No command imports this module.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import click

from ddops.cli import main as cli
from ddops.inventory import values
from ddops.inventory.model import SECTIONS, FlagNames, Gates, HostConfig, Rollout, Sampling, Section
from ddops.units import inventories_dir

FOLDER = Path(__file__).parent.parent / "docs" / "reference"
_NOTE = "<!-- Made by `python -m ddops.reference --write`; the tests fail when it is not current. -->\n"


def pages() -> dict[str, str]:
    """File name below docs/reference -> its text."""
    return {"cli.md": cli_page(), "inventory.md": inventory_page()}


# ---------------------------------------------------------------- commands
def cli_page() -> str:
    """Every command with its usage and options."""
    names = sorted(cli.commands)
    links = " · ".join(f"[{name}](#ddops-{name})" for name in names)
    parts = [
        f"# Command line\n\n{_NOTE}",
        f"{_prose(cli)}\n\n{links}\n",
        "Exit codes: [exit-codes.md](exit-codes.md). Events: [events.md](events.md).\n",
        "## ddops\n",
        _options(cli),
        *(_command(name, cli.commands[name]) for name in names),
    ]
    return "\n".join(parts)


def _command(name: str, command: click.Command) -> str:
    usage = " ".join(["ddops", name, *command.collect_usage_pieces(click.Context(command, info_name=name))])
    return f"## ddops {name}\n\n{_prose(command)}\n\n    {usage}\n\n{_options(command)}"


def _prose(command: click.Command) -> str:
    return "\n\n".join(_one_line(block) for block in (command.help or "").split("\n\n"))


def _options(command: click.Command) -> str:
    context = click.Context(command, info_name="ddops")
    rows = [_option(option, context) for option in command.params if isinstance(option, click.Option)]
    return _table(("Option", "What it does"), rows) if rows else "No options.\n"


def _option(option: click.Option, context: click.Context) -> tuple[str, str]:
    names = ", ".join(f"`{name}`" for name in option.opts)
    shown = "" if option.is_flag else option.make_metavar(context)
    shown = "N" if isinstance(option.type, click.IntRange) else shown
    text = option.help or ""
    if option.show_default and option.default is not None:
        text += f" Default: `{option.default}`."
    if isinstance(option.envvar, str):
        text += f" Environment: `{option.envvar}`."
    return f"{names} `{shown}`" if shown else names, _one_line(text)


# ---------------------------------------------------------------- inventory
_WORDS: tuple[tuple[Any, str], ...] = (
    (values.AbsolutePath, "absolute path"),
    (values.UnitName, "unit name ending in .service"),
    (values.Address, "host name or IP address"),
    (values.Network, "IP address or network"),
    (values.Listen, "IP address or localhost"),
    (values.Arch, "architecture, such as sm_103 or cpu"),
    (values.FlagName, "flag, such as --name"),
    (values.Release, "one folder name"),
    (values.ModelPath, "path"),
    (values.User, "user name"),
    (values.Variable, "variable name"),
    (values.VariableText, "text or number"),
    (values.Plain, "text"),
    (values.Text, "text"),
    (values.Word, "text"),
)
_SIMPLE: dict[Any, str] = {str: "text", int: "whole number", float: "number", bool: "true or false"}
_HOST_ONLY = ("address", "arch", "groups")
_NESTED: dict[str, tuple[tuple[str, type[Section]], ...]] = {
    "engine": (("flags", FlagNames),),
    "prove": (("gates", Gates), ("sampling", Sampling)),
}


def inventory_page() -> str:
    """Every section with its fields, their values, limits and defaults."""
    told = comments((inventories_dir() / "example.yaml").read_text(encoding="utf-8"))
    parts = [
        f"# Inventory\n\n{_NOTE}",
        "One YAML file. `version: 1`, then `defaults`, `groups`, `hosts` and `rollout`. The sections below may stand"
        " under `defaults`, under a group and under a host; they are merged key by key in that order, a list replaces"
        " a list, and an unknown key is an error that names file, line and field. A commented example:"
        " `ddops inventory --example`. A check without any host: `ddops inventory`.\n",
        _host(told),
    ]
    for name, section in SECTIONS.items():
        parts.append(_section(name, section, told))
        parts += [_section(f"{name}.{key}", nested, told) for key, nested in _NESTED.get(name, ())]
    parts.append(_section("rollout", Rollout, told, "Of the whole file: how a run over several hosts proceeds."))
    return "\n".join(parts)


def _host(told: dict[str, str]) -> str:
    hints = get_type_hints(HostConfig, include_extras=True)
    rows = [_field(HostConfig, name, hints[name], told.get(name, "")) for name in _HOST_ONLY]
    return f"## A host\n\nBeside the sections, a host has:\n\n{_table(_COLUMNS, rows)}"


_COLUMNS = ("Field", "Value", "Default", "What it is")


def _section(name: str, section: type[Section], told: dict[str, str], text: str = "") -> str:
    prose = text or _one_line(section.__doc__ or "")
    hints = get_type_hints(section, include_extras=True)
    keys = [key for key in section.model_fields if not _is_section(hints[key])]
    said = {} if section is FlagNames else told  # their names say it
    rows = [_field(section, key, hints[key], said.get(f"{name}.{_alias(section, key)}", "")) for key in keys]
    return "\n\n".join(part for part in (f"## {name}", prose, _table(_COLUMNS, rows)) if part)


def _field(section: type[Section], key: str, hint: Any, text: str) -> tuple[str, str, str, str]:
    return f"`{_alias(section, key)}`", value_of(hint), _default(section, key), text


def _alias(section: type[Section], key: str) -> str:
    return section.model_fields[key].alias or key


def _default(section: type[Section], key: str) -> str:
    field = section.model_fields[key]
    if field.is_required():
        return "required"
    found = field.get_default(call_default_factory=True, validated_data={})
    if found is None or found in ("", (), {}):
        return "none"
    if isinstance(found, tuple):
        return "`[" + ", ".join(map(str, found)) + "]`"
    if isinstance(found, dict):
        return "`{" + ", ".join(f"{k}: {v}" for k, v in found.items()) + "}`"
    return f"`{str(found).lower() if isinstance(found, bool) else found}`"


def _is_section(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, Section)


def value_of(hint: Any) -> str:
    """What a field may hold, in words, with its limits."""
    known = next((words for kind, words in _WORDS if kind == hint), None)
    if known:
        return known
    origin = get_origin(hint)
    if origin is Annotated:
        inner, *notes = get_args(hint)
        return value_of(inner) + _limits(notes)
    if origin in (Union, UnionType):
        parts = [value_of(part) for part in get_args(hint) if part is not NoneType]
        return " or ".join(dict.fromkeys(parts))
    if origin is Literal:
        return ", ".join(f"`{choice}`" for choice in get_args(hint))
    if origin is tuple:
        return f"list of {value_of(get_args(hint)[0])}"
    if origin is dict:
        key, value = map(value_of, get_args(hint))
        return f"{key}: {value}"
    return _SIMPLE[hint]


_SIGNS = (("gt", "above"), ("ge", "from"), ("lt", "below"), ("le", "to"))


def _limits(notes: Sequence[Any]) -> str:
    limits = [limit for note in notes for limit in getattr(note, "metadata", ())]
    bounds = [(word, getattr(limit, name, None)) for limit in limits for name, word in _SIGNS]
    # A billion is "no limit anybody meets": it keeps a slip of the keyboard out, and says nothing here.
    found = [f"{word} {bound}" for word, bound in bounds if bound is not None and bound < 1_000_000_000]
    return f", {' '.join(found)}" if found else ""


def comments(example: str) -> dict[str, str]:
    """Comment of each key in the example -> its words; keys as `engine.unit`, without `defaults` and host names."""
    found: dict[str, str] = {}
    path: list[tuple[int, str]] = []
    for line in example.splitlines():
        match = re.match(r"( *)([A-Za-z_0-9.-]+):(.*)", line)
        if match is None:
            continue
        depth, key = len(match[1]), match[2]
        path = [*((d, k) for d, k in path if d < depth), (depth, key)]
        said = re.search(r"\s# (.*)", match[3])
        if said:
            found.setdefault(_short([name for _, name in path]), re.sub(r"^example[;:]?\s*", "", said[1]))
    return found


def _short(keys: list[str]) -> str:
    dropped = {"defaults": 1, "groups": 2, "hosts": 2}.get(keys[0], 0)
    return ".".join(keys[dropped:])


# ---------------------------------------------------------------- text
def _one_line(text: str) -> str:
    return " ".join(text.split())


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table. Sequence: the cells of a row in the order of the head."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


# ---------------------------------------------------------------- front
def stale(folder: Path = FOLDER) -> Iterator[str]:
    """Names of pages that are not what the code says."""
    for name, text in pages().items():
        path = folder / name
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            yield name


@click.command()
@click.option("--write", is_flag=True, help="Write the pages.")
@click.option("--check", is_flag=True, help="Exit 1 when a page is not current.")
def main(write: bool, check: bool) -> None:
    """Make the reference pages that follow from the code."""
    if write == check:
        raise click.UsageError("say --write or --check")
    if write:
        for name, text in pages().items():
            (FOLDER / name).write_text(text, encoding="utf-8")
        return
    old = list(stale())
    if old:
        click.echo(f"not current: {', '.join(old)}; do: python -m ddops.reference --write", err=True)
        raise SystemExit(1)


if __name__ == "__main__":
    main()
