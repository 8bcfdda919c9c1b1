"""Runs model-written Python where it can do no harm: CPython built for WASI, inside wasmtime.

No files, no network, no processes, no environment; memory is capped, endless loops are cut, output is capped. What a
function *should* return never enters the sandbox: only the code and the arguments do, and the values that come back are
compared outside. So code that prints, patches or inspects its way around can at most hand back values, and a value is
right or it is not. It is not a general container: each run starts from nothing and leaves nothing.
"""

from __future__ import annotations

import json
import math
import secrets
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from ddops.prove.sandbox_runtime import Runtime, SandboxUnavailable, shared_runtime

__all__ = ["Call", "Limits", "Run", "SandboxUnavailable", "Value", "run", "run_many", "shared_runtime"]

_MAX_CODE_BYTES = 256 << 10


@dataclass(frozen=True, slots=True)
class Limits:
    memory_bytes: int = 256 << 20
    seconds: float = 5.0  # wall clock of one run; about 35 ms are needed to start
    output_bytes: int = 1 << 20


@dataclass(frozen=True, slots=True)
class Call:
    """One call of the function that the code must define. Arguments are plain values: numbers, text, containers."""

    function: str
    args: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Value:
    """What one call gave: `ok` with a value, or the reason why there is none."""

    ok: bool
    value: Any = None
    error: str = ""


@dataclass(frozen=True, slots=True)
class Run:
    """One program's results, a Value per call. `error` is why the program as a whole did not get through."""

    values: tuple[Value, ...]
    error: str = ""
    seconds: float = 0.0


def run(code: str, calls: Sequence[Call], limits: Limits = Limits(), runtime: Runtime | None = None) -> Run:
    """Define `code` and make the calls. Raises SandboxUnavailable when there is no interpreter to run it in."""
    runtime = runtime or shared_runtime()
    started = time.monotonic()
    if len(code.encode("utf-8", "replace")) > _MAX_CODE_BYTES:
        return _nothing(calls, f"the code is longer than {_MAX_CODE_BYTES >> 10} KiB", started)
    key = secrets.token_hex(16)
    done = runtime.execute(_program(code, calls, key), limits.memory_bytes, limits.seconds, limits.output_bytes)
    found, problem = _parse(done.output, key, len(calls))
    error = problem or done.error
    values = tuple(found.get(i) or Value(False, error=error or "no result came back") for i in range(len(calls)))
    return Run(values, error, time.monotonic() - started)


def run_many(jobs: Sequence[tuple[str, Sequence[Call]]], limits: Limits = Limits(), workers: int = 2) -> list[Run]:
    """Several programs in parallel; results in the order of the jobs."""
    runtime = shared_runtime()
    with ThreadPoolExecutor(max_workers=max(1, workers)) as pool:
        return list(pool.map(lambda job: run(job[0], job[1], limits, runtime), jobs))


def _nothing(calls: Sequence[Call], error: str, started: float) -> Run:
    return Run(tuple(Value(False, error=error) for _ in calls), error, time.monotonic() - started)


# What runs inside. It takes what it needs before the code runs, so that code which redefines a builtin by accident does
# not break the reporting; code that breaks it on purpose only loses its own results.
_HARNESS = """
def _main(code, calls, key):
    import sys, posix
    write, tid, isa = posix.write, type, isinstance
    types = (bool, int, float, str, list, tuple, dict, set, frozenset)
    Bool, Int, Float, Str, List, Tuple, Dict, Set, Frozen = types
    to_repr, enum, ordinal, err = repr, enumerate, ord, BaseException
    def text(s):
        return '"' + ''.join('%04x' % ordinal(c) if ordinal(c) < 65536 else '+%06x' % ordinal(c) for c in s) + '"'
    def pack(v):
        if v is None: return '["n"]'
        if isa(v, Bool): return '["b",1]' if v else '["b",0]'
        if isa(v, Int): return '["i","' + Int.__repr__(v) + '"]'
        if isa(v, Float): return '["f","' + Float.__repr__(v) + '"]'
        if isa(v, Str): return '["s",' + text(Str.__str__(v)) + ']'
        if isa(v, List): return '["l",[' + ','.join([pack(x) for x in List.__iter__(v)]) + ']]'
        if isa(v, Tuple): return '["t",[' + ','.join([pack(x) for x in Tuple.__iter__(v)]) + ']]'
        if isa(v, Dict):
            return '["d",[' + ','.join(['[' + pack(k) + ',' + pack(x) + ']' for k, x in Dict.items(v)]) + ']]'
        if isa(v, (Set, Frozen)): return '["z",[' + ','.join([pack(x) for x in v]) + ']]'
        return '["o",' + text(tid(v).__name__[:80]) + ']'
    def send(i, body):
        data = ('\\n' + key + ' ' + '%d' % i + ' ' + body + '\\n').encode('ascii')
        while data:
            data = data[write(1, data):]
    def why(e):
        line = getattr(e, 'lineno', None) if isa(e, SyntaxError) else None
        where = ' on line %d' % line if isa(line, Int) else ''
        try: said = Str(e)[:200]
        except err: said = ''
        return '["e",' + text(tid(e).__name__ + where + ': ' + said) + ']'
    space = {'__name__': 'answer', '__builtins__': __builtins__}
    try:
        exec(compile(code, '<answer>', 'exec'), space)
    except err as e:
        send(-1, why(e))
        return
    for i, (name, args) in enum(calls):
        try:
            if name not in space:
                body = '["e",' + text('NameError: ' + name + ' is not defined') + ']'
            else:
                body = pack(space[name](*args))
        except err as e:
            body = why(e)
        send(i, body)
"""


