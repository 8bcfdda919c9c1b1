"""Which keys to offer at login, in which order. Named files only when files are named (IdentitiesOnly).

It never asks for a passphrase; a key it cannot use is an error before the login, not a failed login.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import paramiko

from ddops.errors import Refused
from ddops.hosts.bounded import within
from ddops.hosts.target import Target


def keys(target: Target, timeout: float) -> Iterator[tuple[str, Any]]:
    """Keys in the order they are offered. Named files only when files are named (IdentitiesOnly), else
    the agent's keys and then the default files."""
    if not target.identity_required:
        for key in _agent_keys(timeout):
            yield f"agent key {key.fingerprint}", key
    for path in target.identity_files:
        try:
            yield str(path), _load(target, path, timeout)
        except Refused:
            if target.identity_required:
                raise


def _agent_keys(timeout: float) -> list[Any]:
    if not os.environ.get("SSH_AUTH_SOCK"):
        return []
    try:
        return list(within(timeout, lambda: paramiko.Agent().get_keys()))
    except (TimeoutError, OSError, paramiko.SSHException):
        return []


def _load(target: Target, path: Path, timeout: float) -> Any:
    try:
        return paramiko.PKey.from_path(path)
    except FileNotFoundError as exc:
        raise _bad_key(target, f"key file {path} does not exist", "fix ssh.identity_file") from exc
    except OSError as exc:
        raise _bad_key(target, f"key file {path} cannot be read: {exc.strerror or exc}", "fix its mode") from exc
    except (TypeError, paramiko.PasswordRequiredException) as exc:
        key = _held_by_agent(path, timeout)
        if key is not None:
            return key
        raise _bad_key(
            target,
            f"key file {path} is protected by a passphrase, and ddops never asks for one",
            f"load it into an agent (ssh-add {path}), or use a key without a passphrase",
        ) from exc
    except (ValueError, paramiko.SSHException, paramiko.pkey.UnknownKeyType) as exc:
        raise _bad_key(target, f"{path} is not a private key that can be used: {exc}", "fix ssh.identity_file") from exc


def _held_by_agent(path: Path, timeout: float) -> Any:
    """The agent's copy of a protected key file, found by the public half beside it."""
    try:
        blob = paramiko.PublicBlob.from_file(f"{path}.pub").key_blob
    except (OSError, ValueError, IndexError, TypeError):
        return None
    return next((key for key in _agent_keys(timeout) if key.asbytes() == blob), None)


def _bad_key(target: Target, what: str, hint: str) -> Refused:
    return Refused(f"{target.name}: {what}", means="no login was tried", hint=hint)
