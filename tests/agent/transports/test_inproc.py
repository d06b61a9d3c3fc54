"""What is special about ranks in one process."""

from __future__ import annotations

import contextlib

import pytest
from support.connecting import look

from rankmesh_agent.transports.inproc import QUEUE_BYTES, InprocTransport, connected_pair
from rankmesh_agent.wire.errors import DistNetworkError


def test_a_pair_is_connected():
    one, other = connected_pair()
    with contextlib.closing(one), contextlib.closing(other):
        assert one.medium == other.medium == "inproc"
        assert one.send([b"hello"]) == 5
        received = bytearray(10)
        assert other.recv_into(memoryview(received)) == 5
        assert received[:5] == b"hello"


def test_a_queue_takes_exactly_what_it_holds():
    one, other = connected_pair()
    with contextlib.closing(one), contextlib.closing(other):
        assert one.send([bytes(QUEUE_BYTES - 1), b"ab"]) == QUEUE_BYTES
        assert one.send([b"b"]) == 0
        assert other.recv_into(memoryview(bytearray(3))) == 3
        assert one.send([bytes(10)]) == 3


def test_each_transport_is_a_world_of_its_own():
    transport, another = InprocTransport(), InprocTransport()
    with contextlib.closing(transport.listen("here")), contextlib.closing(another.listen("here")) as listener:
        transport.dial("here").close()
        assert look(listener) == []


def test_names_of_listeners_are_free_text():
    transport = InprocTransport()
    with contextlib.closing(transport.listen("rank 0")) as listener:
        assert listener.address == "rank 0"
        with pytest.raises(DistNetworkError, match="cannot connect to rank 1: no listener there"):
            transport.dial("rank 1")
