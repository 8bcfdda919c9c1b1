"""SGLang's router in front of engines: the fields it adds to every request are taken, and it serves through them.

The bodies are what sglang-router 0.3.2 sent. Its package brings a 30 MB binary: `make setup` installs it where it can be
had, and the tests that start it are skipped where it is missing.
"""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

MODELS = Path(__file__).parents[2] / "engine" / "models"
START_S = 120.0
QUESTION = "What is 17 + 25? Answer with the number only."
needs_router = pytest.mark.skipif(
    importlib.util.find_spec("sglang_router") is None, reason="sglang-router is not installed: pip install sglang-router"
)

_ADDED = {"no_stop_trim": False, "ignore_eos": False, "skip_special_tokens": True, "return_hidden_states": False}
CHAT = {
    "messages": [{"role": "user", "content": "hi"}], "model": "tiny", "logprobs": False, "max_completion_tokens": 4,
    "stream": False, "temperature": 0.0, "continue_final_message": False, "separate_reasoning": True,
    "stream_reasoning": True, **_ADDED,
}  # fmt: skip
COMPLETION = {
    "model": "tiny", "prompt": "hi", "max_tokens": 4, "temperature": 0.0, "stream": False, "echo": False, **_ADDED,
}  # fmt: skip
GENERATE = {
    "text": "hi", "model": None, "sampling_params": {"temperature": 0.0, "max_new_tokens": 4},
    "return_text_in_logprobs": False, "stream": False, "log_metrics": True, "return_hidden_states": False,
    "background": False, "no_logs": False, "return_bytes": False, "return_entropy": False,
}  # fmt: skip


# ---- what it sends, to an engine without it


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION), ("/generate", GENERATE)]
)
def test_the_fields_the_router_adds_are_taken(plain: Any, path: str, body: dict[str, Any], stream: bool) -> None:
    answer = httpx.post(plain.url + path, json=body | {"stream": stream}, timeout=20)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("path", "body", "field", "value"),
    [
        ("/v1/chat/completions", CHAT, "return_hidden_states", True),
        ("/v1/chat/completions", CHAT, "return_routed_experts", True),
        ("/v1/chat/completions", CHAT, "lora_path", "adapter"),
        ("/v1/completions", COMPLETION, "return_hidden_states", True),
        ("/generate", GENERATE, "background", True),
        ("/generate", GENERATE, "return_entropy", True),
        ("/generate", GENERATE, "rid", "mine"),
    ],
)
def test_the_same_fields_are_refused_where_they_would_ask_for_something(
    plain: Any, path: str, body: dict[str, Any], field: str, value: Any
) -> None:
    answer = httpx.post(plain.url + path, json=body | {field: value}, timeout=20)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)


def test_generate_checks_the_model_it_is_asked_for(plain: Any) -> None:
    assert httpx.post(f"{plain.url}/generate", json=GENERATE | {"model": "tiny"}, timeout=20).status_code == 200
    assert httpx.post(f"{plain.url}/generate", json=GENERATE | {"model": "other"}, timeout=20).status_code == 404


@pytest.mark.parametrize("path", ["health", "server_info", "get_server_info", "model_info", "get_model_info", "v1/models"])
def test_what_the_router_polls_is_there(plain: Any, path: str) -> None:
    assert httpx.get(f"{plain.url}/{path}", timeout=20).status_code == 200


# ---- the router itself, before two engines with the bundled models


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


@contextmanager
def process(log: Path, module: str, *flags: str) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as out:
        child = subprocess.Popen(
            [sys.executable, "-m", module, *flags], stdout=out, stderr=out, env=os.environ | {"HF_HUB_OFFLINE": "1"}
        )
    try:
        yield child
    finally:
        child.terminate()
        try:
            child.wait(20)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait(20)


def wait_until(good: Callable[[], bool], child: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and child.poll() is None:
        try:
            if good():
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.3)
    raise AssertionError(log.read_text(errors="replace")[-2000:])


