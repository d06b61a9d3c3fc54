"""A hostile rank: mutated, reordered and excessive frames of the mesh end its own connection, and nothing else."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import example, given
from support.hostile import fuzzed, memory_within, sequences_like

from rankmesh_agent.group.flight_recorder import FlightRecorder
from rankmesh_agent.group.local import LocalCommunicator
from rankmesh_agent.group.local_state import LocalGroupState
from rankmesh_agent.progress import matching, message_link, status, wait_graph
from rankmesh_agent.progress.engine import ProgressEngine
from rankmesh_agent.progress.matching import WINDOW
from rankmesh_agent.progress.message_queues import ANY
from rankmesh_agent.progress.status import Status
from rankmesh_agent.transports.base import Connection
from rankmesh_agent.wire import frames, goodbye
from rankmesh_agent.wire.dtypes import code_of
from rankmesh_agent.wire.errors import DistError, DistNetworkError
from rankmesh_agent.wire.frames import Opcode

GROUP, EPOCH, TAG = 7, 1, 5
EAGER = 1 << 12
BYTES = code_of(np.dtype(np.uint8))
MEMORY = 64 << 20
"""Bytes that a hostile rank makes this one allocate, at most."""


class Hostile(Connection):
    """The connection of a rank that has sent some bytes."""

    medium = "tcp"
    peer = "rank 1"

    def __init__(self, received: bytes = b"") -> None:
        self.received = memoryview(received)
        self._fd = os.eventfd(0)

    def send(self, buffers):
        return sum(map(len, buffers))

    def recv_into(self, buffer):
        count = min(len(buffer), len(self.received))
        buffer[:count] = self.received[:count]
        self.received = self.received[count:]
        return count

    def read_exposed(self, address, into, nbytes):
        raise DistNetworkError("no memory is exposed")

    def fileno(self):
        return self._fd

    def events(self, writing):
        return 1

    def has_work(self, writing, reading=True):
        return False

    def prepare_wait(self, writing, reading=True):
        return True

    def on_wakeup(self):
        return True

    def close(self):
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1


class Rank:
    """Rank 0 of a group of three, in a call and with messages under way, whose peer 1 is hostile."""

    def __init__(self) -> None:
        self.hostile = Hostile()
        self.engine = ProgressEngine(0, EPOCH, 3, eager_limit=EAGER)
        for rank, connection in {1: self.hostile, 2: Hostile()}.items():
            self.engine.add_connection(rank, connection)
        state = LocalGroupState(self.engine, GROUP, "group", (0, 1, 2), {}, FlightRecorder())
        self.group = LocalCommunicator(state, 10.0)
        self.engine.register_sink(GROUP, self.group)
        self.group.link.begin(3, 33, lambda ready, missing, idle=None: None)
        self.matcher = self.group.matcher
        with self.engine.lock:
            self.received = np.zeros(8, np.uint8)
            self.matcher.receive(1, self.received.data, BYTES, TAG)
            self.matcher.receive(ANY, np.zeros(1 << 13, np.uint8).data, BYTES, TAG + 1)
            self.matcher.send(1, np.zeros(1 << 13, np.uint8).data, BYTES, TAG)
            self.group.link.start([], [(1, np.zeros(64, np.uint8).data)])

    def deliver(self, *sent: bytes) -> None:
        """Process what rank 1 has sent."""
        self.hostile.received = memoryview(b"".join(sent))
        if not self.ending():
            self.engine._poller.due.add(self.engine._peers[1])
        for _ in range(3):
            self.engine.progress()

    def receive(self, *sent: bytes) -> None:
        """Process what rank 1 has sent, and what this rank does then."""
        self.deliver(*sent)
        with self.engine.lock:
            if 1 not in self.engine.lost_peers:
                self.matcher.receive(1, np.zeros(16, np.uint8).data, BYTES, TAG)
        self.engine.progress()
        self.engine.wait_graph.stragglers([1, 2], GROUP, 3)
        self.group.link.calls.missing(3)
        self.group.link.begin(4, 44, lambda ready, missing, idle=None: None)

    def ending(self) -> str:
        """Return the reason why rank 1 is disconnected, empty if it is not."""
        lost = self.engine.lost_peers.get(1)
        return "" if lost is None else lost.reason

    def close(self) -> None:
        self.engine.close(timeout=0.0)


def frame(opcode: Opcode, payload: bytes = b"", **fields: int) -> bytes:
    return frames.encode(opcode, **{"group": GROUP, "epoch": EPOCH, "length": len(payload), **fields}) + payload


def corpus() -> Iterator[bytes]:
    failure = {"code": "rank-failed", "message": "it failed", "ranks": [2], "op": "all_reduce", "seq": 3}
    reason = goodbye.Goodbye("it left", raised=True, ranks=(1,)).encode()
    yield frame(Opcode.ENTER, b"small", seq=3, fingerprint=33)
    yield frame(Opcode.ENTER, seq=4, part=1, fingerprint=44)
    for seq, fingerprint in ((4, 44), (3, 33), (3, status.DIFFERENT)):
        calls = status.encode([(Status(GROUP, seq, fingerprint, "barrier()"), 0b010)])
        yield frame(Opcode.ENTER, calls, part=message_link._STATUS)
        yield frame(Opcode.ENTER, calls, part=message_link._LAUNCHES)
        yield frame(Opcode.ENTER, calls, seq=3, part=message_link._DESCRIPTIONS)
    yield frame(Opcode.ENTER, b"early", group=99, seq=1)
    waits = status.encode([(Status(GROUP, 3, 5, "barrier", ((2, 2),)), 0), (Status(0, -1, 0, "limit", ((1, 1),)), 0)])
    yield frame(Opcode.ENTER, waits, group=wait_graph.GROUP, part=wait_graph._ANSWER)
    yield frame(Opcode.ENTER, group=wait_graph.GROUP, part=wait_graph._QUESTION)
    yield frame(Opcode.PART, bytes(64), seq=3, fingerprint=33)
    yield frame(Opcode.EAGER, bytes(8), dtype=BYTES, tag=TAG, part=1)
    yield frame(Opcode.EAGER, bytes(16), dtype=BYTES, tag=9, part=2)
    yield frame(Opcode.RTS, dtype=BYTES, seq=1, tag=TAG + 1, total=1 << 13)
    yield frame(Opcode.RTS, dtype=BYTES, seq=2, tag=TAG, total=8, fingerprint=4096, part=1)
    yield frame(Opcode.BULK, bytes(1 << 13), dtype=BYTES, seq=1, tag=TAG + 1)
    yield frame(Opcode.CTS, seq=1)
    yield frame(Opcode.DONE, seq=1)
    yield frame(Opcode.CREDIT, total=1 << 62)
    yield frame(Opcode.REFUSE, b"it does not fit", seq=1)
    yield frame(Opcode.REFUSE, b"it does not fit", part=1)
    yield frame(Opcode.WITHDRAW, seq=2)
    yield frame(Opcode.ABORT, json.dumps(failure).encode())
    yield frame(Opcode.ABORT, b"done", part=goodbye.GROUP)
    yield frame(Opcode.GOODBYE, reason, group=0)
    yield frame(Opcode.GOODBYE, b"gone", group=0, tag=3)


@pytest.fixture
def rank() -> Iterator[Rank]:
    made = Rank()
    yield made
    made.close()


def test_mutated_frames_end_in_our_errors() -> None:
    @fuzzed
    @given(sequences_like(list(corpus()), fixed=8))
    @example([[frame(Opcode.ABORT, b"[" * 60_000)]])
    @example([[frame(Opcode.ENTER, b'[[0,0,0,"",[[1e999,0]],"0"]]', group=wait_graph.GROUP, part=wait_graph._ANSWER)]])
    def run(sequences: list[list[bytes]]) -> None:
        for sent in sequences:
            with contextlib.closing(Rank()) as rank, contextlib.suppress(DistError):
                rank.receive(*sent)

    with memory_within(MEMORY):
        run()


def test_credit_that_is_ignored_ends_the_connection(rank: Rank) -> None:
    with memory_within(MEMORY):
        for number in range(2 * WINDOW // EAGER):
            rank.receive(frame(Opcode.EAGER, bytes(EAGER), dtype=BYTES, tag=9, part=number))
    assert "rank 1 sent more messages than a receiver holds" in rank.ending()


def test_too_many_announcements_end_the_connection(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matching, "MAX_ANNOUNCED", 100)
    rank.deliver(*(frame(Opcode.RTS, dtype=BYTES, seq=10 + each, tag=9, total=1 << 62) for each in range(101)))
    assert "101 announcements, at most 100" in rank.ending()


def test_arrivals_at_future_calls_end_the_connection(rank: Rank) -> None:
    with memory_within(MEMORY):
        for seq in range(1000):
            rank.receive(frame(Opcode.ENTER, bytes(frames.SMALL), seq=1000 + seq))
    assert "rank 1 arrived at step 0 of call #" in rank.ending()


def test_frames_for_groups_that_do_not_exist_end_the_connection(rank: Rank) -> None:
    with memory_within(MEMORY):
        for group in range(1000):
            rank.receive(frame(Opcode.ENTER, bytes(frames.SMALL), group=1000 + group))
    assert "rank 1 sent too many frames for groups" in rank.ending()


def test_the_end_of_a_rank_outside_the_world_ends_the_connection(rank: Rank) -> None:
    rank.receive(frame(Opcode.GOODBYE, group=0, tag=1 << 40))
    assert "which is not in the world" in rank.ending()
    assert set(rank.engine.lost_peers) == {1}
