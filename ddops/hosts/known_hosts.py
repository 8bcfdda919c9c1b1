"""What known_hosts says about one host key. Pure: text in, a verdict out; it reads no file.

Supported: plain, hashed and wildcard names, `[name]:port`, negation, @revoked. A @cert-authority line
never makes a key known (host certificates are not supported); when it is the only line that names the
host, the verdict says so.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import translate


class Trust(StrEnum):
    """What the files say about a key that a host presented."""

    KNOWN = "known"
    UNKNOWN = "unknown"  # no line names the host
    OTHER_TYPE = "other-type"  # lines name the host, none with a key of this type
    CHANGED = "changed"  # a line names the host with another key of the same type
    REVOKED = "revoked"
    AUTHORITY_ONLY = "authority-only"  # only @cert-authority lines name the host


@dataclass(frozen=True, slots=True)
class Line:
    """One entry of a known_hosts file."""

    file: str
    number: int
    marker: str  # "", "@revoked", "@cert-authority"
    names: str
    key_type: str
    blob: bytes


@dataclass(frozen=True, slots=True)
class Finding:
    """The verdict and the line it rests on."""

    trust: Trust
    line: Line | None = None


def parse(text: str, file: str) -> list[Line]:
    """The entries of one file; comments, blank and malformed lines are left out (they can only reject)."""
    lines = (_line(raw, file, number) for number, raw in enumerate(text.split("\n"), 1))
    return [line for line in lines if line is not None]


def _line(raw: str, file: str, number: int) -> Line | None:
    fields = raw.split()
    if not fields or fields[0].startswith("#"):
        return None
    marker = fields.pop(0) if fields[0].startswith("@") else ""
    if marker not in ("", "@revoked", "@cert-authority") or len(fields) < 3:
        return None
    try:
        blob = base64.b64decode(fields[2], validate=True)
    except ValueError:
        return None
    return Line(file, number, marker, fields[0], fields[1], blob)


def host_names(host: str, port: int, alias: str = "") -> tuple[str, ...]:
    """The names to look up, in order: the alias alone, or `[host]:port` and then the bare host.

    ssh falls back to the bare name for other ports as well; it only ever helps a key that matches.
    """
    if alias:
        return (alias,)
    return (host,) if port == 22 else (f"[{host}]:{port}", host)


def _names_match(names: str, host: str) -> bool:
    if names.startswith("|1|"):
        return _hash_matches(names, host)
    matched = False
    for pattern in names.split(","):
        negated = pattern.startswith("!")
        if _glob(pattern.lstrip("!"), host):
            if negated:
                return False
            matched = True
    return matched


def _glob(pattern: str, host: str) -> bool:
    # Only * and ? are special in known_hosts; a bracket is part of "[name]:port".
    return re.compile(translate(pattern.replace("[", "[[]")), re.IGNORECASE).match(host) is not None


def _hash_matches(names: str, host: str) -> bool:
    try:
        _, _, salt, digest = names.split("|")
        # sha1 is the file format's own choice; it hides names and protects nothing else.
        wanted = hmac.new(base64.b64decode(salt), host.lower().encode(), hashlib.sha1).digest()
        return hmac.compare_digest(wanted, base64.b64decode(digest))
    except ValueError:
        return False


def _about(lines: Iterable[Line], name: str) -> list[Line]:
    return [line for line in lines if _names_match(line.names, name)]


def judge(lines: Sequence[Line], names: Sequence[str], key_type: str, blob: bytes) -> Finding:
    """What the lines say about the key `blob` presented by the host known as `names`.

    A revocation under any of the names wins over everything. Otherwise the first name that has the
    very key decides; without one, the first name that has any line says how it differs.
    """
    for name in names:
        for line in _about(lines, name):
            if line.marker == "@revoked" and line.blob == blob:
                return Finding(Trust.REVOKED, line)
    for name in names:
        for line in _about(lines, name):
            if not line.marker and line.blob == blob:
                return Finding(Trust.KNOWN, line)
    for name in names:
        mismatch = _mismatch(_about(lines, name), key_type)
        if mismatch is not None:
            return mismatch
    return Finding(Trust.UNKNOWN)


def _mismatch(about: list[Line], key_type: str) -> Finding | None:
    plain = [line for line in about if not line.marker]
    same_type = [line for line in plain if line.key_type == key_type]
    if same_type:
        return Finding(Trust.CHANGED, same_type[0])
    if plain:
        return Finding(Trust.OTHER_TYPE, plain[0])
    authorities = [line for line in about if line.marker == "@cert-authority"]
    return Finding(Trust.AUTHORITY_ONLY, authorities[0]) if authorities else None


def key_types(lines: Sequence[Line], names: Sequence[str]) -> list[str]:
    """The key types the files hold for the host, so that the host is asked for one of those first."""
    found = [line.key_type for name in names for line in _about(lines, name) if not line.marker]
    return list(dict.fromkeys(found))


def fingerprint(blob: bytes) -> str:
    """The form `ssh-keygen -lf` prints: SHA256: and base64 without padding."""
    return "SHA256:" + base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip("=")
