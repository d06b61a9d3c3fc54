"""Delivery of received frames to the sink of their group. All methods are called with the engine's lock held."""

from __future__ import annotations

from collections.abc import Callable

from rankmesh_agent.progress.framing import FrameSink
from rankmesh_agent.wire import goodbye
from rankmesh_agent.wire.errors import ProtocolError
from rankmesh_agent.wire.frames import Header, Opcode
from rankmesh_agent.wire.goodbye import Goodbye

_FIRST_FRAMES = frozenset({Opcode.ENTER, Opcode.ABORT})
"""Frames that may arrive before this process has created their group."""
_MAX_UNEXPECTED_BYTES = 1 << 22
"""Bytes of one rank's frames kept for groups that this process has not created yet."""
_MIN_COST = 1 << 10
"""Bytes for which a frame counts at least: it has a header."""
_MAX_DROPPED = 1024
"""Number of groups whose frames are dropped: the latest ones to end."""


class SinkTable(FrameSink):
    """The sinks of the groups of one process; itself the sink of GOODBYEs, and of groups that do not exist here yet.

    Args:
        on_goodbye: called for a GOODBYE with the peer's rank, and the rank that it is about; also to end the connection
            to a peer, if one of its early frames turns out to violate the protocol.

    Attributes:
        sinks: the sinks, by epoch and group id, which is never 0: frames without a group have that.
    """

    def __init__(self, epoch: int, on_goodbye: Callable[[int, int, Goodbye], None]) -> None:
        self.sinks: dict[tuple[int, int], FrameSink] = {}
        self._epoch = epoch
        self._on_goodbye = on_goodbye
        self._dropped: dict[int, None] = {}
        self._unexpected: dict[int, list[tuple[int, Header, memoryview | bytes]]] = {}
        self._unexpected_bytes: dict[int, int] = {}

    def add(self, group: int, sink: FrameSink) -> None:
        """Deliver a group's frames to ``sink`` from now on, including those that arrived early."""
        self.sinks[self._epoch, group] = sink
        for rank, header, payload in self._unexpected.pop(group, ()):
            self._unexpected_bytes[rank] -= max(header.length, _MIN_COST)
            try:
                sink.on_frame(rank, header, payload)
            except ProtocolError as error:
                self._on_goodbye(rank, rank, Goodbye(error.message, died=True))

    def drop(self, group: int) -> FrameSink | None:
        """Drop a group's frames from now on; return its sink."""
        sink = self.sinks.pop((self._epoch, group), None)
        self._dropped[group] = None
        if len(self._dropped) > _MAX_DROPPED:
            del self._dropped[next(iter(self._dropped))]
        return sink

    def sink_for(self, rank: int, header: Header) -> FrameSink | None:
        """Return the sink of a frame, None if the frame is to be dropped."""
        if header.opcode is Opcode.GOODBYE:
            return self
        if header.epoch != self._epoch:
            return None
        sink = self.sinks.get((header.epoch, header.group))
        if sink is None and header.opcode in _FIRST_FRAMES and header.group not in self._dropped:
            return self
        return sink

    def on_frame(self, rank: int, header: Header, payload: memoryview | bytes) -> None:
        """Receive a GOODBYE, or keep a frame until its group exists."""
        if header.opcode is Opcode.GOODBYE:
            about = header.tag - 1 if header.tag else rank
            self._on_goodbye(rank, about, goodbye.decode(bytes(payload)))
            return
        cost = max(header.length, _MIN_COST)
        while self._unexpected_bytes.get(rank, 0) + cost > _MAX_UNEXPECTED_BYTES:
            self._forget_aborted(rank)
        self._unexpected_bytes[rank] = self._unexpected_bytes.get(rank, 0) + cost
        self._unexpected.setdefault(header.group, []).append((rank, header, payload))

    def _forget_aborted(self, rank: int) -> None:
        """Forget a rank's frames for the first of the groups that it has given up; ProtocolError if there is none."""
        for group, early in self._unexpected.items():
            own = [header for sender, header, _ in early if sender == rank]
            if any(header.opcode is Opcode.ABORT for header in own):
                self._unexpected_bytes[rank] -= sum(max(header.length, _MIN_COST) for header in own)
                self._unexpected[group] = [frame for frame in early if frame[0] != rank]
                if not self._unexpected[group]:
                    del self._unexpected[group]
                return
        raise ProtocolError(f"rank {rank} sent too many frames for groups that are not in use here")
