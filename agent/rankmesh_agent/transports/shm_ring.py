"""Two rings in shared memory, one for each direction; the socket of their handshake is the doorbell and reports exits.

::

    line 0   head     total bytes written  (the producer's), its pid, the address of its mapping, its generation
    line 1   tail     total bytes read     (the consumer's), whether it can read the producer's memory
    line 2   reader sleeps: the producer rings the doorbell when it has written
    line 3   writer sleeps: the consumer rings the doorbell when it has made room
    line 4…  data

Only the producer stores head and only the consumer stores tail, each after the bytes that it counts. Before it sleeps,
a side sets its flag, checks the ring again, then polls the socket; the other side checks the flag after each store.
Both place a lock operation between the store and the check, which x86 executes as a full fence, so one of the two sees
the other's store; Mapping.words has the order that other processors do not keep.

Where the kernel lets the consumer read the producer's memory, large messages bypass the ring, unless both sides are at
work on them: the producer exposes them and the consumer copies them itself. The *generation* counts the producer's
revocations. The producer increments it before it changes the bytes, and the consumer checks it after the read, so the
consumer detects changed bytes.
"""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import select
import threading
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from rankmesh_agent.native import core
from rankmesh_agent.net.descriptors import raise_if_exhausted
from rankmesh_agent.net.fork import reset_after_fork
from rankmesh_agent.net.spin import core_contention
from rankmesh_agent.shared_memory import process_vm
from rankmesh_agent.shared_memory.mapping import CACHE_LINE, Mapping, unsupported
from rankmesh_agent.transports.base import Buffer, Connection, connection_lost
from rankmesh_agent.transports.tcp import ACCEPTED, PROPOSAL, Proposal, TcpTransport
from rankmesh_agent.transports.tcp_connection import TcpConnection
from rankmesh_agent.wire.errors import DistNetworkError, ProtocolError
from rankmesh_agent.wire.hello import Script, welcome

