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
from rankmesh_agent.shared_memory import process_vm
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


def exchange(pair: World, send: Callable[[LocalCommunicator], object], receive: Any) -> None:
    """Have rank 0 send, and rank 1 receive: a function, or the value of COUNT elements from rank 0."""

    def check(members: LocalCommunicator) -> None:
        array = np.zeros(COUNT)
        assert members.receive(array, 0, 0, NOW) == 0
        assert (array == receive).all()

    second = receive if callable(receive) else check
    pair.run(lambda members: second(members) if members.rank else send(members))


def send_ones(members: LocalCommunicator) -> Any:
    """Begin to send an array of ones."""
    return members.send(np.ones(COUNT), 1, 0, LATER)


@pytest.mark.parametrize("count", [COUNT, 3_000_000])
def test_a_long_message_is_read_in_pieces_and_never_sent(pair: World, reading: Any, count: int) -> None:
    sizes, array = reading(as_it_is), np.zeros(count)
    sent = np.arange(count, dtype=np.float64)
    exchange(pair, lambda members: members.send(sent, 1, 0, NOW), lambda members: members.receive(array, 0, 0, NOW))
    np.testing.assert_array_equal(array, sent)
    assert sum(sizes) == count * 8
    assert max(sizes) <= 8 << 20, "other peers have their turn between two pieces"


def test_many_short_messages_are_acknowledged_together(pair: World, monkeypatch: pytest.MonkeyPatch) -> None:
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
            while len([*members.matcher.unexpected]) < count:
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


def test_a_message_that_cannot_be_read_is_sent(pair: World, reading: Any) -> None:
    def refuse(*_: Any) -> None:
        raise DistNetworkError("cannot read the memory of process 1: Operation not permitted")

    reading(refuse)
    exchange(pair, lambda members: members.send(np.full(COUNT, 3.0), 1, 0, NOW), 3)


def test_where_reading_is_forbidden_nothing_is_offered(monkeypatch: pytest.MonkeyPatch, reading: Any) -> None:
    monkeypatch.setattr(process_vm, "can_read", lambda *_: False)
    sizes = reading(as_it_is)
    with world(2, "segment") as pair:
        exchange(pair, lambda members: members.send(np.ones(COUNT), 1, 0, NOW), 1)
    assert sizes == []


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_message_withdrawn_while_it_is_read_is_not_taken(pair: World, reading: Any, when: str) -> None:
    begun, spoiled = pause_reads(reading, when)

    def send(members: LocalCommunicator) -> None:
        array = np.ones(COUNT)
        work = members.send(array, 1, 0, Options(0.05, async_op=True))
        assert begun.wait(TIMEOUT)
        with pytest.raises(CollectiveTimeoutError):
            work.wait()  # type: ignore[union-attr]
        array[:] = -1
        spoiled.set()
        members.send(np.full(COUNT, 2.0), 1, 0, NOW)

    exchange(pair, send, 2)


def test_another_message_withdrawn_meanwhile_does_no_harm(pair: World, reading: Any) -> None:
    begun, withdrawn = pause_reads(reading, "after")

    def send(members: LocalCommunicator) -> None:
        work = send_ones(members)
        assert begun.wait(TIMEOUT)
        with pytest.raises(CollectiveTimeoutError):
            members.send(np.zeros(COUNT), 1, 7, Options(0.05))
        withdrawn.set()
        work.wait()

    exchange(pair, send, 1)


def test_an_abort_while_a_message_is_read_fails_the_receive(pair: World, reading: Any) -> None:
    begun, aborted = pause_reads(reading, "after")

    def send(members: LocalCommunicator) -> None:
        array = np.ones(COUNT)
        work = members.send(array, 1, 0, LATER)
        assert begun.wait(TIMEOUT)
        members.abort(ValueError("enough"))
        array[:] = -1
        aborted.set()
        with pytest.raises(DistBackendError):
            work.wait()  # type: ignore[union-attr]

    def receive(members: LocalCommunicator) -> None:
        with pytest.raises(DistBackendError, match=r"gave up.*enough"):
            members.receive(np.zeros(COUNT), 0, 0, NOW)

    exchange(pair, send, receive)


def test_a_sender_that_leaves_while_its_message_is_read_fails_the_receive(pair: World, reading: Any) -> None:
    begun, left = pause_reads(reading, "before")

    def send(members: LocalCommunicator) -> None:
        send_ones(members)
        assert begun.wait(TIMEOUT)
        members.engine.close("it had enough", timeout=0.1)
        left.set()

    def receive(members: LocalCommunicator) -> None:
        with pytest.raises(DistBackendError, match=r"rank 0 .*left \(it had enough\)"):
            members.receive(np.zeros(COUNT), 0, 0, NOW)

    exchange(pair, send, receive)


def test_a_receive_that_times_out_while_it_reads_ends_the_group(pair: World, reading: Any) -> None:
    def slowly(read: Read, *arguments: Any) -> None:
        read(*arguments)
        time.sleep(0.3)

    reading(slowly)
    sent, array = np.ones(5_000_000), np.zeros(5_000_000)

    def send(members: LocalCommunicator) -> None:
        members.barrier(NOW)
        with pytest.raises(DistBackendError, match=r"rank 1 .*gave up: recv"):
            members.send(sent, 1, 0, NOW)

    def receive(members: LocalCommunicator) -> None:
        members.barrier(NOW)
        with pytest.raises(CollectiveTimeoutError):
            members.receive(array, 0, 0, Options(1.0))

    exchange(pair, send, receive)


def test_the_end_of_a_group_revokes_its_messages_alone(pair: World) -> None:
    groups = pair.run(lambda members: [pair.group(members.rank, 70 + each, f"{each}", [0, 1]) for each in range(2)])
    busy, idle = groups[0]
    still_exposed = pair.meshes[1]._peers[0].connection.still_exposed
    works = [members.send(np.ones(COUNT), 1, 0, LATER) for members in (pair.communicators[0], busy)]
    idle.close()
    assert still_exposed(0)
    busy.close()
    assert not still_exposed(0)
    del works
