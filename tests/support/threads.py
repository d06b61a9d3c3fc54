"""Ranks as threads of one process: a whole mesh over any transport, without gateway or HTTP."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from rankmesh_agent import native
from rankmesh_agent.backends.segment_setup import SegmentOptions
from rankmesh_agent.group.flight_recorder import FlightRecorder
from rankmesh_agent.group.local import LocalCommunicator
from rankmesh_agent.group.local_state import LocalGroupState
from rankmesh_agent.group.options import Options
from rankmesh_agent.net.deadline import Deadline
from rankmesh_agent.progress.engine import ProgressEngine
from rankmesh_agent.transports.shm_ring import RingTransport
from rankmesh_agent.transports.tcp import TcpTransport
from rankmesh_agent.wire.schemas import Member
from support.connecting import connect_all

TRANSPORTS = ("tcp", "segment")
ORDERED = pytest.param(
    "ordered", marks=pytest.mark.skipif(native.core is None, reason="the compiled core orders words")
)
"""Parameter of tests in shared memory for its words on processors that reorder accesses."""
WORLD = 1
SHM = "/dev/shm"
TIMEOUT = 30.0
NOW = Options(TIMEOUT)
"""How to make a call that waits."""
LATER = Options(TIMEOUT, async_op=True)
"""How to make one that does not."""


def transport_named(name: str, token: str = "secret") -> TcpTransport:
    """Return a transport."""
    if name == "tcp":
        return TcpTransport(token)
    return RingTransport(token, SHM, "test", strict=True)


class World:
    """Ranks 0 … size - 1, each with a mesh and the world's communicator, used by a thread of its own.

    Args:
        size: how many.
        transport: what connects them, one of TRANSPORTS.
        slot_bytes: see Segment.
        timeout: seconds a call may take.
        hosts: a letter for each rank: those with the same one are as on one host, and share memory.
    """

    def __init__(
        self, size: int, transport: str, *, slot_bytes: int = 1 << 16, timeout: float = 20.0, hosts: str = ""
    ) -> None:
        self.size = size
        self.shares = transport == "segment" or bool(hosts)
        self.hosts = hosts or "h" * size
        self.slot_bytes = slot_bytes
        self.timeout = timeout
        made = transport_named(transport)
        listeners = [made.listen("127.0.0.1:0") for _ in range(size)]
        self.members = [
            Member(rank, f"{rank:032x}", "here", "host", os.getpid(), [listeners[rank].address], "")
            for rank in range(size)
        ]
        self.recorders = [FlightRecorder() for _ in range(size)]
        self.meshes: list[ProgressEngine] = [None] * size  # type: ignore[list-item]
        self.communicators: list[LocalCommunicator] = [None] * size  # type: ignore[list-item]

        def connect(rank: int) -> None:
            self.meshes[rank] = ProgressEngine(rank, 1, size, eager_limit=1 << 12)
            connect_all(self.meshes[rank], self.members, listeners[rank], made, Deadline(20))
            self.communicators[rank] = self.group(rank, WORLD, "world", range(size))

        try:
            in_threads(size, connect)
        except BaseException:
            self.close()
            raise
        finally:
            for listener in listeners:
                listener.close()

    def group(self, rank: int, group: int, name: str, ranks: Any) -> LocalCommunicator:
        """Make a group at one of its ranks."""
        everyone = {member.rank: member for member in self.members}
        state = LocalGroupState(self.meshes[rank], group, name, tuple(ranks), everyone, self.recorders[rank])
        made = LocalCommunicator(state, self.timeout)
        strict = self.shares and len(set(self.hosts)) == 1
        sharing = SegmentOptions(self.shares, SHM, "test", self.slot_bytes, oversubscribed=True, strict=strict)
        made.start([self.hosts[member] for member in ranks], sharing, self.timeout)
        return made

    def run(self, function: Callable[[LocalCommunicator], Any]) -> list[Any]:
        """Call ``function`` with each rank's communicator, all at once; return what they return, by rank."""
        return in_threads(self.size, lambda rank: function(self.communicators[rank]))

    def close(self) -> None:
        """End all ranks."""

        def end(rank: int) -> None:
            if self.communicators[rank] is not None:
                self.communicators[rank].close()
            if self.meshes[rank] is not None:
                self.meshes[rank].close(timeout=0.5)

        in_threads(self.size, end)


@contextmanager
def world(size: int, transport: str, **options: Any) -> Iterator[World]:
    """A World that ends with the block."""
    made = World(size, transport, **options)
    try:
        yield made
    finally:
        made.close()


def in_threads(size: int, function: Callable[[int], Any], timeout: float = 60.0) -> list[Any]:
    """Call ``function(rank)`` in a thread for each rank; return the results, raise the first error."""
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def call(rank: int) -> None:
        try:
            results[rank] = function(rank)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=call, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    deadline = Deadline(timeout)
    for thread in threads:
        thread.join(deadline.remaining())
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads), "ranks still run: somebody waits for ever"
    return results
