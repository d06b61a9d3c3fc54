"""Asking an HTTP port for another protocol."""

from __future__ import annotations

import pytest

from rankmesh_agent.wire import attach_frames, store_frames
from rankmesh_agent.wire.errors import ProtocolError
from rankmesh_agent.wire.upgrade import MAX_HEAD_BYTES, Upgrade, is_complete

WAY = Upgrade(b"/v1/way", b"rankmesh-way/1")


def test_golden():
    head = b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: rankmesh-way/1\r\n"
    assert WAY.response() == head + b"\r\n"


@pytest.mark.parametrize(
    "head",
    [
        *(
            b"G\r",
            b"RKMH-HI\x01",
            b"\x16\x03\x01",
            b"GET /v1/wa HTTP/1.1\r\nHost: x\r\n\r\n",
            b"GET /v1/way HTTP/1.0\r\n",
        ),
        b"GET /v1/way HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /v1/way HTTP/1.1\r\nUpgrade: websocket\r\n\r\n",
        WAY.request("x") + b"more",
        b"GET /v1/way HTTP/1.1\r\n" + b"x" * MAX_HEAD_BYTES,
    ],
)
def test_other_requests(head):
    assert WAY.is_requested(head) is False


def test_byte_by_byte():
    asked, agreed = WAY.request("host"), WAY.response()
    assert {WAY.is_requested(asked[:end]) for end in range(len(asked))} == {None}
    assert WAY.is_requested(asked) is True
    assert not any(is_complete(agreed[:end]) for end in range(len(agreed)))
    assert is_complete(agreed)


def test_the_protocols_of_an_agent_are_told_apart():
    ways = [attach_frames.UPGRADE, store_frames.UPGRADE]
    for way in ways:
        assert [each.is_requested(way.request("host")) for each in ways] == [each is way for each in ways]


@pytest.mark.parametrize(
    "head", [b"HTTP/1.1 404 Not Found\r\n", b"SSH-2.0", b"\n", b"HTTP/1.1 101 " + b"x" * MAX_HEAD_BYTES]
)
def test_what_does_not_agree(head):
    with pytest.raises(ProtocolError):
        is_complete(head)
