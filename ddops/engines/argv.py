"""Reading and changing an engine's argument list. Pure; knows the grammar, not the flags.

The grammar is argparse's: `--flag value` or `--flag=value`, the last of repeated flags counts, and a flag
may be cut to a prefix that is unique among the engine's flags.
"""

from __future__ import annotations

import os.path
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ddops.errors import Refused

_INTERPRETER = re.compile(r"(python|pypy|perl|ruby|node)[0-9.]*|(ba|da|z|k)?sh")
_EXEC_WRAPPERS = ("numactl", "env", "nice", "ionice", "taskset", "chrt", "stdbuf", "setpriv", "prlimit", "setsid")
_SHORTEST_PREFIX = len("--max-ru")  # shorter ones are ambiguous in every engine we know


class ArgvError(Refused):
    """An argument list that does not say what ddops needs to know."""

    def __init__(self, what: str, hint: str = "") -> None:
        super().__init__(what, means="the argument list was left as it is", hint=hint)


@dataclass(frozen=True, slots=True)
class Found:
    """One occurrence of a flag: where it stands and what its value is."""

    index: int
    written: str  # the flag as written, maybe cut short
    value: str
    inline: bool  # --flag=value

    @property
    def words(self) -> int:
        return 1 if self.inline else 2

    def with_value(self, value: str) -> list[str]:
        return [f"{self.written}={value}"] if self.inline else [self.written, value]


def occurrences(argv: Sequence[str], names: Sequence[str], others: Sequence[str] = ()) -> Iterator[Found]:
    """Every occurrence of the flag known as `names`; `others` are flags a prefix could mean instead.

    Raises:
        ArgvError: the flag stands last, without a value.
    """
    index = 0
    while index < len(argv):
        word = argv[index]
        flag, equals, value = word.partition("=")
        if not _is(flag, names, others):
            index += 1
            continue
        if equals:
            yield Found(index, flag, value, inline=True)
            index += 1
            continue
        if index + 1 >= len(argv):
            raise ArgvError(f"{flag} has no value", "give it one, or remove it")
        yield Found(index, flag, argv[index + 1], inline=False)
        index += 2


def _is(flag: str, names: Sequence[str], others: Sequence[str]) -> bool:
    if not flag.startswith("--"):
        return flag in names
    flag = flag.replace("_", "-")  # vLLM takes both; elsewhere the engine itself refuses the wrong one
    if flag in names:
        return True
    if len(flag) < _SHORTEST_PREFIX or flag in others:
        return False
    return any(name.startswith(flag) for name in names) and not any(o.startswith(flag) for o in others)


def last(argv: Sequence[str], names: Sequence[str], others: Sequence[str] = ()) -> Found | None:
    """The occurrence that counts."""
    found = None
    for found in occurrences(argv, names, others):  # noqa: B007 (the last one is the result)
        pass
    return found


def put(argv: Sequence[str], names: Sequence[str], value: str, others: Sequence[str] = ()) -> list[str]:
    """Set the flag: the occurrence that counts is changed in place, else the flag is appended."""
    found = last(argv, names, others)
    if found is None:
        return [*argv, names[0], value]
    if found.value == value:
        return list(argv)
    return [*argv[: found.index], *found.with_value(value), *argv[found.index + found.words :]]


def drop(argv: Sequence[str], names: Sequence[str], others: Sequence[str] = ()) -> list[str]:
    """Remove every occurrence of the flag."""
    gone = {i for f in occurrences(argv, names, others) for i in range(f.index, f.index + f.words)}
    return [word for index, word in enumerate(argv) if index not in gone]


def normalise_argv(rendered: Sequence[str], running: Sequence[str]) -> list[str]:
    """`running` as it would have been written, so that a faithful start equals `rendered`.

    Undone are: the interpreter that the kernel puts before a script (`vllm serve` runs as
    `/usr/bin/python3 /usr/local/bin/vllm serve`), a command without slash that became a path, and a
    wrapper that replaced itself by the engine (numactl, env, taskset, ...).
    """
    want, have = list(rendered), list(running)
    if not want or not have or have == want:
        return have
    for shorter in (have, have[_interpreter(have) :]):
        if shorter and _same_command(want[0], shorter[0]) and shorter[1:] == want[1:]:
            return want
        if _replaced_itself(want, shorter):
            return want
    return have


def _interpreter(argv: Sequence[str]) -> int:
    """How many words an interpreter and its one option take at the front."""
    if not argv or not _INTERPRETER.fullmatch(os.path.basename(argv[0])):
        return 0
    # A first line passes at most one word after the interpreter.
    return 2 if len(argv) > 2 and argv[1].startswith("-") and argv[1] not in ("-m", "-c") else 1


def _same_command(written: str, running: str) -> bool:
    return written == running or ("/" not in written and os.path.basename(running) == written)


def _replaced_itself(want: Sequence[str], have: Sequence[str]) -> bool:
    if os.path.basename(want[0]) not in _EXEC_WRAPPERS or len(have) >= len(want) or have[0].startswith("-"):
        return False
    tail = want[len(want) - len(have) :]
    return _same_command(tail[0], have[0]) and list(tail[1:]) == list(have[1:])
