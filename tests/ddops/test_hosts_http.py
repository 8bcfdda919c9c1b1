"""HTTP through the SSH connection, forwarded and relayed, against a real sshd and a real HTTP server."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import httpx
import psutil
import pytest

from ddops.errors import ConnectionLost
from ddops.hosts import Remote, connect

NOTICED_SECONDS = 9.0


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # one segment per reply

    def do_GET(self) -> None:
        getattr(self, "get_" + self.path.strip("/").split("?")[0])()

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.reply(json.dumps({"got": body.decode(), "path": self.path}).encode())

    def reply(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def get_hello(self) -> None:
        self.reply(b"hello")

    def get_peer(self) -> None:
        self.reply(f"{self.client_address[0]}:{self.client_address[1]}".encode())

    def get_together(self) -> None:
        """Answers only when 64 requests are waiting at once."""
        self.server.gate.wait(30)  # type: ignore[attr-defined]
        self.reply(b"together")

    def get_slow(self) -> None:
        time.sleep(2)
        self.reply(b"slow")

    def get_never(self) -> None:
        time.sleep(60)

    def get_big(self) -> None:
        self.reply(b"x" * 20_000_000)

    def get_events(self) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("connection", "close")
        self.end_headers()
        with contextlib.suppress(OSError):
            for number in range(200):
                self.wfile.write(f"data: {number}\n\n".encode())
                self.wfile.flush()
                time.sleep(0.3 if number else 0.0)
        self.close_connection = True

    def get_reset(self) -> None:
        """Half an answer, then the process is gone as far as the client can tell."""
        self.wfile.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\nhalf")
        self.wfile.flush()
        time.sleep(0.2)
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()
        self.close_connection = True

    def log_message(self, *_: Any) -> None:
        """Quiet."""


class Server(ThreadingHTTPServer):
    request_queue_size = 256
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients go away in these tests; that is no news."""


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    server = Server(("127.0.0.1", 0), Handler)
    server.gate = threading.Barrier(64)  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server.server_port
    server.shutdown()
    server.server_close()


WAYS = ["AllowTcpForwarding yes", "AllowTcpForwarding no"]


@pytest.fixture(params=WAYS, ids=["forwarded", "relayed"])
def server(request: pytest.FixtureRequest, make_sshd: Callable[..., Any]) -> Any:
    made = make_sshd(request.param)
    made.relayed = request.param.endswith("no")
    return made


@pytest.fixture
def remote(server: Any) -> Iterator[Remote]:
    with connect(server.host()) as made:
        yield made


def test_requests_reach_the_engine_and_answers_come_back(remote: Remote, port: int) -> None:
    client = remote.http(port)
    assert client.get("/hello").text == "hello"
    sent = client.post("/generate?x=1", json={"text": "ü" * 100_000}).json()
    assert json.loads(sent["got"]) == {"text": "ü" * 100_000}
    assert sent["path"] == "/generate?x=1"


def test_a_connection_is_kept_for_the_next_request(remote: Remote, port: int) -> None:
    client = remote.http(port)
    assert client.get("/peer").text == client.get("/peer").text


def test_sixty_four_requests_are_under_way_at_once(remote: Remote, port: int) -> None:
    client = remote.http(port, timeout=60)
    with ThreadPoolExecutor(64) as pool:
        answers = list(pool.map(lambda _: client.get("/together").text, range(64)))
    assert answers == ["together"] * 64


def test_a_large_answer_arrives_whole_next_to_small_ones(remote: Remote, port: int) -> None:
    client = remote.http(port, timeout=60)
    with ThreadPoolExecutor(4) as pool:
        big = pool.submit(lambda: len(client.get("/big").content))
        assert {client.get("/hello").text for _ in range(20)} == {"hello"}
        assert big.result() == 20_000_000


def test_a_stream_is_read_as_it_comes_and_can_be_left(remote: Remote, port: int) -> None:
    client = remote.http(port)
    begun = time.monotonic()
    with client.stream("GET", "/events") as answer:
        lines = answer.iter_lines()
        assert next(lines) == "data: 0"
        assert time.monotonic() - begun < 5
        assert [line for line, _ in zip(lines, range(4), strict=False) if line] == ["data: 1", "data: 2"]
    assert time.monotonic() - begun < 20
    assert client.get("/hello").text == "hello"


def test_each_read_has_its_own_limit(remote: Remote, port: int) -> None:
    client = remote.http(port)
    begun = time.monotonic()
    with pytest.raises(httpx.ReadTimeout):
        client.get("/slow", timeout=0.5)
    assert time.monotonic() - begun < 1.9
    assert client.get("/slow", timeout=30).text == "slow"


def test_an_engine_that_does_not_listen_is_a_connect_error(remote: Remote) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        client = remote.http(unused.getsockname()[1])
        begun = time.monotonic()
        with ThreadPoolExecutor(16) as pool:
            problems = list(pool.map(lambda _: _problem(client), range(16)))
        assert set(problems) == {httpx.ConnectError}
        assert time.monotonic() - begun < 15
    assert remote.alive()


