"""Two rings in shared memory, one a direction, with the socket that set them up as doorbell and sign of life.

::

    line 0   head     bytes ever written   (the producer's), its pid, where it has the memory, its generation
    line 1   tail     bytes ever read      (the consumer's), whether it can read the producer's memory
    line 2   reader asleep: the producer rings when it has written
    line 3   writer asleep: the consumer rings when it has made room
    line 4…  data

Only the producer stores head and only the consumer stores tail, each after the bytes it speaks for. A side that wants
to sleep raises its flag, looks again, then polls the socket; the other side looks at the flag after each store. Both
put a lock operation between store and look, which x86 executes as a full fence, so one of the two sees the other.

Where the kernel lets the consumer read the producer's memory, large messages need no ring: the producer offers them and
the consumer copies them itself. The *generation* counts how often the producer has taken its offers back. It counts
before it changes the bytes, and the consumer looks after it has read them, so it never takes changed bytes for good.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from rankmesh_agent.transports import process_vm
from rankmesh_agent.transports.base import Buffer, Connection, connection_lost
from rankmesh_agent.transports.shared_memory import CACHE_LINE, Mapping, unsupported
from rankmesh_agent.transports.tcp import PROPOSAL, Proposal, TcpConnection, TcpTransport
from rankmesh_agent.wire.errors import DistNetworkError

RING_BYTES = 1 << 18
_DATA = 4 * CACHE_LINE
_HEAD, _TAIL, _READER, _WRITER = (line * CACHE_LINE // 8 for line in range(4))
_PID, _ADDRESS, _GENERATION = (_HEAD + word for word in range(1, 4))
_READS = _TAIL + 1
_GENERATIONS = 1 << 32
_NONCE = 16
"""Bytes that the connecting side puts at the beginning of its ring: who has them there has this memory."""
_LARGE = 1 << 15
"""Copies above this go through NumPy, which lets other threads run meanwhile."""
_fence = threading.Lock()


class _Ring:
    """One direction: a view of its lines and its data."""

    def __init__(self, mapping: Mapping, offset: int, capacity: int) -> None:
        memory = mapping.bytes.data[offset : offset + _DATA + capacity]
        self.words = memory[:_DATA].cast("Q")
        self.data = memory[_DATA:]
        self.array = np.frombuffer(self.data, np.uint8)
        self.capacity = capacity

    def readable(self) -> int:
        """Bytes to read now."""
        return self.words[_HEAD] - self.words[_TAIL]

    def writable(self) -> int:
        """Room to write now."""
        return self.capacity - self.readable()

    def write(self, buffers: Sequence[Buffer]) -> int:
        """Append what fits of ``buffers``; return how many bytes."""
        words, capacity = self.words, self.capacity
        begin = head = words[_HEAD]
        room = capacity - (head - words[_TAIL])
        for buffer in buffers:
            if len(buffer) > room:
                if not room:
                    break
                buffer = memoryview(buffer)[:room]
            length = len(buffer)
            at = head % capacity
            first = capacity - at
            if length <= first:
                self._copy_in(at, buffer)
            else:
                self._copy_in(at, buffer[:first])
                self._copy_in(0, buffer[first:])
            head += length
            room -= length
        if head != begin:
            words[_HEAD] = head
        return head - begin

    def read(self, into: memoryview) -> int:
        """Fill ``into`` with what is there; return how many bytes."""
        words = self.words
        tail = words[_TAIL]
        length = words[_HEAD] - tail
        if not length:
            return 0
        if length < len(into):
            into = into[:length]
        else:
            length = len(into)
        at = tail % self.capacity
        first = self.capacity - at
        if length <= first:
            self._copy_out(at, into)
        else:
            self._copy_out(at, into[:first])
            self._copy_out(0, into[first:])
        words[_TAIL] = tail + length
        return length

    def _copy_in(self, at: int, piece: Buffer) -> None:
        if len(piece) > _LARGE:
            self.array[at : at + len(piece)] = np.frombuffer(piece, np.uint8)
        else:
            self.data[at : at + len(piece)] = piece

    def _copy_out(self, at: int, into: memoryview) -> None:
        if len(into) > _LARGE:
            np.frombuffer(into, np.uint8)[:] = self.array[at : at + len(into)]
        else:
            into[:] = self.data[at : at + len(into)]


class RingConnection(Connection):
    """One end of a pair of rings.

    Args:
        mapping: memory of twice ``_DATA`` + capacity bytes; the first ring carries what the connecting side sends.
        capacity: bytes of data in each ring.
        doorbell: the socket between the two processes.
        client: whether this side connected.
    """

    medium: ClassVar[str] = "segment"

    def __init__(self, mapping: Mapping, capacity: int, doorbell: TcpConnection, *, client: bool) -> None:
        self.peer = doorbell.peer
        there, back = (_Ring(mapping, direction * (_DATA + capacity), capacity) for direction in range(2))
        self._out, self._in = (there, back) if client else (back, there)
        self._doorbell = doorbell
        self._gone: DistNetworkError | None = None
        self._pid = self._in.words[_PID]
        self._in.words[_READS] = process_vm.can_read(
            self._pid, self._in.words[_ADDRESS] + _DATA, mapping.bytes[_DATA : _DATA + _NONCE].tobytes()
        )

    def send(self, buffers: Sequence[Buffer]) -> int:
        if self._gone is not None:
            raise self._gone
        sent = self._out.write(buffers)
        if sent:
            self._ring(self._out, _READER)
        return sent

    def recv_into(self, buffer: memoryview) -> int:
        received = self._in.read(buffer)
        if received:
            self._ring(self._in, _WRITER)
        elif self._gone is not None and not self._in.readable():
            raise self._gone
        return received

    def fileno(self) -> int:
        return self._doorbell.fileno()

    def events(self, writing: bool) -> int:
        return select.POLLIN

    def has_work(self, writing: bool) -> bool:
        return bool(self._gone is not None or self._in.readable() or (writing and self._out.writable()))

    def prepare_wait(self, writing: bool) -> bool:
        self._in.words[_READER] = 1
        if writing:
            self._out.words[_WRITER] = 1
        with _fence:
            pass
        return not self.has_work(writing)

    def on_wakeup(self) -> None:
        rings = memoryview(bytearray(64))
        try:
            while self._doorbell.recv_into(rings) == len(rings):
                pass
        except DistNetworkError as error:
            self._gone = error

    def expose(self, view: memoryview) -> tuple[int, int]:
        if not self._out.words[_READS]:
            return 0, 0
        return process_vm.address_of(view), self._out.words[_GENERATION]

    def revoke(self) -> None:
        self._out.words[_GENERATION] = (self._out.words[_GENERATION] + 1) % _GENERATIONS

    def read_exposed(self, address: int, into: int, nbytes: int) -> None:
        process_vm.read(self._pid, address, into, nbytes, parallel=self.parallel_reads)

    def still_exposed(self, generation: int) -> bool:
        return self._in.words[_GENERATION] == generation

    def close(self) -> None:
        self._gone = connection_lost(self.peer, "closed here")
        self.revoke()
        self._doorbell.close()

    def close_in_child(self) -> None:
        self._doorbell.close_in_child()

    def _ring(self, ring: _Ring, sleeper: int) -> None:
        with _fence:
            pass
        if ring.words[sleeper]:
            ring.words[sleeper] = 0
            with contextlib.suppress(DistNetworkError):  # a full socket rings too; a lost one shows when we receive
                self._doorbell.send([b"!"])


def _introduce(mapping: Mapping, offset: int) -> None:
    """Tell the peer, in the ring that this side will write to, where to read this process's memory."""
    words = mapping.bytes.data[offset : offset + CACHE_LINE].cast("Q")
    words[_PID], words[_ADDRESS] = os.getpid(), mapping.address


