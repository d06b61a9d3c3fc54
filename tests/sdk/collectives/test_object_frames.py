"""How an encoded object travels: what fits into the record, and what does not."""

from __future__ import annotations

import numpy as np
import pytest

from rankmesh._collectives.object_frames import HEAD_BYTES, RECORD_BYTES, RECORD_TAG, Incoming, Outgoing, records
from rankmesh._collectives.serialize import Message
from rankmesh_agent.wire.errors import ProtocolError

FITS = RECORD_BYTES - HEAD_BYTES


def message(data: bytes, *apart: np.ndarray, pickled: bool = False) -> Message:
    return Message(data, list(apart), pickled)


def test_golden_bytes() -> None:
    going = Outgoing(message(b"payload", np.zeros(259, np.uint8), pickled=True), count=258, failed=True)
    tag = going.tag.to_bytes(8, "big", signed=True)
    head = b"RMP\x02\x03" + bytes(3) + bytes(6) + b"\x01\x02" + tag + bytes(7) + b"\x07" + bytes(6) + b"\x01\x03"
    assert going.record.tobytes() == head + bytes(8 * 15) + b"payload" + bytes(FITS - 7)
    assert (RECORD_BYTES, HEAD_BYTES) == (1024, 160)


def test_tags_are_for_one_parcel_each() -> None:
    tags = {Outgoing(message(b"")).tag for _ in range(100)}
    assert len(tags) == 100
    assert min(tags) > RECORD_TAG
    assert max(tags) < -(1 << 62), "users' tags are others"


def test_what_is_no_record_is_refused() -> None:
    with pytest.raises(ProtocolError, match="array of another call"):
        Incoming(np.ones(RECORD_BYTES, np.uint8))
    another_version = Outgoing(message(b"x")).record.copy()
    another_version[3] = 1
    with pytest.raises(ProtocolError, match="array of another call"):
        Incoming(another_version)
    for untouched in records(3):
        with pytest.raises(ProtocolError, match="array of another call"):
            Incoming(untouched)
