"""The process: bind, load on the device thread, say READY, serve, and leave with an exit code that tells why.

Exit codes: 0 asked to stop · 2 a setting or checkpoint that cannot be served · 70 the device thread died (its last
words are in the log) · 98 the port is in use. Not here: parsing flags (__main__.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import signal
import socket
from collections.abc import Callable, Iterator
from enum import IntEnum
from typing import TYPE_CHECKING

import uvicorn

from ddtree_engine.api import make_app
from ddtree_engine.chat import ChatTemplate, ChatTemplateError
from ddtree_engine.config import ConfigError, EngineConfig, SpecMode
from ddtree_engine.faults import Faults, server_budget
from ddtree_engine.generation import SamplingDefaults, Service
from ddtree_engine.metrics import Meter, Metrics
from ddtree_engine.notify import Notifier
from ddtree_engine.text import Tokenizer, TokenizerError
from ddtree_engine.web import KeyFileError, read_keys
from ddtree_engine.worker import Death, Load, Worker

if TYPE_CHECKING:
    from ddtree_engine.engine import Engine

log = logging.getLogger("ddtree_engine")

DRAIN_S = 5  # from SIGTERM to the end
ABANDON_S = 4.0  # from SIGTERM until requests still in flight are told 503
STOP_S = 0.5  # then: how long the device thread may take to notice
WATCH_EVERY_S = 1.0
KEEP_ALIVE_S = 30


class ExitCode(IntEnum):
    OK = 0
    USAGE = 2
    ENGINE_DIED = 70
    PORT_IN_USE = 98


class CannotStart(Exception):
    """One line for the operator, and the code to leave with."""

    def __init__(self, message: str, code: ExitCode = ExitCode.USAGE) -> None:
        super().__init__(message)
        self.code = code


def serve(config: EngineConfig, load: Load | None = None) -> ExitCode:
    """Run until told to stop. Raises CannotStart for what is wrong before or while loading. `load` is for tests."""
    keys = _read_keys(config)
    life = _Life(Notifier(), config)
    service = assemble(config, life, load)
    sock = bind(config.host, config.port)
    try:
        return asyncio.run(life.run(service, keys, sock))
    finally:
        sock.close()


def assemble(config: EngineConfig, life: _Life, load: Load | None = None) -> Service:
    """Everything that needs no device: tokenizer, template, faults, metrics. Raises CannotStart."""
    try:
        tokenizer = Tokenizer.load(config.model_path)
        template = ChatTemplate.load(config.model_path)
        defaults = SamplingDefaults.load(config.model_path)
        faults = Faults.parse(config.faults, tokenizer) if config.faults else None
    except (TokenizerError, ChatTemplateError, ConfigError) as exc:
        raise CannotStart(str(exc)) from exc
    meter = Meter(config.decode_log_interval)
    worker = Worker(load or _loader(config, faults), life, meter, faults)
    metrics = Metrics(config.served_model_name or config.model_path, meter)
    return Service(config, tokenizer, template, defaults, worker, meter, metrics, faults)


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; bound before the weights are read, so that /health can say "starting" meanwhile."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.create_server(address[:2], family=family, backlog=2048)
    except OSError as exc:
        if exc.errno == errno.EADDRINUSE:
            message = f"port {port} on {host} is in use; another engine may be running there"
            raise CannotStart(message, ExitCode.PORT_IN_USE) from exc
        raise CannotStart(f"cannot listen on {host} port {port}: {exc.strerror or exc}") from exc
    # asyncio turns Nagle's algorithm off only for sockets it made itself; with it every reply waits 40 ms for the
    # client's delayed acknowledgement, between its head and its body. Accepted connections inherit the option.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def startup_lines(engine: Engine) -> list[str]:
    """What was really loaded, in SGLang's words where it has them."""
    config, info = engine.config, engine.info
    lines = [
        f"target={config.model_path} {info.target_digest} dtype={info.dtype} device={info.device_name} "
        f"arch={info.device_arch} driver={info.driver}",
        f"max_total_num_tokens={info.kv_capacity_tokens}, chunked_prefill_size={config.chunked_prefill_size}, "
        f"max_running_requests={config.max_running_requests}, context_len={info.context_length}",
    ]
    budget, block = config.speculative_ddtree_budget, info.block_size
    match config.speculative_algorithm.mode:
        case SpecMode.TREE:
            nodes = server_budget(engine) + 1
            lines.append(f"Initialized DDTree worker. block_size={block} tree_budget={budget} max_tree_nodes={nodes}")
        case SpecMode.CHAIN:
            lines.append(f"Initialized DFlash worker. block_size={block} max_rows={info.max_rows}")
    return lines


