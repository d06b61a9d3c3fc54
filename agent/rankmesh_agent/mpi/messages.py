"""Point-to-point messages of one group over MPI.

::

    up to INLINE bytes    head with the bytes ──▶    compared, then copied into the array
    above                 head ─────────────────▶    compared
                          body ─────────────────▶    straight into the array, in pieces that MPI can count

The head says dtype and size, which MPI does not compare. Heads and bodies have tags of their own; MPI keeps those
between two ranks with one tag in order. A receive with another dtype or size than its message takes it out of the way
and raises; its sender is told over the mesh, and its next message to or from that rank raises. What is under way moves
while somebody waits, or begins a message, and when the guard looks. Every method is called with the mesh's lock held,
but ``wait`` and ``progress``.

MPI can give up a receive whose head has not come, and nothing else: what is under way when the group ends stays here,
with the memory that MPI reads or writes, until MPI is done with it.
"""

from __future__ import annotations

import ctypes
import os
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rankmesh_agent.collectives.link import chunks
from rankmesh_agent.mpi.collectives import MAX_COUNT
from rankmesh_agent.mpi.library import mpi
from rankmesh_agent.net.deadline import Deadline
from rankmesh_agent.progress.engine import ProgressEngine
from rankmesh_agent.progress.framing import Transfer
from rankmesh_agent.progress.matching import ANY, MessageMatcher, mismatch_reason
from rankmesh_agent.wire.errors import DistBackendError

_HEAD = struct.Struct("!qq")
"""Wire code of the dtype, and bytes of the array."""
INLINE = 4096 - 64 - _HEAD.size
"""Bytes that come with the head: both together are sent at once by most MPI libraries."""
_YIELDS = 300
"""How often a wait looks before it sleeps, giving its core to whoever wants it."""
_SHORTEST, _LONGEST = 2e-5, 1e-3
"""Seconds that it sleeps then, at first and at last."""
_orphaned: list[Any] = []
"""Requests of groups that have ended; they keep their memory. Only the guard's thread takes something out."""
# It outlives the interpreter: MPI moves messages as long as it is not finalized, and mpi4py does that later.
ctypes.pythonapi.Py_IncRef(ctypes.py_object(_orphaned))


def poll_orphaned() -> None:
    """Move what groups that have ended left under way, and forget what is done; for the guard's thread."""
    for request in _orphaned[:]:
        try:
            done = request.Test()
        except mpi().Exception:
            done = True  # nobody is left to be told
        if done:
            _orphaned.remove(request)


@dataclass(eq=False, slots=True)
class _Send:
    requests: list[Any]
    transfer: Transfer


@dataclass(eq=False, slots=True)
class _Receive:
    tag: int
    dtype: int
    view: Any
    transfer: Transfer
    head: Any
    status: Any
    requests: list[Any]
    source: int  # the rank in MPI, or ANY_SOURCE until it is known
    there: bool = False  # the head is
    begun: bool = False  # the requests are the body's

    def arrive(self) -> None:
        """Take note that the head is there."""
        self.there, self.source = True, self.status.Get_source()


