"""The sandbox for model-written code: honest code runs, hostile code gets nowhere, verdicts cannot be forged."""

from __future__ import annotations

import hashlib
import os
import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from wasmtime import wat2wasm

from ddops.prove import sandbox, sandbox_runtime
from ddops.prove.coding import Job, candidates, judge
from ddops.prove.problems import BY_NAME, KIN, STANDARD
from ddops.prove.sandbox import Call, Limits, Run, equal
from ddops.prove.sandbox_runtime import Runtime, SandboxUnavailable, cache_folder
from tests.ddops.prove_fake import SOLUTIONS

SECRET = "do-not-leak-4711"


def run(code: str, *args: object, function: str = "f", **limits: float) -> Run:
    return sandbox.run(code, [Call(function, args)], Limits(**limits))  # type: ignore[arg-type]


def value(code: str, *args: object) -> object:
    done = run(code, *args)
    assert done.values[0].ok, done
    return done.values[0].value


# ---- honest code


@pytest.mark.parametrize(
    ("code", "args", "expected"),
    [
        ("def f(n): return n + 1", (3,), 4),
        ("def f(s): return s[::-1]", ("häß\U0001f600",), "\U0001f600ßäh"),
        ("def f(a, b): return sorted(a + b)", ([3, 1], [2]), [1, 2, 3]),
        ("def f(t):\n    from collections import Counter\n    return Counter(t.split())", ("a b a",), {"a": 2, "b": 1}),
        ("def f(x): return (x, [x], {x}, {x: None})", (1,), (1, [1], {1}, {1: None})),
        ("import math\ndef f(x): return math.sqrt(x)", (2,), 2**0.5),
        ("def f(): return 10 ** 4000", (), 10**4000),
        ("def f(x): return x", ({"k": [(1, 2.5, None, True)]},), {"k": [(1, 2.5, None, True)]}),
        ("print('hello')\ndef f(): print('again'); return 'x'", (), "x"),
    ],
)
def test_honest_code_gives_its_value(code: str, args: tuple[object, ...], expected: object) -> None:
    assert value(code, *args) == expected


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=8,
)


@settings(max_examples=15, deadline=None)
@given(st.lists(plain, min_size=1, max_size=6))
def test_any_plain_value_comes_back_as_it_went_in(values: list[object]) -> None:
    done = sandbox.run("def f(x): return x", [Call("f", (v,)) for v in values])
    assert [v.value for v in done.values] == values
    assert all(type(a.value) is type(b) for a, b in zip(done.values, values, strict=True))


def test_one_call_that_fails_leaves_the_others_alone() -> None:
    done = sandbox.run("def f(n): return 1 // n", [Call("f", (n,)) for n in (1, 0, 2)])
    assert [v.ok for v in done.values] == [True, False, True]
    assert "ZeroDivisionError" in done.values[1].error


def test_syntax_error_names_its_line() -> None:
    assert "SyntaxError on line 2" in run("x = 1\ndef f(: return").values[0].error


def test_missing_function_is_said_so() -> None:
    assert "f is not defined" in run("def g(): return 1").values[0].error


# ---- hostile code

ESCAPES = {
    "reads a file": "def f(): return open('/etc/passwd').read()",
    "lists the root": "import os\ndef f(): return os.listdir('/')",
    "writes a file": "def f():\n    open('owned', 'w').write('x')\n    return 'written'",
    "reads its own interpreter": "import sys\ndef f(): return open(sys.executable, 'rb').read()",
    "opens a socket": "import socket\ndef f(): socket.socket().connect(('127.0.0.1', 22)) or 'connected'",
    "looks up a name": "import socket\ndef f(): return socket.gethostbyname('localhost')",
    "fetches an address": "import urllib.request\ndef f(): return urllib.request.urlopen('http://127.0.0.1').read()",
    "starts a process": "import subprocess\ndef f(): return subprocess.check_output(['id'])",
    "runs a shell": "import os\ndef f(): return os.system('id') == 0 or 1 / 0",
    "forks": "import os\ndef f(): return os.fork()",
    "loads ctypes": "import ctypes\ndef f(): return ctypes.CDLL(None).fork()",
    "execs": "import os\ndef f(): os.execv('/bin/sh', ['sh'])",
    "kills its parent": "import os\ndef f(): return os.kill(os.getppid(), 9)",
    "starts a thread": "import threading\ndef f(): return threading.Thread(target=print).start() or 'started'",
    "recurses without end": "def f(): return f()",
    "takes 300 MiB": "def f(): return len('a' * (300 << 20))",
    "doubles a list for ever": "def f():\n    x = [0]\n    while True: x += x",
    "leaves at once": "import os\ndef f(): os._exit(0)",
    "exits": "import sys\ndef f(): sys.exit(0)",
    "aborts": "import os\ndef f(): os.abort()",
    "returns itself": "def f():\n    x = []\n    x.append(x)\n    return x",
    "returns a huge number": "def f(): return 10 ** 200000",
    "raises from its own str": "class E(Exception):\n    def __str__(self): raise self\ndef f(): raise E()",
    "deep nesting": "def f():\n    x = []\n    for _ in range(500): x = [x]\n    return x",
    "compiles a bomb": "def f(): return eval('(' * 100000 + ')' * 100000)",
}


