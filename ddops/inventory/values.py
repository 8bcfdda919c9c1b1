"""Checked value types for inventory fields: what each may hold. Pure."""

from __future__ import annotations

import ipaddress
import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_LABEL = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(?<!-)")
_UNIT = re.compile(r"[A-Za-z0-9][A-Za-z0-9:_.@-]*\.service")
_SECRET = re.compile(r"(^|_)(API_?KEY|KEY|TOKEN|PASSWORD|PASSWD|SECRET|CREDENTIALS?)$", re.IGNORECASE)


def _one_line(value: str) -> str:
    if any(char in value for char in "\n\r\0"):
        raise ValueError("a line break or NUL is not allowed")
    if value != value.strip():
        raise ValueError("blanks at the start or the end")
    return value


def _given(value: str) -> str:
    if not value:
        raise ValueError("is empty")
    return value


def _no_option(value: str) -> str:
    if value.startswith("-"):
        raise ValueError("begins with '-', which a command would read as an option")
    return value


def _absolute(value: str) -> str:
    if not value.startswith("/") or ".." in value.split("/"):
        raise ValueError("is not an absolute path (begin with /, without ..)")
    return value


def _unit_name(value: str) -> str:
    if not value.endswith(".service"):
        raise ValueError("does not end in .service, as a unit's name must")
    if "/" in value:
        raise ValueError("is a unit's name, not a path")
    if not _UNIT.fullmatch(value) or len(value) > 200 or value.endswith("@.service"):
        raise ValueError("is not a name systemd can start (letters, digits and :_.@- only)")
    if value.startswith("ddops-"):
        raise ValueError("names that begin with ddops- are kept for ddops' own units")
    return value


def _address(value: str) -> str:
    if "@" in value:
        raise ValueError("holds a user; put it under ssh.user")
    try:
        ipaddress.ip_address(value)
        return value
    except ValueError:
        pass
    if ":" in value or value.startswith("["):
        raise ValueError("is no address; a port goes under ssh.port, an IPv6 address stands without brackets")
    labels = value.removesuffix(".").split(".")
    numeric = all(label.isdigit() for label in labels)
    if numeric or len(value) > 253 or not all(_LABEL.fullmatch(label) for label in labels):
        raise ValueError("is neither a host name nor an IP address")
    return value


def _network(value: str) -> str:
    try:
        ipaddress.ip_network(value, strict=False)
    except ValueError:
        raise ValueError("is no IP address or network such as 10.0.0.0/24") from None
    return value


def _listen(value: str) -> str:
    if value != "localhost":
        try:
            ipaddress.ip_address(value)
        except ValueError:
            raise ValueError("is no IP address to listen on") from None
    return value


def _variable(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", value):
        raise ValueError("is no name of an environment variable")
    if _SECRET.search(value):
        raise ValueError("looks like a secret: every user of the host can read a unit's environment")
    return value


def _user(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_.-]{0,31}\$?", value):
        raise ValueError("is no user name")
    return value


def _flag(value: str) -> str:
    if not re.fullmatch(r"--[A-Za-z0-9][A-Za-z0-9_-]*", value):
        raise ValueError("is no flag such as --speculative-ddtree-topk-cap")
    return value


def _release(value: str) -> str:
    if value and (not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,127}", value)):
        raise ValueError("is one folder name below engine.releases_dir")
    return value


def _arch(value: str) -> str:
    if value != "cpu" and not re.fullmatch(r"[a-z][a-z0-9_]{1,31}", value):
        raise ValueError('is no architecture such as "sm_103" or "cpu"')
    return value


def _to_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _number_to_text(value: Any) -> Any:
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


Text = Annotated[str, AfterValidator(_one_line)]
Word = Annotated[Text, AfterValidator(_given)]
Plain = Annotated[Word, AfterValidator(_no_option)]
AbsolutePath = Annotated[Word, AfterValidator(_absolute)]
User = Annotated[Word, AfterValidator(_user)]
Port = Annotated[int, Field(ge=1, le=65535)]
Count = Annotated[int, Field(ge=1, le=1_000_000_000)]
Amount = Annotated[int, Field(ge=0, le=1_000_000_000)]
Seconds = Annotated[float, Field(gt=0, le=7 * 86400, allow_inf_nan=False)]
WholeSeconds = Annotated[int, Field(ge=1, le=7 * 86400)]  # the host script counts in whole seconds
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Ratio = Annotated[float, Field(gt=0, le=100, allow_inf_nan=False)]
Auto = Literal["auto"]
AsTuple = BeforeValidator(_to_tuple)  # YAML has lists; a frozen section holds tuples
UnitName = Annotated[Word, AfterValidator(_unit_name)]
Address = Annotated[Word, AfterValidator(_address)]
Network = Annotated[Word, AfterValidator(_network)]
Listen = Annotated[Word, AfterValidator(_listen)]
Arch = Annotated[Word, AfterValidator(_arch)]
FlagName = Annotated[Word, AfterValidator(_flag)]
Release = Annotated[Text, AfterValidator(_release)]
ModelPath = Annotated[Text, AfterValidator(_no_option)]
Variable = Annotated[Word, AfterValidator(_variable)]
VariableText = Annotated[Text, BeforeValidator(_number_to_text)]
