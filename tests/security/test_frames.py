"""Frames between hosts without TLS: whoever forwards them can change, repeat, leave out or move none unnoticed."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from support.connecting import meet, recv_exactly
from support.hostile import BATCH, fuzzed, seeds
from support.threads import NOW, world

from rankmesh_agent.net import mac_socket
from rankmesh_agent.net.deadline import Deadline
from rankmesh_agent.net.mac_socket import MacSocket, RecordMac
from rankmesh_agent.net.record_socket import RecordChangedError
from rankmesh_agent.transports.base import Connection
from rankmesh_agent.transports.tcp import TcpTransport
from rankmesh_agent.wire import frames
from rankmesh_agent.wire.errors import DistNetworkError
from rankmesh_agent.wire.frames import Opcode
from rankmesh_agent.wire.handshake import WANTS_MACS
from rankmesh_agent.wire.ops import ReduceOp

KEYS = bytes(32), bytes([1]) * 32
HEAD, MAC = 12, 16


def three_frames() -> list[list[bytes]]:
    return [
        [frames.encode(Opcode.CTS, seq=1)],
        [frames.encode(Opcode.EAGER, seq=2, length=5), b"hello"],
        [frames.encode(Opcode.CTS, seq=3)],
    ]


SIZES = [HEAD + 64 + MAC, HEAD + 64 + 5 + MAC, HEAD + 64 + MAC]
"""Bytes of their records."""


@contextlib.contextmanager
def wire() -> Iterator[tuple[MacSocket, socket.socket]]:
    """A socket with MACs that receives what the other end sends as it is; neither blocks."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    theirs.setblocking(False)
    with MacSocket(ours, *KEYS) as made, theirs:
        yield made, theirs


def drained(sock: socket.socket) -> bytes:
    """Return what has come."""
    found = b""
    with contextlib.suppress(BlockingIOError):
        while data := sock.recv(1 << 20):
            found += data
    return found


def sealed(calls: list[list[bytes]]) -> bytes:
    """Return what is sent for some calls of sendmsg."""
    found = b""
    with wire() as (sender, raw):
        for buffers in calls:
            sent, total = 0, sum(map(len, buffers))
            while sent < total:
                with contextlib.suppress(BlockingIOError):
                    sent += sender.sendmsg(rest(buffers, sent))
                found += drained(raw)
            assert not sender.committed()
    return found


def rest(data: list[bytes], sent: int) -> list[bytes]:
    found = []
    for each in data:
        found.append(each[sent:])
        sent = max(0, sent - len(each))
    return found


def received(data: bytes, room: int = 1 << 16) -> bytes:
    """Return what a receiver makes of ``data``, which comes ``room`` bytes at a time."""
    buffer, total = bytearray(len(data)), 0
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    with MacSocket(ours, *reversed(KEYS)) as receiver, theirs:
        for begin in range(0, len(data), room):
            theirs.sendall(data[begin : begin + room])
            with contextlib.suppress(BlockingIOError):
                while True:
                    total += receiver.recv_into(memoryview(buffer)[total:])
    return bytes(buffer[:total])


def fill(receiver: MacSocket, buffer: bytearray) -> None:
    total = 0
    while total < len(buffer):
        total += receiver.recv_into(memoryview(buffer)[total:])


def split(data: bytes) -> list[bytes]:
    found = []
    for size in SIZES:
        found.append(data[:size])
        data = data[size:]
    assert not data
    return found


@pytest.mark.parametrize("room", [1, 7, 64, 100, 1 << 16])
def test_frames_arrive_as_they_were_sent(room):
    bulk = [frames.encode(Opcode.BULK, seq=4, length=30_000), bytes(range(250)) * 120]
    parts = [part for frame in three_frames() for part in frame]
    eager = [frames.encode(Opcode.EAGER, seq=5, length=4097), bytes(4097)]
    long = [frames.encode(Opcode.ABORT, seq=6, length=65_536), bytes(range(256)) * 256]
    data = [*parts, *bulk, b"", *bulk, *long, *eager, *parts] if room > 1 else [*parts, b"", *parts]
    assert received(sealed([data]), room) == b"".join(data)
    assert received(sealed([[each] for each in data]), room) == b"".join(data)


