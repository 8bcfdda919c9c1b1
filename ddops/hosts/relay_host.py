"""The host's half of the HTTP relay: many TCP connections inside one stdin/stdout pair.

ddops sends this source to the host as `python3 -c`, where sshd forwards no ports; nothing is installed.
It needs only the standard library of Python 3.6 or newer and ends when its stdin ends. Frames, both
ways: connection id (4 bytes), kind (1), length (4), payload.
"""

import os
import selectors
import socket
import struct
import sys
from typing import Any, Dict, List  # noqa: UP035  (Python 3.6 has no other spelling)

HEADER = struct.Struct(">IBI")
OPEN, OPENED, REFUSED, DATA, END, CLOSE, READY = range(7)
BLOCK = 65536

selector = selectors.DefaultSelector()
connections: Dict[int, List[Any]] = {}  # noqa: UP006  socket, bytes to send, connected, end after sending


def emit(number: int, kind: int, payload: bytes = b"") -> None:
    data = HEADER.pack(number, kind, len(payload)) + payload
    while data:
        data = data[os.write(1, data) :]


def drop(number: int) -> None:
    entry = connections.pop(number, None)
    if entry is not None:
        selector.unregister(entry[0])
        entry[0].close()


def watch(number: int) -> None:
    sock, pending, connected, _ = connections[number]
    wanted = selectors.EVENT_READ if connected else 0
    if pending or not connected:
        wanted |= selectors.EVENT_WRITE
    selector.modify(sock, wanted, number)


def dial(number: int, address: str, port: int) -> None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connections[number] = [sock, b"", False, False]
    selector.register(sock, selectors.EVENT_WRITE, number)
    sock.connect_ex((address, port))  # how it went shows when the socket gets writable


def handle(number: int, kind: int, payload: bytes) -> None:
    if kind == OPEN:
        address, _, port = payload.decode().rpartition(" ")
        dial(number, address, int(port))
        return
    entry = connections.get(number)
    if entry is None:
        return  # it ended on this side a moment ago
    if kind == DATA:
        entry[1] += payload
    elif kind == END:
        entry[3] = True
    elif kind == CLOSE:
        drop(number)
        return
    watch(number)


def on_socket(number: int, mask: int) -> None:
    entry = connections.get(number)
    if entry is None:
        return
    sock = entry[0]
    try:
        if not entry[2]:
            problem = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if problem:
                raise OSError(problem, os.strerror(problem))
            entry[2] = True
            emit(number, OPENED)
        if mask & selectors.EVENT_WRITE and entry[1]:
            entry[1] = entry[1][sock.send(entry[1]) :]
        if entry[3] and not entry[1]:
            entry[3] = False
            sock.shutdown(socket.SHUT_WR)
        if mask & selectors.EVENT_READ:
            data = sock.recv(BLOCK)
            if not data:
                drop(number)
                emit(number, END)
                return
            emit(number, DATA, data)
    except (BlockingIOError, InterruptedError):
        pass
    except OSError as exc:
        drop(number)
        emit(number, CLOSE if entry[2] else REFUSED, str(exc.strerror or exc).encode())
        return
    watch(number)


def main() -> None:
    buffer = b""
    selector.register(0, selectors.EVENT_READ, -1)
    emit(0, READY)
    while True:
        for key, mask in selector.select():
            if key.data != -1:
                on_socket(key.data, mask)
                continue
            block = os.read(0, BLOCK)
            if not block:
                return
            buffer += block
            while len(buffer) >= HEADER.size:
                number, kind, length = HEADER.unpack_from(buffer)
                if len(buffer) < HEADER.size + length:
                    break
                payload = buffer[HEADER.size : HEADER.size + length]
                buffer = buffer[HEADER.size + length :]
                handle(number, kind, payload)


if __name__ == "__main__":
    try:
        main()
    except (BrokenPipeError, KeyboardInterrupt):
        sys.exit(0)
