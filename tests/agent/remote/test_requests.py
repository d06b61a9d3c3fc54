"""The documents between attached processes and agents: what goes through as it is, and what is refused."""

from __future__ import annotations

import math
import struct

import pytest
from msgspec import msgpack

from rankmesh_agent.remote.calls import REQUESTS, Collective, Message, Wait
from rankmesh_agent.remote.codec import decode, encode, error_data, error_from
from rankmesh_agent.remote.requests import (
    Abort,
    Acquire,
    FailedRanks,
    Failure,
    NewGroup,
    NumWaiting,
    Request,
    SetTimeout,
)
from rankmesh_agent.wire.errors import ProtocolError, RankFailedError
from rankmesh_agent.wire.ops import OpType, ReduceOp
from rankmesh_agent.wire.schemas import LeaseTerms

COLLECTIVE = Collective((1 << 64) - 1, OpType.REDUCE, math.inf, 11, [3, 4], [], in_place=True, root=0, op=ReduceOp.MAX)
SEND = Message(1, 2, True, 3, -(1 << 63), 11, 5, 0.25, blocking=False)


@pytest.mark.parametrize(
    "request_",
    [
        COLLECTIVE,
        SEND,
        Wait(2, None, own=True),
        Acquire(LeaseTerms("job", -1, 4, math.inf, "pid 7", join_seconds=1.5)),
        NewGroup([2, 0], math.inf, [1, 0]),
        Failure(naming=[1]),
    ],
)
def test_a_request_goes_through(request_: Request[object]):
    assert decode(REQUESTS, encode(request_)) == request_


@pytest.mark.parametrize(
    "document",
    [
        b"",
        b"\xc1",
        b"[]",
        msgpack.encode([]),
        msgpack.encode({"type": "Unknown"}),
        msgpack.encode({"type": "NumWaiting"}),
        msgpack.encode({"type": "NumWaiting", "seconds": "1"}),
        msgpack.encode({"type": "NumWaiting", "seconds": math.nan}),
        msgpack.encode({"type": "SetTimeout", "group": 1, "timeout": -1.0}),
        encode(COLLECTIVE).replace(b"\xa4root\x00", b"\xa4root\xc0"),
        encode(FailedRanks())[:-1],
        b"\x91" * 100_000,
        b"\x82\xa4type\xa8NewGroup\xa5ranks\xdd" + struct.pack(">I", 1 << 31),
    ],
)
def test_another_document_is_refused(document: bytes):
    with pytest.raises(ProtocolError, match="malformed document"):
        decode(REQUESTS, document)


def test_a_length_below_zero_is_refused():
    with pytest.raises(ProtocolError, match="malformed document"):
        decode(REQUESTS, encode(Collective(1, OpType.BROADCAST, 1.0, 11, [-1], [])))


def test_results_are_those_of_the_class():
    assert decode(NumWaiting.results(), encode(3)) == 3
    assert decode(Wait.results(), encode(None)) is None
    with pytest.raises(ProtocolError):
        decode(FailedRanks.results(), encode("none"))


def test_a_lone_surrogate_is_replaced():
    sent = Abort(error_data(ValueError("no file \udcff")))
    assert str(error_from(decode(REQUESTS, encode(sent)).error)) == "no file ?"


def test_an_error_goes_through():
    error = error_from(error_data(RankFailedError("rank 1 failed", ranks=[1], group="world")))
    assert isinstance(error, RankFailedError)
    assert (error.message, error.ranks, error.group) == ("rank 1 failed", (1,), "world")
    assert isinstance(error_from(error_data(IndexError("x"))), IndexError)
    assert type(error_from(error_data(KeyboardInterrupt()), at_agent=True)).__name__ == "KeyboardInterrupt"
    assert "could not carry the call out: KeyError" in str(error_from(error_data(KeyError("k"))))


def test_the_timeout_of_a_group_may_be_infinite():
    assert decode(REQUESTS, encode(SetTimeout(1, math.inf))).timeout == math.inf
