"""YAML text to plain values, with the line of every key and item. Pure; knows nothing of inventories.

Stricter than YAML on purpose: tags, keys that are no text, endless aliases and control characters are
refused, since each of them makes a file say something else than it seems to.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.events import CollectionEndEvent, CollectionStartEvent
from ruamel.yaml.reader import ReaderError

from ddops.errors import Fault, InventoryError

Path = tuple[str | int, ...]
MAX_NODES = 200_000  # a few bytes of nested aliases can stand for billions of values
MAX_DEPTH = 40


@dataclass(frozen=True, slots=True)
class Document:
    """Plain dicts, lists and scalars, where each path of keys stands (1-based lines), and what is wrong with it."""

    value: Any
    file: str
    lines: dict[Path, int] = field(default_factory=dict)
    faults: dict[Path, Fault] = field(default_factory=dict)

    def line(self, path: Path) -> int | None:
        """The line of `path`, or of the nearest key above it that has one."""
        while path not in self.lines and path:
            path = path[:-1]
        return self.lines.get(path)

    def wrong(self, path: Path, what: str, hint: str = "") -> None:
        """Take down a fault and go on. What else is found wrong in the same place follows from it, or is the same."""
        self.faults.setdefault(path, Fault(what, self.file, self.line(path), dotted(path), hint))

    def check(self) -> None:
        """Raises: InventoryError: when anything was found wrong so far."""
        if self.faults:
            raise InventoryError(*self.faults.values())

    def error(self, path: Path, what: str, hint: str = "") -> InventoryError:
        """A fault that leaves nothing else to look at, with those before it."""
        self.wrong(path, what, hint)
        return InventoryError(*self.faults.values())


def dotted(path: Path) -> str:
    """`("hosts", "a", "flags", 0)` -> `hosts.a.flags[0]`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def parse(text: str | bytes, file: str) -> Document:
    """Read one YAML document.

    Raises:
        InventoryError: with the line, for anything that is not plain, unambiguous YAML in UTF-8. What is wrong with
            single values is taken down in the document's faults instead.
    """
    source = _decode(text, file)
    try:
        _check_depth(source, file)
        root = YAML(typ="rt").load(source)
    except MarkedYAMLError as problem:
        raise _marked(problem, source, file) from None
    except ReaderError as problem:
        line = source.count("\n", 0, problem.position) + 1
        raise InventoryError(Fault("a character that YAML does not allow", file, line)) from None
    except (
        YAMLError,
        ValueError,
        TypeError,
        KeyError,
        AttributeError,
        IndexError,
        AssertionError,
    ) as problem:
        raise InventoryError(Fault(f"not valid YAML: {_first_line(problem)}", file)) from None
    except (RecursionError, NotImplementedError):
        raise InventoryError(Fault("nested too deeply, or not plain YAML", file)) from None
    document = Document(None, file, {(): 1})
    return replace(document, value=_Plain(document).convert(root, (), 0))


def _check_depth(source: str, file: str) -> None:
    """Found while reading, event by event: loading takes minutes for what is nested thousands deep."""
    depth = 0
    for event in YAML(typ="rt").parse(source):
        depth += isinstance(event, CollectionStartEvent) - isinstance(event, CollectionEndEvent)
        if depth > MAX_DEPTH:
            line = event.start_mark.line + 1 if event.start_mark else None
            raise InventoryError(Fault("nested too deeply", file, line))


def _decode(source: str | bytes, file: str) -> str:
    if isinstance(source, str):
        return source.removeprefix("\ufeff")
    try:
        return source.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as problem:
        line = source.count(b"\n", 0, problem.start) + 1
        raise InventoryError(Fault("not UTF-8", file, line, hint="save the file as UTF-8")) from None


