"""A man in the middle: relays connections to a server, and tampers with bytes on their way."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Tamper = Callable[[bytes], bytes]


def _flip(at: int) -> Tamper:
    def flip(data: bytes) -> bytes:
        changed = bytearray(data)
        changed[at * (len(data) - 1) // 2] ^= 1
        return bytes(changed)

    return flip


TAMPERS: dict[str, Tamper] = {
    "first byte": _flip(0),
    "middle byte": _flip(1),
    "last byte": _flip(2),
    "repeated": lambda data: data + data,
    "a byte left out": lambda data: data[1:],
    "a byte more": lambda data: data[:7] + b"\0" + data[7:],
    "cut": lambda data: b"",
}
"""Ways to tamper with what is received at once; after "cut" the relay ends the connection."""


class Relay:
    """Listens at ``port``, and forwards each connection to the same server.

    Attributes:
        port: its port on 127.0.0.1.
        delay: seconds for which it holds all that it receives at once.
        seen: all that it has forwarded.
    """

    def __init__(self, host: str, port: int) -> None:
        self._target = host, port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.seen = b""
        self.delay = 0.0
        self._next: tuple[str, Tamper] | None = None
        self._ends: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def tamper(self, direction: str, tamper: Tamper) -> None:
        """Send what ``tamper`` returns in place of the next bytes of a direction, ``to the server`` or ``client``."""
        self._next = direction, tamper

    def tampered(self) -> bool:
        """Return whether that has happened."""
        return self._next is None

    def close(self) -> None:
        for end in (self._listener, *self._ends):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(10)
        for end in (self._listener, *self._ends):
            end.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(self._target)
            for end in (client, server):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._ends += client, server
            for direction, source, target in (("to the server", client, server), ("to the client", server, client)):
                thread = threading.Thread(target=self._pump, args=(direction, source, target), daemon=True)
                self._threads.append(thread)
                thread.start()

    def _pump(self, direction: str, source: socket.socket, target: socket.socket) -> None:
        try:
            while data := source.recv(1 << 16):
                self.seen += data
                time.sleep(self.delay)
                armed = self._next
                if armed is not None and armed[0] == direction:
                    self._next = None
                    data = armed[1](data)
                if not data:
                    break
                target.sendall(data)
        except OSError:
            pass
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


@contextmanager
def relayed(host: str, port: int) -> Iterator[Relay]:
    """Relay connections to a server."""
    relay = Relay(host, port)
    try:
        yield relay
    finally:
        relay.close()
