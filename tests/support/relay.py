"""A man in the middle: relays connections to a server, and tampers with a record that has a MAC (net.mac_socket)."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

HEAD_BYTES, MAC_BYTES = 12, 16
_OVERHEAD = HEAD_BYTES + MAC_BYTES
_SIZE = struct.Struct("!I")


class Seen(NamedTuple):
    """What the relay knows as it tampers with a record.

    Attributes:
        record: the record.
        earlier: the one before, of the same direction; empty if there was none.
        opposite: the latest one of the other direction; empty if there was none.
    """

    record: bytes
    earlier: bytes
    opposite: bytes


Tamper = Callable[[Seen], bytes]


def _flip(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


TAMPERS: dict[str, Tamper] = {
    "changed data": lambda seen: _flip(seen.record, HEAD_BYTES + 1),
    "shorter": lambda seen: _SIZE.pack(_size(seen.record) - _OVERHEAD - 1) + seen.record[4:],
    "of any length": lambda seen: b"\xff" + seen.record[1:],
    "changed MAC": lambda seen: _flip(seen.record, -1 % len(seen.record)),
    "replayed": lambda seen: seen.earlier,
    "reflected": lambda seen: seen.opposite,
    "injected": lambda seen: struct.pack("!IQ24s16s", 24, 0, bytes(24), bytes(16)) + seen.record,
    "without MAC": lambda seen: seen.record[HEAD_BYTES:-MAC_BYTES] + bytes(_OVERHEAD),
}
"""Ways to tamper with a record; the receiver finds out at once."""


class Relay:
    """Listens at ``port``, and forwards each connection to the same server.

    Attributes:
        port: its port on 127.0.0.1.
    """

    def __init__(self, host: str, port: int) -> None:
        self._target = host, port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._next: tuple[str, Tamper] | None = None
        self._ends: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def tamper(self, direction: str, tamper: Tamper) -> None:
        """Send what ``tamper`` returns in place of the next record of a direction, ``to the server`` or ``client``."""
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
            latest = {"to the server": b"", "to the client": b""}
            for direction, source, target in (("to the server", client, server), ("to the client", server, client)):
                thread = threading.Thread(target=self._pump, args=(direction, source, target, latest), daemon=True)
                self._threads.append(thread)
                thread.start()

    def _pump(self, direction: str, source: socket.socket, target: socket.socket, latest: dict[str, bytes]) -> None:
        try:
            while data := source.recv(1 << 16):
                armed = self._next
                if armed is not None and armed[0] == direction:
                    while len(data) < HEAD_BYTES or len(data) < (size := _size(data)):
                        data += source.recv(1 << 16)
                    self._next = None
                    (opposite,) = (each for way, each in latest.items() if way != direction)
                    target.sendall(armed[1](Seen(data[:size], latest[direction], opposite)) + data[size:])
                else:
                    target.sendall(data)
                latest[direction] = data
        except OSError:
            pass
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


def _size(record: bytes) -> int:
    return _OVERHEAD + int(_SIZE.unpack_from(record)[0])


@contextmanager
def relayed(host: str, port: int) -> Iterator[Relay]:
    """Relay connections to a server."""
    relay = Relay(host, port)
    try:
        yield relay
    finally:
        relay.close()