@pytest.mark.parametrize("what", ESCAPES)
def test_escape_attempt_yields_nothing(what: str) -> None:
    done = run(ESCAPES[what])
    assert not done.values[0].ok, (what, done.values[0].value)
    assert done.seconds < 10


def test_the_environment_is_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DDOPS_TEST_SECRET", SECRET)
    assert value("import os\ndef f(): return dict(os.environ)") == {}
    assert SECRET not in str(value("import sys\ndef f(): return repr(sys.argv)"))


@pytest.mark.parametrize(
    "code",
    [
        "def f():\n    while True: pass",
        "while True: pass",
        "import re\ndef f(): return re.match('(a+)+$', 'a' * 64 + 'b')",
        "def f(): return 9 ** 9 ** 9",
        "import sys\ndef f():\n    while True:\n        try: sys.exit()\n        except BaseException: pass",
    ],
)
def test_endless_loop_is_cut(code: str) -> None:
    started = time.monotonic()
    done = run(code, seconds=0.5)
    assert not done.values[0].ok
    assert "timeout" in done.values[0].error
    assert time.monotonic() - started < 5


def test_sleeping_is_not_possible_so_it_cannot_hold_up_the_run() -> None:
    started = time.monotonic()
    run("import time\ndef f():\n    time.sleep(1000)\n    return 1", seconds=1)
    run("import select\ndef f():\n    select.select([0], [], [], 1000)\n    return 1", seconds=1)
    assert time.monotonic() - started < 6


def test_output_is_capped() -> None:
    done = run("def f():\n    while True: print('x' * 100000)", output_bytes=1 << 16)
    assert "printed more than" in done.error
    assert not done.values[0].ok


def test_overlong_code_is_refused() -> None:
    assert "longer than" in run("x = 1\n" * 60000).error


# ---- forging results

FORGERIES = {
    "prints that it passed": "print('5/5 passed')\ndef f(n): print('ok'); return 'passed'",
    "prints lines like ours": "def f(n):\n    for i in range(99): print('0' * 32, i, '[\"i\",\"1\"]')\n    return 0",
    "finds the key in the frames and sends a value": (
        "import sys\ndef f(n):\n    fr = sys._getframe(1)\n    key, send = fr.f_locals['key'], fr.f_locals['send']\n"
        '    send(0, \'["i","0"]\')\n    return 0'
    ),
    "reads the program for expected values": (
        "import sys\ndef f(n):\n    src = open('/proc/self/cmdline').read()\n    return src"
    ),
    "patches the reporting": (
        "import posix, sys\nsys._getframe(1).f_locals['enum'] = None\nposix.write = None\n"
        "repr = len = isinstance = None\ndef f(n): return 0"
    ),
    "redefines builtins": (
        "import builtins\nbuiltins.len = builtins.repr = builtins.isinstance = builtins.type = lambda *a: True\n"
        "def f(n): return 0"
    ),
    "is equal to everything": "class A:\n    __eq__ = lambda self, other: True\ndef f(n): return A()",
    "is an int equal to everything": "class A(int):\n    def __eq__(self, o): return True\ndef f(n): return A(0)",
    "is an int that shows another": "class A(int):\n    def __repr__(self): return '8'\ndef f(n): return A(0)",
    "searches memory for the answer": (
        "import gc\ndef f(n):\n    seen = [o for o in gc.get_objects() if isinstance(o, dict) and 'expected' in o]\n"
        "    return seen[0]['expected'] if seen else 0"
    ),
    "leaves before it is asked": "import sys\ndef f(n): return 0\nsys.exit(0)",
    "swallows everything": "import sys\nsys.excepthook = lambda *a: None\ndef f(n): raise KeyboardInterrupt",
}


