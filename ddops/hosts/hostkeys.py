"""Check a host's key against the known_hosts files of the inventory, and say exactly what to do about it.

Nothing is ever added to a file: an unknown key is refused, with the commands that would add it.
"""

from __future__ import annotations

from shlex import quote
from typing import Any

from ddops.errors import HostKeyRejected, Refused
from ddops.hosts import known_hosts
from ddops.hosts.known_hosts import Trust, fingerprint
from ddops.hosts.target import Target


def read_known_hosts(target: Target) -> list[known_hosts.Line]:
    lines: list[known_hosts.Line] = []
    for path in target.known_hosts:
        try:
            lines += known_hosts.parse(path.read_text("utf-8", "replace"), str(path))
        except FileNotFoundError:
            continue  # named in the message when the key turns out to be unknown
        except OSError as exc:
            raise Refused(
                f"{target.name}: known_hosts file {path} cannot be read: {exc.strerror or exc}",
                means="the host's key could not be checked, so no login was tried",
                hint="fix the file, or name another in ssh.known_hosts",
            ) from exc
    return lines


def check_host_key(target: Target, lines: list[known_hosts.Line], key: Any) -> None:
    kind, blob = key.get_name(), key.asbytes()
    finding = known_hosts.judge(lines, target.key_names, kind, blob)
    if finding.trust is Trust.KNOWN:
        return
    raise host_key_rejected(target, finding, kind, blob)


def host_key_rejected(target: Target, finding: known_hosts.Finding, kind: str, blob: bytes) -> HostKeyRejected:
    """The refusal in words: what was presented, what is on file, and the exact commands."""
    name, file = (
        target.key_names[0],
        str(target.known_hosts[0] if target.known_hosts else "~/.ssh/known_hosts"),
    )
    shown = f"{kind} {fingerprint(blob)}"
    line = finding.line
    where = f"{line.file}:{line.number}" if line else ""
    scan = f"ssh-keyscan -p {target.port} -t {_keyscan_type(kind)} {quote(target.host)}"
    if target.alias:
        scan += f" | sed {quote(f's/^[^ ]*/{target.alias}/')}"
    add = f"compare the fingerprint with the host's own (ssh-keygen -lf /etc/ssh/ssh_host_*_key.pub), then: {scan} >> "
    means = "no login was tried and nothing was changed on it"
    if finding.trust is Trust.REVOKED:
        return HostKeyRejected(
            f"{target.name} presents a revoked host key: {shown} ({where})",
            means=means,
            hint="this may be another machine; give the host a new key before using it again",
        )
    if finding.trust is Trust.CHANGED and line:
        return HostKeyRejected(
            f"the host key of {target.name} changed: it presents {shown}, {where} has {fingerprint(line.blob)}",
            means=f"either the host was set up anew or another machine answers; {means}",
            hint=f"if it was set up anew: ssh-keygen -R {quote(name)} -f {quote(line.file)}; then {add}{quote(line.file)}",
        )
    read = ", ".join(str(path) for path in target.known_hosts) or "no known_hosts file"
    what = {
        Trust.OTHER_TYPE: f"is known by another key type only ({line and line.key_type}, {where})",
        Trust.AUTHORITY_ONLY: f"is known only by a @cert-authority line ({where}), and those are not supported",
    }.get(finding.trust, f"is not known ({read})")
    return HostKeyRejected(
        f"the host key of {target.name} {what}: it presents {shown} as {name}",
        means=means,
        hint=f"{add}{quote(file)}",
    )


def _keyscan_type(kind: str) -> str:
    return {"ssh-rsa": "rsa", "ssh-ed25519": "ed25519"}.get(kind, "ecdsa")
