"""Shared memory of a group: its slots, and the memory windows that its ranks expose to each other."""

from __future__ import annotations

from rankmesh_agent.transports.shared_memory import Mapping
from rankmesh_agent.transports.slots import Slots
from rankmesh_agent.transports.windows import MemoryWindows


class Segment(Slots):
    """One rank's view of its group's shared memory; see Slots.

    Attributes:
        windows: the memory that the ranks expose to each other.
    """

    def __init__(self, mapping: Mapping, rank: int, size: int, slot_bytes: int, oversubscribed: bool) -> None:
        super().__init__(mapping, rank, size, slot_bytes, oversubscribed)
        self.windows = MemoryWindows(self)

    def close(self) -> None:
        """Drop the references that keep this object alive: with the caller's, the last array unmaps the memory.

        A thread that is still inside a call goes on with its own reference.
        """
        self.windows.weaken()
