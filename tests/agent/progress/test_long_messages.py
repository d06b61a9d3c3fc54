"""Long messages between two ranks that each have a core: shared memory carries them while both sides are at work.

Both ranks are in one thread here: what the receiver does while it polls for bytes is the sender's next step.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from support.threads import LATER, NOW, World, world

from rankmesh_agent.group.options import Options
from rankmesh_agent.progress.framing import Transfer
from rankmesh_agent.transports import shm_ring
from rankmesh_agent.transports.shm_ring import RING_BYTES, RingConnection
from rankmesh_agent.wire.errors import CollectiveTimeoutError, DistBackendError

EAGER = 1 << 12  # as support.threads sets it
FLOAT64 = 12


class Free:
    """Cores that no other program wants."""

    def should_spin(self) -> bool:
        return True

    def yield_core(self) -> bool:
        return True


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setattr(shm_ring, "core_contention", Free())
    with world(2, "segment") as made:
        for rank, mesh in enumerate(made.meshes):
            mesh.rings[1 - rank].connection.use_aggressive_mode()
        yield made


@pytest.fixture
def sender_moves(monkeypatch: pytest.MonkeyPatch, pair: World) -> Callable[..., None]:
    """Let rank 0 move its bytes in each of rank 1's next polls for bytes; press Ctrl-C in one of them."""

    def allow(polls: int, interrupted_at: int = -1) -> None:
        left = [polls]
        receiving = pair.meshes[1].rings[0].connection
        original = RingConnection._await_bytes

        def poll(connection: RingConnection) -> bool:
            if connection is receiving and left[0]:
                left[0] -= 1
                pair.meshes[0].progress()
                if polls - left[0] == interrupted_at:
                    os.kill(os.getpid(), signal.SIGINT)
            return original(connection)

        monkeypatch.setattr(RingConnection, "_await_bytes", poll)

    return allow


def begin(pair: World, sent: Any, received: Any) -> tuple[Transfer, Transfer]:
    """Have rank 0 send, and rank 1 receive, as in synchronous calls; return both transfers."""
    transfers = []
    for rank, array in enumerate((sent, received)):
        matcher = pair.communicators[rank].matcher
        with pair.meshes[rank].lock:
            begun = matcher.receive_soon if rank else matcher.send_soon
            transfers.append(begun(1 - rank, array.view(np.uint8).data, FLOAT64, 0))
    return transfers[0], transfers[1]


def test_a_message_longer_than_the_ring_is_there_when_the_receive_begins(pair: World, sender_moves: Any) -> None:
    sender_moves(100)
    for count in (EAGER // 8 + 1, RING_BYTES // 8 - 8, RING_BYTES // 8, 3 * RING_BYTES // 8 + 5):
        sent, received = np.arange(count, dtype=np.float64), np.zeros(count)
        sending, receiving = begin(pair, sent, received)
        assert (sending.done, receiving.done, receiving.source) == (True, True, 0)
        np.testing.assert_array_equal(received, sent)
    assert not any(comm.matcher.announced or comm.matcher.cleared for comm in pair.communicators)


@pytest.mark.parametrize("polls", range(5))
def test_where_the_sender_stops_the_rest_comes_later(pair: World, sender_moves: Any, polls: int) -> None:
    count = 4 * RING_BYTES // 8
    sent, received = np.arange(count, dtype=np.float64), np.zeros(count)
    sender_moves(polls)
    sending, receiving = begin(pair, sent, received)
    assert not receiving.done
    for _ in range(20):
        for mesh in pair.meshes:
            mesh.progress()
    assert sending.done
    assert receiving.done
    np.testing.assert_array_equal(received, sent)
    for one in pair.communicators:  # the connection is at a frame's begin
        one.barrier(LATER)


@pytest.mark.parametrize("polls", [100, 4])
def test_ctrl_c_comes_between_frames(pair: World, sender_moves: Any, polls: int) -> None:
    count = 4 * RING_BYTES // 8
    sent, received = np.arange(count, dtype=np.float64), np.zeros(count)
    sender_moves(polls, interrupted_at=3)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pair.meshes[0].lock:
            pair.communicators[0].matcher.send_soon(1, sent.view(np.uint8).data, FLOAT64, 0)
        with pytest.raises(KeyboardInterrupt):
            pair.communicators[1].receive(received, 0, 0, NOW)
    finally:
        signal.signal(signal.SIGINT, before)
    assert not pair.meshes[1].lost_peers
    whole = polls == 100
    assert (received == sent).all() == whole
    assert (pair.communicators[1].state.failure is None) == whole


def test_other_messages_may_come_first(pair: World) -> None:
    def call(members: Any) -> None:
        for turn in range(10):
            if members.rank == 0:
                members.send(np.full(3, float(turn)), 1, 7, NOW)
                members.send(np.full(90_000, float(turn)), 1, 8, LATER)
                members.send(np.full(90_000, turn + 0.5), 1, 9, NOW)
            else:
                arrays = {tag: np.zeros(3 if tag == 7 else 90_000) for tag in (9, 8, 7)}
                for tag, array in arrays.items():
                    members.receive(array, 0, tag, NOW)
                assert [array[-1] for array in arrays.values()] == [turn + 0.5, turn, turn]

    pair.run(call)


def test_a_receive_of_another_size_fails_at_both_ends_and_the_next_message_comes(pair: World) -> None:
    def call(members: Any) -> None:
        make = members.receive if members.rank else members.send
        with pytest.raises(DistBackendError, match="sizes and dtypes must be equal"):
            make(np.zeros(90_000 + members.rank), 1 - members.rank, 0, NOW)
        array = np.full(90_000, 1.0 - members.rank)
        make(array, 1 - members.rank, 0, NOW)
        assert (array == 1).all()

    pair.run(call)


def test_a_message_for_which_the_receiver_is_late_may_time_out(pair: World) -> None:
    one, other = pair.communicators
    with pytest.raises(CollectiveTimeoutError):
        one.send(np.ones(90_000), 1, 0, Options(0.05))
    received = np.zeros(90_000)
    work = other.receive(received, 0, 0, LATER)
    one.send(np.full(90_000, 2.0), 1, 0, LATER)
    work.wait()  # type: ignore[union-attr]
    assert (received == 2).all()
