"""Point-to-point messages of one group over MPI, which matches them by source and tag.

A receive probes for its message, compares the size, which MPI does not, and takes the message into its array. If the
sizes differ, the receive raises, and the group ends: the sender's next call raises the error. Dtypes are not compared.
Messages progress while a thread waits for one or begins one, and at each check of the watchdog. Every method is called
with the engine's lock held, except ``wait`` and ``progress``.

MPI cannot cancel messages in flight. When the group ends, they stay in ``_orphaned``, with the memory that MPI reads or
writes, until they are complete.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rankmesh_agent.collectives.link import chunks
from rankmesh_agent.group.local import LocalCommunicator
from rankmesh_agent.mpi.collectives import MAX_COUNT
from rankmesh_agent.mpi.library import fault_classes, mpi
from rankmesh_agent.net.deadline import Deadline
from rankmesh_agent.progress.framing import Transfer
from rankmesh_agent.progress.message_queues import ANY, Receive
from rankmesh_agent.wire import dtypes
from rankmesh_agent.wire.errors import DistBackendError
from rankmesh_agent.wire.object_records import MIN_TAG, RECORD_TAG

_YIELDS = 300
"""Polls of a wait, with a sched_yield after each, before it sleeps between polls."""
_MIN_PAUSE, _MAX_PAUSE = 2e-5, 1e-3
"""First and longest sleep between polls, in seconds."""
_orphaned: list[_InFlight] = []
"""Messages of groups that have ended. Only the watchdog's thread removes any."""
# The list outlives the interpreter: MPI moves messages until mpi4py finalizes it, which is later.
ctypes.pythonapi.Py_IncRef(ctypes.py_object(_orphaned))


@dataclass(eq=False, slots=True)
class _InFlight:
    """A message that MPI moves, with its memory."""

    request: Any
    view: memoryview
    transfer: Transfer

    def test(self) -> bool:
        """Return whether MPI is done with the message, and record how it has ended."""
        try:
            if not self.request.Test():
                return False
        except mpi().Exception as error:
            if error.Get_error_class() in fault_classes():
                return not self.request  # the caller's wait ends by the group's failure, which names the rank
            self.transfer.error = DistBackendError(f"a message: MPI error: {error}")
        self.transfer.done = True
        return True


def poll_orphaned() -> None:
    """Progress the messages of groups that have ended, and drop completed ones; for the watchdog's thread."""
    for message in _orphaned[:]:
        if message.test():
            _orphaned.remove(message)


class MpiMessages:
    """One rank's side of a group's messages; see MessageTransport.

    Attributes:
        max_count: largest count of an MPI call, in bytes; smaller in tests.
    """

    def __init__(self, comm: Any, group: LocalCommunicator) -> None:
        self.max_count = MAX_COUNT
        self._comm = comm
        self._ranks = group.ranks
        self._engine = group.engine
        self._state = group.state
        self._posted: list[Receive] = []
        self._in_flight: list[_InFlight] = []
        self._mpi = mpi()
        self._tags: int = (self._mpi.COMM_WORLD.Get_attr(self._mpi.TAG_UB) + 1) // 4
        self._error: Any = self._mpi.Exception
        self._faults = fault_classes()

    def send(self, rank: int, view: memoryview, dtype: int, tag: int) -> Transfer:
        """Begin to send ``view`` to a rank; raise ValueError if the tag is out of range, as ``receive`` does."""
        transfer = Transfer()
        self._begin(self._comm.Isend, view, transfer, self._ranks.index(rank), self._mpi_tag(tag))
        self._progress()
        return transfer

    def receive(self, source: int, view: memoryview, dtype: int, tag: int) -> Transfer:
        """Begin to receive into ``view`` from a rank, or from ANY."""
        self._mpi_tag(tag)
        transfer = Transfer()
        self._posted.append(Receive(source, tag, dtype, view, transfer))
        self._progress()
        return transfer

    def progress_in_background(self, transfer: Transfer) -> None:
        """Do nothing: the watchdog progresses all messages."""

    def cancel(self, transfer: Transfer) -> bool:
        """Cancel a receive without a message; return False if data may be in flight."""
        self._progress()
        for receive in self._posted:
            if receive.transfer is transfer:
                self._posted.remove(receive)
                transfer.error = DistBackendError("this message was canceled: its wait ended before")
                transfer.done = True
                break
        return transfer.done

    def close(self) -> None:
        """Forget the receives without a message, and leave the messages in flight to ``poll_orphaned``."""
        self._posted.clear()
        _orphaned.extend(self._in_flight)
        self._in_flight.clear()

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
        for (source, tag), count in Counter((receive.source, receive.tag) for receive in self._posted).items():
            while count and self._match(source, tag):
                count -= 1
        for message in self._in_flight[:]:
            if message.test():
                self._in_flight.remove(message)

    def _match(self, source: int, tag: int) -> bool:
        """Take a message of a source and tag into the first receive that matches it; return whether one has come."""
        status = self._mpi.Status()
        rank = self._mpi.ANY_SOURCE if source == ANY else self._ranks.index(source)
        try:
            message = self._comm.Improbe(rank, self._mpi_tag(tag), status)
        except self._error as error:
            if error.Get_error_class() in self._faults:
                return False  # see _InFlight.test
            raise DistBackendError(f"a message: MPI error: {error}") from error
        if message is None:
            return False
        sender, nbytes = self._ranks[status.Get_source()], status.Get_elements(self._mpi.BYTE)
        receive = next(each for each in self._posted if each.tag == tag and each.source in (ANY, sender))
        self._posted.remove(receive)
        view, transfer = receive.view, receive.transfer
        transfer.source = sender
        if nbytes != len(view):
            itemsize = dtypes.FROM_CODE[receive.dtype].itemsize
            why = (
                f"rank {self._state.global_rank(sender)} sent {nbytes} bytes with tag {tag}, but the receive expects "
                f"{dtypes.name_of(receive.dtype)}[{len(view) // itemsize}], {len(view)} bytes: sizes must be equal on "
                "both sides"
            )
            transfer.error = DistBackendError(why)
            transfer.done = True
            self._state.on_misfit(why)
            view, transfer = memoryview(bytearray(nbytes)), Transfer()  # the sender's is done with it
        self._begin(message.Irecv, view, transfer)
        return True

    def _begin(self, function: Callable[..., Any], view: memoryview, transfer: Transfer, *where: int) -> None:
        """Begin a message in flight; more bytes than MPI can count are one element of many blocks."""
        byte = self._mpi.BYTE
        if len(view) <= self.max_count:
            request = function((view, byte), *where)
        else:
            pieces = [(piece.stop - piece.start, piece.start) for piece in chunks(len(view), self.max_count)]
            blocks = byte.Create_hindexed(*zip(*pieces, strict=True)).Commit()
            request = function((view, 1, blocks), *where)
            blocks.Free()  # MPI keeps it for the request
        self._in_flight.append(_InFlight(request, view, transfer))

    def _mpi_tag(self, tag: int) -> int:
        """Return MPI's tag: the first quarter has tags from 0, the second negative ones, the others tags of objects."""
        if 0 <= tag < self._tags:
            return tag
        if -self._tags <= tag < 0:
            return self._tags - 1 - tag
        if tag < MIN_TAG:
            rest = tag - RECORD_TAG  # 0 for a record; the tags of the rests are used again after all others
            return 2 * self._tags + (rest and 1 + (rest - 1) % (self._tags - 1))
        raise ValueError(
            f"tag {tag} is out of range: under backend 'mpi' tags are {-self._tags} to {self._tags - 1}, half as many "
            "as this MPI library has (MPI_TAG_UB)"
        )
