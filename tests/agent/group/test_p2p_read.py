"""Large messages that the receiver reads from the memory of the sender: what could spoil them. Ranks as threads."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from support.threads import LATER, NOW, World, world

from rankmesh_agent.group.local import LocalCommunicator
from rankmesh_agent.group.options import Options
from rankmesh_agent.progress import framing
from rankmesh_agent.transports import process_vm
from rankmesh_agent.transports.shm_ring import RingConnection
from rankmesh_agent.wire.errors import CollectiveTimeoutError, DistBackendError, DistNetworkError

TIMEOUT = 20.0
COUNT = 100_000
HERE = np.zeros(1)
Read = Callable[[Any, int, int, int], None]

pytestmark = pytest.mark.skipif(
    not process_vm.can_read(os.getpid(), process_vm.address_of(HERE), HERE.tobytes()),
    reason="this machine lets no process read memory in this way",
)


@pytest.fixture
def pair() -> Iterator[World]:
    with world(2, "segment") as made:
        yield made


@pytest.fixture
def reading(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Read, Any, int, int, int], None]], list[int]]:
    """Have every read go through a function, which is given the true one; return the list of bytes read."""

    def replace(function: Callable[[Read, Any, int, int, int], None]) -> list[int]:
        original, sizes = RingConnection.read_exposed, []

        def read(connection: RingConnection, address: int, into: int, nbytes: int) -> None:
            sizes.append(nbytes)
            function(original, connection, address, into, nbytes)

        monkeypatch.setattr(RingConnection, "read_exposed", read)
        monkeypatch.setattr(framing, "REMOTE_READ_BYTES", 8 << 20)  # so that several pieces are no long message
        return sizes

    return replace


def pause_reads(reading: Any, when: str) -> tuple[threading.Event, threading.Event]:
    """Have each read set the first event and wait for the second ``before`` it reads or ``after``."""
    begun, resume = threading.Event(), threading.Event()

    def slowly(read: Read, *arguments: Any) -> None:
        if when == "after":
            read(*arguments)
        begun.set()
        assert resume.wait(TIMEOUT)
        if when == "before":
            read(*arguments)

    reading(slowly)
    return begun, resume


def as_it_is(read: Read, *arguments: Any) -> None:
    read(*arguments)


def send(members: LocalCommunicator, array: Any, timeout: float = TIMEOUT) -> None:
    members.send(array, 1, 0, Options(timeout))


def recv(members: LocalCommunicator, array: Any) -> Any:
    return members.receive(array, 0, 0, NOW)


def check_receive(members: LocalCommunicator, value: float) -> None:
    """Receive an array of COUNT elements with this value."""
    got = np.zeros(COUNT)
    assert recv(members, got) == 0
    assert (got == value).all()


@pytest.mark.parametrize("count", [COUNT, 3_000_000])
def test_it_is_read_in_pieces_and_never_sent(pair: World, reading: Any, count: int) -> None:
    sizes = reading(as_it_is)

    def call(members: LocalCommunicator) -> None:
        if members.rank == 0:
            send(members, np.arange(count, dtype=np.float64))
        else:
            got = np.zeros(count)
            assert recv(members, got) == 0
            np.testing.assert_array_equal(got, np.arange(count))

    pair.run(call)
    assert sum(sizes) == count * 8
    assert max(sizes) <= 8 << 20, "others have their turn between two pieces"


def test_of_many_short_ones_the_sender_is_told_at_once(pair: World, monkeypatch: pytest.MonkeyPatch) -> None:
    count, sends = 16, list[int]()
    original = RingConnection.send

    def counted(connection: RingConnection, buffers: Any) -> int:
        sends.append(len(buffers))
        return original(connection, buffers)

    def call(members: LocalCommunicator) -> None:
        members.barrier(NOW)
        arrays = [np.full(1000, float(number)) if members.rank == 0 else np.zeros(1000) for number in range(count)]
        if members.rank == 0:
            works = [members.send(array, 1, 0, LATER) for array in arrays]
        else:
            deadline = time.monotonic() + TIMEOUT
            while len(members.matcher.unexpected) < count:
                assert time.monotonic() < deadline
                members.engine.progress()
            with members.engine.lock:
                works = [members.receive(array, 0, 0, LATER) for array in arrays]
                monkeypatch.setattr(RingConnection, "send", counted)
        for number, (work, array) in enumerate(zip(works, arrays, strict=True)):
            assert work is not None
            work.wait()
            assert (array == number).all()

    pair.run(call)
    assert sends[0] == count, "a frame for each, all at once"


def test_what_cannot_be_read_is_sent(pair: World, reading: Any) -> None:
    def refuse(*_: Any) -> None:
        raise DistNetworkError("cannot read the memory of process 1: Operation not permitted")

    reading(refuse)

    def call(members: LocalCommunicator) -> None:
        if members.rank == 0:
            send(members, np.full(COUNT, 3.0))
        else:
            check_receive(members, 3)

    pair.run(call)


def test_where_it_is_forbidden_nothing_is_offered(monkeypatch: pytest.MonkeyPatch, reading: Any) -> None:
    monkeypatch.setattr(process_vm, "can_read", lambda *_: False)
    sizes = reading(as_it_is)

    def call(members: LocalCommunicator) -> None:
        if members.rank == 0:
            send(members, np.ones(COUNT))
        else:
            check_receive(members, 1)

    with world(2, "segment") as pair:
        pair.run(call)
    assert sizes == []


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_message_withdrawn_while_it_is_read_is_not_taken(pair: World, reading: Any, when: str) -> None:
    begun, spoiled = pause_reads(reading, when)

    def call(members: LocalCommunicator) -> None:
        if members.rank == 0:
            array = np.ones(COUNT)
            with pytest.raises(CollectiveTimeoutError):
                send(members, array, timeout=1.0)
            assert begun.is_set()
            array[:] = -1
            spoiled.set()
            send(members, np.full(COUNT, 2.0))
        else:
            check_receive(members, 2)

    pair.run(call)


def test_another_message_withdrawn_meanwhile_does_no_harm(pair: World, reading: Any) -> None:
    begun, withdrawn = pause_reads(reading, "after")

    def call(members: LocalCommunicator) -> None:
        if members.rank == 0:
            work = members.send(np.full(COUNT, 5.0), 1, 0, LATER)
            assert begun.wait(TIMEOUT)
            with pytest.raises(CollectiveTimeoutError):
                members.send(np.zeros(COUNT), 1, 7, Options(0.05))
            withdrawn.set()
            assert work is not None
            work.wait()
        else:
            check_receive(members, 5)

    pair.run(call)


def test_a_group_given_up_while_it_is_read_fails_the_receive(pair: World, reading: Any) -> None:
    begun, given_up = pause_reads(reading, "after")

    def call(members: LocalCommunicator) -> None:
        if members.rank == 0:
            array = np.ones(COUNT)
            work = members.send(array, 1, 0, LATER)
            assert begun.wait(TIMEOUT)
            members.abort(ValueError("enough"))
            array[:] = -1
            given_up.set()
            assert work is not None
            with pytest.raises(DistBackendError):
                work.wait()
        else:
            with pytest.raises(DistBackendError, match=r"gave up.*enough"):
                recv(members, np.zeros(COUNT))

    pair.run(call)


def test_a_sender_that_leaves_while_it_is_read_fails_the_receive(pair: World, reading: Any) -> None:
    begun, left = pause_reads(reading, "before")

    def call(members: LocalCommunicator) -> None:
        if members.rank == 0:
            members.send(np.ones(COUNT), 1, 0, LATER)
            assert begun.wait(TIMEOUT)
            members.engine.close("it had enough", timeout=0.1)
            left.set()
        else:
            with pytest.raises(DistBackendError, match=r"rank 0 .*left \(it had enough\)"):
                recv(members, np.zeros(COUNT))

    pair.run(call)


def test_a_receive_given_up_while_it_reads_ends_the_group(pair: World, reading: Any) -> None:
    def slowly(read: Read, *arguments: Any) -> None:
        read(*arguments)
        time.sleep(1.0)

    reading(slowly)
    count = 10_000_000

    def call(members: LocalCommunicator) -> None:
        array = np.ones(count)
        members.barrier(NOW)  # making it may take longer than the receive waits
        if members.rank == 0:
            with pytest.raises(DistBackendError, match=r"rank 1 .*gave up: recv"):
                send(members, array)
        else:
            with pytest.raises(CollectiveTimeoutError):
                members.receive(array, 0, 0, Options(3.0))

    pair.run(call)
