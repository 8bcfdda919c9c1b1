"""`ddops probe --url` against servers of every kind on loopback: what it says, and the code it leaves with."""

from __future__ import annotations

import json
import socket
import ssl
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from ddops.cli import main
from ddops.errors import DdopsError, UsageError
from tests.ddops.foreign_fake import PlainServer, VllmServer, served
from tests.ddops.prove_fake import Lies


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


def test_options_of_an_address_need_one() -> None:
    with pytest.raises(UsageError, match="go with --url"):
        raise_of(probe("--model", "m"))


def raise_of(result: Result) -> None:
    assert result.exception is not None, result.output
    raise result.exception
