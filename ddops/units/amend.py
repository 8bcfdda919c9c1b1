"""Change the command of a unit a person wrote, and nothing else in it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import SequenceMatcher

from ddops.units.parse import ParsedUnit, parse
from ddops.units.quoting import UnitError, exec_quote
from ddops.units.render import Unit
from ddops.units.words import Word


def amend(adopted: bytes, argv: Sequence[str], name: str = "engine.service") -> Unit:
    """The unit with ExecStart running `argv`; comments, line breaks and every untouched word keep their bytes.

    Raises:
        UnitError: the unit can't be understood (see `parse`), or a word can't be written into a unit.
    """
    unit = parse(adopted, name)
    if tuple(argv) == unit.argv:
        return Unit.of(name, adopted, unit.argv)
    if not argv or argv[0] != unit.argv[0]:
        raise UnitError("the command itself would change", hint="only its arguments can be amended")
    text = unit.text
    for start, end, replacement in reversed(_edits(unit, list(argv))):
        text = text[:start] + replacement + text[end:]
    changed = text.encode()
    if parse(changed, name).argv != tuple(argv):  # a safety net: the file is never written if it says something else
        raise UnitError(f"{name} can't be amended to run these arguments", hint="edit ExecStart by hand and adopt it")
    return Unit.of(name, changed, tuple(argv))


def _edits(unit: ParsedUnit, argv: list[str]) -> list[tuple[int, int, str]]:
    """(start, end, new text) in the file, in order, for each run of words that differs."""
    owners = [index for index, word in enumerate(unit.words) for _ in word.values]
    edits: list[tuple[int, int, str]] = []
    for first, last, new in _blocks(unit, owners, argv):
        before = unit.words[first - 1]
        if first == last:  # insert
            edits.append((before.end, before.end, "".join(" " + exec_quote(word) for word in new)))
        elif not new:  # delete, with the blanks or the line break before it
            edits.append((before.end, unit.words[last - 1].end, ""))
        elif len(new) == last - first:  # word by word, so that what lies between keeps its bytes
            edits += [_replaced(word, value) for word, value in zip(unit.words[first:last], new, strict=True)]
        else:
            words = " ".join(exec_quote(word) for word in new)
            edits.append((unit.words[first].start, unit.words[last - 1].end, words))
    return edits


def _replaced(word: Word, value: str) -> tuple[int, int, str]:
    return word.start, word.end, exec_quote(value)


def _blocks(unit: ParsedUnit, owners: list[int], argv: list[str]) -> list[tuple[int, int, list[str]]]:
    """Differences as (first word, word behind the last, new arguments); a word of several arguments is whole."""
    old = list(unit.argv)
    blocks: list[tuple[int, int, list[str]]] = []
    for tag, i1, i2, j1, j2 in SequenceMatcher(None, old, argv, autojunk=False).get_opcodes():
        if tag == "equal":
            continue
        # Grow to whole words: `$OPTS` that stands for three arguments is replaced as one.
        while i1 > 0 and i1 < len(old) and owners[i1 - 1] == owners[i1]:
            i1, j1 = i1 - 1, j1 - 1
        while i2 < len(old) and i2 > 0 and owners[i2 - 1] == owners[i2]:
            i2, j2 = i2 + 1, j2 + 1
        first = owners[i1] if i1 < len(old) else len(unit.words)
        last = owners[i2] if i2 < len(old) else len(unit.words)
        blocks.append((first, last, argv[j1:j2]))
    return blocks
