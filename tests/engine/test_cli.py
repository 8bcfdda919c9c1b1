"""The process: flags, exit codes, what it says while it starts and stops. Real processes, a small random model."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from ddtree_engine.__main__ import parse_config
from ddtree_engine.config import Algorithm
from ddtree_engine.selfcheck import REQUIRED

from tests.engine.conftest import write_tokenizer_folder
from tests.engine.small_models import DRAFTER, TARGET, write_checkpoint

START_S = 60.0  # generous: other work may share the machine
ONE_LINE = re.compile(r"\Addtree-engine: error: [^\n]+\n(hint: [^\n]+\n)?\Z")


@dataclass(frozen=True)
class Models:
    target: Path
    drafter: Path

    def flags(self, *more: str) -> list[str]:
        speculative = ["--speculative-algorithm", "DDTREE", "--speculative-draft-model-path", str(self.drafter)]
        small = ["--num-threads", "1", "--dtype", "float32", "--max-running-requests", "4", "--port", "0"]
        return ["--model-path", str(self.target), "--served-model-name", "tiny", *speculative, *small, *more]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    root = tmp_path_factory.mktemp("models")
    write_checkpoint(root / "target", TARGET | {"vocab_size": 304}, 1)
    write_checkpoint(root / "drafter", DRAFTER | {"vocab_size": 304}, 2)
    write_tokenizer_folder(root / "target")
    return Models(root / "target", root / "drafter")


class Process:
    """A running engine; its log is read as it is written."""

    def __init__(self, flags: list[str], env: dict[str, str]) -> None:
        command = [sys.executable, "-m", "ddtree_engine", *flags]
        self.popen = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ | env)
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.popen.stderr is not None
        self.lines.extend(line.rstrip("\n") for line in iter(self.popen.stderr.readline, ""))

    @property
    def log(self) -> str:
        self._reader.join(0.2)
        return "\n".join(self.lines)

    def until(self, pattern: str, deadline_s: float = START_S) -> re.Match[str]:
        ends = time.monotonic() + deadline_s
        while time.monotonic() < ends:
            if found := re.search(pattern, "\n".join(list(self.lines))):
                return found
            assert self.popen.poll() is None, f"it left with {self.popen.returncode}:\n{self.log}"
            time.sleep(0.02)
        raise AssertionError(f"no {pattern!r} in:\n{self.log}")

    def ready(self) -> str:
        return self.until(r"Listening on (http://\S+)").group(1)

    def leave(self, deadline_s: float = 20.0) -> int:
        return self.popen.wait(deadline_s)


@contextmanager
def running(*flags: str, env: dict[str, str] | None = None) -> Iterator[Process]:
    process = Process(list(flags), env or {})
    try:
        yield process
    finally:
        process.popen.kill()
        process.popen.wait(10)


def run(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ddtree_engine", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=START_S, check=False)


# --- flags ---


def test_flags_become_settings_and_what_is_not_given_keeps_its_default() -> None:
    config = parse_config(
        ["--model-path", "m", "--speculative-algorithm", "ddtree", "--speculative-draft-model-path", "d",
         "--speculative-ddtree-budget", "32", "--max-running-requests", "64", "--tp", "1", "--nnodes=1"]
    )  # fmt: skip
    assert config.speculative_algorithm is Algorithm.DDTREE
    assert config.speculative_ddtree_budget == 32
    assert config.max_running_requests == 64
    assert config.port == 30000
    assert parse_config(["--model-path", "m"]).speculative_algorithm is Algorithm.NONE
    auto = ["--model-path", "m", "--speculative-algorithm", "DDTREE", "--speculative-draft-model-path", "d"]
    assert parse_config([*auto, "--speculative-ddtree-budget", "auto"]).speculative_ddtree_budget == "auto"


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ([], "--model-path"),
        (["--model-path", "m", "--wibble", "1"], "--wibble"),
        (["--model-path", "m", "--max-running", "4"], "--max-running"),
        (["--model-path", "m", "--tp-size", "8"], "--tp-size 8: .*SGLang or vLLM"),
        (["--model-path", "m", "--tp", "2"], "--tp 2: .*SGLang or vLLM"),
        (["--model-path", "m", "--nnodes", "2"], "--nnodes 2: .*SGLang or vLLM"),
        (["--model-path", "m", "--speculative-algorithm", "EAGLE3"], "EAGLE3.*SGLang or vLLM"),
        (["--model-path", "m", "--speculative-algorithm", "DDTREE"], "--speculative-draft-model-path"),
        (["--model-path", "m", "--speculative-ddtree-budget", "many"], "neither a number nor 'auto'"),
        (["--model-path", "m", "--port", "70000"], "--port"),
        (["--model-path", "m", "--max-running-requests", "0"], "--max-running-requests"),
        (["--model-path", "m", "--dtype", "int4"], "--dtype"),
        (["--model-path", "m", "--fault", "garbage"], "--enable-fault-injection"),
        (["--model-path", "m", "--enable-fault-injection", "--fault", "wibble"], "unknown kind 'wibble'"),
        (["--model-path", "m", "--enable-fault-injection", "--fault", "rope,x=1"], "'x' is unknown"),
    ],
)
def test_a_wrong_flag_is_one_line_and_exit_code_2(flags: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        parse_config(flags)
    assert left.value.code == 2
    said = capsys.readouterr().err
    assert ONE_LINE.match(said), said
    assert re.search(says, said), said


def test_flags_are_judged_before_anything_heavy_is_imported() -> None:
    code = (
        "import sys\nfrom ddtree_engine.__main__ import parse_config\n"
        "parse_config(['--model-path', 'm', '--enable-fault-injection', '--fault', 'rope'])\n"
        "print([name for name in ('torch', 'uvicorn', 'starlette') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.strip() == "[]", done.stderr


def test_help_lists_flags_and_fault_kinds() -> None:
    assert "--speculative-ddtree-budget" in run("--help").stdout
    kinds = run("--fault", "help")
    assert kinds.returncode == 0
    assert "no-compaction" in kinds.stdout


# --- checkpoints and ports that cannot be used ---


def test_a_missing_model_is_one_line(tmp_path: Path) -> None:
    done = run("--model-path", str(tmp_path / "nothing"))
    assert done.returncode == 2
    assert ONE_LINE.match(done.stderr), done.stderr
    assert "tokenizer.json" in done.stderr


def test_a_drafter_that_does_not_fit_is_one_line(models: Models, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "drafter", DRAFTER | {"vocab_size": 304, "hidden_size": 32}, 2)
    done = run(*Models(models.target, tmp_path / "drafter").flags())
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert re.search(r"^ddtree-engine: error: ", done.stderr, re.MULTILINE), done.stderr


def test_a_port_in_use_is_one_line_and_exit_code_98(models: Models) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = run(*models.flags("--port", str(port)))
    assert done.returncode == 98
    assert ONE_LINE.match(done.stderr), done.stderr
    assert str(port) in done.stderr


@pytest.mark.parametrize(("content", "says"), [(None, "cannot read"), ("\n# no key\n", "holds no key")])
def test_a_key_file_that_cannot_be_used_is_one_line(models: Models, tmp_path: Path, content: str | None, says: str) -> None:
    if content is not None:
        (tmp_path / "keys").write_text(content)
    done = run(*models.flags("--api-key-file", str(tmp_path / "keys")))
    assert done.returncode == 2
    assert says in done.stderr
    assert ONE_LINE.match(done.stderr), done.stderr


# --- a life ---


def post(url: str, path: str, body: Any, **kwargs: Any) -> httpx.Response:
    return httpx.post(url + path, json=body, timeout=30, **kwargs)


def generation(tokens: int) -> dict[str, Any]:
    return {"text": "is_even", "sampling_params": {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}}


class Manager:
    """A service manager that only listens."""

    def __init__(self, address: Path) -> None:
        self.address = str(address)
        self.heard: list[str] = []
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._sock.bind(self.address)
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        while True:
            self.heard.append(self._sock.recv(4096).decode())

    @property
    def env(self) -> dict[str, str]:
        return {"NOTIFY_SOCKET": self.address}


@pytest.mark.slow
def test_a_life_from_start_to_stop(models: Models, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("the-secret-key\n")
    manager = Manager(tmp_path / "notify")
    flags = models.flags(
        "--speculative-ddtree-budget", "12", "--api-key-file", str(tmp_path / "keys"), "--enable-metrics",
        "--decode-log-interval", "5",
    )  # fmt: skip
    with running(*flags, env=manager.env) as engine:
        url, auth = engine.ready(), {"Authorization": "Bearer the-secret-key"}
        assert httpx.get(url + "/health").status_code == 200
        assert post(url, "/generate", generation(5)).status_code == 401
        answers = {
            mode: post(url, "/generate", generation(60) | {"speculative": mode}, headers=auth).json()
            for mode in ("off", "chain", "tree")
        }
        assert len({tuple(a["output_ids"]) for a in answers.values()}) == 1, "off, chain and tree agree"
        info = httpx.get(url + "/server_info", headers=auth).json()
        assert info["speculative_ddtree_budget"] == 12
        assert info["internal_states"][0]["avg_spec_accept_length"] >= 1
        engine.until(r"Decode batch, #running-req: 1, .*accept len: \d")
        engine.popen.send_signal(signal.SIGTERM)
        assert engine.leave() == 0
        log = engine.log
    assert "block_size=8 tree_budget=12 max_tree_nodes=13" in log
    assert re.search(r"max_total_num_tokens=\d+, .*max_running_requests=4", log)
    assert "the-secret-key" not in log + json.dumps(info)
    assert any(re.match(r"STATUS=loading weights \d+ %", each) for each in manager.heard)
    ready = next(i for i, each in enumerate(manager.heard) if each.startswith("READY=1"))
    assert any(each.startswith("STOPPING=1") for each in manager.heard[ready:])


@pytest.mark.slow
def test_health_says_starting_before_the_weights_are_there(models: Models) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    flags = models.flags("--port", str(port), "--enable-fault-injection", "--fault", "slow-load,seconds=3")
    url, seen = f"http://127.0.0.1:{port}", []
    with running(*flags) as engine:
        while not seen or seen[-1][0] != 200:
            assert engine.popen.poll() is None, engine.log
            try:
                response = httpx.get(url + "/health", timeout=5)
                seen.append((response.status_code, response.json()["status"]))
            except httpx.ConnectError:
                pass
            time.sleep(0.05)
        assert (503, "starting") in seen
        assert "FAULT INJECTION IS ON" in engine.log


@pytest.mark.slow
def test_sigterm_lets_requests_in_flight_finish(models: Models) -> None:
    flags = models.flags("--enable-fault-injection", "--fault", "slow,ms=40")
    with running(*flags) as engine:
        url = engine.ready()
        with httpx.stream("POST", url + "/generate", json=generation(20) | {"stream": True}, timeout=30) as response:
            lines = response.iter_lines()
            next(lines)
            engine.popen.send_signal(signal.SIGTERM)
            events = [line for line in lines if line]
        assert events[-1] == "data: [DONE]"
        assert json.loads(events[-2].removeprefix("data: "))["meta_info"]["completion_tokens"] == 20
        assert engine.leave() == 0


@pytest.mark.slow
def test_what_does_not_finish_in_time_is_answered_all_the_same(models: Models) -> None:
    flags = models.flags("--enable-fault-injection", "--fault", "slow,ms=500")
    with running(*flags) as engine:
        url, answers = engine.ready(), []
        asking = threading.Thread(target=lambda: answers.append(post(url, "/generate", generation(200))))
        asking.start()
        time.sleep(1.0)
        began = time.monotonic()
        engine.popen.send_signal(signal.SIGTERM)
        assert engine.leave() == 0
        assert time.monotonic() - began < 9
        asking.join(10)
    assert answers[0].status_code == 503
    assert answers[0].json()["error"]["code"] == "shutting down"


@pytest.mark.slow
def test_a_second_sigterm_ends_it_at_once(models: Models) -> None:
    flags = models.flags("--enable-fault-injection", "--fault", "slow,ms=500")
    with running(*flags) as engine:
        url = engine.ready()
        threading.Thread(target=lambda: _ignoring_errors(url), daemon=True).start()
        time.sleep(1.0)
        engine.popen.send_signal(signal.SIGTERM)
        engine.until("SIGTERM: finishing 1 requests")
        began = time.monotonic()
        engine.popen.send_signal(signal.SIGTERM)
        assert engine.leave() == -signal.SIGTERM
        assert time.monotonic() - began < 2


def _ignoring_errors(url: str) -> None:
    try:
        post(url, "/generate", generation(200))
    except httpx.HTTPError:
        return


@pytest.mark.slow
def test_sigterm_while_loading_leaves_with_0(models: Models) -> None:
    flags = models.flags("--enable-fault-injection", "--fault", "hang-start", "--log-level", "debug")
    with running(*flags) as engine:
        engine.until("Started server process")
        time.sleep(0.5)
        engine.popen.send_signal(signal.SIGTERM)
        assert engine.leave() == 0


@pytest.mark.slow
def test_a_crash_at_start_is_exit_code_70_with_the_reason_in_the_log(models: Models, tmp_path: Path) -> None:
    manager = Manager(tmp_path / "notify")
    with running(*models.flags("--enable-fault-injection", "--fault", "crash-start"), env=manager.env) as engine:
        assert engine.leave(START_S) == 70
        assert "Capture cuda graph failed: CUDA error: an illegal memory access was encountered" in engine.log
        assert "fatal: the device thread died: RuntimeError: CUDA error" in engine.log
    assert not any(each.startswith("READY=1") for each in manager.heard)


@pytest.mark.slow
def test_a_crash_under_load_answers_503_and_leaves_with_70(models: Models) -> None:
    flags = models.flags("--enable-fault-injection", "--fault", "cublas,above-product=20")
    with running(*flags) as engine:
        url = engine.ready()
        assert post(url, "/generate", generation(5)).status_code == 200, "alone it works"
        answers: list[httpx.Response] = []
        asking = [threading.Thread(target=lambda: answers.append(post(url, "/generate", generation(100)))) for _ in "ab"]
        for thread in asking:
            thread.start()
        for thread in asking:
            thread.join(30)
        assert [a.status_code for a in answers] == [503, 503]
        assert "CUBLAS_STATUS_EXECUTION_FAILED" in answers[0].json()["error"]["message"]
        assert engine.leave() == 70
        assert re.search(
            r"RuntimeError: CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmStridedBatchedEx",
            engine.log,
        )


@pytest.mark.slow
def test_a_process_killed_by_its_own_fault_is_seen_as_killed(models: Models) -> None:
    with running(*models.flags("--enable-fault-injection", "--fault", "crash-load,min-batch=1,after-tokens=8")) as engine:
        url = engine.ready()
        with pytest.raises(httpx.HTTPError):
            post(url, "/generate", generation(100))
        assert engine.leave() == -signal.SIGSEGV


# --- packages ---


@pytest.mark.parametrize("more", [(), ("--enable-fault-injection", "--fault", "garbage")])
@pytest.mark.parametrize("missing", [("torch",), ("uvicorn", "prometheus_client")])
def test_a_python_that_lacks_packages_is_told_so_in_one_line(
    models: Models, missing: tuple[str, ...], more: tuple[str, ...]
) -> None:
    hidden = "".join(f"sys.modules[{name!r}] = None\n" for name in missing)
    code = f"import sys, runpy\n{hidden}runpy.run_module('ddtree_engine', run_name='__main__', alter_sys=True)"
    command = [sys.executable, "-c", code, *models.flags(*more)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=START_S, check=False)
    assert done.returncode == 2, done.stderr
    assert ONE_LINE.match(done.stderr), done.stderr
    wanted = [name.replace("_", "-") for name in missing]
    assert f"lacks {', '.join(wanted)}\n" in done.stderr
    assert f"pip install {' '.join(wanted)}\n" in done.stderr


def test_help_needs_no_package() -> None:
    hidden = "".join(f"sys.modules[{name!r}] = None\n" for name in REQUIRED)
    code = f"import sys, runpy\n{hidden}runpy.run_module('ddtree_engine', run_name='__main__', alter_sys=True)"
    command = [sys.executable, "-c", code, "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=START_S, check=False)
    assert done.returncode == 0, done.stderr
    assert "--speculative-ddtree-budget" in done.stdout


# --- selfcheck ---


def test_selfcheck_is_one_json_object() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ddtree_engine.selfcheck"], capture_output=True, text=True, timeout=START_S, check=False
    )
    assert done.returncode == 0, done.stdout
    found = json.loads(done.stdout)
    assert found["ok"] is True
    assert found["missing"] == []
    assert found["torch"]
    assert found["devices"][0]["type"] == "cpu"
    assert found["devices"][0]["works"] is True


def test_selfcheck_names_what_is_missing() -> None:
    code = (
        "import sys, runpy\nsys.modules['uvicorn'] = None\nsys.argv = ['x']\n"
        "runpy.run_module('ddtree_engine.selfcheck', run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=START_S, check=False)
    assert done.returncode == 1
    found = json.loads(done.stdout)
    assert found["ok"] is False
    assert found["missing"] == ["uvicorn"]
