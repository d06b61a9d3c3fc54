"""Framing on one connection: what comes in goes to the ports, what goes out waits its turn."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice

import numpy as np

from rankmesh_agent.transports.base import Buffer, Connection
from rankmesh_agent.transports.process_vm import address_of
from rankmesh_agent.wire import frames
from rankmesh_agent.wire.errors import DistNetworkError, ProtocolError
from rankmesh_agent.wire.frames import HEADER_BYTES, Header, Opcode

_AHEAD_BYTES = HEADER_BYTES + (1 << 12)
"""Bytes received at once where a frame for an array may begin: the rest of its payload then goes where it belongs."""
_STAGE_BYTES = HEADER_BYTES + frames.SMALL
REMOTE_READ_BYTES = 32 << 20
"""Bytes read from one peer's memory before the others have their turn."""
_TOLD_BYTES = 1 << 18
"""Bytes of short messages read from a peer's memory before it is told, of all of them at once."""
_FRAMES = 64
"""Frames of the queue that are sent at once."""
_TURN_BYTES = 8 << 20
"""Bytes received from one peer before the others have their turn."""


class Transfer:
    """Something under way: an outgoing frame, or a buffer to be filled."""

    __slots__ = ("done", "error", "source")

    def __init__(self) -> None:
        self.done = False
        self.error: Exception | None = None
        self.source = -1


class RemoteRead:
    """A message that is read from the peer's memory.

    Args:
        group: the id of its group.
        seq: its number.
        offered: its address and the generation of the offer.
        view: where it goes.
        then: called with whether all of it is there and good, with the mesh's lock held.
    """

    __slots__ = ("_address", "_generation", "_into", "_read", "_view", "group", "seq", "then")

    def __init__(
        self, group: int, seq: int, offered: tuple[int, int], view: memoryview, then: Callable[[bool], None]
    ) -> None:
        self.group = group
        self.seq = seq
        self.then = then
        self._address, self._generation = offered
        self._view = view
        self._into = address_of(view)
        self._read = 0

    @property
    def next_bytes(self) -> int:
        """Bytes that the next step reads."""
        return min(REMOTE_READ_BYTES, len(self._view) - self._read)

    def advance(self, connection: Connection) -> bool | None:
        """Read on; return None if there is more to read, and otherwise whether what was read is good."""
        step = self.next_bytes
        try:
            connection.read_exposed(self._address + self._read, self._into + self._read, step)
        except DistNetworkError:
            return False  # it may still be sent the other way; if the peer is gone, the connection tells
        self._read += step
        return None if self._read < len(self._view) else connection.still_exposed(self._generation)


class FrameSink(ABC):
    """Where a group's frames go. All methods are called with the mesh's lock held and must not wait."""

    @abstractmethod
    def buffer_for(self, rank: int, header: Header) -> memoryview | None:
        """Return the posted buffer for a frame's payload, None while there is none: a PART or a BULK waits for it."""

    @abstractmethod
    def on_frame(self, rank: int, header: Header, payload: memoryview | bytes) -> None:
        """Take a complete frame."""

    @abstractmethod
    def on_peer_lost(self, rank: int) -> None:
        """Take note that a peer is gone."""


SinkFor = Callable[[int, Header], FrameSink | None]
"""Returns where a peer's frame goes; None if nobody wants it."""


