"""Framing of encoded objects: a record of fixed size, and rests for what does not fit.

::

    record, 1024 bytes    "RMP", version 2 · flags: 1 this is an error, 2 a pickle (1 byte, 3 of padding) · number of
                          objects, tag of the rests, bytes of the message, bytes of each of 16 arrays that travel apart
                          (8 bytes each, network byte order) · the first bytes of the message
    rest                  the other bytes of the message
    rests                 the arrays

Receivers know the record's size beforehand, so a small object takes one round. A rank that cannot encode its object
sends the reason in its place, so that no receiver waits for the object.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rankmesh._collectives.plain import Octets
from rankmesh._collectives.serialize import MAX_APART, Message, loads
from rankmesh_agent.group.communicator import Communicator
from rankmesh_agent.group.options import Options
from rankmesh_agent.wire.errors import DistBackendError, DistError, ProtocolError
from rankmesh_agent.wire.object_records import MAGIC, MIN_TAG, RECORD_BYTES, RECORD_TAG

_HEAD = struct.Struct(f"!4sB3xQqQ{MAX_APART}Q")
_FAILED, _PICKLED = 1, 2
HEAD_BYTES = _HEAD.size
_FIRST = RECORD_BYTES - HEAD_BYTES

_tags = itertools.count(RECORD_TAG + 1)


class Outgoing:
    """Record and rests that one rank sends; ``rests``: sent next, but for empty ones."""

    def __init__(self, message: Message, count: int = 1, failed: bool = False) -> None:
        self.tag = next(_tags)
        data = np.frombuffer(message.data, np.uint8)
        record = bytearray(RECORD_BYTES)
        sizes = [octets.size for octets in message.apart]
        flags = _FAILED * failed | _PICKLED * message.pickled
        _HEAD.pack_into(record, 0, MAGIC, flags, count, self.tag, data.size, *sizes, *[0] * (MAX_APART - len(sizes)))
        self.record: Octets = np.frombuffer(record, np.uint8)
        first = data[:_FIRST]
        self.record[HEAD_BYTES : HEAD_BYTES + first.size] = first
        self.rests: list[Octets] = [data[_FIRST:], *message.apart]


class Incoming:
    """Record received from one rank, and memory for its rests; ``record``: the record; at least HEAD_BYTES of it."""

    def __init__(self, record: Octets) -> None:
        magic, self._flags, self.count, self.tag, *sizes = _HEAD.unpack_from(record.data)
        if magic != MAGIC:
            raise ProtocolError("the array of another call arrived in the place of an object")
        if not RECORD_TAG < self.tag < MIN_TAG:
            raise ProtocolError(f"the rest of an object would come with the tag {self.tag} of other messages")
        try:
            self._data: Octets = np.empty(sizes[0], np.uint8)
            self._apart: list[Octets] = [np.empty(size, np.uint8) for size in sizes[1:] if size]
        except (MemoryError, ValueError):
            raise ProtocolError(f"there is no memory for the {sum(sizes)} bytes of an object") from None
        first = record[HEAD_BYTES : HEAD_BYTES + sizes[0]]
        self._data[: first.size] = first
        self.rests: list[Octets] = [self._data[first.size :], *self._apart]

    def copy(self, outgoing: Outgoing) -> None:
        """Take over the rests that this rank would send to itself."""
        for memory, rest in zip(self.rests, outgoing.rests, strict=True):
            memory[:] = rest

    def decode(self, comm: Communicator, group_rank: int, called: str, weights_only: bool = False) -> Any:
        """Return the objects, once the rest has arrived."""
        rank = comm.global_ranks[group_rank]
        if self._flags & _FAILED:
            reason = self._data.tobytes().decode(errors="replace")
            raise DistBackendError(
                f"{called}: rank {rank} had no object to send: {reason}", ranks=[rank], op=called, group=comm.name
            )
        try:
            return loads(Message(self._data.data, self._apart, bool(self._flags & _PICKLED)), weights_only)
        except Exception as error:  # of the objects' own code, too
            kind: type[DistError] = type(error) if isinstance(error, DistError) else DistBackendError
            reason = error.message if isinstance(error, DistError) else f"{type(error).__name__}: {error}"
            raise kind(
                f"{called}: what rank {rank} sent cannot be read: {reason}", op=called, group=comm.name
            ) from error


def pack(
    encode: Callable[[], Sequence[Message]], frames: int, count: int = 1
) -> tuple[list[Outgoing], Exception | None]:
    """Return the frames to send, and None; or frames with the reason why there are no objects, and the error."""
    try:
        return [Outgoing(message, count) for message in encode()], None
    except Exception as error:  # of the objects' own code, too
        reason = f"{type(error).__name__}: {error}".encode(errors="replace")[:_FIRST]
        return [Outgoing(Message(reason, [], pickled=False), count, failed=True)] * frames, error


def records(size: int) -> list[Octets]:
    """Return memory for records to be received."""
    return list(np.zeros((size, RECORD_BYTES), np.uint8))


def transfer_rests(
    comm: Communicator,
    sends: Sequence[tuple[int, Outgoing]],
    receives: Sequence[tuple[int, Incoming]],
    next_options: Callable[[bool], Options],
) -> None:
    """Send and receive all rests that are not empty, point to point, by group ranks; this rank itself is skipped."""
    works: list[Any] = [
        comm.receive(rest, comm.ranks[rank], incoming.tag, next_options(True))
        for rank, incoming in receives
        for rest in incoming.rests
        if rest.size and rank != comm.rank
    ]
    works += [
        comm.send(rest, comm.ranks[rank], outgoing.tag, next_options(True))
        for rank, outgoing in sends
        for rest in outgoing.rests
        if rest.size and rank != comm.rank
    ]
    for work in works:
        work.wait()
