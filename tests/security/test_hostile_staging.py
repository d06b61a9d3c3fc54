"""A hostile process attached to an agent: what it sends for a staging buffer, and sizes that lead out of one."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator

import pytest
from support.staged import FLOATS, MIB, SEALS, Recorder, all_reduce, described, memfd, served_stream

from rankmesh_agent.net.stream import StreamClosedError
from rankmesh_agent.remote import staging
from rankmesh_agent.remote.calls import Message
from rankmesh_agent.remote.codec import encode
from rankmesh_agent.remote.staging import AgentStream, StagedStream
from rankmesh_agent.wire import attach_frames
from rankmesh_agent.wire.attach_frames import STAGED, Kind
from rankmesh_agent.wire.errors import ProtocolError


@pytest.fixture
def pair() -> Iterator[tuple[StagedStream, AgentStream, Recorder]]:
    with served_stream() as pair:
        yield pair


def read_only() -> int:
    descriptor = memfd(MIB)
    again = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY)
    os.close(descriptor)
    return again


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: [memfd(MIB, 0)], id="no seals"),
        pytest.param(lambda: [memfd(MIB, fcntl.F_SEAL_GROW)], id="may shrink"),
        pytest.param(lambda: [memfd(MIB, SEALS | fcntl.F_SEAL_WRITE)], id="no writes"),
        pytest.param(lambda: [memfd(0)], id="empty"),
        pytest.param(lambda: [memfd(1 << 44)], id="huge"),
        pytest.param(lambda: [read_only()], id="read only"),
        pytest.param(lambda: [os.open("/dev/null", os.O_RDWR)], id="a device"),
        pytest.param(lambda: list(os.pipe()), id="two"),
        pytest.param(lambda: [os.pipe()[0]], id="a pipe"),
    ],
)
def test_another_is_refused_and_closed(make: Callable[[], list[int]]):
    received = make()
    with pytest.raises(ProtocolError, match="an attached process sent"):
        staging.map_received(received)
    for descriptor in received:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)


@pytest.mark.parametrize(
    ("document", "payload"),
    [
        pytest.param(described(MIB // 4 + 1), MIB + 4, id="longer"),
        pytest.param(described(1, (MIB // 4,)), 4, id="longer with the outputs"),
        pytest.param(described(1), 8, id="another payload"),
        pytest.param(described(1 << 38), 4 << 38, id="huge"),
        pytest.param(described((1 << 64) - 1), 4, id="overflow"),
    ],
)
def test_arrays_that_are_not_in_the_buffer_end_the_stream(pair, document, payload, caplog):
    process, _, session = pair
    all_reduce(process, 1)
    process.send(attach_frames.encode(Kind.REQUEST, document, payload, STAGED))
    with pytest.raises(StreamClosedError):
        process.receive(None)
    assert "violates the protocol" in caplog.text
    assert session.seen == [1]


def test_a_stream_without_a_buffer(pair, caplog):
    process, *_ = pair
    process.send(attach_frames.encode(Kind.REQUEST, described(1), 4, STAGED))
    with pytest.raises(StreamClosedError):
        process.receive(None)
    assert "has no buffer" in caplog.text


@pytest.mark.parametrize("sends", [True, False])
def test_a_message_that_is_not_in_the_buffer(pair, sends, caplog):
    process, *_ = pair
    message = encode(Message(1, 1, sends, 0, 0, FLOATS, MIB, 1.0, blocking=True))
    all_reduce(process, 1)
    process.send(attach_frames.encode(Kind.REQUEST, message, 4 * MIB if sends else 0, STAGED))
    with pytest.raises(StreamClosedError):
        process.receive(None)
    assert "has no buffer for the 4194304 bytes" in caplog.text


def test_a_file_that_may_shrink_ends_the_stream(pair, caplog):
    process, _, session = pair
    descriptor = memfd(MIB, 0)
    process.send(attach_frames.encode(Kind.REQUEST, described(1), 4, STAGED), (), [descriptor])
    with pytest.raises(StreamClosedError):
        process.receive(None)
    os.close(descriptor)
    assert "seals" in caplog.text
    assert not session.seen
