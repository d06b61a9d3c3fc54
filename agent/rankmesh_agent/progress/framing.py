"""Framing on the connections of an engine: received frames go to their sinks, frames to send are queued in order."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np

from rankmesh_agent.native import core
from rankmesh_agent.shared_memory.process_vm import address_of
from rankmesh_agent.transports.base import Buffer, Connection, Unconnected
from rankmesh_agent.wire import frames
from rankmesh_agent.wire.errors import DistNetworkError, ProtocolError
from rankmesh_agent.wire.frames import HEADER_BYTES, Header, Opcode

_AHEAD_BYTES = HEADER_BYTES + (1 << 12)
"""Bytes of one receive where a frame for a posted buffer may begin: the rest of its payload then needs no copy."""
_STAGING_BYTES = HEADER_BYTES + frames.SMALL
REMOTE_READ_BYTES = 32 << 20
"""Bytes read from one peer's memory before the engine turns to the other peers."""
_ACK_BATCH_BYTES = 1 << 18
"""Bytes of short messages read from a peer's memory before they are acknowledged together."""
_MAX_SENT_BYTES = 4 << 20
"""Bytes of the queued frames but the last that are sent at once: about as many as one system call takes."""
_TURN_BYTES = 8 << 20
"""Bytes received from one peer before the engine turns to the other peers."""
UNCONNECTED = Unconnected()


class Transfer:
    """A frame being sent, or a buffer being filled."""

    done = False
    error: Exception | None = None
    source = -1


class RemoteRead:
    """A message read from the peer's memory.

    Args:
        exposed: the message's address and the generation of its exposure.
        on_done: called, with the engine's lock held, with whether the message has been read completely and is valid.
    """

    __slots__ = ("_address", "_generation", "_into", "_read", "_view", "group", "on_done", "seq")

    def __init__(
        self, group: int, seq: int, exposed: tuple[int, int], view: memoryview, on_done: Callable[[bool], None]
    ) -> None:
        self.group = group
        self.seq = seq
        self.on_done = on_done
        self._address, self._generation = exposed
        self._view = view
        self._into = address_of(view)
        self._read = 0

    @property
    def next_bytes(self) -> int:
        """Bytes that the next step reads."""
        return min(REMOTE_READ_BYTES, len(self._view) - self._read)

    def advance(self, connection: Connection) -> bool | None:
        """Read one step; return None if more is left to read, otherwise whether the message is valid."""
        step = self.next_bytes
        try:
            connection.read_exposed(self._address + self._read, self._into + self._read, step)
        except DistNetworkError:
            return False  # the peer may still send the message; the connection reports a lost peer
        self._read += step
        return None if self._read < len(self._view) else connection.still_exposed(self._generation)


class FrameSink(ABC):
    """Receiver of a group's frames. All methods are called with the engine's lock held and must not wait."""

    def buffer_for(self, rank: int, header: Header) -> memoryview | None:
        """Return the posted buffer for a frame's payload; a PART or BULK frame waits while this is None."""
        return None

    @abstractmethod
    def on_frame(self, rank: int, header: Header, payload: memoryview | bytes) -> None:
        """Receive a complete frame; the payload is empty if it is in the posted buffer."""

    def on_peer_lost(self, rank: int) -> None:
        """Note that the connection to a peer has ended."""
        return

    def exposed_to(self) -> Collection[int]:
        """Return the ranks that may read memory of this process for the group's messages."""
        return ()


SinkFor = Callable[[int, Header], FrameSink | None]
"""Returns the sink of a peer's frame, None if the frame is to be dropped."""


