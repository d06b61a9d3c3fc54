"""A hostile process at the other end of shared memory: no value that it writes there leads out of the ring."""

from __future__ import annotations

import contextlib
from random import Random

import numpy as np
import pytest
from hypothesis import given
from support.hostile import BATCH, fuzzed, memory_within, seeds

from rankmesh_agent.shared_memory.mapping import Mapping
from rankmesh_agent.transports import shm_ring
from rankmesh_agent.transports.shm_ring import RingConnection
from rankmesh_agent.wire.errors import DistNetworkError, ProtocolError

CAPACITY = 1 << 10
GUARD = 1 << 12
EXTREMES = (0, 1, CAPACITY, CAPACITY + 1, 1 << 31, 1 << 32, 1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)
MEMORY = 32 << 20


class Doorbell:
    """The socket beside the memory, through which nothing comes."""

    peer = "rank 1"

    def __init__(self) -> None:
        self.closed = False

    def send(self, buffers):
        return 1

    def recv_into(self, buffer):
        return 0

    def close(self) -> None:
        self.closed = True


class Shared:
    """One end of two rings, between guards that nothing may overwrite."""

    def __init__(self) -> None:
        size = 2 * (shm_ring._DATA + CAPACITY)
        self.memory = Mapping.anonymous(size + 2 * GUARD)
        self.memory.bytes[:] = 0xA5
        rings = Mapping.anonymous(size)
        rings.bytes = self.memory.bytes[GUARD:-GUARD]
        rings.bytes[:] = 0
        self.words = (
            rings.bytes.data[: shm_ring._DATA].cast("Q"),
            rings.bytes.data[shm_ring._DATA + CAPACITY : 2 * shm_ring._DATA + CAPACITY].cast("Q"),
        )
        self.ring = RingConnection(rings, CAPACITY, Doorbell(), client=True)  # type: ignore[arg-type]

    def check_guards(self) -> None:
        assert (self.memory.bytes[:GUARD] == 0xA5).all()
        assert (self.memory.bytes[-GUARD:] == 0xA5).all()


@pytest.fixture
def shared() -> Shared:
    return Shared()


def spoil(shared: Shared, random: Random) -> None:
    """Set a word of one of the rings."""
    if random.random() < 0.6:
        value = random.choice(EXTREMES) + random.randint(-2, 2)
        random.choice(shared.words)[random.choice((0, 1, 2, 3, 8, 9, 16, 24))] = value % (1 << 64)


def use(ring: RingConnection, random: Random) -> None:
    """Do what the engine does with a connection."""
    received = memoryview(bytearray(3 * CAPACITY))
    match random.randrange(7):
        case 0:
            assert ring.send([bytes(random.randint(0, 2 * CAPACITY)), b"x"]) <= CAPACITY
        case 1:
            assert ring.recv_into(received[: random.randint(1, len(received))]) <= CAPACITY
        case 2:
            ring.prepare_wait(True)
        case 3:
            ring.revoke()
        case 4:
            _, generation = ring.expose(received)
            assert generation < 1 << 32
        case 5:
            with pytest.raises(DistNetworkError):
                ring.read_exposed(random.choice(EXTREMES), 1, 1)
        case 6:
            ring.take(bytes(random.randint(0, 2)), received[: random.randint(0, len(received))])


def test_no_word_leads_out_of_the_ring() -> None:
    @fuzzed
    @given(seeds)
    def run(seed: int) -> None:
        random = Random(seed)
        for _ in range(BATCH):
            shared = Shared()
            with contextlib.suppress(ProtocolError):
                for _ in range(random.randint(1, 12)):
                    spoil(shared, random)
                    use(shared.ring, random)
            shared.check_guards()

    with memory_within(MEMORY):
        run()


@pytest.mark.parametrize("head", [CAPACITY + 1, 1 << 62, (1 << 64) - 1])
def test_a_head_out_of_range_ends_the_connection(shared: Shared, head: int) -> None:
    shared.words[1][shm_ring._HEAD] = head
    with pytest.raises(ProtocolError, match=f"rank 1 set the head of a ring of {CAPACITY} bytes to {head}"):
        shared.ring.recv_into(memoryview(bytearray(8 * CAPACITY)))


@pytest.mark.parametrize("tail", [1, 1 << 62, (1 << 64) - 1])
def test_a_tail_out_of_range_ends_the_connection(shared: Shared, tail: int) -> None:
    shared.words[0][shm_ring._TAIL] = tail
    with pytest.raises(ProtocolError, match="rank 1 set the tail"):
        shared.ring.send([bytes(np.int64(CAPACITY))])


def test_own_counters_are_not_read_from_shared_memory(shared: Shared) -> None:
    assert shared.ring.send([b"12345678"]) == 8
    shared.words[0][shm_ring._HEAD] = (1 << 64) - 1
    assert shared.ring.send([b"12345678"]) == 8
    assert shared.words[0][shm_ring._HEAD] == 16
