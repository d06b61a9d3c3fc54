"""Point-to-point messages of one group over MPI.

::

    up to INLINE bytes    header with the bytes ──▶    compared, then copied into the array
    above                 header ─────────────────▶    compared
                          body ───────────────────▶    straight into the array, in pieces that MPI can count

The header has dtype and size, which MPI does not compare. Headers and bodies have tags of their own; MPI keeps the
messages between two ranks with one tag in order. A receive whose dtype or size differs from the message's consumes the
message and raises, and the group ends: the sender's next call raises the error. Messages in flight progress while a
thread waits for one or begins one, and at each check of the watchdog. Every method is called with the mesh's lock held,
except ``wait`` and ``progress``.

MPI can cancel a receive whose header has not arrived, and nothing else. Other requests in flight when the group ends
stay in ``_orphaned``, with the memory that MPI reads or writes, until they complete.
"""

from __future__ import annotations

import ctypes
import os
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from rankmesh_agent.collectives.link import chunks
from rankmesh_agent.group.local import LocalCommunicator
from rankmesh_agent.mpi.collectives import MAX_COUNT
from rankmesh_agent.mpi.library import mpi
from rankmesh_agent.net.deadline import Deadline
from rankmesh_agent.progress.framing import Transfer
from rankmesh_agent.progress.matching import mismatch_reason
from rankmesh_agent.progress.message_queues import ANY
from rankmesh_agent.wire.errors import DistBackendError

_HEADER = struct.Struct("!qq")
"""Wire code of the dtype, and bytes of the array."""
INLINE = 4096 - 64 - _HEADER.size
"""Bytes sent with the header: most MPI libraries send messages of this total size eagerly."""
_YIELDS = 300
"""Polls of a wait, with a sched_yield after each, before it sleeps between polls."""
_MIN_PAUSE, _MAX_PAUSE = 2e-5, 1e-3
"""First and longest sleep between polls, in seconds."""
_orphaned: list[Any] = []
"""Requests of groups that have ended, with their memory. Only the watchdog's thread removes any."""
# The list outlives the interpreter: MPI moves messages until mpi4py finalizes it, which is later.
ctypes.pythonapi.Py_IncRef(ctypes.py_object(_orphaned))


def poll_orphaned() -> None:
    """Progress the requests of groups that have ended, and drop completed ones; for the watchdog's thread."""
    for request in _orphaned[:]:
        try:
            done = request.Test()
        except mpi().Exception:
            done = True  # the group has ended, so no caller gets the error
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
    header: Any
    status: Any
    requests: list[Any]
    source: int  # rank in MPI, ANY_SOURCE until it is known
    header_arrived: bool = False
    body_posted: bool = False  # the requests are the body's

    def on_header(self) -> None:
        """Record that the header has arrived."""
        self.header_arrived, self.source = True, self.status.Get_source()


