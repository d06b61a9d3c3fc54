"""How an encoded object travels: what fits into the record, and what does not."""

from __future__ import annotations

import numpy as np
import pytest

from rankmesh._collectives.object_frames import HEAD_BYTES, RECORD_BYTES, RECORD_TAG, Incoming, Outgoing, records
from rankmesh_agent.wire.errors import ProtocolError

FITS = RECORD_BYTES - HEAD_BYTES


@pytest.mark.parametrize("size", [0, 1, FITS - 1, FITS, FITS + 1, 100_000])
def test_what_does_not_fit_into_the_record_is_the_rest(size: int) -> None:
    payload = np.random.default_rng(1).bytes(size)
    going = Outgoing(payload, count=3)
    assert going.record.size == RECORD_BYTES
    assert going.rest.size == max(0, size - FITS)
    came = Incoming(going.record)
    assert (came.count, came.failed, came.tag) == (3, False, going.tag)
    assert came.rest.size == going.rest.size
    came.rest[:] = going.rest
    assert came._payload.tobytes() == payload


def test_golden_bytes() -> None:
    going = Outgoing(b"payload", count=258, failed=True)
    head = b"RMP\x01" + b"\x01\x00\x00\x00" + b"\x00" * 6 + b"\x01\x02" + b"\x00" * 7 + b"\x07"
    assert going.record.tobytes() == head + going.tag.to_bytes(8, "big", signed=True) + b"payload" + bytes(985)
    assert RECORD_BYTES == 1024


def test_tags_are_for_one_parcel_each() -> None:
    tags = {Outgoing(b"").tag for _ in range(100)}
    assert len(tags) == 100
    assert min(tags) > RECORD_TAG
    assert max(tags) < -(1 << 62), "users' tags are others"


def test_what_is_no_record_is_refused() -> None:
    with pytest.raises(ProtocolError, match="array of another call"):
        Incoming(np.ones(RECORD_BYTES, np.uint8))
    another_version = Outgoing(b"x").record.copy()
    another_version[3] = 2
    with pytest.raises(ProtocolError, match="array of another call"):
        Incoming(another_version)
    for untouched in records(3):
        with pytest.raises(ProtocolError, match="array of another call"):
            Incoming(untouched)
