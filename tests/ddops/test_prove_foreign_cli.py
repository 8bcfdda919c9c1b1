"""`ddops probe --url` against servers of every kind on loopback: what it says, and the code it leaves with."""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import threading
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

import httpx
import pytest
from click.testing import CliRunner, Result
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from ddops import twins
from ddops.cli import main
from ddops.errors import DdopsError, Refused, Unreachable, UsageError
from ddops.prove.client import EngineClient
from tests.ddops.foreign_fake import PlainServer, SglangServer, VllmServer, served
from tests.ddops.prove_fake import FakeEngine, Lies


def probe(*words: str) -> Result:
    return CliRunner().invoke(main, ["probe", *words])


def test_what_a_server_speaks_is_found_out_and_its_address_may_end_in_v1() -> None:
    with served(VllmServer()) as url:
        result = probe("--url", f"{url}/v1", "--only", "copy", "--only", "rescore")
    assert result.exit_code == 0, result.output
    assert f"{url}/v1 speaks vllm, model tiny" in result.stderr
    assert "rescore" in result.stderr
    assert "not scored" not in result.stdout


def test_a_lying_server_leaves_with_its_code_and_one_json_object(tmp_path: Path) -> None:
    saved = tmp_path / "verdict.json"
    with served(VllmServer(lies=Lies(kind="typo"))) as url:
        result = probe("--url", url, "--only", "copy", "--json", "--save", str(saved))
        assert result.exit_code == 5
        assert json.loads(result.stdout)["verdict"]["kind"] == "corrupt"
        again = probe("--url", url, "--replay", str(saved))
        assert "requests sent again: " in again.stdout
        beside = probe("--url", url, "--replay", str(saved), "--json")
        assert "--replay goes with none of" in str(beside.exception)
        assert again.exit_code == 5
        assert "wrong    copy" in again.stdout
    with served(VllmServer()) as url:
        healed = probe("--url", url, "--replay", str(saved))
    assert healed.exit_code == 11
    assert "differs  copy" in healed.stdout


def test_a_failed_verdict_shows_the_prompt_what_was_expected_and_what_came() -> None:
    with served(VllmServer(lies=Lies(kind="typo"))) as url:
        result = probe("--url", url, "--only", "copy")
    asked, expected, came = (_row(result.stdout, name) for name in ("asked", "expected", "came"))
    assert asked.startswith("Repeat these ids exactly")
    assert expected.split()[0] in asked
    assert came
    assert came != expected
    with served(VllmServer()) as url:
        assert "asked" not in probe("--url", url, "--only", "copy").stdout


def _row(text: str, name: str) -> str:
    return next(line.split(maxsplit=1)[1] for line in text.splitlines() if line.strip().startswith(f"{name} "))


def test_another_engine_with_the_same_weights_scores_what_a_plain_server_cannot() -> None:
    with served(PlainServer()) as url, served(VllmServer()) as reference:
        result = probe("--url", url, "--reference", f"{reference}/v1", "--only", "copy", "--only", "rescore")
    assert result.exit_code == 0, result.output
    assert "rescore: not scored" not in result.stdout
    assert "the engine does not return the ids it generated" in result.stderr