@pytest.mark.parametrize("what", FORGERIES)
def test_forged_result_is_not_the_right_value(what: str) -> None:
    """The right value (8) never enters the sandbox, so whatever is sent back is not it."""
    got = run(FORGERIES[what], 7).values[0]
    assert not (got.ok and equal(8, got.value)), what


def test_accidental_redefinition_of_builtins_does_not_break_the_report() -> None:
    assert value("len = 5\nrepr = str = list = None\ndef f(x): return x", [1]) == [1]


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=200))
def test_any_output_is_read_without_error(noise: bytes) -> None:
    found, problem = sandbox._parse(b"KEY 0 " + noise + b"\n" + noise, "KEY", 3)
    assert isinstance(found, dict)
    assert isinstance(problem, str)


@pytest.mark.parametrize("body", ["[" * 100000, '["l",' * 5000, '["i","' + "9" * 5000 + '"]', '["x"]', "null", '["s","zz"]'])
def test_hostile_result_lines_are_read_as_failures(body: str) -> None:
    found, _ = sandbox._parse(f"\nKEY 0 {body}\n".encode(), "KEY", 1)
    assert not found[0].ok


# ---- comparing


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        (0.1 + 0.2, 0.3, True),
        (1, 1.0, True),
        (True, 1, True),
        ([1], (1,), False),
        ({"a": 0.3}, {"a": 0.1 + 0.2}, True),
        ({"a": 1}, {"a": 1, "b": 2}, False),
        ("1", 1, False),
        (None, 0, False),
        ([1, [2]], [1, [2]], True),
        (1.0, "x", False),
        (10**400, 1.0, False),
    ],
)
def test_values_are_compared_as_a_person_would(a: object, b: object, same: bool) -> None:
    assert equal(a, b) is same


# ---- cache, pin, parallel runs


@pytest.fixture
def tiny(tmp_path: Path) -> Callable[[], Runtime]:
    """Runtimes of a small module over one cache folder: the real interpreter takes seconds to compile."""
    wasm = tmp_path / "tiny.wasm"
    wasm.write_bytes(wat2wasm('(module (memory (export "memory") 1) (func (export "_start")))'))
    digest = hashlib.sha256(wasm.read_bytes()).hexdigest()
    return lambda: Runtime(wasm=wasm, cache=tmp_path / "cache", sha256=digest)


def works(runtime: Runtime) -> bool:
    return runtime.execute("", 1 << 20, 1.0, 100).error == ""


def test_second_process_loads_the_compiled_interpreter(tiny: Callable[[], Runtime], tmp_path: Path) -> None:
    first, second = tiny(), tiny()
    assert not first.from_cache
    assert second.from_cache
    assert works(second)
    (file,) = (tmp_path / "cache").iterdir()
    assert file.stat().st_mode & 0o077 == 0


def test_processes_that_start_together_do_not_disturb_each_other(tiny: Callable[[], Runtime], tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(lambda _: works(tiny()), range(16)))
    assert len(list((tmp_path / "cache").iterdir())) == 1
    assert tiny().from_cache


def damage_foreign(file: Path) -> None:
    data = file.read_bytes()
    file.write_bytes(data[:14] + b"0" * 32 + data[46:])


