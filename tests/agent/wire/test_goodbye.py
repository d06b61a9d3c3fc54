"""Goodbyes: what of a rank's end is in the part and the payload of a frame."""

from __future__ import annotations

import pytest

from rankmesh_agent.wire import frames
from rankmesh_agent.wire.errors import CollectiveTimeoutError, RankFailedError
from rankmesh_agent.wire.goodbye import Goodbye, decode

LATE = CollectiveTimeoutError("all_reduce waited for rank 2", ranks=[2], op="all_reduce", group="world", seq=7)

LATE_JSON = (
    b'{"reason":"why","ranks":"","failure":{"ranks":"2","op":"all_reduce","group":"world","seq":7,'
    b'"code":"collective-timeout","message":"all_reduce waited for rank 2"}}'
)


@pytest.mark.parametrize(
    ("goodbye", "part", "payload"),
    [
        (Goodbye(), 0, b""),
        (Goodbye("it was done"), 0, b"it was done"),
        (Goodbye("its process ended without a goodbye", died=True), 1, b"its process ended without a goodbye"),
        (Goodbye("it ended with ValueError: no", raised=True), 2, b"it ended with ValueError: no"),
        (
            Goodbye("its host has answered nothing for 8 s", died=True, silent=True),
            17,
            b"its host has answered nothing for 8 s",
        ),
        (Goodbye("", ranks=(2, 3)), 4, b'{"reason":"","ranks":"2-3"}'),
        (
            Goodbye("why", raised=True, failure=LATE),
            6,
            LATE_JSON,
        ),
    ],
)
def test_golden_bytes_both_ways(goodbye: Goodbye, part: int, payload: bytes) -> None:
    assert goodbye.encode() == (part, payload)
    found = decode(part, payload)
    assert found._replace(failure=None) == goodbye._replace(failure=None)
    assert repr(found.failure) == repr(goodbye.failure)
    assert found.failure is None or found.failure.details() == LATE.details()


def test_long_texts_fit_into_a_frame() -> None:
    part, payload = Goodbye("ä" * 100_000, failure=RankFailedError("ö" * 100_000, ranks=range(0, 100_000, 2))).encode()
    assert len(payload) <= frames.SMALL
    found = decode(part, payload)
    assert set(found.reason) == {"ä"}
    assert found.failure is not None
    assert set(found.failure.message) == {"ö"}
    assert found.failure.ranks == tuple(range(0, 2 * len(found.failure.ranks), 2)) != ()


@pytest.mark.parametrize(
    "payload", [b"", b"[]", b"{}", b'{"reason": 1, "ranks": "x"}', b'{"reason": "", "ranks": "0-99999999"}', b"\xff"]
)
def test_what_cannot_be_read_is_left_out(payload: bytes) -> None:
    assert decode(6, payload) == Goodbye("its reason cannot be read", raised=True)
