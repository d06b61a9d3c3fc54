"""Framing of encoded objects: a record of fixed size, and a rest for what does not fit.

::

    record, 1024 bytes    "RMP", version 1 · whether this is an error (1 byte, 3 of padding) · number of objects, bytes
                          in total, tag of the rest (8 bytes each, network byte order) · the first 992 bytes
    rest                  the other bytes

Receivers know the record's size beforehand, so a small object takes one round. A rank that cannot encode its object
sends the reason in its place, so that no receiver waits for the object.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rankmesh._collectives.serialize import loads
from rankmesh_agent.group.communicator import Communicator
from rankmesh_agent.group.options import Options
from rankmesh_agent.wire.errors import DistBackendError, DistError, ProtocolError
from rankmesh_agent.wire.object_records import MAGIC, MIN_TAG, RECORD_BYTES, RECORD_TAG

Octets = npt.NDArray[np.uint8]

_HEAD = struct.Struct("!4s?3xQQq")
HEAD_BYTES = _HEAD.size
_FIRST = RECORD_BYTES - HEAD_BYTES

_tags = itertools.count(RECORD_TAG + 1)


class Outgoing:
    """Record and rest that one rank sends.

    Args:
        payload: the encoded objects, or the reason why there are none.
        count: number of objects.
        failed: whether the payload is the reason.

    Attributes:
        record: sent first.
        rest: sent next, unless it is empty.
        tag: of the rest, if it is sent point to point.
    """

    def __init__(self, payload: bytes, count: int = 1, failed: bool = False) -> None:
        self.tag = next(_tags)
        record = bytearray(RECORD_BYTES)
        first = payload[:_FIRST]
        _HEAD.pack_into(record, 0, MAGIC, failed, count, len(payload), self.tag)
        record[HEAD_BYTES : HEAD_BYTES + len(first)] = first
        self.record: Octets = np.frombuffer(record, np.uint8)
        self.rest: Octets = np.frombuffer(payload, np.uint8)[_FIRST:]


class Incoming:
    """Record received from one rank, and memory for its rest.

    Args:
        record: the record; at least HEAD_BYTES of it.

    Attributes:
        count: number of objects, as sent.
        rest: memory for the rest.
        tag: of the rest.

    Raises:
        ProtocolError: this is not a record.
    """

    def __init__(self, record: Octets) -> None:
        magic, self.failed, self.count, size, self.tag = _HEAD.unpack_from(record.data)
        if magic != MAGIC:
            raise ProtocolError("the array of another call arrived in the place of an object")
        if not RECORD_TAG < self.tag < MIN_TAG:
            raise ProtocolError(f"the rest of an object would come with the tag {self.tag} of other messages")
        try:
            self._payload: Octets = np.empty(size, np.uint8)
        except (MemoryError, ValueError):
            raise ProtocolError(f"there is no memory for the {size} bytes of an object") from None
        first = record[HEAD_BYTES : HEAD_BYTES + size]
        self._payload[: first.size] = first
        self.rest = self._payload[first.size :]

    def decode(self, comm: Communicator, group_rank: int, called: str) -> Any:
        """Return the objects, once the rest has arrived.

        Args:
            comm: the group.
            group_rank: the sender.
            called: the function's name.

        Raises:
            DistBackendError: the sender could not encode it, or this rank could not unpickle it.
            ProtocolError: it is damaged, or contains a pickle that this rank must not read.
        """
        rank = comm.global_ranks[group_rank]
        if self.failed:
            reason = self._payload.tobytes().decode(errors="replace")
            raise DistBackendError(
                f"{called}: rank {rank} had no object to send: {reason}", ranks=[rank], op=called, group=comm.name
            )
        try:
            return loads(self._payload.data)
        except Exception as error:  # of the objects' own code, too
            kind: type[DistError] = type(error) if isinstance(error, DistError) else DistBackendError
            reason = error.message if isinstance(error, DistError) else f"{type(error).__name__}: {error}"
            raise kind(
                f"{called}: what rank {rank} sent cannot be read: {reason}", op=called, group=comm.name
            ) from error


def pack(encode: Callable[[], Sequence[bytes]], frames: int, count: int = 1) -> tuple[list[Outgoing], Exception | None]:
    """Return the frames to send, and None; or frames with the reason why there are no objects, and the error.

    Args:
        encode: returns the payload of each frame.
        frames: number of frames.
        count: objects in each.
    """
    try:
        return [Outgoing(payload, count) for payload in encode()], None
    except Exception as error:  # of the objects' own code, too
        reason = f"{type(error).__name__}: {error}".encode(errors="replace")[:_FIRST]
        return [Outgoing(reason, count, failed=True)] * frames, error


def records(size: int) -> list[Octets]:
    """Return memory for records to be received."""
    return list(np.zeros((size, RECORD_BYTES), np.uint8))


def transfer_rests(
    comm: Communicator,
    sends: Sequence[tuple[int, Outgoing]],
    receives: Sequence[tuple[int, Incoming]],
    next_options: Callable[[bool], Options],
) -> None:
    """Send and receive all rests that are not empty, point to point.

    Args:
        comm: the group.
        sends: group ranks, and the frames for them; this rank itself is skipped.
        receives: group ranks, and the frames from them; this rank itself is skipped.
        next_options: returns the options of a call, asynchronous or not.
    """
    works: list[Any] = []
    for rank, incoming in receives:
        if rank != comm.rank and incoming.rest.size:
            works.append(comm.receive(incoming.rest, comm.ranks[rank], incoming.tag, next_options(True)))
    for rank, outgoing in sends:
        if rank != comm.rank and outgoing.rest.size:
            works.append(comm.send(outgoing.rest, comm.ranks[rank], outgoing.tag, next_options(True)))
    for work in works:
        work.wait()