DAMAGE: dict[str, Callable[[Path], object]] = {
    "truncated": lambda f: f.write_bytes(f.read_bytes()[:-100]),
    "flipped": lambda f: f.write_bytes(f.read_bytes()[:-50] + b"x" + f.read_bytes()[-49:]),
    "empty": lambda f: f.write_bytes(b""),
    "wrong digest": damage_foreign,
    "not ours": lambda f: f.write_bytes(b"\x7fELF" + f.read_bytes()),
    "writable by others": lambda f: f.chmod(0o666),
    "a folder": lambda f: (f.unlink(), f.mkdir()),
    "not for this wasmtime": lambda f: f.write_bytes(b"ddops-cwasm-1\n" + hashlib.sha256(b"old").digest() + b"old"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_cache_is_compiled_anew(tiny: Callable[[], Runtime], tmp_path: Path, damage: str) -> None:
    assert works(tiny())
    (file,) = (tmp_path / "cache").iterdir()
    DAMAGE[damage](file)
    again = tiny()
    assert not again.from_cache
    assert works(again)


def test_unwritable_cache_only_costs_time(tiny: Callable[[], Runtime], tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("not a folder")
    assert works(tiny())


def test_cache_lies_under_xdg_cache_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "ddops" / "sandbox"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/is/invalid")
    assert cache_folder() == Path(os.path.expanduser("~")) / ".cache" / "ddops" / "sandbox"


def test_an_interpreter_that_is_not_the_pinned_one_is_refused(tmp_path: Path) -> None:
    other = tmp_path / "python.wasm"
    other.write_bytes(b"\0asm\x01\0\0\0")
    with pytest.raises(SandboxUnavailable, match="not the pinned one"):
        Runtime(wasm=other, cache=tmp_path)
    with pytest.raises(SandboxUnavailable, match="missing"):
        Runtime(wasm=tmp_path / "absent.wasm", cache=tmp_path)


def test_the_installed_interpreter_is_the_pinned_one() -> None:
    data = sandbox_runtime._packaged().read_bytes()
    assert len(sandbox_runtime._read_pinned(None, sandbox_runtime.INTERPRETER_SHA256)) == len(data)


def test_runs_in_parallel_do_not_mix() -> None:
    with ThreadPoolExecutor(8) as pool:
        done = list(pool.map(lambda n: sandbox.run(f"x = {n}\ndef f(): return x", [Call("f", ())]), range(24)))
    assert [d.values[0].value for d in done] == list(range(24))


def test_a_loop_in_one_run_does_not_cut_the_others() -> None:
    jobs = [("def f():\n    while True: pass", [Call("f", ())]), *[("def f(): return 1", [Call("f", ())])] * 5]
    done = sandbox.run_many(jobs, Limits(seconds=1.0), workers=3)
    assert [d.values[0].ok for d in done] == [False, True, True, True, True, True]


# ---- code in replies


def test_code_is_found_in_fences_or_bare() -> None:
    code = "def f(n):\n    return n"
    assert candidates(f"Here you are:\n```python\n{code}\n```\nDone.", ["f"])[0].strip() == code
    assert candidates(f"```\nnoise\n```\n```py\n{code}\n```", ["f"])[0].strip() == code
    assert candidates(code, ["f"])[0].strip() == code
    assert candidates(f"Sure, here it is:\n{code}\nThis function returns n.", ["f"])[-1].strip() == code
    assert candidates(f"```python\n{code}", ["f"])[0].strip() == code  # cut by the length limit
    assert candidates(f"<think>def g(): pass</think>```python\n{code}\n```", ["f"])[0].strip() == code
    assert candidates("I cannot help with that.", ["f"]) == []


def test_right_and_wrong_code_are_told_apart_for_every_problem() -> None:
    problems = [*STANDARD, *KIN]
    right = judge([Job(f"```python\n{SOLUTIONS[p.name]}\n```", (p,)) for p in problems], random.Random(1))
    assert [c.got for c in right if not c.ok] == []
    wrong = judge([Job(f"def {p.signature}:\n    return None", (p,)) for p in problems], random.Random(1))
    assert not any(c.ok for c in wrong)


def test_evidence_says_what_was_wrong() -> None:
    problem = BY_NAME["fib"]
    (syntax,) = judge([Job("```python\ndef fib(n) return n\n```", (problem,))], random.Random(1))
    assert "SyntaxError on line 1" in syntax.got
    (value_,) = judge([Job("def fib(n): return n", (problem,))], random.Random(1))
    assert "fib(2,) returned 2, not 1" in value_.got or "fib(" in value_.got
    (nothing,) = judge([Job("no", (problem,))], random.Random(1))
    assert "no code" in nothing.got