def _marked(problem: MarkedYAMLError, source: str, file: str) -> InventoryError:
    mark = problem.problem_mark or problem.context_mark
    line = mark.line + 1 if mark is not None else None
    what = str(problem.problem or problem.context or "not valid YAML")
    hint = ""
    lines = source.split("\n")
    if "\\t" in what or (line and line <= len(lines) and lines[line - 1][:1] == "\t"):
        hint = "YAML is indented with spaces; a tab is not allowed there"
    elif "undefined alias" in what:
        hint = "an alias (*name) needs its anchor (&name) earlier in the file; use groups to share settings"
    elif "another document" in what:
        what, hint = "a second document starts here", "keep one inventory in a file (no --- in the middle)"
    return InventoryError(Fault(what, file, line, hint=hint))


def _first_line(problem: Exception) -> str:
    return (str(problem).strip().splitlines() or [type(problem).__name__])[0]


class _Plain:
    """Walks ruamel's round-trip nodes; `open` holds the containers we are inside of."""

    def __init__(self, document: Document) -> None:
        self.document = document
        self.nodes = 0
        self.open: set[int] = set()

    def convert(self, node: Any, path: Path, depth: int) -> Any:
        self.nodes += 1
        if self.nodes > MAX_NODES or depth > MAX_DEPTH or id(node) in self.open:
            raise self.document.error(path, "aliases or nesting that stand for far too many values", "write the values out")
        self._refuse_tag(node, path)
        if isinstance(node, dict):
            return self._inside(node, lambda: self._mapping(node, path, depth))
        if isinstance(node, list):
            return self._inside(node, lambda: self._sequence(node, path, depth))
        if isinstance(node, bool) or node is None:
            return node
        if type(node).__name__ == "ScalarBoolean":  # a bool with an anchor: an int to Python, as bool can't be subclassed
            return bool(node)
        if isinstance(node, str):
            return self._text(str(node), path)
        if isinstance(node, int):
            return int(node)
        if isinstance(node, float):
            return float(node)
        if isinstance(node, date):  # datetime is one, too
            self.document.wrong(path, "this reads as a date", "put it in quotes if it is a name")
        else:
            self.document.wrong(path, f"a {type(node).__name__} is not allowed here")
        return None

    def _inside(self, node: Any, convert: Any) -> Any:
        self.open.add(id(node))
        try:
            return convert()
        finally:
            self.open.discard(id(node))

    def _mapping(self, node: dict[Any, Any], path: Path, depth: int) -> dict[str, Any]:
        places = getattr(getattr(node, "lc", None), "data", None) or {}
        result: dict[str, Any] = {}
        for key, value in node.items():
            if not isinstance(key, str):
                self._place((*path, str(key)), places, key)
                self.document.wrong((*path, str(key)), f"the key {key!r} is not text", "put it in quotes")
                continue
            name = self._text(str(key), path)
            place = (*path, name)
            self._place(place, places, key)
            result[name] = self.convert(value, place, depth + 1)
        return result

    def _sequence(self, node: list[Any], path: Path, depth: int) -> list[Any]:
        places = getattr(getattr(node, "lc", None), "data", None) or {}
        for index in range(len(node)):
            self._place((*path, index), places, index)
        return [self.convert(item, (*path, index), depth + 1) for index, item in enumerate(node)]

    def _place(self, path: Path, places: Mapping[Any, Sequence[int]], key: Any) -> None:
        if key in places:
            self.document.lines[path] = places[key][0] + 1

    def _text(self, text: str, path: Path) -> str:
        for char, name in (("\n", "a line break"), ("\r", "a carriage return"), ("\0", "a NUL")):
            if char in text:
                self.document.wrong(path, f"{name} inside a value", "a value is one line; it ends up in a unit file")
        if any(0xD800 <= ord(char) <= 0xDFFF for char in text):
            self.document.wrong(path, "a character that is not Unicode text")
        return text

    def _refuse_tag(self, node: Any, path: Path) -> None:
        tag = getattr(node, "tag", None)
        name = getattr(tag, "value", tag)
        if isinstance(name, str) and name and not isinstance(node, (str, int, float)):
            self.document.wrong(path, f"the tag {name} is not allowed", "write a plain value")