def _program(code: str, calls: Sequence[Call], key: str) -> str:
    plain = [(c.function, c.args) for c in calls]
    # Arguments are written as repr does, which calls these two by name.
    # !a keeps the program free of NUL and surrogates, which could not travel as an argument.
    return f"{_HARNESS}\ninf, nan = float('inf'), float('nan')\n_main({code!a}, {plain!a}, {key!r})\n"


def _parse(output: bytes, key: str, count: int) -> tuple[dict[int, Value], str]:
    """Results by call, first word wins, and why the code as a whole failed. Everything in it is untrusted."""
    found: dict[int, Value] = {}
    problem = ""
    prefix = key.encode() + b" "
    for line in output.split(b"\n"):
        if not line.startswith(prefix):
            continue
        number, _, body = line[len(prefix) :].partition(b" ")
        value = _decode(body)
        if number == b"-1":
            problem = problem or value.error
        elif number.isdigit() and len(number) < 7 and int(number) < count:
            found.setdefault(int(number), value)
    return found, problem


def _decode(body: bytes) -> Value:
    try:
        raw = json.loads(body)
        if isinstance(raw, list) and len(raw) == 2 and raw[0] == "e":
            return Value(False, error=_text(raw[1]))
        return Value(True, _unpack(raw, 0))
    except (ValueError, TypeError, KeyError, IndexError, RecursionError, MemoryError, OverflowError) as exc:
        return Value(False, error=f"a result that cannot be read ({type(exc).__name__})")


def _unpack(raw: Any, depth: int) -> Any:
    if depth > 60:
        raise ValueError("nested too deeply")
    tag: Any = raw[0]
    body: Any = raw[1] if len(raw) > 1 else None
    if tag == "n":
        return None
    if tag == "b":
        return bool(body)
    if tag == "i":
        return int(body)
    if tag == "f":
        return float(body)
    if tag == "s":
        return _text(body)
    if tag == "l":
        return [_unpack(x, depth + 1) for x in body]
    if tag == "t":
        return tuple(_unpack(x, depth + 1) for x in body)
    if tag == "z":
        return {_unpack(x, depth + 1) for x in body}
    if tag == "d":
        return {_unpack(k, depth + 1): _unpack(v, depth + 1) for k, v in body}
    if tag == "o":
        return Opaque(_text(body))
    raise ValueError("unknown tag")


def _text(packed: Any) -> str:
    """Four hex digits a character, or '+' and six."""
    if not isinstance(packed, str):
        raise TypeError("not text")
    out, i = [], 0
    while i < len(packed):
        width = 7 if packed[i] == "+" else 4
        out.append(chr(int(packed[i : i + width].lstrip("+"), 16)))
        i += width
    return "".join(out)


@dataclass(frozen=True, slots=True)
class Opaque:
    """A returned object of a kind that is not compared; equal to nothing a test expects."""

    type_name: str


def equal(expected: Any, got: Any) -> bool:
    """Whether a returned value is the expected one. Floats may differ by rounding; 1, 1.0 and True are the same."""
    if isinstance(expected, float) or isinstance(got, float):
        if not isinstance(expected, (int, float)) or not isinstance(got, (int, float)):
            return False
        try:
            return math.isclose(expected, got, rel_tol=1e-9, abs_tol=1e-12)
        except OverflowError:
            return False
    if isinstance(expected, (list, tuple)):
        return type(got) is type(expected) and len(got) == len(expected) and all(map(equal, expected, got))
    if isinstance(expected, dict):
        same_keys = isinstance(got, dict) and got.keys() == expected.keys()
        return same_keys and all(equal(v, got[k]) for k, v in expected.items())
    return bool(expected == got)