class MpiMessages:
    """One rank's side of a group's messages; a MessageTransport.

    Args:
        comm: mpi4py's communicator of the group.
        group: the group, which a message that does not fit ends.

    Attributes:
        max_count: largest count of an MPI call, in bytes; smaller in tests.
    """

    def __init__(self, comm: Any, group: LocalCommunicator) -> None:
        self.max_count = MAX_COUNT
        self._comm = comm
        self._ranks = group.ranks
        self._engine = group.engine
        self._matcher = group.matcher
        self._global_rank = group.state.global_rank
        self._sends: list[_Send] = []
        self._receives: list[_Receive] = []
        self._mpi = mpi()
        bound = comm.Get_attr(self._mpi.TAG_UB) or (1 << 15) - 1
        self._max_tag = (bound - 3) // 4
        self._error: type[Exception] = self._mpi.Exception

    def send(self, rank: int, view: memoryview, dtype: int, tag: int) -> Transfer:
        """Begin to send ``view`` to a rank; it must stay unchanged until the transfer is done.

        Raises:
            ValueError: the tag is out of range.
        """
        mpi_tag, to = self._mpi_tag(tag), self._ranks.index(rank)
        transfer = Transfer()
        header = _HEADER.pack(dtype, len(view))
        if len(view) <= INLINE:
            whole = np.frombuffer(header + bytes(view), np.uint8)
            begun = _Send([self._isend(whole, to, mpi_tag)], transfer)
        else:
            requests = [self._isend(np.frombuffer(header, np.uint8), to, mpi_tag)]
            requests += [self._isend(view[piece], to, mpi_tag + 1) for piece in chunks(len(view), self.max_count)]
            begun = _Send(requests, transfer)
        self._sends.append(begun)
        self._progress()
        return transfer

    def receive(self, source: int, view: memoryview, dtype: int, tag: int) -> Transfer:
        """Begin to receive into ``view`` from a rank, or from ANY.

        Raises:
            ValueError: the tag is out of range.
        """
        mpi_tag = self._mpi_tag(tag)
        header = np.empty(_HEADER.size + INLINE, np.uint8)
        source_rank = self._mpi.ANY_SOURCE if source == ANY else self._ranks.index(source)
        request = self._comm.Irecv((header, header.size, self._mpi.BYTE), source_rank, mpi_tag)
        begun = _Receive(mpi_tag, dtype, view, Transfer(), header, self._mpi.Status(), [request], source_rank)
        self._receives.append(begun)
        self._progress()
        return begun.transfer

    def progress_in_background(self, transfer: Transfer) -> None:
        """Do nothing: the watchdog progresses all messages."""

    def cancel(self, transfer: Transfer) -> bool:
        """Cancel a transfer that has not begun; return False if data may be in flight."""
        self._progress()
        posted = next((each for each in self._receives if each.transfer is transfer), None)
        if posted is not None and not posted.header_arrived:
            if self._cancel_receive(posted):
                self._receives.remove(posted)
                transfer.error = DistBackendError("this message was canceled: its wait ended before")
                transfer.done = True
            else:
                self._progress()
        return transfer.done

    def close(self) -> None:
        """Cancel the receives that can be canceled, and leave the other requests to ``poll_orphaned``."""
        sends, receives = self._sends, self._receives
        self._sends, self._receives = [], []
        for posted in receives:
            if posted.body_posted:
                _orphaned.extend(posted.requests)
            elif not posted.header_arrived:
                self._cancel_receive(posted)
        for sent in sends:
            _orphaned.extend(sent.requests)

    # Without the lock

    def wait(self, ready: Callable[[], bool], deadline: Deadline) -> bool:
        """Wait until ``ready()``, which is called with the lock held; return whether it was in time."""
        polls, pause = 0, _MIN_PAUSE
        while True:
            with self._engine.lock:
                self._progress()
                if ready():
                    return True
            if deadline.expired() or self._engine.closed:
                return False
            polls += 1
            if polls < _YIELDS:
                os.sched_yield()
            else:
                time.sleep(min(pause, deadline.remaining()))
                pause = min(2 * pause, _MAX_PAUSE)

    def progress(self) -> None:
        """Progress the messages without a wait."""
        with self._engine.lock:
            self._progress()

    # With it

    def _progress(self) -> None:
        try:
            self._progress_sends()
            self._progress_receives()
        except self._error as error:
            raise DistBackendError(f"a message: MPI error: {error}") from error

    def _progress_sends(self) -> None:
        for sent in self._sends[:]:
            while sent.requests and sent.requests[-1].Test():
                sent.requests.pop()
            if not sent.requests:
                sent.transfer.done = True
                self._sends.remove(sent)

    def _progress_receives(self) -> None:
        # Between two ranks and with one tag, bodies are posted in the order of the headers.
        blocked: set[tuple[int, int]] = set()
        for posted in self._receives[:]:
            if not posted.body_posted:
                if not posted.header_arrived and posted.requests[0].Test(posted.status):
                    posted.on_header()
                tag = posted.tag
                if (
                    not posted.header_arrived
                    or (posted.source, tag) in blocked
                    or (self._mpi.ANY_SOURCE, tag) in blocked
                ):
                    blocked.add((posted.source, tag))
                    continue
                self._deliver(posted)
            while posted.requests and posted.requests[-1].Test():
                posted.requests.pop()
            if posted.body_posted and not posted.requests:
                posted.transfer.done = True
                self._receives.remove(posted)

    def _cancel_receive(self, posted: _Receive) -> bool:
        """Cancel a receive whose header had not arrived; return whether that succeeded."""
        posted.requests[0].Cancel()
        posted.requests[0].Wait(posted.status)
        cancelled: bool = posted.status.Is_cancelled()
        if not cancelled:
            posted.on_header()
        return cancelled

    def _deliver(self, posted: _Receive) -> None:
        """Match a message whose header has arrived: copy inline bytes, or post receives for the body."""
        posted.body_posted, posted.requests = True, []
        source_rank = posted.source
        source = posted.transfer.source = self._ranks[source_rank]
        dtype, nbytes = _HEADER.unpack_from(posted.header)
        fits = dtype == posted.dtype and nbytes == len(posted.view)
        if not fits:
            rank = self._global_rank(source)
            why = mismatch_reason(rank, _user_tag(posted.tag), (dtype, nbytes), (posted.dtype, len(posted.view)))
            self._matcher.refuse(source, why)
            posted.transfer.error = DistBackendError(why)
        if nbytes > INLINE:
            view = posted.view if fits else memoryview(bytearray(nbytes))
            posted.requests = [
                self._comm.Irecv((view[piece], self._mpi.BYTE), source_rank, posted.tag + 1)
                for piece in chunks(nbytes, self.max_count)
            ]
        elif fits:
            posted.view[:] = posted.header[_HEADER.size : _HEADER.size + nbytes].data

    def _isend(self, view: Any, to: int, tag: int) -> Any:
        return self._comm.Isend((view, self._mpi.BYTE), to, tag)

    def _mpi_tag(self, tag: int) -> int:
        """Return MPI's tag of a header; the body's is one more."""
        if not -self._max_tag <= tag <= self._max_tag:
            raise ValueError(
                f"tag {tag} is more than this MPI has: tags are -{self._max_tag} to {self._max_tag} under backend 'mpi'"
            )
        return 4 * tag if tag >= 0 else -4 * tag + 2


def _user_tag(mpi_tag: int) -> int:
    return -(mpi_tag // 4) if mpi_tag % 4 else mpi_tag // 4
