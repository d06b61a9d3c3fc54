"""The frames of the store's binary protocol: their header, and the names of unix sockets."""

from __future__ import annotations

import pytest

from rankmesh_agent.wire.errors import ProtocolError
from rankmesh_agent.wire.store_frames import (
    HEADER,
    MAX_BYTES,
    decode_header,
    decode_unix_name,
    encode_unix_name,
    with_seq,
)


def test_a_header():
    frame = bytes.fromhex("00000002 fffffffe c0c0")
    assert HEADER.pack(2, 0xFFFFFFFE) == frame[:8]
    assert decode_header(frame) == decode_header(bytearray(frame)) == (2, 0xFFFFFFFE)
    assert with_seq(frame, 77) == with_seq(bytearray(frame), 77) == bytes.fromhex("00000002 0000004d c0c0")


def test_impossible_headers():
    with pytest.raises(ProtocolError, match="7 bytes are no frame"):
        decode_header(bytes(7))
    with pytest.raises(ProtocolError, match=str(MAX_BYTES)):
        decode_header(HEADER.pack(MAX_BYTES + 1, 1))


def test_names_of_unix_sockets():
    assert encode_unix_name("abc") == b"abc" + bytes(61)
    assert decode_unix_name(encode_unix_name("abc")) == "abc"
    assert decode_unix_name(encode_unix_name("")) == ""
