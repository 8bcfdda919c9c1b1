"""Where to log in and how: the inventory's ssh section and an OpenSSH client configuration, resolved.

It opens no connection. What the inventory says outright wins over the ssh_config file, as options on
ssh's command line do. Settings that ddops cannot honour are refused or noted, never dropped.
"""

from __future__ import annotations

import glob
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ddops.errors import Refused
from ddops.hosts.known_hosts import host_names

DEFAULT_CONFIG = Path("~/.ssh/config")
DEFAULTS: Mapping[str, object] = {
    "user": "root",
    "port": 22,
    "identity_file": None,
    "known_hosts": ("~/.ssh/known_hosts",),
}
INCLUDE_DEPTH = 8


class SshLike(Protocol):
    """The ssh section of an inventory, by attribute name."""

    @property
    def user(self) -> str: ...
    @property
    def port(self) -> int: ...
    @property
    def identity_file(self) -> str | Path | None: ...
    @property
    def known_hosts(self) -> Sequence[str | Path]: ...
    @property
    def config(self) -> str | Path | None: ...
    @property
    def connect_timeout_seconds(self) -> float: ...
    @property
    def sudo(self) -> object: ...


class HostLike(Protocol):
    """A host of the inventory, by attribute name."""

    @property
    def name(self) -> str: ...
    @property
    def address(self) -> str: ...
    @property
    def ssh(self) -> SshLike: ...


@dataclass(frozen=True, slots=True)
class Target:
    """One login, fully resolved."""

    name: str  # the inventory's name, used in messages
    host: str  # what is looked up and dialled
    port: int
    user: str
    identity_files: tuple[Path, ...]
    identity_required: bool  # named on purpose: a missing file is an error, and no agent is asked
    known_hosts: tuple[Path, ...]
    alias: str  # HostKeyAlias, or ""
    timeout_seconds: float  # for each phase of connecting
    address_family: str = "any"  # any | inet | inet6
    notes: tuple[str, ...] = ()

    @property
    def key_names(self) -> tuple[str, ...]:
        return host_names(self.host, self.port, self.alias)


def resolve(config: HostLike) -> Target:
    """Raises Refused for anything that would need a second hop or that cannot be honoured safely."""
    options = _options(config)
    _refuse_unsupported(config.name, options)
    ssh = config.ssh
    user = ssh.user if _explicit(ssh, "user") else str(options.get("user", ssh.user))
    port = str(ssh.port if _explicit(ssh, "port") else options.get("port", ssh.port))
    if not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise _refused(config.name, f"ssh_config gives it the port {port!r}")
    identities, required = _identities(ssh, options)
    return Target(
        name=config.name,
        host=str(options.get("hostname", config.address)),
        port=int(port),
        user=user,
        identity_files=identities,
        identity_required=required,
        known_hosts=_known_hosts(ssh, options, config.address, user),
        alias=str(options.get("hostkeyalias", "")),
        timeout_seconds=float(ssh.connect_timeout_seconds),
        address_family=str(options.get("addressfamily", "any")).lower(),
        notes=tuple(_notes(options)),
    )


def _explicit(ssh: SshLike, field: str) -> bool:
    """Did the inventory say it? A pydantic model knows; otherwise a value that is not the default was said."""
    value = getattr(ssh, field)
    default = DEFAULTS[field]
    if isinstance(default, tuple):
        differs = tuple(str(item) for item in value) != default
    else:
        differs = value != default
    return differs or field in getattr(ssh, "model_fields_set", ())


def _options(config: HostLike) -> dict[str, Any]:
    """The matching ssh_config settings; keys in lower case. No file: an empty dict.

    `config: none` reads no file, a path reads that file, and unset reads ~/.ssh/config where it exists.
    """
    wanted = config.ssh.config
    if wanted is not None and str(wanted) == "none":
        return {}
    path = Path(wanted if wanted is not None else DEFAULT_CONFIG).expanduser()
    if wanted is None and not path.is_file():
        return {}
    from paramiko import SSHConfig
    from paramiko.ssh_exception import ConfigParseError

    text = "\n".join(_lines(path, config.name, INCLUDE_DEPTH))
    try:
        return dict(SSHConfig.from_text(text).lookup(config.address))
    except (ConfigParseError, ValueError, KeyError) as exc:
        raise _refused(config.name, f"{path} cannot be read as an ssh_config: {exc}") from exc


