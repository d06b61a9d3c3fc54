"""The frames of the store's binary protocol: golden bytes both ways, and the checks before any allocation."""

from __future__ import annotations

import math

import pytest

from rankmesh_agent.wire.errors import ProtocolError
from rankmesh_agent.wire.store_frames import (
    MAX_BYTES,
    REQUEST,
    RESPONSE,
    Kind,
    decode_parts,
    decode_request,
    decode_response,
    decode_unix_name,
    encode_request,
    encode_response,
    encode_unix_name,
    with_seq,
)

REQUESTS = {
    "without parts": (
        (9, 4, 7, 0.0, []),
        "09 04 0000 00000007 00000000 00000000 0000000000000000",
    ),
    "one part": (
        (1, 0, 1, 2.5, [b"key"]),
        "01 00 0000 00000001 00000001 00000007 4004000000000000 00000003 6b6579",
    ),
    "several parts": (
        (2, 0x81, 0xFFFFFFFF, 0.0, [b"k", b"", b"\x00\xff"]),
        "02 81 0000 ffffffff 00000003 0000000f 0000000000000000 00000001 00000000 00000002 6b 00ff",
    ),
}
RESPONSES = {
    "a number": ((Kind.NUMBER, 5, -2, []), "02 000000 00000005 00000000 00000000 fffffffffffffffe"),
    "a value": (
        (Kind.VALUE, 1, 0, [b"v"]),
        "03 000000 00000001 00000001 00000005 0000000000000000 00000001 76",
    ),
    "values of one length": (
        (Kind.EQUAL, 1, 1, [b"ab"]),
        "08 000000 00000001 00000001 00000006 0000000000000001 00000002 6162",
    ),
    "an error": (
        (Kind.ERROR, 1, 0, [b"c", b"m"]),
        "06 000000 00000001 00000002 0000000a 0000000000000000 00000001 00000001 63 6d",
    ),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_requests(name):
    (opcode, flags, seq, seconds, parts), golden = REQUESTS[name]
    data = bytes.fromhex(golden)
    assert encode_request(opcode, flags, seq, seconds, parts) == data
    assert decode_request(data) == (opcode, flags, seq, len(parts), len(data) - REQUEST.size, seconds)
    assert decode_parts(data, len(parts)) == parts
    assert decode_parts(bytearray(data), len(parts)) == parts


@pytest.mark.parametrize("name", RESPONSES)
def test_responses(name):
    (kind, seq, number, parts), golden = RESPONSES[name]
    data = bytes.fromhex(golden)
    assert encode_response(kind, seq, number, parts) == data
    assert decode_response(data) == (kind, seq, len(parts), len(data) - RESPONSE.size, number)
    assert decode_parts(data, len(parts)) == parts
    assert decode_response(with_seq(data, 77)) == (kind, 77, len(parts), len(data) - RESPONSE.size, number)


def test_many_parts():
    parts = [b"%d" % number for number in range(1000)]
    frame = encode_request(7, 0, 1, 0.0, parts)
    assert decode_parts(frame, 1000) == parts


@pytest.mark.parametrize(("count", "length"), [(0, MAX_BYTES + 1), (2, 7), (0xFFFFFFFF, 100)])
def test_impossible_lengths(count, length):
    with pytest.raises(ProtocolError, match=str(MAX_BYTES)):
        decode_request(REQUEST.pack(1, 0, 1, count, length, 0.0))
    with pytest.raises(ProtocolError, match=str(MAX_BYTES)):
        decode_response(RESPONSE.pack(1, 1, count, length, 0))


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -1.0])
def test_invalid_times(seconds):
    with pytest.raises(ProtocolError, match="seconds"):
        decode_request(REQUEST.pack(1, 0, 1, 0, 0, seconds))


@pytest.mark.parametrize("count", [1, 2])
def test_parts_that_do_not_add_up(count):
    frame = bytearray(encode_request(1, 0, 1, 0.0, [b"abc"] * count))
    frame[REQUEST.size + 3] += 1
    with pytest.raises(ProtocolError, match="do not add up"):
        decode_parts(bytes(frame), count)


def test_names_of_unix_sockets():
    assert encode_unix_name("abc") == b"abc" + bytes(61)
    assert decode_unix_name(encode_unix_name("abc")) == "abc"
    assert decode_unix_name(encode_unix_name("")) == ""
