"""The contract between the two programs, from the engine's side.

`fixtures/` holds what a client may rely on: requests with their replies, metrics, log lines. Here the real engine, over
the bundled models, is asked the same things, and must answer in the same shape: the same keys, the same types, the same
lines but for their numbers. The other program's tests parse the same files.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

FIXTURES = Path(__file__).parent / "fixtures"
MODELS = Path(__file__).parents[2] / "engine" / "models"
START_S = 90.0
# What is null in one situation and a value in another.
NULLABLE = {
    "spec_accept_length", "avg_spec_accept_length", "driver", "drafter_digest", "api_key_file", "finish_reason",
    "param", "logprobs", "cuda",
}  # fmt: skip


# Objects whose keys are tokens, so that another model has other ones.
KEYED_BY_TOKENS = r"\.logprobs\.top_logprobs\[\d+\]$"


def fixture(name: str) -> Any:
    return json.loads((FIXTURES / f"{name}.json").read_text())


def difference(want: Any, got: Any, path: str = "") -> str | None:
    """How the shape of `got` differs from that of `want`; None when it does not."""
    key = path.rpartition(".")[2]
    if key == "finish_reason" and isinstance(got, dict):
        return None if got in finish_reasons(got) else f"{path}: {got}"
    if want is None or got is None:
        return None if want is got or key in NULLABLE else f"{path}: {want!r} against {got!r}"
    if isinstance(want, dict) and isinstance(got, dict):
        if re.search(KEYED_BY_TOKENS, path):
            return None if all(isinstance(value, float) for value in got.values()) else f"{path}: {got}"
        if want.keys() != got.keys():
            return f"{path}: keys differ: {sorted(want.keys() ^ got.keys())}"
        return next((d for k in want if (d := difference(want[k], got[k], f"{path}.{k}"))), None)
    if isinstance(want, list) and isinstance(got, list):
        return next((d for i, each in enumerate(got) if want and (d := nearest(want, each, f"{path}[{i}]"))), None)
    if isinstance(want, bool) or isinstance(got, bool) or isinstance(want, str) or isinstance(got, str):
        return None if type(want) is type(got) else f"{path}: {want!r} against {got!r}"
    return None if isinstance(got, int | float) else f"{path}: {want!r} against {got!r}"


def nearest(wanted: list[Any], got: Any, path: str) -> str | None:
    """None when one of `wanted` has the shape of `got`."""
    found = [difference(want, got, path) for want in wanted]
    return None if None in found else found[0]


def finish_reasons(got: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {"type": "stop", "matched": got.get("matched")},
        {"type": "length", "length": got.get("length")},
        {"type": "abort", "message": got.get("message")},
    ]


def without_numbers(line: str) -> str:
    return re.sub(r"\d+(\.\d+)*", "#", line)


class Engine:
    """A real engine over the bundled models, and its log."""

    def __init__(self, *flags: str) -> None:
        command = [
            sys.executable, "-m", "ddtree_engine", "--model-path", str(MODELS / "target"),
            "--served-model-name", "ddtree-tiny", "--speculative-algorithm", "DDTREE",
            "--speculative-draft-model-path", str(MODELS / "drafter-b16"), "--speculative-ddtree-budget", "16",
            "--speculative-ddtree-topk-cap", "4", "--max-running-requests", "8", "--enable-metrics",
            "--decode-log-interval", "2", "--port", "0", *flags,
        ]  # fmt: skip
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.lines: list[str] = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        self.lines.extend(line.rstrip("\n") for line in iter(self.process.stderr.readline, ""))

    def until(self, text: str) -> str:
        ends = time.monotonic() + START_S
        while time.monotonic() < ends:
            if found := [line for line in list(self.lines) if text in line]:
                return found[-1]
            time.sleep(0.02)
        raise AssertionError("\n".join(self.lines))


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    engine = Engine()
    yield engine
    engine.process.kill()
    engine.process.wait(10)


@pytest.fixture(scope="module")
def client(engine: Engine) -> Iterator[httpx.Client]:
    url = engine.until("Listening on").rpartition(" ")[2]
    with httpx.Client(base_url=url, timeout=60) as client:
        yield client


def send(client: httpx.Client, request: dict[str, Any]) -> httpx.Response:
    return client.request(request["method"], request["path"], json=request["body"])


REPLIES = [name for name in sorted(p.stem for p in FIXTURES.glob("*.json")) if "reply" in fixture(name)]
STREAMS = [name for name in sorted(p.stem for p in FIXTURES.glob("*.json")) if "events" in fixture(name)]


@pytest.mark.parametrize("name", [name for name in REPLIES if name != "health_starting"])
def test_replies_have_the_contracts_shape(client: httpx.Client, name: str) -> None:
    want = fixture(name)
    got = send(client, want["request"])
    assert got.status_code == want["status"], got.text
    assert difference(want["reply"], got.json()) is None


@pytest.mark.parametrize("name", STREAMS)
def test_streams_have_the_contracts_events(client: httpx.Client, name: str) -> None:
    want = fixture(name)
    got = [line for line in send(client, want["request"]).text.splitlines() if line]
    assert got[-1] == want["events"][-1] == "data: [DONE]"
    known = [json.loads(event.removeprefix("data: ")) for event in want["events"][:-1]]
    for event in got[:-1]:
        assert event.startswith("data: ")
        assert nearest(known, json.loads(event.removeprefix("data: ")), "event") is None


def test_metrics_have_the_contracts_names_types_and_labels(client: httpx.Client) -> None:
    def families(text: str) -> dict[str, tuple[str, frozenset[str]]]:
        return {
            family.name: (family.type, frozenset(label for sample in family.samples for label in sample.labels))
            for family in text_string_to_metric_families(text)
        }

    want, got = fixture("metrics"), client.get("/metrics")
    assert families(got.text) == families(want["text"])
    assert got.headers["content-type"] == want["content_type"]


def test_log_lines_are_the_contracts_but_for_their_numbers(engine: Engine, client: httpx.Client) -> None:
    prompt = fixture("chat")["request"]["body"]
    for mode in ("tree", "off"):
        assert client.post("/v1/chat/completions", json=prompt | {"speculative": mode}).status_code == 200
    engine.until("Decode batch")
    known = {without_numbers(line) for lines in fixture("log_lines").values() for line in lines}
    seen = [without_numbers(line) for line in engine.lines if "target=" not in line]
    assert len(seen) > 3
    assert [line for line in seen if line not in known] == []


def test_before_it_is_ready_health_says_starting_and_a_death_says_why() -> None:
    faults = ["--enable-fault-injection", "--fault", "slow-load,seconds=2", "--fault", "crash-start", "--port", "0"]
    engine = Engine(*faults, "--log-level", "debug")
    try:
        assert engine.process.wait(START_S) == 70
    finally:
        engine.process.kill()
    engine.until("fatal: the device thread died")
    known = {without_numbers(line) for line in fixture("log_lines")["fatal"]}
    assert len({without_numbers(line) for line in engine.lines} & known) == 3


def test_selfcheck_has_the_contracts_keys() -> None:
    want = fixture("selfcheck")
    done = subprocess.run([sys.executable, *want["command"][1:]], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == want["exit_code"]
    assert json.loads(done.stdout).keys() == want["stdout"].keys()


# --- the comparison itself ---


@pytest.mark.parametrize(
    ("want", "got"),
    [
        ({"a": 1}, {"b": 1}),
        ({"a": 1}, {"a": "1"}),
        ({"a": 1}, {"a": True}),
        ({"a": 1}, {"a": None}),
        ({"a": {"b": 1}}, {"a": [1]}),
        ([{"a": 1}], [{"a": 1}, {"c": 2}]),
        ({"finish_reason": {"type": "stop", "matched": 2}}, {"finish_reason": {"type": "stop"}}),
    ],
)
def test_the_comparison_sees_a_difference(want: Any, got: Any) -> None:
    assert difference(want, got) is not None


@pytest.mark.parametrize(
    ("want", "got"),
    [
        ({"a": 1}, {"a": 2.5}),
        ({"driver": None}, {"driver": "570.1"}),
        ([[None, 1], [0.5, 2]], [[None, 9], [1.0, 3], [2.0, 4]]),
        ({"finish_reason": {"type": "stop", "matched": 2}}, {"finish_reason": {"type": "length", "length": 3}}),
    ],
)
def test_the_comparison_allows_other_values(want: Any, got: Any) -> None:
    assert difference(want, got) is None
