"""From the file's text to a checked fleet: layers, merging, and whose line an error is on. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from ddops.inventory import rules, yaml_lines
from ddops.inventory.messages import Problem, kind_of, near
from ddops.inventory.model import SECTIONS, Fleet, HostConfig, Rollout, SpecSection
from ddops.inventory.values import NAME
from ddops.inventory.yaml_lines import Document, Path, dotted

VERSION = 1


def load(text: str | bytes, file: str) -> Fleet:
    """Read an inventory.

    Args:
        text: the file's content; bytes are decoded as UTF-8.
        file: its name, for messages.

    Raises:
        InventoryError: the first thing that is wrong, with file, line and field; the hint counts the rest.
    """
    return _Reader(yaml_lines.parse(text, file)).fleet()


# ---------------------------------------------------------------- reading
_Merged = dict[Path, Path]  # where in the file a key of a resolved host came from


class _Reader:
    def __init__(self, document: Document) -> None:
        self.document = document

    def fleet(self) -> Fleet:
        top = self._top()
        defaults = self._layer(top.get("defaults", {}), ("defaults",), {})
        groups = self._groups(top.get("groups", {}))
        hosts = {}
        for name, raw in self._table(top.get("hosts"), ("hosts",)).items():
            hosts[name] = self._host(name, raw, defaults, groups)
        if not hosts:
            raise self.document.error(("hosts",), "no hosts", "add one under hosts: with its address")
        self._check_names(hosts, groups)
        self._check_twins(hosts)
        self._check_references(hosts)
        rollout = self._model(Rollout, top.get("rollout", {}), ("rollout",))
        members = {g: tuple(h.name for h in hosts.values() if g in h.groups) for g in groups}
        return Fleet(self.document.file, hosts, members, rollout)

    def _top(self) -> dict[str, Any]:
        raw = self.document.value
        if raw is None:
            raise self.document.error((), "the file is empty", "start from inventories/example.yaml")
        if not isinstance(raw, dict):
            raise self.document.error((), f"expected keys and values, found {kind_of(raw)}", "see inventories/example.yaml")
        self._known_keys(raw, (), ("version", "defaults", "groups", "hosts", "rollout"))
        if "version" not in raw:
            raise self.document.error((), "version is missing", f"write version: {VERSION}")
        if raw["version"] != VERSION or isinstance(raw["version"], bool):
            raise self.document.error(
                ("version",),
                f"version {raw['version']!r} is not known here",
                f"this ddops reads version {VERSION}",
            )
        return raw

    def _table(self, raw: Any, path: Path) -> dict[str, Any]:
        if raw is None and path in self.document.lines:
            raise self.document.error(path, "is empty", "give it a value or remove the line")
        if raw is None:
            raise self.document.error(path, "is missing")
        if not isinstance(raw, dict):
            raise self.document.error(path, f"expected keys and values, found {kind_of(raw)}")
        return raw

    def _groups(self, raw: Any) -> dict[str, dict[str, Any]]:
        groups = self._table(raw, ("groups",))
        for name, layer in groups.items():
            self._name(name, ("groups", name), "group")
            self._layer(layer, ("groups", name), {})
        return groups

    def _name(self, name: str, path: Path, what: str) -> None:
        if not NAME.fullmatch(name):
            raise self.document.error(
                path,
                f"{name!r} is not a {what} name",
                "letters, digits, dot, dash and underscore, at most 63",
            )
        if name == "all":
            raise self.document.error(path, "the name all is taken: it means every host")

    def _layer(self, raw: Any, path: Path, extra: Mapping[str, Any]) -> dict[str, Any]:
        """One set of sections, each checked on its own so that an error names the line it was written on."""
        layer = self._table(raw, path)
        self._known_keys(layer, path, (*SECTIONS, *extra))
        for section, model in SECTIONS.items():
            if section in layer:
                self._model(model, self._table(layer[section], (*path, section)), (*path, section))
        return layer

    def _host(self, name: str, raw: Any, defaults: dict[str, Any], groups: dict[str, dict[str, Any]]) -> HostConfig:
        path: Path = ("hosts", name)
        self._name(name, path, "host")
        own = self._layer(raw, path, {"address": 1, "arch": 1, "groups": 1})
        if "address" not in own:
            raise self.document.error(path, "address is missing", "add address: with a host name or an IP address")
        members = self._memberships(own.get("groups", []), (*path, "groups"), groups)
        merged: dict[str, Any] = {}
        origin: _Merged = {}
        layers = [(defaults, ("defaults",)), *((groups[g], ("groups", g)) for g in members), (own, path)]
        for layer, place in layers:
            _merge(merged, {k: v for k, v in layer.items() if k in SECTIONS}, (), place, origin)
        merged |= {"name": name, "groups": members, "address": own["address"]}
        if "arch" in own:
            merged["arch"] = own["arch"]
        host = self._model(HostConfig, merged, path, origin)
        return self._whole(_engine_default(host), path, origin)

    def _memberships(self, raw: Any, path: Path, groups: Mapping[str, Any]) -> tuple[str, ...]:
        if not isinstance(raw, list):
            raise self.document.error(path, f"expected a list of group names, found {kind_of(raw)}")
        for index, name in enumerate(raw):
            if not isinstance(name, str) or name not in groups:
                hint = near(str(name), groups)
                raise self.document.error((*path, index), f"no group {name!r}", hint)
            if name in raw[:index]:
                raise self.document.error((*path, index), f"group {name} is named twice")
        return tuple(raw)

    def _model(self, model: type[Any], raw: Any, path: Path, origin: _Merged | None = None) -> Any:
        """Check `raw` against `model`; `origin` tells where a merged key was written."""
        try:
            return model.model_validate(self._table(raw, path) if model is Rollout else raw)
        except ValidationError as problem:
            errors = [Problem.of(item, model, raw) for item in problem.errors(include_url=False, include_context=True)]
        places = [((origin or {}).get(e.path, (*path, *e.path)), e) for e in errors]
        places.sort(key=lambda pair: self.document.line(pair[0]) or 0)
        place, first = places[0]
        others = {p for p, _ in places} - {place}
        more = "; ".join(f"line {self.document.line(p)}: {dotted(p)} is wrong, too" for p in sorted(others, key=str)[:4])
        raise self.document.error(place, first.what, "; ".join(filter(None, (first.hint, more))))

    def _known_keys(self, raw: Mapping[str, Any], path: Path, known: Sequence[str]) -> None:
        for key in raw:
            if key not in known:
                raise self.document.error((*path, key), "unknown key", near(key, known))

    # ------------------------------------------------------------ rules over several fields
    def _whole(self, host: HostConfig, path: Path, origin: _Merged) -> HostConfig:
        for field, what, hint in rules.broken(host):
            raise self.document.error(origin.get(field, (*path, *field)), what, hint)
        return host

    def _check_names(self, hosts: Mapping[str, HostConfig], groups: Mapping[str, Any]) -> None:
        for name in hosts:
            if name in groups:
                raise self.document.error(("hosts", name), f"{name} is a group's name, too")

    def _check_twins(self, hosts: Mapping[str, HostConfig]) -> None:
        """Two hosts that are one machine would be changed at the same time by one run."""
        seen: dict[tuple[str, int, str], str] = {}
        for name, host in hosts.items():
            login = (host.address.lower().removesuffix("."), host.ssh.port)
            for what, key in (("unit", host.engine.unit), ("port", f"port {host.engine.port}")):
                other = seen.setdefault((*login, key), name)
                if other != name:
                    raise self.document.error(
                        ("hosts", name, "address"),
                        f"{name} and {other} have the same address and the same {what} ({key.removeprefix('port ')})",
                        "one machine and unit is one host; give a second engine its own unit and port",
                    )

    def _check_references(self, hosts: Mapping[str, HostConfig]) -> None:
        for name, host in hosts.items():
            reference = host.prove.reference
            if reference is None or reference.startswith(("http://", "https://")):
                continue
            path: Path = ("hosts", name, "prove", "reference")
            if reference == name:
                raise self.document.error(path, "a host can't be its own reference")
            if reference not in hosts:
                hint = near(reference, hosts) + "; a host of this file, or http://ADDRESS:PORT"
                raise self.document.error(path, f"no host {reference!r}", hint)


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
