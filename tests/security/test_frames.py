"""Frames between hosts without TLS: whoever forwards them can change, repeat, leave out or move none unnoticed."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.connecting import meet, recv_exactly
from support.threads import NOW, world

from rankmesh_agent.net.deadline import Deadline
from rankmesh_agent.transports import tcp
from rankmesh_agent.transports.authenticated import AuthenticatedConnection
from rankmesh_agent.transports.base import Connection
from rankmesh_agent.transports.tcp import TcpTransport
from rankmesh_agent.wire import frames
from rankmesh_agent.wire.errors import DistNetworkError
from rankmesh_agent.wire.frames import Opcode
from rankmesh_agent.wire.ops import ReduceOp

Tamper = Callable[[list[bytes]], list[bytes]]
WIRE = [64 + 16, 64 + 16 + 5, 64 + 16]
"""Bytes of the frames below, with their MACs."""


def three_frames() -> list[bytes]:
    return [
        frames.encode(Opcode.CTS, seq=1),
        frames.encode(Opcode.EAGER, seq=2, length=5) + b"hello",
        frames.encode(Opcode.CTS, seq=3),
    ]


class Wire(Connection):
    """A connection that keeps what is sent, and receives what it is given, ``room`` bytes at a time."""

    medium = "tcp"
    peer = "there"

    def __init__(self, room: int = 1 << 30) -> None:
        self.sent, self.incoming, self.room = bytearray(), bytearray(), room

    def send(self, buffers: Any) -> int:
        data = b"".join(buffers)[: self.room]
        self.sent += data
        return len(data)

    def recv_into(self, buffer: memoryview) -> int:
        count = min(len(buffer), len(self.incoming), self.room)
        buffer[:count] = self.incoming[:count]
        del self.incoming[:count]
        return count

    def fileno(self) -> int:
        return -1

    def events(self, writing: bool) -> int:
        return 0

    def has_work(self, writing: bool) -> bool:
        return False

    def prepare_wait(self, writing: bool) -> bool:
        return True

    def on_wakeup(self) -> None:
        pass

    def close(self) -> None:
        pass

    def close_in_child(self) -> None:
        pass


KEYS = bytes(32), bytes([1]) * 32


def sent_on_the_wire(data: list[bytes], room: int = 1 << 30) -> bytes:
    wire = Wire(room)
    sender = AuthenticatedConnection(wire, *KEYS)
    total = 0
    while total < sum(map(len, data)):
        total += sender.send(rest(data, total))
    while sender.committed():
        sender.send([])
    return bytes(wire.sent)


def rest(data: list[bytes], sent: int) -> list[bytes]:
    found = []
    for each in data:
        found.append(each[sent:])
        sent = max(0, sent - len(each))
    return found


def received(data: bytes, room: int = 1 << 30) -> bytes:
    wire = Wire(room)
    wire.incoming += data
    receiver = AuthenticatedConnection(wire, *reversed(KEYS))
    buffer, total = bytearray(1 << 20), 0
    while count := receiver.recv_into(memoryview(buffer)[total:]):
        total += count
    return bytes(buffer[:total])


def split(data: bytes) -> list[bytes]:
    found = []
    for size in WIRE:
        found.append(data[:size])
        data = data[size:]
    assert not data
    return found


@pytest.mark.parametrize("room", [1, 7, 64, 100, 1 << 30])
def test_frames_arrive_as_they_were_sent(room):
    bulk = [frames.encode(Opcode.BULK, seq=4, length=300_000), bytes(range(250)) * 1200]
    parts = [part for frame in three_frames() for part in (frame[:64], frame[64:])]
    eager = [frames.encode(Opcode.EAGER, seq=5, length=4097), bytes(4097)]
    data = [*parts, *bulk, *bulk, *eager, *parts]
    if room == 1:
        data = [*parts, *parts]
    assert received(sent_on_the_wire(data, room), room) == b"".join(data)


@pytest.mark.parametrize("byte", [0, 5, 30, 63, 64, 79, 80 + 2, 80 + 64 + 16 + 4, -1])
def test_a_changed_byte_ends_the_connection(byte):
    data = bytearray(sent_on_the_wire(three_frames_in_parts()))
    data[byte] ^= 1
    with pytest.raises(DistNetworkError, match="its MAC is wrong"):
        all_of(bytes(data))


@pytest.mark.parametrize(
    "tamper",
    [
        lambda each: [each[0], each[0], *each[1:]],
        lambda each: [each[0], each[2]],
        lambda each: [each[1], each[0], each[2]],
        lambda each: each[1:],
    ],
    ids=["repeated", "left out", "moved", "the first one left out"],
)
def test_frames_that_are_repeated_left_out_or_moved_end_the_connection(tamper):
    whole = split(sent_on_the_wire(three_frames_in_parts()))
    with pytest.raises(DistNetworkError, match="its MAC is wrong"):
        all_of(b"".join(tamper(whole)))


def test_frames_of_the_other_direction_are_refused():
    wire = Wire()
    wire.incoming += sent_on_the_wire(three_frames_in_parts())
    reflected = AuthenticatedConnection(wire, *KEYS)
    with pytest.raises(DistNetworkError, match="its MAC is wrong"):
        reflected.recv_into(memoryview(bytearray(100)))


def three_frames_in_parts() -> list[bytes]:
    return [part for frame in three_frames() for part in (frame[:64], frame[64:])]


def all_of(data: bytes) -> None:
    """Receive until an error; bytes that were verified before it are delivered."""
    wire = Wire()
    wire.incoming += data
    receiver = AuthenticatedConnection(wire, *reversed(KEYS))
    for _ in range(10):
        receiver.recv_into(memoryview(bytearray(1000)))


# Between ranks


@pytest.fixture(params=["client", "server"])
def one_side_sees_a_network(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """One end of a connection takes it for one that leaves the host: the other follows."""
    ports: dict[str, int] = {}
    is_client = request.param == "client"
    original = TcpTransport._client_script

    def client_script(self: TcpTransport, connection: Any, identity: bytes) -> Any:
        ports["client"] = connection.socket.getsockname()[1]
        return original(self, connection, identity)

    def leaves_host(connection: Any) -> bool:
        return (connection.socket.getsockname()[1] == ports["client"]) is is_client

    monkeypatch.setattr(TcpTransport, "_client_script", client_script)
    monkeypatch.setattr(tcp, "_leaves_host", leaves_host)


def test_both_ends_agree(one_side_sees_a_network):
    for end in through(lambda data, number: data):
        assert isinstance(end, AuthenticatedConnection)
        end.close()


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
        back.join()


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
    monkeypatch.setattr(tcp, "_leaves_host", lambda connection: True)


def test_a_relay_that_changes_a_frame_is_found_out(between_hosts):
    # The last byte of the number in the frame: the frame stays valid but for its MAC.
    client, server = through(lambda data, number: data if number < 2 else data[:63] + b"!" + data[64:])
    client.send([frames.encode(Opcode.CREDIT, total=7)])
    with pytest.raises(DistNetworkError, match="changed, repeated, left out or moved on its way"):
        recv_exactly(server, 64, Deadline(10))
    client.close()
    server.close()


@pytest.mark.parametrize("ours", [True, False], ids=["the proposal", "the answer"])
def test_macs_cannot_be_negotiated_away(between_hosts, monkeypatch, ours):
    """The client's proposal is covered by its proof; a client that was told otherwise sends what the server refuses."""

    def tamper(data: bytes, number: int) -> bytes:
        if number != 1:
            return data
        if ours:
            return data[:32] + bytes([data[32] & ~tcp.AUTHENTICATE]) + data[33:]
        return data[:-1] + tcp.DECLINED if data.endswith(tcp.AUTHENTICATED) else data

    if ours:
        with pytest.raises(DistNetworkError):
            through(tamper)
        return
    client, server = through(tamper, ours=False)
    assert isinstance(client, AuthenticatedConnection), "it has found out itself that the connection leaves its host"
    client.close()
    server.close()


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
        assert all(isinstance(each, AuthenticatedConnection) for each in ends)
        found = made.run(calls)
    assert found[0] == found[1] == found[2]
    assert found[0][1] == (3 * np.arange(1000, dtype=np.float32) + 3).tobytes()