@dataclass(eq=False)
class MpiMessages:
    """One rank's side of a group's messages.

    Args:
        comm: the group's communicator.
        ranks: the mesh's numbers of the members, by group rank.
        mesh: the process's connections.
        matching: the mesh's side of the group's messages: has what the others have refused.
        number: the number the user knows a rank by.
        most: bytes that one MPI call may count: fewer for tests.
    """

    comm: Any
    ranks: Sequence[int]
    mesh: ProgressEngine
    matching: MessageMatcher
    number: Callable[[int], int]
    most: int = MAX_COUNT
    _sends: list[_Send] = field(default_factory=list)
    _receives: list[_Receive] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._mpi = mpi()
        bound = self.comm.Get_attr(self._mpi.TAG_UB) or (1 << 15) - 1
        self._highest = (bound - 3) // 4
        self._error: type[Exception] = self._mpi.Exception

    def send(self, rank: int, view: memoryview, dtype: int, tag: int) -> Transfer:
        """Begin to send ``view`` to a rank; it must not change until the transfer is done.

        Raises:
            ValueError: the tag is out of range.
            DistBackendError: the rank refused an earlier message.
        """
        self.matching.raise_refusal(rank)
        number, to = self._tag(tag), self.ranks.index(rank)
        transfer = Transfer()
        head = _HEAD.pack(dtype, len(view))
        if len(view) <= INLINE:
            whole = np.frombuffer(head + bytes(view), np.uint8)
            begun = _Send([self._isend(whole, to, number)], transfer)
        else:
            requests = [self._isend(np.frombuffer(head, np.uint8), to, number)]
            requests += [self._isend(view[piece], to, number + 1) for piece in chunks(len(view), self.most)]
            begun = _Send(requests, transfer)
        self._sends.append(begun)
        self._progress()
        return transfer

    def receive(self, source: int, view: memoryview, dtype: int, tag: int) -> Transfer:
        """Begin to receive into ``view`` from a rank, or from ANY.

        Raises:
            ValueError: the tag is out of range.
            DistBackendError: the rank refused an earlier message.
        """
        self.matching.raise_refusal(source)
        number = self._tag(tag)
        head = np.empty(_HEAD.size + INLINE, np.uint8)
        who = self._mpi.ANY_SOURCE if source == ANY else self.ranks.index(source)
        request = self.comm.Irecv((head, head.size, self._mpi.BYTE), who, number)
        begun = _Receive(number, dtype, view, Transfer(), head, self._mpi.Status(), [request], who)
        self._receives.append(begun)
        self._progress()
        return begun.transfer

    def progress_in_background(self, transfer: Transfer) -> None:
        """See to it that a message moves while nobody waits for it: the guard does, for all."""

    def cancel(self, transfer: Transfer) -> bool:
        """Undo a transfer that has not begun; False if data may be on its way."""
        self._progress()
        posted = next((each for each in self._receives if each.transfer is transfer), None)
        if posted is not None and not posted.there:
            if self._undo(posted):
                self._receives.remove(posted)
                transfer.error = DistBackendError("this message was given up before, nobody waits for it any more")
                transfer.done = True
            else:
                self._progress()
        return transfer.done

    def close(self) -> None:
        """Look at no message any more: give up what can be given up, and leave the rest to ``poll_orphaned``."""
        sends, receives = self._sends, self._receives
        self._sends, self._receives = [], []
        for posted in receives:
            if posted.begun:
                _orphaned.extend(posted.requests)
            elif not posted.there:
                self._undo(posted)
        for sent in sends:
            _orphaned.extend(sent.requests)

    # Without the lock

    def wait(self, ready: Callable[[], bool], deadline: Deadline) -> bool:
        """Wait until ``ready()``, which is called with the lock held; return whether it became so in time."""
        looks, pause = 0, _SHORTEST
        while True:
            with self.mesh.lock:
                self._progress()
                if ready():
                    return True
            if deadline.expired() or self.mesh.closed:
                return False
            looks += 1
            if looks < _YIELDS:
                os.sched_yield()
            else:
                time.sleep(min(pause, deadline.remaining()))
                pause = min(2 * pause, _LONGEST)

    def progress(self) -> None:
        """Move what can be moved now."""
        with self.mesh.lock:
            self._progress()

    # With it

    def _progress(self) -> None:
        try:
            self._look_at_sends()
            self._look_at_receives()
        except self._error as error:
            raise DistBackendError(f"a message: MPI says: {error}") from error

    def _look_at_sends(self) -> None:
        for sent in self._sends[:]:
            while sent.requests and sent.requests[-1].Test():
                sent.requests.pop()
            if not sent.requests:
                sent.transfer.done = True
                self._sends.remove(sent)

    def _look_at_receives(self) -> None:
        # Bodies have to be asked for in the order in which the heads came, of those between two ranks with one tag.
        held_up: set[tuple[int, int]] = set()
        for posted in self._receives[:]:
            if not posted.begun:
                if not posted.there and posted.requests[0].Test(posted.status):
                    posted.arrive()
                tag = posted.tag
                if not posted.there or (posted.source, tag) in held_up or (self._mpi.ANY_SOURCE, tag) in held_up:
                    held_up.add((posted.source, tag))
                    continue
                self._take(posted)
            while posted.requests and posted.requests[-1].Test():
                posted.requests.pop()
            if posted.begun and not posted.requests:
                posted.transfer.done = True
                self._receives.remove(posted)

    def _undo(self, posted: _Receive) -> bool:
        """Give up a receive whose head was not there; return whether that could be done."""
        posted.requests[0].Cancel()
        posted.requests[0].Wait(posted.status)
        undone: bool = posted.status.Is_cancelled()
        if not undone:
            posted.arrive()
        return undone

    def _take(self, posted: _Receive) -> None:
        """Take a message whose head is there: what came with it, or the body, when that comes."""
        posted.begun, posted.requests = True, []
        came_from = posted.source
        source = posted.transfer.source = self.ranks[came_from]
        dtype, nbytes = _HEAD.unpack_from(posted.head)
        fits = dtype == posted.dtype and nbytes == len(posted.view)
        if not fits:
            rank = self.number(source)
            why = mismatch_reason(rank, _untagged(posted.tag), (dtype, nbytes), (posted.dtype, len(posted.view)))
            self.matching.refuse(source, why)
            posted.transfer.error = DistBackendError(why, ranks=[rank])
        if nbytes > INLINE:
            view = posted.view if fits else memoryview(bytearray(nbytes))
            posted.requests = [
                self.comm.Irecv((view[piece], self._mpi.BYTE), came_from, posted.tag + 1)
                for piece in chunks(nbytes, self.most)
            ]
        elif fits:
            posted.view[:] = posted.head[_HEAD.size : _HEAD.size + nbytes].data

    def _isend(self, view: Any, to: int, tag: int) -> Any:
        return self.comm.Isend((view, self._mpi.BYTE), to, tag)

    def _tag(self, tag: int) -> int:
        """Return MPI's tag of a head; the body's is one more."""
        if not -self._highest <= tag <= self._highest:
            raise ValueError(
                f"tag {tag} is more than this MPI has: tags are -{self._highest} to {self._highest} under backend 'mpi'"
            )
        return 4 * tag if tag >= 0 else -4 * tag + 2


def _untagged(number: int) -> int:
    return -(number // 4) if number % 4 else number // 4
