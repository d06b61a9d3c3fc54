"""Delivery of received frames to the sink of their group."""

from __future__ import annotations

from rankmesh_agent.progress.framing import FrameSink
from rankmesh_agent.wire.errors import ProtocolError
from rankmesh_agent.wire.frames import Header, Opcode

_FIRST_FRAMES = frozenset({Opcode.ENTER, Opcode.ABORT})
"""Frames that may arrive before this process has created their group."""
_MAX_EARLY_FRAMES = 4096
"""Frames kept for groups that this process has not created yet."""


class SinkTable:
    """The sinks of the groups of one process, by group id. All methods are called with the engine's lock held.

    Args:
        epoch: the job's epoch; frames of another epoch are dropped.
        goodbye: receives the GOODBYE frames, which belong to no group.
    """

    def __init__(self, epoch: int, goodbye: FrameSink) -> None:
        self._epoch = epoch
        self._goodbye = goodbye
        self._sinks: dict[int, FrameSink] = {}
        self._dropped: set[int] = set()
        self._early = _EarlyFrames()

    def add(self, group: int, sink: FrameSink) -> None:
        """Deliver a group's frames to ``sink`` from now on, including those that arrived early."""
        self._sinks[group] = sink
        self._dropped.discard(group)
        kept, self._early.frames = self._early.frames, []
        for rank, header, payload in kept:
            if header.group == group:
                sink.on_frame(rank, header, payload)
            else:
                self._early.frames.append((rank, header, payload))

    def drop(self, group: int) -> None:
        """Drop a group's frames from now on."""
        self._sinks.pop(group, None)
        self._dropped.add(group)

    def all(self) -> list[FrameSink]:
        """Return the sinks of all groups."""
        return list(self._sinks.values())

    def sink_for(self, rank: int, header: Header) -> FrameSink | None:
        """Return the sink of a frame, None if the frame is to be dropped."""
        if header.opcode is Opcode.GOODBYE:
            return self._goodbye
        if header.epoch != self._epoch:
            return None
        sink = self._sinks.get(header.group)
        if sink is None and header.opcode in _FIRST_FRAMES and header.group not in self._dropped:
            return self._early
        return sink


class _EarlyFrames(FrameSink):
    """Keeps the frames of groups that this process has not created yet."""

    def __init__(self) -> None:
        self.frames: list[tuple[int, Header, memoryview | bytes]] = []

    def buffer_for(self, rank: int, header: Header) -> memoryview | None:
        return None

    def on_frame(self, rank: int, header: Header, payload: memoryview | bytes) -> None:
        if len(self.frames) >= _MAX_EARLY_FRAMES:
            raise ProtocolError(f"rank {rank} sent too many frames for groups that are not in use here")
        self.frames.append((rank, header, payload))

    def on_peer_lost(self, rank: int) -> None:
        pass
