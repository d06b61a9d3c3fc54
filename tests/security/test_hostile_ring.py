"""A hostile process at the other end of shared memory: no value that it writes there leads out of the ring."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given
from support.hostile import BATCH, fuzzed, memory_within, seeds

from rankmesh_agent import native
from rankmesh_agent.group.flight_recorder import FlightRecorder
from rankmesh_agent.group.local_state import LocalGroupState
from rankmesh_agent.group.messages import NativeMessages
from rankmesh_agent.progress.engine import ProgressEngine
from rankmesh_agent.progress.framing import FramedConnection
from rankmesh_agent.progress.matching import MessageMatcher
from rankmesh_agent.shared_memory.mapping import Mapping
from rankmesh_agent.transports import shm_ring
from rankmesh_agent.transports.shm_ring import RingConnection
from rankmesh_agent.wire import frames
from rankmesh_agent.wire.dtypes import code_of
from rankmesh_agent.wire.errors import DistNetworkError, ProtocolError
from rankmesh_agent.wire.frames import Opcode

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

    def __init__(self, make: Callable[[int], Mapping] = Mapping.anonymous) -> None:
        size = 2 * (shm_ring._DATA + CAPACITY)
        self.memory = make(size + 2 * GUARD)
        self.memory.bytes[:] = 0xA5
        rings = Mapping.anonymous(size)
        rings.bytes, rings.address = self.memory.bytes[GUARD:-GUARD], self.memory.address + GUARD
        rings.bytes[:] = 0
        self.words = (
            rings.bytes.data[: shm_ring._DATA].cast("Q"),
            rings.bytes.data[shm_ring._DATA + CAPACITY : 2 * shm_ring._DATA + CAPACITY].cast("Q"),
        )
        self.ring = RingConnection(rings, CAPACITY, Doorbell(), client=True)  # type: ignore[arg-type]
        self.at_once = None if native.core is None else at_once(self.ring)

    def check_guards(self) -> None:
        assert (self.memory.bytes[:GUARD] == 0xA5).all()
        assert (self.memory.bytes[-GUARD:] == 0xA5).all()


@pytest.fixture
def shared() -> Shared:
    return Shared()


@functools.cache
def own_engine() -> ProgressEngine:
    return ProgressEngine(0, 1, 2, eager_limit=CAPACITY, oversubscribed=True)


def at_once(ring: RingConnection) -> Callable[..., bool]:
    """Return what sends and receives messages in the compiled core, which believes every word."""
    assert native.core is not None
    engine = own_engine()
    engine.rings[1] = FramedConnection(1, ring, CAPACITY)
    state = LocalGroupState(engine, 1, "world", (0, 1), {}, FlightRecorder())
    return NativeMessages(native.core, state, MessageMatcher(engine, 1, int, print)).at_once


def spoil(shared: Shared, random: Random) -> None:
    """Set a word of one of the rings."""
    if random.random() < 0.6:
        value = random.choice(EXTREMES) + random.randint(-2, 2)
        random.choice(shared.words)[random.choice((0, 1, 2, 3, 8, 9, 16, 24))] = value % (1 << 64)


def use(shared: Shared, random: Random) -> None:
    """Do what the engine, and the compiled core, does with a connection."""
    ring = shared.ring
    received = memoryview(bytearray(3 * CAPACITY))
    match random.randrange(8 if shared.at_once is None else 10):
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
        case 7:
            length = random.choice((0, 1, CAPACITY // 2, CAPACITY - 64))
            forge_message(shared, length, random.choice((0, length, CAPACITY, -1)))
        case _:
            assert shared.at_once is not None
            array = np.full(random.choice((0, 1, CAPACITY // 2, CAPACITY - 64, CAPACITY - 63)), 0xA5, np.uint8)
            shared.at_once(random.random() < 0.5, array, 1, 0)


def forge_message(shared: Shared, length: int, come: int) -> None:
    """Write the header of a message where the next one is expected, as if so many of its bytes had come."""
    ring = shared.ring._in
    header = frames.encode(Opcode.EAGER, code_of(np.dtype(np.uint8)), 1, 1, length=length)
    for place, byte in enumerate(header):
        ring.data[(ring.position + place) % CAPACITY] = byte
    ring.words[shm_ring._HEAD] = (ring.position + len(header) + come) % (1 << 64)


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
                    use(shared, random)
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


@pytest.mark.skipif(native.core is None, reason="the compiled core alone reads the head twice")
def test_a_head_that_goes_back_in_a_message(tmp_path: Path) -> None:
    shared = Shared(functools.partial(Mapping.create, str(tmp_path), "job"))
    shared.memory.release()
    memory = np.full(3 * GUARD, 0xA5, np.uint8)
    array, head = memory[GUARD : GUARD + CAPACITY // 2], shared.words[1]
    forge_message(shared, array.size, 0)
    child = os.fork()
    while not child:
        for head[shm_ring._HEAD] in (64, 80, 96, 0):
            pass
    try:
        until = time.monotonic() + 0.5
        while time.monotonic() < until:
            assert shared.at_once is not None
            assert not shared.at_once(False, array, 1, 0)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert (memory[:GUARD] == 0xA5).all()
    assert (memory[GUARD + array.size :] == 0xA5).all()


def test_own_counters_are_not_read_from_shared_memory(shared: Shared) -> None:
    assert shared.ring.send([b"12345678"]) == 8
    shared.words[0][shm_ring._HEAD] = (1 << 64) - 1
    assert shared.ring.send([b"12345678"]) == 8
    assert shared.words[0][shm_ring._HEAD] == 16
