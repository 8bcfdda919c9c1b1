"""Shared by the engine's tests: a tiny tokenizer folder, an engine without a model, and a served app on loopback."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import uvicorn
from ddtree_engine.api import make_app
from ddtree_engine.chat import ChatTemplate
from ddtree_engine.config import EngineConfig
from ddtree_engine.faults import Faults
from ddtree_engine.generation import SamplingDefaults, Service
from ddtree_engine.metrics import Meter, Metrics
from ddtree_engine.requests import Finish, InputLogprobs, Request, RequestError, Sampling, Stats, Update
from ddtree_engine.text import Tokenizer
from ddtree_engine.worker import State, Worker
from tokenizers import Tokenizer as BpeTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>"]
END_OF_TURN = 2
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_CORPUS = ["def is_even(n):\n    return n % 2 == 0\n", "Repeat these ids: kx7f-29ab q0zd-7731", "grün, 漢字 and 🙂"]
DEADLINE_S = 20.0


def write_tokenizer_folder(folder: Path) -> Path:
    """tokenizer.json and its companions, as a checkpoint folder has them (no weights)."""
    bpe = BpeTokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=SPECIAL_TOKENS, initial_alphabet=alphabet, show_progress=False)
    bpe.train_from_iterator(_CORPUS, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    bpe.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>", "chat_template": CHATML}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0]}))
    return folder


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer_folder(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def tokenizer(tokenizer_folder: Path) -> Tokenizer:
    return Tokenizer.load(tokenizer_folder)


@dataclass
class _Running:
    request: Request
    answer: tuple[int, ...]
    given: int = 0
    passes: int = 0
    cancelled: bool = False


@dataclass
class FakeEngine:
    """Answers a prompt with its own tokens (specials left out) and an end of turn; two tokens per verify pass.

    It keeps Engine's promises to the shell and nothing more. `on_step` may raise or wait: that is how tests break it.
    """

    config: EngineConfig
    context_length: int = 256
    on_step: Callable[[], None] = lambda: None
    answer: Callable[[Request], Sequence[int]] = lambda r: [*(i for i in r.prompt_ids if i > 3), END_OF_TURN]
    flushes: int = 0
    _queue: deque[_Running] = field(default_factory=deque)
    _rounds: int = 0
    _committed: int = 0
    _prompt_tokens: int = 0

    @property
    def info(self) -> Any:
        return FakeInfo(context_length=self.context_length, kv_capacity_tokens=16 * self.context_length)

    def check(self, request: Request) -> None:
        if any(i >= 300 for i in request.prompt_ids):
            raise RequestError("input_ids", "300 is outside the vocabulary")

    def submit(self, request: Request) -> None:
        self.check(request)
        self._prompt_tokens += len(request.prompt_ids)
        self._queue.append(_Running(request, tuple(self.answer(request))))

    def cancel(self, request_id: str) -> None:
        for running in self._queue:
            running.cancelled |= running.request.id == request_id

    @property
    def busy(self) -> bool:
        return bool(self._queue)

    def flush(self) -> bool:
        self.flushes += 1
        return True

    def step(self) -> list[Update]:
        self.on_step()
        self._rounds += 1
        running = [self._queue[i] for i in range(min(len(self._queue), self.config.max_running_requests))]
        updates = [self._advance(each) for each in running]
        ended = {update.request_id for update in updates if update.finish is not None}
        self._queue = deque(each for each in self._queue if each.request.id not in ended)
        return updates

    def stats(self) -> Stats:
        running = min(len(self._queue), self.config.max_running_requests)
        return Stats(
            running=running, queued=len(self._queue) - running, tokens_in_use=10 * running, capacity_tokens=4096,
            rounds=self._rounds, verify_passes=self._rounds, committed_tokens=self._committed, accepted_drafts=0,
            proposed_drafts=0, spec_requests=0, prompt_tokens=self._prompt_tokens, cached_tokens=0,
            cuda_graph=False, stage_seconds={},
        )  # fmt: skip

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling, mode: Any) -> list[Any]:
        return [SimpleNamespace(token_ids=(5,)) for _ in prompts]

    def _advance(self, each: _Running) -> Update:
        request, first = each.request, each.given == 0 and each.passes == 0
        if each.cancelled:
            return Update(request.id, (), Finish.ABORT, None, each.passes, 0)
        limit = request.sampling.max_new_tokens
        width = 1 if first or not request.mode.drafts else 2
        tokens = each.answer[each.given : min(each.given + width, limit)]
        each.given += len(tokens)
        each.passes += 0 if first else 1
        self._committed += 0 if first else len(tokens)
        stopped = bool(tokens) and tokens[-1] == END_OF_TURN and not request.sampling.ignore_eos
        ended = each.given >= min(limit, len(each.answer))
        finish = Finish.STOP if stopped else Finish.LENGTH if ended else None
        return Update(
            request.id, tokens, finish, END_OF_TURN if stopped else None, each.passes, 0,
            accepted_drafts=each.passes, proposed_drafts=8 * each.passes if request.mode.drafts else 0,
            logprobs=tuple(-0.5 for _ in tokens) if request.want_logprobs else (),
            top_logprobs=tuple(((-0.5, i), (-2.0, 7))[: request.top_logprobs] for i in tokens)
            if request.want_logprobs and request.top_logprobs else (),
            input_logprobs=_score(request) if first else None,
        )  # fmt: skip


@dataclass(frozen=True)
class FakeInfo:
    """The facts of an engine without a model."""

    context_length: int
    kv_capacity_tokens: int
    target_digest: str = "sha256:0"
    drafter_digest: str | None = None
    device_name: str = "fake"
    device_arch: str = "none"
    driver: str | None = None
    dtype: str = "float32"
    vocab_size: int = 300
    eos_token_ids: tuple[int, ...] = (2, 0)
    block_size: int | None = 8
    max_rows: int = 16 * 9 + 512  # 16 requests with 8 nodes and a root each, and a prefill chunk


def _score(request: Request) -> InputLogprobs | None:
    start = request.logprob_start if request.logprob_start >= 0 or request.sampling.max_new_tokens else 0
    if not request.want_logprobs or start < 0:
        return None
    ids = request.prompt_ids[start:]
    scores = tuple(None if start + i == 0 else -1.0 for i in range(len(ids)))
    top = tuple(() if lp is None else ((-1.0, i),) for i, lp in zip(ids, scores, strict=True))
    return InputLogprobs(start, ids, scores, top if request.top_logprobs else ())


class QuietObserver:
    """Remembers what the device thread says."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.deaths: list[Any] = []

    def progress(self, text: str) -> None:
        self.said.append(text)

    def ready(self, engine: Any) -> None:
        self.said.append("ready")

    def died(self, death: Any) -> None:
        self.deaths.append(death)


