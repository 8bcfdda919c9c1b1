"""A host's unit and its trial fence from templates/: the same input gives the same bytes. Pure."""

from __future__ import annotations

import hashlib
import ipaddress
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddops.engines import profile_of
from ddops.units.parse import parse
from ddops.units.quoting import UnitError, env_quote, exec_line, value_quote

if TYPE_CHECKING:
    import jinja2

    from ddops.engines import Settings
    from ddops.inventory import EngineSection, HostConfig

HEADER = b"# Rendered by ddops"
FENCE_NAME = "90-ddops-fence.conf"
START_MARGIN_SECONDS = 60  # systemd must not end a start that ddops still waits for
STOP_SECONDS = 30  # a few seconds for requests in flight, then the whole group is killed


@dataclass(frozen=True, slots=True)
class Unit:
    """A unit's bytes, their sha256 (the configuration's id) and the command in it."""

    name: str
    text: bytes
    digest: str
    argv: tuple[str, ...] = field(default=())

    @classmethod
    def of(cls, name: str, text: bytes, argv: Sequence[str] | None = None) -> Unit:
        """Raises UnitError when no argv is given and the text can't be understood."""
        words = tuple(argv) if argv is not None else parse(text, name).argv
        return cls(name, text, hashlib.sha256(text).hexdigest(), words)


def digest(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()


def from_text(name: str, text: bytes) -> Unit:
    """A unit read from a host. Raises UnitError when it can't be understood."""
    return Unit.of(name, text)


def settings(unit: Unit, config: HostConfig) -> Settings:
    """What a unit's command sets. Raises ArgvError when its flags can't be read."""
    return profile_of(config.engine).parse_argv(unit.argv)


def is_ours(text: bytes) -> bool:
    """Whether ddops rendered this unit (it may have been edited since)."""
    return text.startswith(HEADER)


def render(config: HostConfig, chosen: Settings) -> Unit:
    """The unit of this host with these settings.

    Raises:
        UnitError: a value that can't stand in a unit file.
    """
    engine = config.engine
    profile = profile_of(engine)
    argv = profile.argv(engine, chosen)
    text = _template(f"{engine.kind}.service.j2").render(
        description=f"{engine.kind} inference engine",
        settings=chosen.describe(),
        exec_start=exec_line(argv),
        engine=engine,
        environment=sorted(engine.environment.items()),
        cache_name=engine.unit.removesuffix(".service").replace("@", "-").replace(":", "-"),
        start_seconds=round(config.ready.timeout_seconds) + START_MARGIN_SECONDS,
        stop_seconds=STOP_SECONDS,
        private_tmp=not _needs_tmp(engine),
    )
    data = text.encode()
    if parse(data, engine.unit).argv != tuple(argv):
        raise UnitError(f"{engine.unit} would not run the arguments it was rendered for")
    return Unit.of(engine.unit, data, argv)


def _needs_tmp(engine: EngineSection) -> bool:
    """Whether the engine itself lies below a folder that PrivateTmp= would hide from it."""
    paths = (engine.python, engine.release_folder, engine.model, engine.drafter)
    return any(path.startswith(("/tmp/", "/var/tmp/")) for path in paths)


def fence(config: HostConfig, addresses: Iterable[str] = ()) -> bytes:
    """The drop-in that keeps everyone but this host away from an unproven engine, and makes a death final.

    Args:
        addresses: the host's own addresses; NCCL and torch.distributed connect over them.

    Raises:
        UnitError: an address that is none.
    """
    allowed: list[str] = []
    for address in addresses:
        try:
            allowed.append(str(ipaddress.ip_address(address.partition("%")[0])))
        except ValueError:
            raise UnitError(f"{address[:60]!r} is no IP address") from None
    allowed = sorted(set(allowed)) + list(config.fence.allow)
    text = _template("fence.conf.j2").render(enabled=config.fence.enabled, allowed=allowed)
    return text.encode()


# ---------------------------------------------------------------- templates
def _shipped(folder: str) -> Traversable:
    """A folder that lies beside the package in a checkout and inside it in a wheel."""
    inside = resources.files("ddops") / folder
    return inside if inside.is_dir() else Path(__file__).parents[2] / folder


def templates_dir() -> Traversable:
    """Where the templates are: checkout, editable install or wheel."""
    return _shipped("templates")


def inventories_dir() -> Traversable:
    """Where the example inventories are."""
    return _shipped("inventories")


@cache
def _environment() -> jinja2.Environment:
    import jinja2

    def load(name: str) -> str | None:
        file = templates_dir() / name
        return file.read_text(encoding="utf-8") if file.is_file() else None

    made = jinja2.Environment(
        loader=jinja2.FunctionLoader(load),
        undefined=jinja2.StrictUndefined,
        autoescape=False,  # unit files, not HTML; every value goes through a quoting filter
        keep_trailing_newline=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters: dict[str, Any] = {"value": lambda v: value_quote(str(v)), "env": lambda v, name: env_quote(name, str(v))}
    made.filters.update(filters)
    return made


def _template(name: str) -> jinja2.Template:
    return _environment().get_template(name)
