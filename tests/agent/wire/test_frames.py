"""The frame header, byte for byte."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rankmesh_agent.wire import dtypes
from rankmesh_agent.wire.errors import ProtocolError
from rankmesh_agent.wire.frames import SMALL, Header, Opcode, decode, encode

GOLDEN = [
    (
        Header(Opcode.ENTER, 11, 0x0102030405060708, 3, 2, 41, 0, 4096, 0xDEADBEEFCAFEF00D, 0),
        (
            "524b4d48 03 01 000b 0102030405060708 00000003 00000002 0000000000000029"
            "0000000000000000 0000000000001000 deadbeefcafef00d 0000000000000000"
        ),
    ),
    (
        Header(Opcode.RTS, 6, 1, 1, 0, 7, -2, 0, 0, 1 << 40),
        (
            "524b4d48 03 04 0006 0000000000000001 00000001 00000000 0000000000000007"
            "fffffffffffffffe 0000000000000000 0000000000000000 0000010000000000"
        ),
    ),
    (
        Header(Opcode.BULK, 12, 2**64 - 1, 2**32 - 1, 0, 2**64 - 1, -(2**63), 3 << 31, 0, 0),
        (
            "524b4d48 03 06 000c ffffffffffffffff ffffffff 00000000 ffffffffffffffff"
            "8000000000000000 0000000180000000 0000000000000000 0000000000000000"
        ),
    ),
    (
        Header(Opcode.GOODBYE),
        (
            "524b4d48 03 0a 0000 0000000000000000 00000000 00000000 0000000000000000"
            "0000000000000000 0000000000000000 0000000000000000 0000000000000000"
        ),
    ),
]

OPCODES = "ENTER PART EAGER RTS CTS BULK CREDIT REFUSE ABORT GOODBYE WITHDRAW DONE"


@pytest.mark.parametrize(("header", "golden"), GOLDEN)
def test_golden_bytes_both_ways(header, golden):
    assert encode(*header) == bytes.fromhex(golden)
    assert decode(bytes.fromhex(golden)) == header


def test_opcodes_keep_their_numbers():
    assert [(opcode.value, opcode.name) for opcode in Opcode] == list(enumerate(OPCODES.split(), 1))


u32, u64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(
    opcode=st.sampled_from(Opcode),
    dtype=st.sampled_from([dtypes.NONE, *dtypes.FROM_CODE]),
    group=u64,
    epoch=u32,
    part=u32,
    seq=u64,
    tag=st.integers(-(2**63), 2**63 - 1),
    length=st.integers(0, SMALL),
    fingerprint=u64,
    total=u64,
)
def test_every_field_comes_back(opcode, **fields):
    assert decode(encode(opcode, **fields)) == Header(opcode, **fields)


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_decode_takes_any_bytes_at_any_offset(kind):
    assert decode(kind(b"before" + encode(Opcode.CTS, seq=3) + b"after"), 6) == Header(Opcode.CTS, seq=3)


@pytest.mark.parametrize(
    ("offset", "bytes_there", "reported"),
    [
        (0, b"HTTP", "b'HTTP'"),
        (3, b"\0", "RankMesh port"),
        (4, b"\1", "protocol version 1, this side 3"),
        (4, b"\2", "protocol version 2, this side 3"),
        (5, b"\0", "unknown opcode 0"),
        (5, b"\x7f", "unknown opcode 127"),
        (5, b"\xff", "unknown opcode 255"),
        (6, b"\x00\x1d", "unknown dtype code 29"),
        (6, b"\xff\xff", "unknown dtype code 65535"),
    ],
)
def test_what_is_not_a_frame_of_ours_is_refused(offset, bytes_there, reported):
    data = bytearray(encode(Opcode.ENTER))
    data[offset : offset + len(bytes_there)] = bytes_there
    with pytest.raises(ProtocolError, match=reported):
        decode(data)


@pytest.mark.parametrize("length", [SMALL + 1, 2**63, 2**64 - 1])
def test_only_data_for_a_posted_buffer_may_be_large(length):
    for opcode in Opcode:
        assert decode(encode(opcode, length=SMALL)).length == SMALL
        if opcode in (Opcode.PART, Opcode.BULK):
            assert decode(encode(opcode, length=length)).length == length
        else:
            with pytest.raises(ProtocolError, match=f"a {opcode.name} frame of {length} bytes is over the limit"):
                decode(encode(opcode, length=length))


@pytest.mark.parametrize("limit", [0, 100, 2 * SMALL])
def test_eager_messages_have_their_own_limit(limit):
    assert decode(encode(Opcode.EAGER, length=limit), eager_limit=limit).length == limit
    with pytest.raises(ProtocolError, match="EAGER"):
        decode(encode(Opcode.EAGER, length=limit + 1), eager_limit=limit)
    assert decode(encode(Opcode.ENTER, length=SMALL), eager_limit=limit).length == SMALL
    with pytest.raises(ProtocolError, match="ENTER"):
        decode(encode(Opcode.ENTER, length=SMALL + 1), eager_limit=limit)


@pytest.mark.parametrize("have", [0, 1, 63])
def test_truncated_input_is_no_header(have):
    with pytest.raises(struct.error):
        decode(encode(Opcode.ENTER)[:have])
    with pytest.raises(struct.error):
        decode(encode(Opcode.ENTER), 64 - have)


@pytest.mark.parametrize(
    "fields", [{"group": 2**64}, {"epoch": -1}, {"part": 2**32}, {"tag": 2**63}, {"length": -1}, {"dtype": 2**16}]
)
def test_a_field_out_of_range_is_not_sent(fields):
    with pytest.raises(struct.error):
        encode(Opcode.ENTER, **fields)