class Fleet:
    """Two engines and the router before them."""

    def __init__(self, url: str, engines: list[str], processes: list[subprocess.Popen[bytes]]) -> None:
        self.url, self.engines, self.processes = url, engines, processes

    def served(self, engine: str) -> int:
        text = httpx.get(f"{engine}/metrics", timeout=20).text
        return round(sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith("sglang:num_requests_total")))


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    logs = tmp_path_factory.mktemp("router")
    with ExitStack() as stack:
        engines, processes = [], []
        for number in range(2):
            port, log = free_port(), logs / f"engine-{number}.log"
            flags = (
                "--model-path", str(MODELS / "target"), "--served-model-name", "tiny", "--speculative-algorithm", "DDTREE",
                "--speculative-draft-model-path", str(MODELS / "drafter-b16"), "--speculative-ddtree-budget", "16",
                "--host", "127.0.0.1", "--port", str(port), "--num-threads", "1", "--enable-metrics",
            )  # fmt: skip
            engines.append(f"http://127.0.0.1:{port}")
            processes.append(stack.enter_context(process(log, "ddtree_engine", *flags)))
        for number, url in enumerate(engines):
            check = _healthy(f"{url}/health")
            wait_until(check, processes[number], logs / f"engine-{number}.log")
        port, log = free_port(), logs / "router.log"
        flags = (
            "--host", "127.0.0.1", "--port", str(port), "--worker-urls", *engines, "--policy", "round_robin",
            "--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port()), "--health-check-interval-secs", "1",
            "--health-failure-threshold", "1",
        )  # fmt: skip
        router = stack.enter_context(process(log, "sglang_router.launch_router", *flags))
        url = f"http://127.0.0.1:{port}"
        wait_until(lambda: len(_workers(url)) == 2, router, log)
        yield Fleet(url, engines, processes)


def _healthy(url: str) -> Callable[[], bool]:
    return lambda: httpx.get(url, timeout=5).status_code == 200


def _workers(url: str) -> list[str]:
    return [w["url"] for w in httpx.get(f"{url}/workers", timeout=5).json()["workers"] if w["is_healthy"]]


@pytest.fixture
def client(fleet: Fleet) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{fleet.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


@needs_router
def test_chat_through_the_router_is_right_whole_and_streamed(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": QUESTION}]
    whole = client.chat.completions.create(model="tiny", messages=messages, temperature=0, max_tokens=20)
    assert whole.choices[0].message.content == "42"
    assert whole.choices[0].finish_reason == "stop"
    chunks = list(
        client.chat.completions.create(
            model="tiny", messages=messages, temperature=0, max_tokens=20, stream=True, stream_options={"include_usage": True}
        )
    )
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "42"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens  # type: ignore[union-attr]


@needs_router
def test_completions_through_the_router_agree_whole_and_streamed(client: openai.OpenAI) -> None:
    whole = client.completions.create(model="tiny", prompt="def is_even(n):\n    return", max_tokens=24, temperature=0)
    stream = client.completions.create(
        model="tiny", prompt="def is_even(n):\n    return", max_tokens=24, temperature=0, stream=True
    )
    assert whole.choices[0].text
    assert "".join(c.choices[0].text for c in stream) == whole.choices[0].text


@needs_router
def test_generate_through_the_router_gives_ids_and_figures(fleet: Fleet) -> None:
    body = {"text": "def is_even(n):", "sampling_params": {"max_new_tokens": 8, "temperature": 0}}
    whole = httpx.post(f"{fleet.url}/generate", json=body, timeout=60).json()
    assert len(whole["output_ids"]) == 8
    assert whole["meta_info"]["spec_verify_ct"] > 0
    with httpx.stream("POST", f"{fleet.url}/generate", json=body | {"stream": True}, timeout=60) as stream:
        events = [line[6:] for line in stream.iter_lines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    assert json.loads(events[-2])["output_ids"] == whole["output_ids"]


@needs_router
def test_many_at_once_are_spread_over_both_engines(fleet: Fleet, client: openai.OpenAI) -> None:
    before = [fleet.served(e) for e in fleet.engines]

    def ask(number: int) -> str | None:
        messages: Any = [{"role": "user", "content": f"What is {number} + 20? Answer with the number only."}]
        reply = client.chat.completions.create(model="tiny", messages=messages, temperature=0, max_tokens=20)
        return reply.choices[0].message.content

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, range(10, 26))) == [str(n + 20) for n in range(10, 26)]
    grown = [fleet.served(e) - b for e, b in zip(fleet.engines, before, strict=True)]
    assert sum(grown) == 16
    assert min(grown) > 0


@needs_router
def test_a_refusal_reaches_the_client_as_it_is(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="tiny", prompt="a " * 5000, max_tokens=4)
    assert caught.value.param == "prompt"


@needs_router
def test_an_engine_that_ends_is_left_out(fleet: Fleet, client: openai.OpenAI) -> None:
    fleet.processes[1].terminate()
    fleet.processes[1].wait(20)
    wait_until(lambda: _workers(fleet.url) == fleet.engines[:1], fleet.processes[0], Path(os.devnull))
    messages: Any = [{"role": "user", "content": QUESTION}]
    for _ in range(4):
        reply = client.chat.completions.create(model="tiny", messages=messages, temperature=0, max_tokens=20)
        assert reply.choices[0].message.content == "42"
