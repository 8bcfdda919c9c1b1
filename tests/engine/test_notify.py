"""sd_notify: what the service manager hears, and that its absence changes nothing."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from ddtree_engine.notify import Notifier


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(str(tmp_path / "notify"))
        sock.settimeout(5)
        yield sock


def test_states_arrive_as_lines(manager: socket.socket) -> None:
    notifier = Notifier(manager.getsockname())
    notifier.status("loading weights 41 %")
    assert manager.recv(1000) == b"STATUS=loading weights 41 %"
    notifier.ready("serving tiny")
    assert manager.recv(1000).split(b"\n") == [b"READY=1", b"STATUS=serving tiny", b"MAINPID=%d" % os.getpid()]
    notifier.stopping("finishing 2 requests")
    assert manager.recv(1000).startswith(b"STOPPING=1\n")
    notifier.failed("died: x", 70)
    assert b"EXIT_STATUS=70" in manager.recv(1000)


def test_a_text_with_line_breaks_cannot_add_fields(manager: socket.socket) -> None:
    Notifier(manager.getsockname()).status("one\nREADY=1")
    assert manager.recv(1000) == b"STATUS=one READY=1"


def test_an_abstract_address_works() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(f"\0ddtree-test-{os.getpid()}")
        sock.settimeout(5)
        Notifier(f"@ddtree-test-{os.getpid()}").status("hello")
        assert sock.recv(100) == b"STATUS=hello"


@pytest.mark.parametrize("address", ["", "/nowhere/at/all", "@nobody-listens-here", "tcp:1"])
def test_nobody_listening_changes_nothing(address: str) -> None:
    Notifier(address).ready("serving")


def test_the_address_comes_from_the_environment(manager: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", manager.getsockname())
    Notifier().status("x")
    assert manager.recv(100) == b"STATUS=x"
    monkeypatch.delenv("NOTIFY_SOCKET")
    assert not Notifier().listening
