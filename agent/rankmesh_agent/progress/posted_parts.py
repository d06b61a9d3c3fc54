"""The buffers of the PART frames of a group: pieces of arrays, each for a buffer that its receiver posts.

A PART that comes with its sender's arrival may be there before its receiver makes the call. It must not hold up the
frames behind it, so it gets memory of its own, and is copied when the buffer is posted.
"""

from __future__ import annotations

from collections import defaultdict, deque

import numpy as np

from rankmesh_agent.progress.framing import Transfer
from rankmesh_agent.wire.frames import Header

Call = tuple[int, int]
"""Sequence number and fingerprint of a call."""


class PostedParts:
    """The posted buffers by rank, and the PARTs that came before theirs. With the engine's lock held."""

    def __init__(self) -> None:
        self._posted: defaultdict[int, deque[tuple[memoryview, Transfer]]] = defaultdict(deque)
        self._unposted: dict[int, memoryview] = {}
        """Memory of the PART that a rank is sending, if it began to come before its buffer was posted."""
        self._early: dict[int, tuple[Call, memoryview]] = {}
        """The latest such PART of each rank, after its call."""
        self._free: list[memoryview] = []
        """Memory of earlier ones, whose pages exist already; never more than one such PART of each rank needs."""

    def post(self, rank: int, call: Call, view: memoryview, transfer: Transfer) -> None:
        """Receive the next PART of a rank into a buffer, or copy it there if it came before the call."""
        early = self._early.get(rank)
        if early is not None and early[0] == call:
            transfer.done = True
            del self._early[rank]
            self._copy(early[1], view)
        else:
            self._posted[rank].append((view, transfer))

    def clear(self) -> None:
        """Forget the buffers of a call that has failed."""
        self._posted.clear()

    def next_buffer(self, rank: int) -> memoryview | None:
        """Return the buffer for the next PART of a rank in this call; None if it is not posted."""
        posted = self._posted[rank]
        return posted[0][0] if posted else None

    def new_buffer(self, rank: int, nbytes: int) -> memoryview:
        """Return memory for a PART that has no buffer."""
        memory = self._free.pop() if self._free else memoryview(b"")
        if len(memory) < nbytes:
            memory = np.empty(nbytes, np.uint8).data
        self._unposted[rank] = memory[:nbytes]
        return self._unposted[rank]

    def complete(self, rank: int, header: Header, call: Call) -> None:
        """Note that a PART is complete, during a call."""
        of = header.seq, header.fingerprint
        unposted, posted = self._unposted.pop(rank, None), self._posted[rank]
        if posted and of == call:
            view, transfer = posted.popleft()
            if unposted is not None:
                self._copy(unposted, view)
            transfer.done = True
        elif unposted is not None:
            self._early[rank] = of, unposted

    def _copy(self, memory: memoryview, view: memoryview) -> None:
        view[:] = memory
        self._free.append(memory)