RING_BYTES = 1 << 18
_DATA = 4 * CACHE_LINE
_HEAD, _TAIL, _READER_SLEEPS, _WRITER_SLEEPS = (line * CACHE_LINE // 8 for line in range(4))
_PID, _ADDRESS, _GENERATION = (_HEAD + word for word in range(1, 4))
_CAN_READ = _TAIL + 1
_GENERATIONS = 1 << 32
_NONCE = 16
"""Bytes that the client writes at the beginning of its ring, by which a peer recognizes the memory."""
_PIECE_BYTES, _LONG_PIECE_BYTES = 1 << 14, 1 << 16
"""Bytes of a long buffer that its consumer can read while the producer writes the next ones: at first, and at most."""
_STREAM_BYTES = 16 << 20
"""Most bytes of a message that takes less time through the ring, both sides at work, than one read of the memory."""
_SPIN_ROUNDS, _SPINS = 64, 16
"""Rounds of a wait for bytes, and checks in each: see slots."""
_TAKE_SPINS = 256
"""Checks for the rest of a frame, or for room for it: several times the duration of the copy of a piece."""
_fence = reset_after_fork(threading.Lock())


class _Ring(object if core is None else core.Ring):  # type: ignore[misc]  # of position, capacity and address
    """The ring of one direction: a view of its lines and its data.

    The peer can write to all of this memory, so each side keeps its own counter, and checks the peer's.

    Attributes:
        position: this side's own counter: the head of the producer, the tail of the consumer.
        patience: checks for room in the middle of a long buffer.
    """

    patience = 0

    def __init__(self, mapping: Mapping, offset: int, capacity: int, peer: str = "") -> None:
        self.words = mapping.words(offset, _DATA)
        self.data = mapping.bytes.data[offset + _DATA : offset + _DATA + capacity]
        self.capacity = capacity
        self.address = mapping.address + offset
        self.position = 0
        self._peer = peer

    def readable(self) -> bool:
        """Return whether there are bytes to read, for the consumer."""
        return self.words[_HEAD] != self.position

    def writable(self) -> bool:
        """Return whether there is room, for the producer."""
        return self.position - self.words[_TAIL] != self.capacity

    def write(self, buffers: Sequence[Buffer]) -> int:
        """Append as many bytes as fit; return their number. ProtocolError: the peer's counter is out of range."""
        words, data, capacity = self.words, self.data, self.capacity
        begin = head = self.position
        room = capacity - (head - words[_TAIL])
        if not 0 <= room <= capacity:
            raise self._violation("tail", words[_TAIL])
        for buffer in buffers:
            length, at = len(buffer), head % capacity
            if length <= room and length <= _PIECE_BYTES and at + length <= capacity:  # nearly all
                data[at : at + length] = buffer
                head += length
                room -= length
                continue
            rest, piece = memoryview(buffer), _PIECE_BYTES
            while rest and (room or (room := self._room_soon(head))):
                at = head % capacity
                count = min(len(rest), room, piece, capacity - at)
                data[at : at + count] = rest[:count]
                head += count
                room -= count
                words[_HEAD] = head
                rest, piece = rest[count:], min(2 * piece, _LONG_PIECE_BYTES)
            if rest:
                break
        if head != begin:
            self.position = words[_HEAD] = head
        return head - begin

    def _room_soon(self, head: int) -> int:
        """Return the room of a full ring, after a moment in which a consumer that is at work may make some."""
        words, full = self.words, head - self.capacity
        for _ in range(self.patience):
            if words[_TAIL] != full or words[_READER_SLEEPS]:
                break
        room = words[_TAIL] - full
        if not 0 <= room <= self.capacity:
            raise self._violation("tail", words[_TAIL])
        return room

    def read(self, into: memoryview) -> int:
        """Read at most ``len(into)`` bytes; return their number. ProtocolError: the peer's counter is out of range."""
        words, data, capacity = self.words, self.data, self.capacity
        tail = self.position
        length = words[_HEAD] - tail
        if not 0 < length <= capacity:
            if not length:
                return 0
            raise self._violation("head", length + tail)
        if length < len(into):
            into = into[:length]
        else:
            length = len(into)
        at = tail % capacity
        first = capacity - at
        if length <= first:
            into[:] = data[at : at + length]
        else:
            into[:first] = data[at:]
            into[first:] = data[: length - first]
        self.position = words[_TAIL] = tail + length
        return length

    def take(self, head: bytes, into: memoryview) -> bool:
        """Read ``head``, and ``into`` after it, as its producer writes it; False if these are not the next bytes.

        The tail advances once all bytes have come; where the producer stops in between, they are read again later.
        """
        words, data, capacity = self.words, self.data, self.capacity
        tail, length, done, spins = self.position, len(into), 0, 0
        begin, at = tail + len(head), tail % capacity
        if not len(head) <= words[_HEAD] - tail <= capacity or data[at : at + len(head)] != head:
            return False
        while done < length:
            at = (begin + done) % capacity
            count = min(words[_HEAD] - begin - done, length - done, capacity - at)
            if count > 0:
                into[done : done + count] = data[at : at + count]
                done += count
            elif (spins := spins + 1) > _TAKE_SPINS:
                return False
        self.position = words[_TAIL] = begin + length
        return True

    def _violation(self, name: str, value: int) -> ProtocolError:
        return ProtocolError(
            f"{self._peer} set the {name} of a ring of {self.capacity} bytes to {value}, and this side is at "
            f"{self.position}",
            address=self._peer,
        )


@functools.cache
def _closed_ring() -> _Ring:
    """Return the ring of closed connections: it is empty, and no message in it is exposed."""
    ring = _Ring(Mapping.anonymous(_DATA + CACHE_LINE), 0, CACHE_LINE)
    ring.words[_GENERATION] = _GENERATIONS  # which no message has
    return ring


class RingConnection(Connection, object if core is None else core.Rings):  # type: ignore[misc]  # of both rings
    """One end of a pair of rings.

    Args:
        mapping: memory of twice ``_DATA`` + capacity bytes; the client writes to the first ring.
        doorbell: the socket between the two processes.
    """

    medium: ClassVar[str] = "segment"

    def __init__(self, mapping: Mapping, capacity: int, doorbell: TcpConnection, *, client: bool) -> None:
        self.peer = doorbell.peer
        first, second = (_Ring(mapping, ring * (_DATA + capacity), capacity, self.peer) for ring in range(2))
        self._out, self._in = (first, second) if client else (second, first)
        self._doorbell = doorbell
        self._lost: DistNetworkError | None = None
        self._own_cores = False
        self._generation = 0
        self._pid = self._in.words[_PID]
        self._can_read = self._in.words[_CAN_READ] = process_vm.can_read(
            self._pid, self._in.words[_ADDRESS] + _DATA, mapping.bytes[_DATA : _DATA + _NONCE].tobytes()
        )

    def send(self, buffers: Sequence[Buffer]) -> int:
        if self._lost is not None:
            raise self._lost
        sent = self._out.write(buffers)
        if sent:
            self._ring_doorbell(self._out, _READER_SLEEPS)
        return sent

    def take(self, head: bytes, into: memoryview) -> bool:
        taken = self._await_bytes() and self._in.take(head, into)
        if taken:
            self._ring_doorbell(self._in, _WRITER_SLEEPS)
        return taken

    def _await_bytes(self) -> bool:
        """Poll for bytes for a moment, if the host has a core for each rank and is not busy."""
        words, position = self._in.words, self._in.position
        rounds = _SPIN_ROUNDS if self._own_cores and core_contention.should_spin() else 0
        for _ in range(rounds):
            for _ in range(_SPINS):
                if words[_HEAD] != position:
                    return True
            if not core_contention.yield_core():
                break
        return words[_HEAD] != position

    def recv_into(self, buffer: memoryview) -> int:
        received = self._in.read(buffer)
        if received:
            self._ring_doorbell(self._in, _WRITER_SLEEPS)
        elif self._lost is not None and not self._in.readable():
            raise self._lost
        return received

    def recv_payload(self, buffer: memoryview) -> int:
        received, ring, words = self.recv_into(buffer), self._in, self._in.words
        while 0 < received < len(buffer) and (words[_HEAD] != ring.position or self._await_bytes()):
            received += ring.read(buffer[received:])
            if words[_WRITER_SLEEPS]:  # without a fence: the last look has one
                self._ring_doorbell(ring, _WRITER_SLEEPS)
        self._ring_doorbell(ring, _WRITER_SLEEPS)
        return received

    def fileno(self) -> int:
        return self._doorbell.fileno()

    def events(self, writing: bool) -> int:
        return select.POLLIN

    def has_work(self, writing: bool, reading: bool = True) -> bool:
        readable = reading and self._in.readable()
        return bool(self._lost is not None or readable or (writing and self._out.writable()))

    def prepare_wait(self, writing: bool, reading: bool = True) -> bool:
        if reading:
            self._in.words[_READER_SLEEPS] = 1
        if writing:
            self._out.words[_WRITER_SLEEPS] = 1
        with _fence:
            pass
        return not self.has_work(writing, reading)

    def on_wakeup(self) -> bool:
        rings = memoryview(bytearray(64))
        try:
            while self._doorbell.recv_into(rings) == len(rings):
                pass
        except DistNetworkError as error:
            self._lost = error
        return self._lost is None

    def use_aggressive_mode(self) -> None:
        self._own_cores, self._out.patience = True, _TAKE_SPINS

    def streams(self, nbytes: int) -> bool:
        return nbytes <= _STREAM_BYTES and self._own_cores and core_contention.should_spin()

    def expose(self, view: memoryview) -> tuple[int, int]:
        if not self._out.words[_CAN_READ]:
            return 0, 0
        return process_vm.address_of(view), self._generation

    def revoke(self) -> None:
        if self._lost is not None:
            return
        self._generation = self._out.words[_GENERATION] = (self._generation + 1) % _GENERATIONS

    def read_exposed(self, address: int, into: int, nbytes: int) -> None:
        if not self._can_read:
            raise DistNetworkError(f"this process cannot read the memory of {self.peer}", address=self.peer)
        process_vm.read(self._pid, address, into, nbytes, parallel=self._own_cores)  # the core of a waiting peer, too

    def still_exposed(self, generation: int) -> bool:
        # Without its socket, the peer is gone, and its pid may be another process's by now.
        return self.on_wakeup() and self._in.words[_GENERATION] == generation

    def close(self) -> None:
        self.revoke()
        self._lost = connection_lost(self.peer, "closed here")
        self._doorbell.close()
        self._in = self._out = _closed_ring()  # the memory is unmapped now, not when this object is collected

    def _ring_doorbell(self, ring: _Ring, sleeper: int) -> None:
        with _fence:
            pass
        if ring.words[sleeper]:
            ring.words[sleeper] = 0
            with contextlib.suppress(DistNetworkError):  # a full socket wakes, too; the next receive reports a lost one
                self._doorbell.send([b"!"])


def _publish_address(mapping: Mapping, offset: int) -> None:
    """Write this process's pid and mapping address to its outgoing ring, for the peer's reads of its memory."""
    words = mapping.words(offset, CACHE_LINE)
    words[_PID], words[_ADDRESS] = os.getpid(), mapping.address


class _RingOffer(Proposal):
    """Proposal of two rings in new shared memory, which no other process can open once both sides have mapped it."""

    def __init__(self, mapping: Mapping, ring_bytes: int, *, strict: bool) -> None:
        self._mapping = mapping
        self._ring_bytes = ring_bytes
        self._strict = strict
        nonce = secrets.token_hex(_NONCE // 2).encode()
        mapping.bytes[_DATA : _DATA + len(nonce)] = np.frombuffer(nonce, np.uint8)
        _publish_address(mapping, 0)
        self.proposal = PROPOSAL.pack(1, ring_bytes, mapping.name.encode(), nonce)

    def resolve(self, connection: TcpConnection, accepted: bool) -> Connection:
        if accepted:
            return RingConnection(self._mapping, self._ring_bytes, connection, client=True)
        if self._strict:
            raise DistNetworkError(
                f"RANKMESH_TRANSPORT=shm, but {connection.peer} cannot map the shared memory of this rank: "
                "both ranks must see the same RANKMESH_SHM_DIR",
                address=connection.peer,
            )
        return super().resolve(connection, accepted)

    def close(self) -> None:
        self._mapping.release()


class RingTransport(TcpTransport):
    """Transport through shared memory on the same host, set up over TCP; TCP to other hosts, and as a fallback.

    Args:
        strict: whether to raise rather than fall back to TCP if the processes cannot share memory.
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
            mapping = Mapping.create(self._directory, self._job, 2 * (_DATA + self._ring_bytes))
        except DistNetworkError:
            if self._strict:
                raise
            return super()._offer()
        return _RingOffer(mapping, self._ring_bytes, strict=self._strict)

    def _answer(self, connection: TcpConnection, proposal: bytes) -> Script[Connection]:
        proposed, ring_bytes, name, nonce = PROPOSAL.unpack(proposal)
        mapping = None
        if proposed and CACHE_LINE <= ring_bytes <= 1 << 30 and not unsupported():
            mapping = self._open(name, ring_bytes)
        expected = nonce.rstrip(b"\0")
        if mapping is None or mapping.bytes[_DATA : _DATA + len(expected)].tobytes() != expected:
            return (yield from super()._answer(connection, proposal))
        _publish_address(mapping, _DATA + ring_bytes)
        rings = RingConnection(mapping, ring_bytes, connection, client=False)
        yield welcome() + ACCEPTED, 0
        return rings

    def _open(self, name: bytes, ring_bytes: int) -> Mapping | None:
        """Map the memory that a client proposes; return None if this side declines it."""
        try:
            return Mapping.open(self._directory, name.rstrip(b"\0").decode("ascii"), 2 * (_DATA + ring_bytes))
        except (DistNetworkError, UnicodeDecodeError) as error:
            if self._strict:
                raise_if_exhausted(error, "cannot open the shared memory of a peer")
        return None