def _problem(client: httpx.Client) -> type[BaseException]:
    try:
        client.get("/hello")
    except Exception as exc:
        return type(exc)
    return AssertionError


def test_an_engine_that_dies_in_mid_answer_is_an_http_error(remote: Remote, port: int) -> None:
    with pytest.raises((httpx.ReadError, httpx.RemoteProtocolError)):
        remote.http(port).get("/reset")
    assert remote.alive()


def test_a_lost_connection_is_not_taken_for_a_dead_engine(server: Any, port: int) -> None:
    with connect(server.host()) as remote:
        client = remote.http(port)
        assert client.get("/hello").text == "hello"
        threading.Timer(1.0, server.kill_sessions).start()
        with pytest.raises(ConnectionLost):
            client.get("/never", timeout=60)
        with pytest.raises(ConnectionLost):
            client.get("/hello")
        remote.reconnect(deadline=30)
        assert client.get("/hello").text == "hello"  # the same client goes on


def test_a_frozen_host_is_noticed_under_a_long_request(server: Any, port: int) -> None:
    with connect(server.host()) as remote:
        client = remote.http(port)
        client.get("/hello")
        threading.Timer(0.5, server.freeze).start()
        begun = time.monotonic()
        with pytest.raises(ConnectionLost, match="answered nothing"):
            client.get("/never", timeout=300)
        assert time.monotonic() - begun < 0.5 + NOTICED_SECONDS


def test_the_fallback_is_said_once_and_only_where_it_is_used(server: Any, port: int) -> None:
    notes: list[str] = []
    with connect(server.host(), on_note=notes.append) as remote:
        for _ in range(3):
            remote.http(port).get("/hello")
        assert [note for note in notes if "relay" in note] == notes
        assert len(notes) == (1 if server.relayed else 0)
        assert list(remote.notes) == notes


def test_clients_of_one_host_share_one_relay(make_sshd: Callable[..., Any], port: int) -> None:
    server = make_sshd("AllowTcpForwarding no")
    with connect(server.host()) as remote:
        for _ in range(4):
            with remote.http(port) as client:
                client.get("/hello")
        relays = [process for process in server.sessions() if "python" in process.name()]
        assert len(relays) == 1


def test_no_port_is_opened_on_this_machine(remote: Remote, port: int) -> None:
    before = _listening()
    remote.http(port).get("/hello")
    assert _listening() <= before


def _listening() -> set[Any]:
    connections = psutil.Process().net_connections(kind="inet")
    return {found.laddr for found in connections if found.status == psutil.CONN_LISTEN}


def test_proxies_of_this_machine_do_not_apply(remote: Remote, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    assert remote.http(port).get("/hello").text == "hello"


def test_closing_the_remote_ends_requests_and_threads(server: Any, port: int) -> None:
    before = _our_threads()
    remote = connect(server.host())
    client = remote.http(port)
    client.get("/hello")
    closing = threading.Timer(0.5, remote.close)
    closing.start()
    begun = time.monotonic()
    with pytest.raises((ConnectionLost, httpx.TransportError)):
        client.get("/never", timeout=60)
    assert time.monotonic() - begun < 10
    closing.join(10)
    assert _our_threads() <= before


def _our_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("ddops")}


def test_permit_open_counts_as_no_forwarding(make_sshd: Callable[..., Any], port: int) -> None:
    with connect(make_sshd("PermitOpen 127.0.0.1:1").host()) as remote:
        assert remote.http(port).get("/hello").text == "hello"
        assert "relay" in remote.notes[0]


def test_a_host_without_python_and_forwarding_says_so(make_sshd: Callable[..., Any], port: int, tmp_path: Any) -> None:
    for tool in ("sh", "env"):
        (tmp_path / tool).symlink_to(f"/usr/bin/{tool}")
    server = make_sshd("AllowTcpForwarding no", f"SetEnv PATH={tmp_path} HOME={tmp_path}")
    with connect(server.host()) as remote, pytest.raises(httpx.ConnectError, match="none of these is on the host"):
        remote.http(port).get("/hello")


def test_the_relay_is_not_confused_by_a_talkative_login_shell(make_sshd: Callable[..., Any], port: int, tmp_path: Any) -> None:
    (tmp_path / ".bashrc").write_text("echo Welcome to the machine\n")
    with connect(make_sshd("AllowTcpForwarding no", f"SetEnv HOME={tmp_path}").host()) as remote:
        assert remote.http(port).get("/hello").text == "hello"


def test_the_relay_serves_an_engine_whose_python_lies_elsewhere(
    make_sshd: Callable[..., Any], port: int, tmp_path: Any
) -> None:
    for tool in ("sh", "env"):
        (tmp_path / tool).symlink_to(f"/usr/bin/{tool}")
    host = make_sshd("AllowTcpForwarding no", f"SetEnv PATH={tmp_path} HOME={tmp_path}").host()
    host.engine = SimpleNamespace(python=os.path.realpath(sys.executable))
    with connect(host) as remote:
        assert remote.http(port).get("/hello").text == "hello"