class FramedConnection(object if core is None else core.Framing):  # type: ignore[misc]  # of what the core looks at
    """Framing on one connection.

    Attributes:
        paused: whether a frame has arrived whose buffer has not been posted.
        at_eof: whether the peer has closed the connection: only bytes that have arrived can be received.
        corked: whether frames are queued rather than sent, because more may follow at once.
        custom_events: whether epoll waits for events other than received bytes.
        remote_reads: the messages to read from the peer's memory, in order.
        bare_fd: descriptor of a socket that carries nothing but frames, thus without TLS; -1 for none.
        address: of the memory for received bytes.
        unread: whether the latest ``take`` has left bytes that poll does not report.
    """

    unread = False
    bare_fd = address = -1

    def __init__(self, rank: int, connection: Connection, eager_limit: int) -> None:
        self.rank = rank
        self.connection = connection
        self.paused = False
        self.at_eof = False
        self.corked = False
        self.outgoing: deque[tuple[Sequence[Buffer], Transfer | None]] = deque()
        self.custom_events = False
        self.remote_reads: deque[RemoteRead] = deque()
        self._broken = False
        self._queued_while_corked = False
        self._head_begun = False
        """True if some bytes of the first queued frame have been sent."""
        self._eager_limit = eager_limit
        # Memory that is not zeroed occupies no pages before its first use: in a large world most peers send little.
        self.staging = np.empty(max(_STAGING_BYTES, HEADER_BYTES + eager_limit), np.uint8).data
        self._begin = 0
        self._end = 0
        self._header: Header | None = None
        self._target: memoryview | None = None
        self._filled = 0
        self._to_discard = 0
        self._drained = False
        self._posted = False
        """True if the last frame's payload may have had a posted buffer: the next one's may have one, too."""

    def discard_group(self, group: int) -> None:
        """Discard the partly received frame of a group: no bytes may be written to its buffers any more."""
        if self._header is not None and self._header.group == group:
            self._to_discard = self._header.length - self._filled
            self._header = self._target = None
            self.paused = False
        if self.remote_reads:
            self.remote_reads = deque(read for read in self.remote_reads if read.group != group)

    def take(self, header: bytes, into: memoryview) -> bool:
        """Receive a frame if it comes next and soon; False if nothing or something else does."""
        if self._header is not None or self._to_discard:
            return False
        if self.connection.medium != "tcp":
            if self._begin != self._end or len(into) <= self._eager_limit:
                return self._begin == self._end and self.connection.take(header, into)
            if not self.connection.take(header, into[:0]):
                return False
            received = self.connection.recv_payload(into)
            if received < len(into):  # the sender has stopped: the rest is received as that of other frames
                self._header, self._target, self._filled = frames.decode(header), into, received
            return received == len(into)
        staging, nbytes = self.staging, HEADER_BYTES + len(into)
        if nbytes > len(staging):
            return False
        expected = False
        try:
            while True:
                begin, received = self._begin, self._end - self._begin
                if not expected and received >= HEADER_BYTES:
                    expected = staging[begin : begin + HEADER_BYTES] == header
                    if not expected:
                        return False
                if received >= nbytes:
                    self._begin = begin + nbytes
                    into[:] = staging[begin + HEADER_BYTES : begin + nbytes]
                    return True
                if not self._fill(self.connection.recv_soon, nbytes if nbytes > _AHEAD_BYTES else _AHEAD_BYTES):
                    return False
        finally:
            self.unread = self._begin != self._end or not self._drained

    def run_remote_reads(self) -> int:
        """Read some short messages from the peer's memory, or a part of a long one; return about how many bytes."""
        nbytes = 0
        while self.remote_reads and nbytes < _ACK_BATCH_BYTES:
            read = self.remote_reads[0]
            nbytes += read.next_bytes
            valid = read.advance(self.connection)
            if valid is not None:
                self.remote_reads.popleft()
                read.on_done(valid)
        return nbytes

    def send(self, buffers: Sequence[Buffer], transfer: Transfer | None) -> None:
        """Send as many bytes as possible, queue the rest."""
        if self._broken:
            return
        if self.corked or self.outgoing:
            self._queued_while_corked = True
            self.outgoing.append((buffers, transfer))
            return
        sent = self.connection.send(buffers)
        if sent < sum(map(len, buffers)):
            self._head_begun = sent > 0
            self.outgoing.append((_after(buffers, sent), transfer))
        elif transfer is not None:
            transfer.done = True

    def cancel_send(self, transfer: Transfer) -> Header | None:
        """Remove a frame from the queue and return its header; None if it is not queued or has begun to leave."""
        committed = self.connection.committed()
        for place, (buffers, queued) in enumerate(self.outgoing):
            if queued is transfer:
                if (self._head_begun and not place) or committed > 0:
                    return None
                del self.outgoing[place]
                return frames.decode(bytes(buffers[0]), 0, self._eager_limit)
            committed -= sum(map(len, buffers))
        return None

    def stop_sending(self) -> None:
        """Drop all frames from now on: the connection is broken, but bytes that have arrived can still be received."""
        self._broken = True
        self.outgoing.clear()

    def flush(self) -> None:
        """Send as much of the queue as possible, many frames at once."""
        outgoing = self.outgoing
        while outgoing:
            together: list[Buffer] = []
            room = _MAX_SENT_BYTES
            for frame, _ in outgoing:
                together += frame
                room -= HEADER_BYTES + len(frame[-1])
                if room <= 0:
                    break
            sent = self.connection.send(together)
            if not sent:
                return
            while outgoing:
                buffers, transfer = outgoing[0]
                length = sum(map(len, buffers))
                if sent < length:
                    if sent:
                        outgoing[0] = (_after(buffers, sent), transfer)
                        self._head_begun = True
                    break
                sent -= length
                outgoing.popleft()
                self._head_begun = False
                if transfer is not None:
                    transfer.done = True

    def receive(self, sinks: Mapping[tuple[int, int], FrameSink], sink_for: SinkFor) -> bool:
        """Receive the bytes that have arrived, as far as buffers are posted; return whether there may be more."""
        budget = _TURN_BYTES
        self._drained = self._queued_while_corked = False
        while budget > 0:
            if self._to_discard:
                received = self._discard()
            elif self._header is not None:
                if self._queued_while_corked:
                    return True  # the queued frames go first: the payload may be long
                received = self._receive_payload(sink_for)
            elif self._end - self._begin >= HEADER_BYTES:
                header = frames.decode(self.staging, self._begin, self._eager_limit)
                self._begin += HEADER_BYTES
                self._posted = header.opcode is not Opcode.ENTER
                received = HEADER_BYTES
                if self._begin + header.length <= self._end and header.opcode not in frames.POSTED:
                    received += header.length  # the whole frame has arrived: the usual case
                    sink = sinks.get((header.epoch, header.group)) or sink_for(self.rank, header)
                    begin, self._begin = self._begin, self._begin + header.length
                    if sink is not None:
                        payload = bytes(self.staging[begin : self._begin]) if header.length else b""
                        sink.on_frame(self.rank, header, payload)
                else:
                    self._header = header
                    self._filled = 0
            elif self._drained:
                return False  # the last receive returned fewer bytes than it could: another one would be in vain
            else:
                received = self._fill(self.connection.recv_into, _AHEAD_BYTES if self._posted else None)
            if not received:
                return False
            budget -= received
        return True

    def _fill(self, receive: Callable[[memoryview], int], nbytes: int | None = None) -> int:
        if self._begin == self._end:
            self._begin = self._end = 0
        elif self._begin:
            left = self._end - self._begin
            self.staging[:left] = bytes(self.staging[self._begin : self._end])
            self._begin, self._end = 0, left
        space = self.staging[self._end : None if nbytes is None else self._end + nbytes]
        received = receive(space)
        self._drained = received < len(space)
        self._end += received
        return received

    def _receive_payload(self, sink_for: SinkFor) -> int:
        header = self._header
        assert header is not None
        sink = sink_for(self.rank, header)
        if header.opcode is Opcode.EAGER and self._target is None and sink is not None:
            self._target = sink.buffer_for(self.rank, header)
        if header.opcode not in frames.POSTED and self._target is None:
            if self._end - self._begin < header.length:
                return self._fill(self.connection.recv_into)
            self._header = None
            self._deliver(header, sink)
            return header.length or 1
        if self._target is None:
            if sink is None:
                self.discard_group(header.group)
                return header.length or 1
            self._target = sink.buffer_for(self.rank, header)
            self.paused = self._target is None
            if self._target is None:
                return 0
            if len(self._target) != header.length:
                raise ProtocolError(
                    f"rank {self.rank} sent {header.length} bytes where {len(self._target)} were expected"
                )
        received = self._receive_target()
        if self._filled == header.length:
            self._header = self._target = None
            assert sink is not None
            sink.on_frame(self.rank, header, b"")
            return received or 1
        return received

    def _discard(self) -> int:
        discarded = min(self._end - self._begin, self._to_discard)
        if discarded:
            self._begin += discarded
        else:
            discarded = self.connection.recv_into(self.staging[: self._to_discard])
        self._to_discard -= discarded
        return discarded

    def _receive_target(self) -> int:
        target = self._target
        assert target is not None
        staged = min(self._end - self._begin, len(target) - self._filled)
        if staged:
            target[self._filled : self._filled + staged] = self.staging[self._begin : self._begin + staged]
            self._begin += staged
            self._filled += staged
            return staged
        if self._filled == len(target):
            return 0
        received = self.connection.recv_payload(target[self._filled :])
        self._filled += received
        return received

    def _deliver(self, header: Header, sink: FrameSink | None) -> None:
        begin, self._begin = self._begin, self._begin + header.length
        if sink is not None:
            sink.on_frame(self.rank, header, bytes(self.staging[begin : self._begin]) if header.length else b"")


class Peers(dict[int, FramedConnection]):
    """The peers of a progress engine by rank; one that is looked up and not connected yet is dialled."""

    def __init__(self, dial: Callable[[int], object], eager_limit: int) -> None:
        super().__init__()
        self._dial = dial
        self._eager_limit = eager_limit

    def __missing__(self, rank: int) -> FramedConnection:
        self._dial(rank)
        peer = self[rank] = FramedConnection(rank, UNCONNECTED, self._eager_limit)
        return peer


def _after(buffers: Sequence[Buffer], sent: int) -> list[memoryview]:
    """Return the rest of ``buffers`` after their first ``sent`` bytes."""
    rest = []
    for buffer in buffers:
        if sent >= len(buffer):
            sent -= len(buffer)
        else:
            rest.append(memoryview(buffer)[sent:])
            sent = 0
    return rest
