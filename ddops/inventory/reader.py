"""From the file's text to a checked fleet: layers, merging, and whose line an error is on. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from pydantic import ValidationError

from ddops.inventory import rules, yaml_lines
from ddops.inventory.messages import Problem, kind_of, near
from ddops.inventory.model import SECTIONS, Fleet, HostConfig, Rollout, Section, SpecSection
from ddops.inventory.values import NAME
from ddops.inventory.yaml_lines import Document, Path

VERSION = 1
Model = TypeVar("Model", bound=Section)


def load(text: str | bytes, file: str) -> Fleet:
    """Read an inventory.

    Args:
        text: the file's content; bytes are decoded as UTF-8.
        file: its name, for messages.

    Raises:
        InventoryError: everything that is wrong, each with file, line and field.
    """
    return _Reader(yaml_lines.parse(text, file)).fleet()


# ---------------------------------------------------------------- reading
_Merged = dict[Path, Path]  # where in the file a key of a resolved host came from


class _Reader:
    """Goes on after a fault, with what is left: a person mends a file once, not fault by fault."""

    def __init__(self, document: Document) -> None:
        self.document = document
        self.wrong = document.wrong

    def fleet(self) -> Fleet:
        top = self._top()
        defaults = self._layer(top.get("defaults", {}), ("defaults",), {})
        groups = self._groups(top.get("groups", {}))
        named = self._table(top.get("hosts"), ("hosts",))
        if not named:
            self.wrong(("hosts",), "no hosts", "add one under hosts: with its address")
        read = {name: self._host(name, raw, defaults, groups) for name, raw in named.items()}
        hosts = {name: host for name, host in read.items() if host is not None}
        self._check_names(named, groups)
        self._check_twins(hosts)
        self._check_references(hosts, named)
        rollout = self._model(Rollout, self._table(top.get("rollout", {}), ("rollout",)), ("rollout",)) or Rollout()
        self.document.check()
        members = {g: tuple(h.name for h in hosts.values() if g in h.groups) for g in groups}
        return Fleet(self.document.file, hosts, members, rollout)

    def _top(self) -> dict[str, Any]:
        raw = self.document.value
        if raw is None:
            raise self.document.error((), "the file is empty", "start from inventories/example.yaml")
        if not isinstance(raw, dict):
            raise self.document.error((), f"expected keys and values, found {kind_of(raw)}", "see inventories/example.yaml")
        if "version" not in raw:
            self.wrong((), "version is missing", f"write version: {VERSION}")
        elif raw["version"] != VERSION or isinstance(raw["version"], bool):
            hint = f"this ddops reads version {VERSION}"
            raise self.document.error(("version",), f"version {raw['version']!r} is not known here", hint)
        self._known_keys(raw, (), ("version", "defaults", "groups", "hosts", "rollout"))
        return raw

    def _table(self, raw: Any, path: Path) -> dict[str, Any]:
        """Keys and values; none where something else stands."""
        if isinstance(raw, dict):
            return raw
        if raw is None and path in self.document.lines:
            self.wrong(path, "is empty", "give it a value or remove the line")
        elif raw is None:
            self.wrong(path, "is missing")
        else:
            self.wrong(path, f"expected keys and values, found {kind_of(raw)}")
        return {}

    def _groups(self, raw: Any) -> dict[str, dict[str, Any]]:
        groups = {}
        for name, layer in self._table(raw, ("groups",)).items():
            self._name(name, ("groups", name), "group")
            groups[name] = self._layer(layer, ("groups", name), {})
        return groups

    def _name(self, name: str, path: Path, what: str) -> None:
        if not NAME.fullmatch(name):
            hint = "letters, digits, dot, dash and underscore, at most 63"
            self.wrong(path, f"{name!r} is not a {what} name", hint)
        if name == "all":
            self.wrong(path, "the name all is taken: it means every host")

    def _layer(self, raw: Any, path: Path, extra: Mapping[str, Any]) -> dict[str, Any]:
        """One set of sections, each checked on its own so that a fault names the line it was written on."""
        layer = self._table(raw, path)
        self._known_keys(layer, path, (*SECTIONS, *extra))
        for section, model in SECTIONS.items():
            if section in layer:
                self._model(model, self._table(layer[section], (*path, section)), (*path, section))
        return layer

    def _host(self, name: str, raw: Any, defaults: dict[str, Any], groups: dict[str, dict[str, Any]]) -> HostConfig | None:
        """None: something in it, or in what it is made of, is wrong."""
        path: Path = ("hosts", name)
        self._name(name, path, "host")
        own = self._layer(raw, path, {"address": 1, "arch": 1, "groups": 1})
        if "address" not in own:
            self.wrong((*path, "address"), "is missing", "a host name or an IP address")
        members = self._memberships(own.get("groups", []), (*path, "groups"), groups)
        merged: dict[str, Any] = {}
        origin: _Merged = {}
        layers = [(defaults, ("defaults",)), *((groups[g], ("groups", g)) for g in members), (own, path)]
        for layer, place in layers:
            _merge(merged, {k: v for k, v in layer.items() if k in SECTIONS}, (), place, origin)
        merged |= {"name": name, "groups": members} | {k: own[k] for k in ("address", "arch") if k in own}
        host = self._model(HostConfig, merged, path, origin)
        if host is None or self._doubtful(tuple(place for _, place in layers)):
            return None
        return self._whole(_engine_default(host), path, origin)

    def _doubtful(self, places: Sequence[Path]) -> bool:
        """A fault in what a host is made of: what else looks wrong with it may only follow from that."""
        return any(len(found) <= 1 or found[:1] in places or found[:2] in places for found in self.document.faults)

    def _memberships(self, raw: Any, path: Path, groups: Mapping[str, Any]) -> tuple[str, ...]:
        if not isinstance(raw, list):
            self.wrong(path, f"expected a list of group names, found {kind_of(raw)}")
            return ()
        found: list[str] = []
        for index, name in enumerate(raw):
            if not isinstance(name, str) or name not in groups:
                self.wrong((*path, index), f"no group {name!r}", near(str(name), groups))
            elif name in found:
                self.wrong((*path, index), f"group {name} is named twice")
            else:
                found.append(name)
        return tuple(found)

    def _model(self, model: type[Model], raw: dict[str, Any], path: Path, origin: _Merged | None = None) -> Model | None:
        """`raw` as a `model`, None where it is none; `origin` tells where a merged key was written."""
        try:
            return model.model_validate(raw)
        except ValidationError as problem:
            for item in problem.errors(include_url=False, include_context=True):
                found = Problem.of(item, model, raw)
                self.wrong(_written(found.path, path, origin or {}), found.what, found.hint)
        return None

    def _known_keys(self, raw: Mapping[str, Any], path: Path, known: Sequence[str]) -> None:
        for key in raw:
            if key not in known:
                self.wrong((*path, key), "unknown key", near(key, known))

    # ------------------------------------------------------------ rules over several fields
    def _whole(self, host: HostConfig, path: Path, origin: _Merged) -> HostConfig:
        for field, what, hint in rules.broken(host):
            self.wrong(_written(field, path, origin), what, hint)
        return host

    def _check_names(self, hosts: Iterable[str], groups: Mapping[str, Any]) -> None:
        for name in hosts:
            if name in groups:
                self.wrong(("hosts", name), f"{name} is a group's name, too")

    def _check_twins(self, hosts: Mapping[str, HostConfig]) -> None:
        """Two hosts that are one machine would be changed at the same time by one run."""
        seen: dict[tuple[str, int, str], str] = {}
        for name, host in hosts.items():
            login = (host.address.lower().removesuffix("."), host.ssh.port)
            for what, key in (("unit", host.engine.unit), ("port", f"port {host.engine.port}")):
                other = seen.setdefault((*login, key), name)
                if other != name:
                    self.wrong(
                        ("hosts", name, "address"),
                        f"{name} and {other} have the same address and the same {what} ({key.removeprefix('port ')})",
                        "one machine and unit is one host; give a second engine its own unit and port",
                    )

    def _check_references(self, hosts: Mapping[str, HostConfig], named: Mapping[str, Any]) -> None:
        for name, host in hosts.items():
            reference = host.prove.reference
            if reference is None or reference.startswith(("http://", "https://")):
                continue
            path: Path = ("hosts", name, "prove", "reference")
            if reference == name:
                self.wrong(path, "a host can't be its own reference")
            elif reference not in named:
                hint = near(reference, named) + "; a host of this file, or http://ADDRESS:PORT"
                self.wrong(path, f"no host {reference!r}", hint)


def _written(field: Path, host: Path, origin: _Merged) -> Path:
    """Where a field of a resolved host stands in the file: in a layer it was merged from, or else below the host."""
    for length in range(len(field), 0, -1):
        if field[:length] in origin:
            return (*origin[field[:length]], *field[length:])
    return (*host, *field)


def _engine_default(host: HostConfig) -> HostConfig:
    """vLLM has no tree drafting, so an algorithm nobody gave is DFLASH there; it still counts as not given."""
    if host.engine.kind != "vllm" or "algorithm" in host.spec.model_fields_set:
        return host
    values = {name: getattr(host.spec, name) for name in SpecSection.model_fields} | {"algorithm": "DFLASH"}
    spec = SpecSection.model_construct(_fields_set=set(host.spec.model_fields_set), **values)
    return host.model_copy(update={"spec": spec})


def _merge(target: dict[str, Any], layer: Mapping[str, Any], at: Path, place: Path, origin: _Merged) -> None:
    for key, value in layer.items():
        here = (*at, key)
        if isinstance(value, dict):
            inner = target.get(key)
            target[key] = dict(inner) if isinstance(inner, dict) else {}
            _merge(target[key], value, here, place, origin)
        else:
            target[key] = value
        origin[here] = (*place, *here)