class _Life:
    """One run of the process, as the device thread, the signals and the watchdog see it."""

    def __init__(self, notifier: Notifier, config: EngineConfig) -> None:
        self._notifier = notifier
        self._config = config
        self._last_progress = ""
        self._death: Death | None = None
        self._server: uvicorn.Server | None = None

    async def run(self, service: Service, keys: tuple[bytes, ...], sock: socket.socket) -> ExitCode:
        """Serve until a signal or a death. Raises CannotStart when the checkpoints cannot be served."""
        loop, worker = asyncio.get_running_loop(), service.worker
        self._address = _url(sock)
        self._server = _Server(make_app(service, keys), lambda name: self._signalled(name, worker))
        watchdog = asyncio.create_task(self._watch(worker))
        if self._config.faults:
            log.warning("FAULT INJECTION IS ON, output will be wrong on purpose: %s", "; ".join(self._config.faults))
        worker.start(loop)
        await self._server.serve(sockets=[sock])
        watchdog.cancel()
        worker.stop(STOP_S)
        if self._death is None:
            log.info("stopped")
            return ExitCode.OK
        if self._death.config_error is not None:
            raise CannotStart(str(self._death.config_error)) from self._death.config_error
        return ExitCode.ENGINE_DIED

    # --- told by the device thread ---

    def progress(self, text: str) -> None:
        if text != self._last_progress:
            self._last_progress = text
            self._notifier.status(text)

    def ready(self, engine: Engine) -> None:
        for line in startup_lines(engine):
            log.info(line)
        log.info("The server is fired up and ready to roll! Listening on %s", self._address)
        self._notifier.ready(f"serving {engine.config.served_model_name or engine.config.model_path}")

    # --- told on the event loop ---

    def died(self, death: Death) -> None:
        self._death = death
        if death.config_error is None:
            log.critical("fatal: the device thread died: %s", death.reason)
        self._notifier.failed(f"died: {death.reason}", ExitCode.ENGINE_DIED)
        assert self._server is not None
        self._server.should_exit = True

    def _signalled(self, name: str, worker: Worker) -> None:
        log.info("%s: finishing %d requests in flight, for at most %d s", name, worker.in_flight, DRAIN_S)
        self._notifier.stopping(f"finishing {worker.in_flight} requests")
        worker.drain()
        asyncio.get_running_loop().call_later(ABANDON_S, worker.abandon)

    async def _watch(self, worker: Worker) -> None:
        while True:
            await asyncio.sleep(WATCH_EVERY_S)
            if worker.hung_for() > 0:
                worker.declare_dead("watchdog: one decoding round has not come back; the device hangs")


class _Server(uvicorn.Server):
    """uvicorn without its own words on signals: the first one drains, the second one ends the process at once."""

    def __init__(self, app: object, signalled: Callable[[str], None]) -> None:
        super().__init__(
            uvicorn.Config(
                app,  # type: ignore[arg-type]
                log_config=None,
                access_log=log.isEnabledFor(logging.DEBUG),
                lifespan="off",
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=DRAIN_S,
            )
        )
        self._signalled = signalled

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        signals = (signal.SIGTERM, signal.SIGINT)

        def first(received: signal.Signals) -> None:
            for each in signals:
                loop.remove_signal_handler(each)
                signal.signal(each, signal.SIG_DFL)  # the kernel carries out the second one, whatever we are doing
            self.should_exit = True
            self._signalled(received.name)

        for each in signals:
            loop.add_signal_handler(each, first, each)
        yield


def _url(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if sock.family == socket.AF_INET6 else f"http://{host}:{port}"


def _read_keys(config: EngineConfig) -> tuple[bytes, ...]:
    try:
        return read_keys(config.api_key_file) if config.api_key_file else ()
    except KeyFileError as exc:
        raise CannotStart(f"--api-key-file: {exc}") from exc


def _loader(config: EngineConfig, faults: Faults | None) -> Load:
    def load(progress: Callable[[str, float], None]) -> Engine:
        progress("importing torch", 0.0)
        from ddtree_engine.engine import (
            Engine,
        )  # seconds of imports: on the device thread, while /health answers

        return Engine.load(config, progress=progress, faults=faults)

    return load