def _lines(path: Path, host: str, depth: int) -> list[str]:
    """The file's lines with Include resolved (paramiko skips it). Only at top level: inside a Host block
    an Include is conditional, and reading it as unconditional would apply settings to the wrong host."""
    try:
        raw = path.read_text("utf-8", "replace").splitlines()
    except OSError as exc:
        raise _refused(host, f"ssh_config {path} cannot be read: {exc.strerror or exc}") from exc
    lines: list[str] = []
    in_block = False
    for line in raw:
        word, value = _keyword(line)
        if word == "match" and "exec" in value.lower().split():
            raise _refused(host, f"{path}: `Match exec` would run a command on this machine")
        if word != "include":
            in_block = in_block or word in ("host", "match")
            lines.append(line)
            continue
        if in_block or depth == 0:
            raise _refused(host, f"{path}: an Include inside a Host or Match block is not supported")
        # After the included file's own blocks, what follows is unconditional again.
        lines += [*_included(value, path, host, depth), "Host *"]
    return lines


def _keyword(line: str) -> tuple[str, str]:
    word, _, value = line.strip().replace("=", " ", 1).partition(" ")
    return word.lower(), value.strip()


def _included(value: str, path: Path, host: str, depth: int) -> list[str]:
    lines: list[str] = []
    for word in shlex.split(value):
        pattern = Path(word).expanduser()
        base = pattern if pattern.is_absolute() else Path("~/.ssh").expanduser() / pattern
        for name in sorted(glob.glob(str(base))):
            lines += _lines(Path(name), host, depth - 1)
    return lines


def _refuse_unsupported(host: str, options: Mapping[str, Any]) -> None:
    for key, name in (("proxyjump", "ProxyJump"), ("proxycommand", "ProxyCommand")):
        value = options.get(key)
        if value and str(value).lower() != "none":
            raise _refused(
                host,
                f"ssh_config sets {name} {value} for it, and ddops uses one hop only",
                hint=f"run ddops where {host} is reachable directly, or set ssh.config to another file or to none",
            )
    if str(options.get("revokedhostkeys", "none")).lower() != "none":
        raise _refused(
            host,
            "ssh_config sets RevokedHostKeys, which ddops cannot check",
            hint="put @revoked lines into a known_hosts file that ssh.known_hosts names",
        )


def _refused(host: str, what: str, *, hint: str = "") -> Refused:
    return Refused(
        f"{host}: {what}",
        means="no connection was made",
        hint=hint or "set ssh.config in the inventory to another file, or to none",
    )


def _identities(ssh: SshLike, options: Mapping[str, Any]) -> tuple[tuple[Path, ...], bool]:
    """The key files to try, and whether they were named on purpose (then no agent is asked)."""
    if ssh.identity_file is not None:
        return (Path(ssh.identity_file).expanduser(),), True
    named = [name for name in options.get("identityfile", []) if name.lower() != "none"]
    if named:
        paths = [Path(name).expanduser() for name in named]
        # As in ssh, a key file of the configuration that does not exist is passed over if another does.
        return tuple([path for path in paths if path.exists()] or paths), True
    defaults = (Path(f"~/.ssh/id_{kind}").expanduser() for kind in ("ed25519", "ecdsa", "rsa"))
    return tuple(path for path in defaults if path.is_file()), False


def _known_hosts(ssh: SshLike, options: Mapping[str, Any], address: str, user: str) -> tuple[Path, ...]:
    if "userknownhostsfile" not in options or _explicit(ssh, "known_hosts"):
        return tuple(Path(name).expanduser() for name in ssh.known_hosts)
    tokens = {"%d": str(Path.home()), "%h": str(options.get("hostname", address)), "%r": user, "%%": "%"}
    paths = []
    for word in shlex.split(str(options["userknownhostsfile"])):
        for token, value in tokens.items():
            word = word.replace(token, value)
        if word.lower() != "none":
            paths.append(Path(word).expanduser())
    return tuple(paths)


def _notes(options: Mapping[str, Any]) -> list[str]:
    notes = []
    checking = str(options.get("stricthostkeychecking", "yes")).lower()
    if checking not in ("yes", "ask", "true"):
        notes.append(f"ssh_config's StrictHostKeyChecking {checking} is not obeyed: host keys are always checked")
    for key, name in (
        ("identityagent", "IdentityAgent"),
        ("certificatefile", "CertificateFile"),
        ("knownhostscommand", "KnownHostsCommand"),
        ("bindaddress", "BindAddress"),
        ("bindinterface", "BindInterface"),
    ):
        if key in options:
            notes.append(f"ssh_config's {name} is not supported and has no effect")
    return notes