@pytest.mark.parametrize("length", [5000, 1 << 16, 200_000])
def test_a_changed_byte_of_long_data_ends_the_connection_before_it_is_received(length):
    changed = bytearray(sealed([[frames.encode(Opcode.BULK, length=length), bytes(length)]]))
    changed[-MAC - 1] ^= 1
    buffer = bytearray(64 + length)
    ours, theirs = socket.socketpair()
    with MacSocket(ours, *reversed(KEYS)) as receiver, theirs:
        thread = threading.Thread(target=theirs.sendall, args=(bytes(changed),))
        thread.start()
        with pytest.raises(RecordChangedError, match="its MAC is wrong"):
            fill(receiver, buffer)
        thread.join(30)
    assert buffer[64:] == bytes(length)


def test_data_without_a_mac_are_refused():
    with wire() as (receiver, raw):
        head = struct.pack("!IQ", 64, 5000) + frames.encode(Opcode.BULK, length=5000)
        raw.sendall(head + RecordMac(KEYS[1]).next(head) + bytes(5000))
        with pytest.raises(ConnectionError, match="upgrade it"):
            receiver.recv(100)


@pytest.mark.parametrize("byte", [0, 3, 4, 11, 12, 17, 42, 75, 76, 91, 92 + 3, 92 + HEAD + 64 + 4, -1])
def test_a_changed_byte_ends_the_connection(byte):
    data = bytearray(sealed(three_frames()))
    data[byte] ^= 1
    with pytest.raises(RecordChangedError, match="its MAC is wrong"):
        received(bytes(data) + bytes(100))


@pytest.mark.parametrize(
    "tamper",
    [
        lambda each: [each[0], each[0], *each[1:]],
        lambda each: [each[0], each[2]],
        lambda each: [each[1], each[0], each[2]],
        lambda each: each[1:],
        lambda each: [each[0], bytes(HEAD + 20 + MAC), *each[1:]],
    ],
    ids=["repeated", "left out", "moved", "the first one left out", "inserted"],
)
def test_frames_that_are_repeated_left_out_or_moved_end_the_connection(tamper):
    with pytest.raises(RecordChangedError, match="its MAC is wrong"):
        received(b"".join(tamper(split(sealed(three_frames())))))


def test_frames_of_the_other_direction_are_refused():
    with wire() as (reflected, raw):
        raw.sendall(sealed(three_frames()))
        with pytest.raises(RecordChangedError, match="its MAC is wrong"):
            reflected.recv(100)
        with pytest.raises(RecordChangedError, match="its MAC is wrong"):
            reflected.recv(100, socket.MSG_PEEK)


@fuzzed
@given(seeds)
def test_what_is_received_is_a_prefix_of_what_was_sent(seed):
    """However the bytes are changed on their way: without the key, nothing else is accepted."""
    random = Random(seed)
    data = [random.randbytes(random.choice((1, 24, 100, 5000))) for _ in range(random.randint(1, 6))]
    for _ in range(BATCH):
        sent = bytearray(sealed([[each] for each in data]))
        for _ in range(random.randint(1, 3)):
            at = random.randrange(len(sent))
            match random.randrange(4):
                case 0:
                    sent[at] ^= 1 << random.randrange(8)
                case 1:
                    del sent[at : at + random.randint(1, 40)]
                case 2:
                    sent[at:at] = random.randbytes(random.randint(1, 40))
                case _:
                    sent += sent[at:]
            if not sent:
                break
        found = bytearray()
        with wire() as (receiver, raw):
            receiver._receiving = RecordMac(KEYS[0])
            raw.sendall(sent)
            with contextlib.suppress(BlockingIOError, RecordChangedError):
                while piece := receiver.recv(1 << 16):
                    found += piece
        assert b"".join(data).startswith(bytes(found))


# Between ranks


