"""Goodbyes: what of a rank's end is in the part and the payload of a frame."""

from __future__ import annotations

import pytest

from rankmesh_agent.wire import frames
from rankmesh_agent.wire.errors import CollectiveTimeoutError, RankFailedError
from rankmesh_agent.wire.goodbye import Goodbye, decode

LATE = CollectiveTimeoutError("all_reduce waited for rank 2", ranks=[2], op="all_reduce", group="world", seq=7)
LATE_JSON = (
    b'{"ranks":"2","op":"all_reduce","group":"world","seq":7,"code":"collective-timeout",'
    b'"message":"all_reduce waited for rank 2"}'
)


@pytest.mark.parametrize(
    ("goodbye", "payload"),
    [
        (Goodbye(), b'{"reason":"","died":false,"raised":false,"failure":null,"ranks":"","silent":false}'),
        (
            Goodbye("its host is silent", died=True, ranks=(2, 3), silent=True),
            b'{"reason":"its host is silent","died":true,"raised":false,"failure":null,"ranks":"2-3","silent":true}',
        ),
        (
            Goodbye("why", raised=True, failure=LATE),
            b'{"reason":"why","died":false,"raised":true,"failure":%s,"ranks":"","silent":false}' % LATE_JSON,
        ),
    ],
)
def test_golden_bytes_both_ways(goodbye: Goodbye, payload: bytes) -> None:
    assert goodbye.encode() == payload
    found = decode(payload)
    assert found._replace(failure=None) == goodbye._replace(failure=None)
    assert repr(found.failure) == repr(goodbye.failure)
    assert found.failure is None or found.failure.details() == LATE.details()


def test_long_texts_fit_into_a_frame() -> None:
    payload = Goodbye("ä" * 100_000, failure=RankFailedError("ö" * 100_000, ranks=range(0, 100_000, 2))).encode()
    assert len(payload) <= frames.SMALL
    found = decode(payload)
    assert set(found.reason) == {"ä"}
    assert found.failure is not None
    assert set(found.failure.message) == {"ö"}
    assert found.failure.ranks == tuple(range(0, 2 * len(found.failure.ranks), 2)) != ()


@pytest.mark.parametrize(
    "payload", [b"", b"[]", b"{}", Goodbye().encode().replace(b'ranks":"', b'ranks":"0-99999999'), b"\xff"]
)
def test_what_cannot_be_read_is_that_of_an_exception(payload: bytes) -> None:
    assert decode(payload) == Goodbye("its goodbye cannot be read", raised=True)