def test_a_key_is_read_from_a_file_and_asked_for_where_it_is_wanted(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("s3cret\n")
    with served(VllmServer(api_key="s3cret")) as url:
        right = probe("--url", url, "--api-key-file", str(key), "--only", "answers")
        assert right.exit_code == 0, right.output
        assert "s3cret" not in right.output
        with pytest.raises(UsageError, match="wants an API key") as caught:
            raise_of(probe("--url", url))
        assert caught.value.hint == "give it one: --api-key-file FILE"
        key.write_text("another")
        with pytest.raises(UsageError, match="wants an API key") as caught:
            raise_of(probe("--url", url, "--api-key-file", str(key)))
        assert "another one" in caught.value.hint


@pytest.mark.parametrize("content", ["", "\n", "a b", "schlüssel", "a\nb"])
def test_a_file_without_a_usable_key_is_refused(tmp_path: Path, content: str) -> None:
    key = tmp_path / "key"
    key.write_text(content)
    with pytest.raises(UsageError, match="holds no key"):
        raise_of(probe("--url", "http://127.0.0.1:1", "--api-key-file", str(key)))


def self_signed(folder: Path) -> tuple[Path, ssl.SSLContext]:
    """A certificate for 127.0.0.1 that no authority has signed, and a server's context with it."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "engine")])
    now = datetime.now(UTC)
    address = x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))])
    made = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number(), now, now + timedelta(days=1))
    certificate = made.add_extension(address, critical=False).sign(key, hashes.SHA256())
    file = folder / "engine.pem"
    pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain)
    file.write_bytes(private + certificate.public_bytes(pem))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(file)
    return file, context


def test_a_certificate_must_be_one_that_is_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, context = self_signed(tmp_path)
    with served(PlainServer(), context) as url:
        with pytest.raises(DdopsError, match="CERTIFICATE_VERIFY_FAILED") as caught:
            raise_of(probe("--url", url))
        assert "SSL_CERT_FILE" in caught.value.hint
        monkeypatch.setenv("SSL_CERT_FILE", str(file))
        trusted = probe("--url", url, "--only", "answers")
    assert trusted.exit_code == 0, trusted.output


def test_of_several_models_one_must_be_named() -> None:
    with served(PlainServer(models=("a", "b"))) as url:
        with pytest.raises(UsageError, match="serves a, b") as caught:
            raise_of(probe("--url", url))
        assert "--model" in caught.value.hint
        named = probe("--url", url, "--model", "b", "--only", "answers")
    assert named.exit_code == 0, named.output


def test_nothing_that_listens_is_not_a_crash() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(DdopsError, match="nothing answers there") as caught:
        raise_of(probe("--url", f"http://127.0.0.1:{port}"))
    assert caught.value.exit != 0
    with served(VllmServer()) as url, pytest.raises(DdopsError, match="nothing answers there"):
        raise_of(probe("--url", url, "--reference", f"http://127.0.0.1:{port}"))


@pytest.mark.parametrize("option", ["--url", "--reference"])
@pytest.mark.parametrize("address", ["x:1", "ftp://x", "http://u:p@x", "http://["])
def test_what_is_no_address_is_refused_before_anything_is_sent(option: str, address: str) -> None:
    with pytest.raises(UsageError, match=option):
        raise_of(probe(option, address, *(("--url", "http://127.0.0.1:1") if option != "--url" else ())))


def test_a_server_taken_for_another_is_pointed_out() -> None:
    with served(VllmServer()) as url:
        result = probe("--url", url, "--engine", "sglang", "--only", "answers")
    assert "looks like vllm; it is asked as sglang" in result.stderr


class Stranger(FakeEngine):
    """A server that is no engine: one answer to everything."""

    def __init__(self, status: int, body: str, kind: str = "text/html", **headers: str) -> None:
        super().__init__()
        self.reply = httpx.Response(status, text=body, headers={"content-type": kind} | headers)

    def handle(self, request: httpx.Request) -> httpx.Response:
        return self.reply


MISSING = Stranger(404, "<html><body>404 page not found</body></html>")
STRANGERS = {
    "404 in HTML": MISSING,
    "a page for every path": Stranger(200, "<html><body>Welcome to nginx!</body></html>"),
    "JSON for every path": Stranger(200, '{"status": "ok"}', "application/json"),
    "another API's 404": Stranger(404, '{"detail": "Not Found"}', "application/json"),
    "another API's error": Stranger(405, '{"error": "Incorrect HTTP method, allowed: [GET]"}', "application/json"),
    "a list": Stranger(200, "[1, 2]", "application/json"),
    "no content": Stranger(204, "", ""),
    "a broken page": Stranger(500, "<h1>Internal Server Error</h1>"),
}


@pytest.mark.parametrize("name", STRANGERS)
@pytest.mark.parametrize("more", [(), ("--engine", "sglang"), ("--model", "m")])
def test_a_web_server_is_told_from_an_engine_and_what_it_said_is_shown(name: str, more: tuple[str, ...]) -> None:
    server = STRANGERS[name]
    with served(server) as url, pytest.raises(UsageError, match="does not speak the API of") as caught:
        raise_of(probe("--url", url, *more))
    assert f"GET /v1/models: {server.reply.status_code}" in caught.value.what
    assert f"POST /v1/chat/completions: {server.reply.status_code}" in caught.value.what
    assert "<" not in caught.value.what
    assert "and it is no engine" in caught.value.means
    assert "name a model" not in str(caught.value)


def test_a_redirect_is_not_followed_and_the_address_it_names_is_shown() -> None:
    moved = Stranger(301, "", location="https://engine.example/v1/models")
    with served(moved) as url, pytest.raises(UsageError, match="301") as caught:
        raise_of(probe("--url", url))
    assert caught.value.hint == "--url https://engine.example, if that is the engine"


def test_a_gateway_with_no_engine_behind_it_is_no_usage_error() -> None:
    with served(Stranger(502, "<h1>Bad Gateway</h1>")) as url, pytest.raises(Unreachable, match="502 text/html Bad Gateway"):
        raise_of(probe("--url", url))


def test_a_reference_that_is_no_engine_is_told_by_its_option() -> None:
    with served(VllmServer()) as url, served(MISSING) as other, pytest.raises(UsageError, match="does not speak") as caught:
        raise_of(probe("--url", url, "--reference", other))
    assert "--reference http://" in caught.value.hint


def test_http_where_tls_is_spoken_and_tls_where_it_is_not_are_told_apart(tmp_path: Path) -> None:
    _, context = self_signed(tmp_path)
    with served(PlainServer(), context) as url, pytest.raises(UsageError, match="speaks TLS") as caught:
        raise_of(probe("--url", url.replace("https", "http")))
    assert caught.value.hint == f"--url {url}"
    with served(PlainServer()) as url, pytest.raises(UsageError, match="does not speak TLS") as caught:
        raise_of(probe("--url", url.replace("http", "https")))
    assert caught.value.hint == f"--url {url}"


@pytest.mark.parametrize("greeting", [b"SSH-2.0-OpenSSH_9.2\r\n", b"", b"\x00\x01nonsense\n"])
def test_what_speaks_no_http_is_not_called_an_engine(greeting: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=_greet_all, args=(listener, greeting), daemon=True).start()
        with pytest.raises(DdopsError, match="is no HTTP server") as caught:
            raise_of(probe("--url", f"http://127.0.0.1:{listener.getsockname()[1]}"))
    assert "--url http://ADDRESS:PORT" in caught.value.hint


def _greet_all(listener: socket.socket, greeting: bytes) -> None:
    with contextlib.suppress(OSError):  # the listener is closed at the end
        while True:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(greeting)
                connection.recv(65536)


@pytest.mark.parametrize("probe_name", ["alarms", "rescore", "acceptance", "served"])
def test_a_probe_that_only_looks_at_replies_is_refused_alone_and_taken_with_one_that_asks(probe_name: str) -> None:
    with pytest.raises(UsageError, match=f"--only: {probe_name} sends nothing by itself") as caught:
        raise_of(probe("--url", "http://127.0.0.1:1", "--only", probe_name))
    assert "coding" in caught.value.hint
    with served(VllmServer()) as url:
        assert probe("--url", url, "--only", probe_name, "--only", "copy").exit_code == 0


@pytest.mark.parametrize("probe_name", ["applied", "golden"])
def test_a_probe_of_what_a_host_knows_is_refused_beside_an_address(probe_name: str) -> None:
    with pytest.raises(UsageError, match=f"--only: {probe_name} compares") as caught:
        raise_of(probe("--url", "http://127.0.0.1:1", "--only", probe_name, "--only", "copy"))
    assert "--host" in caught.value.hint


def test_a_reference_that_is_the_probed_engine_is_refused_whatever_its_address() -> None:
    engine = SglangServer()
    with served(engine) as url, served(engine) as forwarded, served(SglangServer()) as other:
        for same in (url, f"{url}/v1", url.replace("127.0.0.1", "localhost"), forwarded):
            with pytest.raises(Refused, match="is the engine that is probed") as caught:
                raise_of(probe("--url", url, "--reference", same, "--only", "copy"))
            assert "nothing was probed" in caught.value.means
        assert probe("--url", url, "--reference", other, "--only", "copy").exit_code == 0


def test_two_engines_that_others_use_are_not_taken_for_one() -> None:
    busy = SglangServer()
    with served(busy) as url, served(SglangServer()) as other:
        client = EngineClient(httpx.Client(base_url=url), "sglang")
        reference = EngineClient(httpx.Client(base_url=other), "sglang")
        stop = threading.Event()
        user = threading.Thread(target=_use, args=(client, stop))
        user.start()
        try:
            assert not twins.same_process(client, reference)
        finally:
            stop.set()
            user.join()
        assert twins.same_process(client, client)


def _use(client: EngineClient, stop: threading.Event) -> None:
    while not stop.wait(0.01):
        client.answers()


def test_a_replay_names_the_near_ties_that_the_verdict_has_counted(tmp_path: Path) -> None:
    saved = tmp_path / "verdict.json"
    with served(VllmServer()) as url:
        assert probe("--url", url, "--only", "copy", "--only", "rescore", "--save", str(saved)).exit_code == 0
        assert "near ties" not in probe("--url", url, "--replay", str(saved)).stdout
        saved.write_text(saved.read_text().replace("0 near ties", "7 near ties"))
        told = probe("--url", url, "--replay", str(saved))
    assert "near ties in the saved verdict: rescore 7;" in told.stdout


def test_options_of_an_address_need_one() -> None:
    with pytest.raises(UsageError, match="go with --url"):
        raise_of(probe("--model", "m"))


def raise_of(result: Result) -> None:
    assert result.exception is not None, result.output
    raise result.exception