class FramedConnection:
    """Framing on one connection."""

    def __init__(self, rank: int, connection: Connection, eager_limit: int) -> None:
        self.rank = rank
        self.connection = connection
        self.paused = False
        """Whether a frame has arrived whose buffer has not been posted."""
        self.at_eof = False
        """Whether nothing more will come than what is already here."""
        self.unanswered_since: float | None = None
        """The clock when the peer's host was first seen to leave something unanswered, None while it does not."""
        self._broken = False
        self.corked = False
        """Whether frames are to be queued, because more may follow at once; set by cork and by the mesh."""
        self._fresh = False
        self._begun = False
        """Whether some bytes of the queue's first frame have been sent."""
        self.custom_events = False
        """Whether poll is asked for other events than 'something to receive'."""
        self._eager_limit = eager_limit
        self.remote_reads: deque[RemoteRead] = deque()
        """What is being read from the peer's memory, one after the other."""
        self._outgoing: deque[tuple[Sequence[Buffer], Transfer | None]] = deque()
        # Memory without zeros in it takes no room before it is used: in a large world most peers never send much.
        self._stage = np.empty(max(_STAGE_BYTES, HEADER_BYTES + eager_limit), np.uint8).data
        self._begin = 0
        self._end = 0
        self._header: Header | None = None
        self._target: memoryview | None = None
        self._filled = 0
        self._dropping = 0
        self._drained = False
        self._posted = False
        """Whether the last frame was of a kind whose payload may go straight into an array: the next may be, too."""

    @property
    def writing(self) -> bool:
        """Whether something waits to be sent."""
        return bool(self._outgoing)

    def discard_group(self, group: int) -> None:
        """Throw away what is coming for a group: its buffers are no longer ours to write to."""
        if self._header is not None and self._header.group == group:
            self._dropping = self._header.length - self._filled
            self._header = self._target = None
            self.paused = False
        if self.remote_reads:
            self.remote_reads = deque(fetch for fetch in self.remote_reads if fetch.group != group)

    def run_remote_reads(self) -> int:
        """Read some short messages in the peer's memory, or a piece of a long one; return about how many bytes."""
        fetched = 0
        while self.remote_reads and fetched < _TOLD_BYTES:
            fetch = self.remote_reads[0]
            fetched += fetch.next_bytes
            good = fetch.advance(self.connection)
            if good is not None:
                self.remote_reads.popleft()
                fetch.then(good)
        return fetched

    def cork(self) -> None:
        """Queue frames from now on: what is sent until ``corked`` is taken back leaves in one go."""
        self.corked = True
        self._fresh = False

    def send(self, buffers: Sequence[Buffer], transfer: Transfer | None) -> None:
        """Send now what can be, queue the rest."""
        if self._broken:
            return
        if self.corked or self._outgoing:
            self._fresh = True
            self._outgoing.append((buffers, transfer))
            return
        sent = self.connection.send(buffers)
        if sent < _length(buffers):
            self._begun = sent > 0
            self._outgoing.append((_after(buffers, sent), transfer))
        elif transfer is not None:
            transfer.done = True

    def cancel_send(self, transfer: Transfer) -> Header | None:
        """Remove a frame from the queue and return its header; None if there is none, or it has begun to leave."""
        for place, (buffers, queued) in enumerate(self._outgoing):
            if queued is transfer:
                if self._begun and not place:
                    return None
                del self._outgoing[place]
                return frames.decode(bytes(buffers[0]), 0, self._eager_limit)
        return None

    def stop_sending(self) -> None:
        """Send nothing any more: the connection is broken. What it still holds can be received."""
        self._broken = True
        self._outgoing.clear()

    def flush(self) -> None:
        """Send what can be sent of the queue, many frames at once."""
        outgoing = self._outgoing
        while outgoing:
            sent = self.connection.send([buffer for frame, _ in islice(outgoing, _FRAMES) for buffer in frame])
            if not sent:
                return
            while outgoing:
                buffers, transfer = outgoing[0]
                length = _length(buffers)
                if sent < length:
                    if sent:
                        outgoing[0] = (_after(buffers, sent), transfer)
                        self._begun = True
                    break
                sent -= length
                outgoing.popleft()
                self._begun = False
                if transfer is not None:
                    transfer.done = True

    def receive(self, port_of: SinkFor) -> bool:
        """Receive what is here, as long as there is a place to put it; return whether there may be more."""
        budget = _TURN_BYTES
        self._drained = False
        while budget > 0:
            if self._dropping:
                received = self._drop()
            elif self._header is not None:
                if self._fresh:
                    return True  # what has been queued goes first: the payload may be long
                received = self._receive_payload(port_of)
            elif self._end - self._begin >= HEADER_BYTES:
                received = self._parse(port_of)
            elif self._drained:
                return False  # the last read took less than it could: asking again only costs a system call
            else:
                received = self._fill()
            if not received:
                return False
            budget -= received
        return True

    def _fill(self) -> int:
        if self._begin == self._end:
            self._begin = self._end = 0
        elif self._begin:
            left = self._end - self._begin
            self._stage[:left] = bytes(self._stage[self._begin : self._end])
            self._begin, self._end = 0, left
        space = self._stage[self._end : self._end + _AHEAD_BYTES if self._posted and self._header is None else None]
        received = self.connection.recv_into(space)
        self._drained = received < len(space)
        self._end += received
        return received

    def _parse(self, port_of: SinkFor) -> int:
        payload = self._begin + HEADER_BYTES
        header = frames.decode(self._stage, self._begin, self._eager_limit)
        self._begin = payload
        self._posted = header.opcode is not Opcode.ENTER
        length = header.length
        if payload + length <= self._end and header.opcode not in frames.POSTED:
            self._deliver_small(header, port_of(self.rank, header))  # all of it is here: the usual case
            return HEADER_BYTES + length
        self._header = header
        self._filled = 0
        return HEADER_BYTES

    def _receive_payload(self, port_of: SinkFor) -> int:
        header = self._header
        assert header is not None
        port = port_of(self.rank, header)
        if header.opcode is Opcode.EAGER and self._target is None and port is not None:
            self._target = port.buffer_for(self.rank, header)
        if header.opcode not in frames.POSTED and self._target is None:
            if self._end - self._begin < header.length:
                return self._fill()
            self._header = None
            self._deliver_small(header, port)
            return header.length or 1
        if self._target is None:
            if port is None:
                self.discard_group(header.group)
                return header.length or 1
            self._target = port.buffer_for(self.rank, header)
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
            assert port is not None
            port.on_frame(self.rank, header, b"")
            return received or 1
        return received

    def _drop(self) -> int:
        dropped = min(self._end - self._begin, self._dropping)
        if dropped:
            self._begin += dropped
        else:
            dropped = self.connection.recv_into(self._stage[: self._dropping])
        self._dropping -= dropped
        return dropped

    def _receive_target(self) -> int:
        target = self._target
        assert target is not None
        staged = min(self._end - self._begin, len(target) - self._filled)
        if staged:
            target[self._filled : self._filled + staged] = self._stage[self._begin : self._begin + staged]
            self._begin += staged
            self._filled += staged
            return staged
        if self._filled == len(target):
            return 0
        received = self.connection.recv_into(target[self._filled :])
        self._filled += received
        return received

    def _deliver_small(self, header: Header, port: FrameSink | None) -> None:
        begin, self._begin = self._begin, self._begin + header.length
        if port is not None:
            port.on_frame(self.rank, header, bytes(self._stage[begin : self._begin]) if header.length else b"")


def _length(buffers: Sequence[Buffer]) -> int:
    length = 0
    for buffer in buffers:
        length += len(buffer)
    return length


def _after(buffers: Sequence[Buffer], sent: int) -> list[memoryview]:
    """Return what is left of ``buffers`` when their first ``sent`` bytes are gone."""
    rest = []
    for buffer in buffers:
        if sent >= len(buffer):
            sent -= len(buffer)
        else:
            rest.append(memoryview(buffer)[sent:])
            sent = 0
    return rest