@dataclass
class Served:
    """A running app on loopback and what is behind it."""

    url: str
    service: Service
    engine: FakeEngine
    observer: QuietObserver
    server: uvicorn.Server
    thread: threading.Thread

    @property
    def client(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=DEADLINE_S)

    def post(self, path: str, body: Any, **kwargs: Any) -> httpx.Response:
        with self.client as client:
            return client.post(path, json=body, **kwargs)

    def get(self, path: str, **kwargs: Any) -> httpx.Response:
        with self.client as client:
            return client.get(path, **kwargs)

    def events(self, path: str, body: Any) -> list[Any]:
        """The events of a stream, decoded; the closing [DONE] must be there and is left out."""
        with self.client as client, client.stream("POST", path, json=body | {"stream": True}) as response:
            assert response.status_code == 200, response.read()
            lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
        assert lines[-1] == "[DONE]", lines[-1]
        return [json.loads(line) for line in lines[:-1]]


Serve = Callable[..., Served]


@pytest.fixture
def serve(tokenizer_folder: Path) -> Iterator[Serve]:
    """Start apps with fake engines: `serve(keys=(...), wait=False, engine={...}, **config)`; all end with the test."""
    with serving(tokenizer_folder) as start:
        yield start


@pytest.fixture(scope="module")
def plain(tokenizer_folder: Path) -> Iterator[Served]:
    """One app with default settings for all tests of a module that change nothing about it."""
    with serving(tokenizer_folder) as start:
        yield start()


@contextmanager
def serving(tokenizer_folder: Path) -> Iterator[Serve]:
    started: list[Served] = []

    def start(
        *, keys: tuple[bytes, ...] = (), wait: bool = True, engine: dict[str, Any] | None = None,
        load_gate: threading.Event | None = None, folder: Path | None = None, **settings: Any,
    ) -> Served:  # fmt: skip
        model = str(folder or tokenizer_folder)
        config = EngineConfig(
            model_path=model, served_model_name="tiny", **{"enable_metrics": True, "decode_log_interval": 4} | settings
        )
        tokenizer = Tokenizer.load(model)
        fake = FakeEngine(config, **engine or {})
        faults = Faults.parse(config.faults, tokenizer) if config.faults else None
        meter, observer = Meter(config.decode_log_interval), QuietObserver()

        def load(progress: Callable[[str, float], None]) -> FakeEngine:
            progress("loading weights", 0.41)
            if load_gate is not None:
                assert load_gate.wait(DEADLINE_S)
            return fake

        worker = Worker(load, observer, meter, faults)
        service = Service(
            config, tokenizer, ChatTemplate.load(model), SamplingDefaults.load(model), worker, meter,
            Metrics("tiny", meter), faults,
        )  # fmt: skip
        served = _serve_in_thread(service, fake, observer, keys)
        started.append(served)
        if wait:
            wait_until(lambda: worker.state is not State.STARTING)
        return served

    yield start
    for served in started:
        served.service.worker.stop(1.0)
        served.server.force_exit = served.server.should_exit = True
        served.thread.join(DEADLINE_S)
        assert not served.thread.is_alive()


def _serve_in_thread(service: Service, engine: FakeEngine, observer: QuietObserver, keys: tuple[bytes, ...]) -> Served:
    config = uvicorn.Config(
        make_app(service, keys), host="127.0.0.1", port=0, log_config=None, lifespan="off", timeout_graceful_shutdown=1
    )
    server = uvicorn.Server(config)

    async def run() -> None:
        service.worker.start(asyncio.get_running_loop())
        await server.serve()

    thread = threading.Thread(target=lambda: asyncio.run(run()), daemon=True)
    thread.start()
    wait_until(lambda: server.started)
    port = server.servers[0].sockets[0].getsockname()[1]
    return Served(f"http://127.0.0.1:{port}", service, engine, observer, server, thread)


def wait_until(holds: Callable[[], bool], deadline_s: float = DEADLINE_S) -> None:
    ends = time.monotonic() + deadline_s
    while not holds():
        assert time.monotonic() < ends, "it did not happen in time"
        time.sleep(0.01)


@pytest.fixture(name="wait_until")
def wait_until_fixture() -> Callable[..., None]:
    return wait_until