class _RingOffer(Proposal):
    """Proposes two rings in memory that was made for them, whose name is gone as soon as both sides have it.

    Args:
        mapping: the memory.
        ring_bytes: bytes of data in each ring.
        strict: whether to raise instead of staying on TCP.
    """

    def __init__(self, mapping: Mapping, ring_bytes: int, *, strict: bool) -> None:
        self._mapping = mapping
        self._ring_bytes = ring_bytes
        self._strict = strict
        nonce = mapping.name[-_NONCE:].encode()
        mapping.bytes[_DATA : _DATA + len(nonce)] = np.frombuffer(nonce, np.uint8)
        _introduce(mapping, 0)
        self.proposal = PROPOSAL.pack(1, ring_bytes, mapping.name.encode(), nonce)

    def resolve(self, connection: TcpConnection, taken: bool) -> Connection:
        if taken:
            return RingConnection(self._mapping, self._ring_bytes, connection, client=True)
        if self._strict:
            raise DistNetworkError(
                f"RANKMESH_TRANSPORT=shm, but {connection.peer} cannot map {self._mapping.path}: both "
                "ranks must see the same RANKMESH_SHM_DIR",
                address=connection.peer,
            )
        return super().resolve(connection, taken)

    def close(self) -> None:
        self._mapping.unlink()


class RingTransport(TcpTransport):
    """Reaches processes of the same host through shared memory, set up over TCP; others, and as a fallback, over TCP.

    Args:
        token: the job's secret.
        directory: where shared memory is made.
        job: the job's name, part of the files' names.
        ring_bytes: bytes of data in each ring.
        strict: whether to raise instead of staying on TCP when memory cannot be shared.
    """

    def __init__(
        self, token: str, directory: str, job: str, *, ring_bytes: int = RING_BYTES, strict: bool = False
    ) -> None:
        super().__init__(token)
        self._directory = directory
        self._job = job
        self._ring_bytes = ring_bytes
        self._strict = strict

    def _offer(self) -> Proposal:
        try:
            if reason := unsupported():
                raise DistNetworkError(reason)
            mapping = Mapping.create(self._directory, self._job, self._size())
        except DistNetworkError:
            if self._strict:
                raise
            return super()._offer()
        return _RingOffer(mapping, self._ring_bytes, strict=self._strict)

    def _accept_proposal(self, connection: TcpConnection, proposal: bytes) -> tuple[Connection, bool]:
        wanted, ring_bytes, name, nonce = PROPOSAL.unpack(proposal)
        mapping = None
        if wanted and CACHE_LINE <= ring_bytes <= 1 << 30 and not unsupported():
            with contextlib.suppress(DistNetworkError, UnicodeDecodeError):
                mapping = Mapping.open(self._directory, name.rstrip(b"\0").decode("ascii"), 2 * (_DATA + ring_bytes))
        said = nonce.rstrip(b"\0")
        if mapping is None or mapping.bytes[_DATA : _DATA + len(said)].tobytes() != said:
            return super()._accept_proposal(connection, proposal)
        _introduce(mapping, _DATA + ring_bytes)
        return RingConnection(mapping, ring_bytes, connection, client=False), True

    def _size(self) -> int:
        return 2 * (_DATA + self._ring_bytes)
