"""A hostile client of the store: mutated and reordered requests end its own connection, and nothing else."""

from __future__ import annotations

import contextlib
import itertools
import logging
import select
import socket
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from hypothesis import given
from support.hostile import allocations_within, fuzzed, memory_within, sequences_like

from rankmesh_agent.net.admission import ConnectionLimit
from rankmesh_agent.store import codec, commands
from rankmesh_agent.store.keys import Condition
from rankmesh_agent.store.server import StoreServer
from rankmesh_agent.store.table import Table
from rankmesh_agent.wire import store_frames
from rankmesh_agent.wire.errors import DistError, InvalidKeyError, InvalidValueError, ProtocolError

MEMORY = 64 << 20
"""Bytes that a hostile client makes the server allocate, at most."""


class Server:
    """A store's server without its thread, and one client that it has accepted."""

    def __init__(self) -> None:
        self.table = Table()
        self.server = StoreServer(self.table, "")
        self.server._thread = SimpleNamespace(start=lambda: None, is_alive=lambda: False)  # type: ignore[assignment]
        self.server._start()
        self._client: socket.socket | None = None

    def receive(self, *sent: bytes) -> bytes:
        """Have the server process what a new client sends; return its responses."""
        with self._connect() as client:
            connection = next(iter(self.server._connections.values()))
            responses = b""
            for frame in sent:
                client.sendall(frame)
                while connection.sock.fileno() >= 0 and _readable(connection.sock):
                    self.server._on_ready(connection)
                    while piece := _drain(client):
                        responses += piece
                if connection.sock.fileno() < 0:
                    break
            self.server._close_connection(connection)
            return responses

    def close(self) -> None:
        self.server._close_descriptors()

    def _connect(self) -> socket.socket:
        client, accepted = socket.socketpair()
        admission = ConnectionLimit("test").admit(accepted)
        assert self.server._poll is not None
        connection = self.server._register(self.server._poll, accepted, admission)
        connection.handshake, connection.on_due, connection.table = None, None, self.table
        admission.end()
        client.setblocking(False)
        return client


def _readable(sock: socket.socket) -> bool:
    return bool(select.select([sock], [], [], 0)[0])


def _drain(client: socket.socket) -> bytes:
    try:
        return client.recv(1 << 16)
    except (BlockingIOError, ConnectionError):
        return b""


def corpus() -> Iterator[bytes]:
    made = [
        commands.Get("key", 0.0),
        commands.Get("missing", 60.0),
        commands.Set("key", b"value"),
        commands.Set("key", b"value", Condition(("tag",), True, ("other",))),
        commands.Delete("key"),
        commands.Add("count", 5),
        commands.CompareSet("key", b"value", b"new"),
        commands.Append("key", b"more"),
        commands.MultiGet(("key", "count"), 0.0),
        commands.MultiSet((("key", b"1"), ("other", b"2"))),
        commands.Wait(("key", "other"), 1.0),
        commands.Check(("key",)),
        commands.Keys(""),
        commands.Count("k"),
        commands.QueuePush("queue", b"value"),
        commands.QueuePop("queue", 0.0),
        commands.QueueLen("queue"),
    ]
    for seq, command in enumerate(made):
        yield codec.encode_command(command, seq)
        for keyed in (False, True):
            yield codec.encode_command(command, seq, store_frames.RequestId(b"a" * 64, 1, keyed))


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.close()


def test_mutated_requests_end_in_our_errors(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    @fuzzed
    @given(sequences_like(list(corpus())))
    def run(sequences: list[list[bytes]]) -> None:
        for sent in sequences:
            server.receive(*sent)

    with memory_within(MEMORY), caplog.at_level(logging.WARNING, "rankmesh.store"):
        run()
    assert not caplog.records, caplog.text
    answer = server.receive(codec.encode_command(commands.QueueLen("another"), 9))
    assert codec.decode_result(commands.QueueLen("another"), answer) == 0


def test_mutated_responses_end_in_our_errors() -> None:
    command = commands.MultiGet(("key", "other"), 0.0)
    error = codec.encode_error(1, InvalidKeyError("the key is invalid", ranks=[1]))
    results = [None, b"value", True, 7, ["key"], [b"equal", b"sizes"], [b"two", b"sizes"], [b"\0", b"\0\0"]]

    @fuzzed
    @given(sequences_like([*(codec.encode_result(1, result) for result in results), error]))
    def run(sequences: list[list[bytes]]) -> None:
        for frame in itertools.chain.from_iterable(sequences):
            with contextlib.suppress(DistError):
                codec.decode_result(command, frame)

    with memory_within(MEMORY):
        run()


@pytest.mark.parametrize("announced", [70_000, 0xFFFFFFFF])
@pytest.mark.parametrize("opcode", [7, 8, 10])
def test_a_request_of_too_many_keys_is_refused_before_it_is_split(server: Server, opcode: int, announced: int) -> None:
    body = b"\x93\x92" + bytes([opcode]) + b"\xdd" + announced.to_bytes(4, "big") + b"\xa1k" * 70_000
    frame = store_frames.HEADER.pack(len(body), 1) + body
    with allocations_within(1 << 20), pytest.raises(ProtocolError, match="of length <= 65536"):
        codec.decode_request(frame)
    assert server.receive(frame[:1000]) == b""


@pytest.mark.parametrize("announced", [70_000, 0xFFFFFFFF])
def test_a_response_of_too_many_values_is_refused_before_it_is_split(announced: int) -> None:
    body = b"\x92\xc0\xdd" + announced.to_bytes(4, "big") + b"\xc4\1v" * 70_000
    frame = store_frames.HEADER.pack(len(body), 1) + body
    with allocations_within(1 << 20), pytest.raises(ProtocolError, match="of length <= 65536"):
        codec.decode_result(commands.MultiGet(("key",), 0.0), frame)


def test_one_value_for_many_keys_is_not_copied_before_its_size_is_known() -> None:
    command, value = commands.MultiGet(("key",) * 60_000), bytes(1 << 20)
    with allocations_within(1 << 20):
        answer = codec.encode_result(1, [value] * len(command.keys))
    with pytest.raises(InvalidValueError, match="ask for less at a time"):
        codec.decode_result(command, answer)


def test_nothing_is_allocated_for_bytes_that_have_not_come(server: Server) -> None:
    head = store_frames.HEADER.pack(store_frames.MAX_BYTES, 1) + b"\x93\x94\2\xa3key\xc6"
    with allocations_within(4 << 20):
        server.receive(head + (64 << 20).to_bytes(4, "big") + b"value")