@pytest.mark.parametrize("wants", ["client", "server"])
def test_both_ends_agree(monkeypatch, wants):
    """One end of a connection takes it for one that leaves the host: the other follows."""
    ports: dict[str, int] = {}
    original = TcpTransport._client_script

    def client_script(self: TcpTransport, connection: Any, identity: bytes) -> Any:
        ports["client"] = connection.socket.getsockname()[1]
        return original(self, connection, identity)

    def leaves_host(sock: socket.socket) -> bool:
        return (sock.getsockname()[1] == ports["client"]) is (wants == "client")

    monkeypatch.setattr(TcpTransport, "_client_script", client_script)
    monkeypatch.setattr(mac_socket, "leaves_host", leaves_host)
    for end in through(lambda data, number: data):
        assert has_macs(end)
        end.close()


def test_a_network_declared_private_at_both_ends_has_no_macs(between_hosts, monkeypatch):
    monkeypatch.setenv("RANKMESH_PRIVATE_NETWORK", "1")
    for end in through(lambda data, number: data):
        assert not has_macs(end)
        end.close()


def has_macs(connection: Connection) -> bool:
    return isinstance(getattr(connection, "socket", None), MacSocket)


def through(tamper: Callable[[bytes, int], bytes], *, ours: bool = True) -> list[Connection]:
    """Return both ends of a connection through a relay, which passes on what ``tamper`` returns of each message.

    Args:
        tamper: gets the message and its number.
        ours: whether it gets those of the client, or else those of the server.
    """
    transport = TcpTransport("secret")
    listener = transport.listen("127.0.0.1:0")
    relay = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=run_relay, args=(relay, listener.address, tamper, ours), daemon=True)
    thread.start()
    try:
        (client,), ((_, server),) = meet([transport.dial(f"127.0.0.1:{relay.getsockname()[1]}")], listener)
    finally:
        listener.close()
        relay.close()
    return [client, server]


def run_relay(relay: socket.socket, address: str, tamper: Callable[[bytes, int], bytes], ours: bool) -> None:
    host, port = address.split(":")
    with relay.accept()[0] as client, socket.create_connection((host, int(port))) as server:
        identity: Callable[[bytes, int], bytes] = lambda data, number: data  # noqa: E731
        back = threading.Thread(target=pump, args=(server, client, identity if ours else tamper), daemon=True)
        back.start()
        pump(client, server, tamper if ours else identity)
        back.join(30)
        assert not back.is_alive()


def pump(source: socket.socket, target: socket.socket, tamper: Callable[[bytes, int], bytes]) -> None:
    number = 0
    try:
        while data := source.recv(1 << 16):
            target.sendall(tamper(data, number))
            number += 1
    except OSError:
        pass
    for end in (source, target):
        end.close()


@pytest.fixture
def between_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mac_socket, "leaves_host", lambda sock: True)


def test_a_relay_that_changes_a_frame_is_found_out(between_hosts):
    # The last byte of the number in the frame: the frame stays valid but for its MAC.
    client, server = through(lambda data, number: data if number < 2 else data[: HEAD + 63] + b"!" + data[HEAD + 64 :])
    client.send([frames.encode(Opcode.CREDIT, total=7)])
    with pytest.raises(DistNetworkError, match="changed, repeated, left out, inserted or moved on its way"):
        recv_exactly(server, 64, Deadline(10))
    client.close()
    server.close()


@pytest.mark.parametrize("ours", [True, False], ids=["of the client", "of the server"])
def test_macs_cannot_be_negotiated_away(between_hosts, ours):
    """The proofs cover the flag of both HELLOs."""

    def tamper(data: bytes, number: int) -> bytes:
        if number:
            return data
        assert data[7] & WANTS_MACS
        return data[:7] + bytes([data[7] & ~WANTS_MACS]) + data[8:]

    with pytest.raises(DistNetworkError):
        through(tamper, ours=ours)


def test_collectives_with_macs_are_those_without(between_hosts):
    def calls(comm: Any) -> list[bytes]:
        found = []
        for count in (1, 1000, 30_000, 1 << 20):
            array = np.arange(count, dtype=np.float32) + comm.rank
            comm.all_reduce(array, ReduceOp.SUM, NOW)
            found.append(array.tobytes())
        return found

    with world(3, "tcp") as made:
        ends = [peer.connection for mesh in made.meshes for peer in mesh._peers.values()]
        assert all(map(has_macs, ends))
        found = made.run(calls)
    assert found[0] == found[1] == found[2]
    assert found[0][1] == (3 * np.arange(1000, dtype=np.float32) + 3).tobytes()
