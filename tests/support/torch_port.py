"""A gateway that serves torch's TCPStore protocol, and a client of that protocol without torch.

As a program, it serves until its standard input ends, and removes all keys for each line of it; its first line is the
port, and each further one says that the keys are gone.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

from rankmesh_agent.config.settings import Settings
from rankmesh_agent.http.server import HttpServer
from rankmesh_agent.net.sockets import bind
from rankmesh_gateway.http.app import create_app
from rankmesh_gateway.torch_store import PREFACE, TorchStore

TOKEN = "the secret of the gateway"
SECONDS = 60.0
NAMES = (
    *("validate", "set", "compare_set", "get", "add", "check", "wait", "num_keys", "delete", "append", "multi_get"),
    *("multi_set", "cancel_wait", "ping", "push", "pop", "length", "list_keys", "barrier"),
)
STOPPED, CANCELED = b"\0", b"\1"
READY, NOT_READY = b"\0", b"\1"


class Served(NamedTuple):
    """A store, and the server and port where it is served."""

    store: TorchStore
    server: HttpServer
    port: int


@contextlib.contextmanager
def served(settings: Settings | None = None, **options: Any) -> Iterator[Served]:
    """Serve a gateway's port, with a token, until the end of the block."""
    store = TorchStore(settings or Settings(), **options)
    server = HttpServer(bind("127.0.0.1", 0, purpose="a test serves"), "gateway", token=TOKEN)
    server.start(lambda: create_app(token=TOKEN), protocols={PREFACE: store.make_protocol})
    try:
        yield Served(store, server, server.port)
    finally:
        server.close()


def request(name: str, *arguments: str | bytes | int | list[Any]) -> bytes:
    """Return the bytes of a command: text and bytes with their sizes, lists with their lengths, numbers."""
    return bytes([NAMES.index(name)]) + b"".join(map(_encoded, arguments))


def _encoded(argument: Any) -> bytes:
    match argument:
        case int():
            return struct.pack("<q", argument)
        case list() | tuple():
            packed = b"".join(
                _encoded(each) for pair in argument for each in (pair if type(pair) is tuple else (pair,))
            )
            return struct.pack("<Q", len(argument)) + packed
    content = argument.encode() if isinstance(argument, str) else argument
    return struct.pack("<Q", len(content)) + content


class Client:
    """A connection, which has sent the preface."""

    def __init__(self, port: int, host: str = "127.0.0.1") -> None:
        self.sock = socket.create_connection((host, port), SECONDS)
        self.sock.sendall(PREFACE)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.sock.close()

    def send(self, name: str, *arguments: Any) -> None:
        """Send a command, and read no result."""
        self.sock.sendall(request(name, *arguments))

    def read(self, size: int) -> bytes:
        """Return the next bytes of results; fewer if the connection ends."""
        content = b""
        while len(content) < size:
            try:
                piece = self.sock.recv(size - len(content))
            except ConnectionError:
                break
            if not piece:
                break
            content += piece
        return content

    def number(self, name: str, *arguments: Any) -> int:
        """Return the result of a command that is a number."""
        self.send(name, *arguments)
        (number,) = struct.unpack("<q", self.read(8))
        return int(number)

    def value(self, name: str = "", *arguments: Any) -> bytes:
        """Return the result of a command that is a value; without a name, the next one of a result."""
        if name:
            self.send(name, *arguments)
        (size,) = struct.unpack("<Q", self.read(8))
        return self.read(size)

    def byte(self, name: str, *arguments: Any) -> bytes:
        """Return the result of a command that is a byte."""
        self.send(name, *arguments)
        return self.read(1)

    def ping(self) -> bytes:
        """Return the response to a PING of 1234: the same bytes."""
        self.sock.sendall(bytes([NAMES.index("ping")]) + struct.pack("<I", 1234))
        return self.read(4)


if __name__ == "__main__":
    with served() as at:
        print(at.port, flush=True)
        for _ in sys.stdin:
            at.store.clear()
            print("cleared", flush=True)
