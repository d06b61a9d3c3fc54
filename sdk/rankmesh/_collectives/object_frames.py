"""How an encoded object travels: a record of fixed size, and a rest where that is too small.

::

    record, 1024 bytes    "RMP", version 1 · whether this is an error (1 byte, 3 of nothing) · number of objects, bytes
                          of the whole, tag of the rest (8 bytes each, network byte order) · the first 992 bytes
    rest                  the other bytes

Receivers know the record's size beforehand, so a small object takes one round. A rank that cannot encode its object
sends the reason in its place: the others learn why there is none, and nobody waits.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rankmesh._collectives.serialize import loads
from rankmesh_agent.group.call_queue import Options
from rankmesh_agent.group.communicator import Communicator
from rankmesh_agent.wire.errors import DistBackendError, DistError, ProtocolError

Octets = npt.NDArray[np.uint8]

_MAGIC = b"RMP\x01"
_HEAD = struct.Struct("!4s?3xQQq")
HEAD_BYTES = _HEAD.size
RECORD_BYTES = 1024
_FIRST = RECORD_BYTES - HEAD_BYTES

RECORD_TAG = -(1 << 63)
"""Tag of a record that goes point to point. It and those behind it are not for users' messages."""
_tags = itertools.count(RECORD_TAG + 1)


class Outgoing:
    """What one rank sends to another, or to all.

    Args:
        payload: the encoded objects, or the reason why there are none.
        count: how many objects.
        failed: whether it is the reason.

    Attributes:
        record: goes first.
        rest: goes then, unless it is empty.
        tag: of the rest, if that goes point to point.
    """

    def __init__(self, payload: bytes, count: int = 1, failed: bool = False) -> None:
        self.tag = next(_tags)
        record = bytearray(RECORD_BYTES)
        first = payload[:_FIRST]
        _HEAD.pack_into(record, 0, _MAGIC, failed, count, len(payload), self.tag)
        record[HEAD_BYTES : HEAD_BYTES + len(first)] = first
        self.record: Octets = np.frombuffer(record, np.uint8)
        self.rest: Octets = np.frombuffer(payload, np.uint8)[_FIRST:]


class Incoming:
    """What came from one rank.

    Args:
        record: its record; of HEAD_BYTES at least.

    Attributes:
        count: how many objects, as the sender says.
        rest: where the rest goes.
        tag: of the rest.

    Raises:
        ProtocolError: this is no record.
    """

    def __init__(self, record: Octets) -> None:
        magic, self.failed, self.count, size, self.tag = _HEAD.unpack_from(record.data)
        if magic != _MAGIC:
            raise ProtocolError("the array of another call arrived in the place of an object")
        self._payload: Octets = np.empty(size, np.uint8)
        first = record[HEAD_BYTES : HEAD_BYTES + size]
        self._payload[: first.size] = first
        self.rest = self._payload[first.size :]

    def open(self, comm: Communicator, group_rank: int, called: str) -> Any:
        """Return the objects, once the rest is there.

        Args:
            comm: the group.
            group_rank: who sent it.
            called: the function's name.

        Raises:
            DistBackendError: that rank could not encode it, or this one not make it from its pickle.
            ProtocolError: it is damaged, or has a pickle in it that must not be read here.
        """
        rank = comm.global_ranks[group_rank]
        if self.failed:
            why = self._payload.tobytes().decode(errors="replace")
            raise DistBackendError(
                f"{called}: rank {rank} had no object to send: {why}", ranks=[rank], op=called, group=comm.name
            )
        try:
            return loads(self._payload.data)
        except Exception as error:  # of the objects' own code, too
            kind: type[DistError] = type(error) if isinstance(error, DistError) else DistBackendError
            why = error.message if isinstance(error, DistError) else f"{type(error).__name__}: {error}"
            raise kind(
                f"{called}: what rank {rank} sent cannot be read: {why}", ranks=[rank], op=called, group=comm.name
            ) from error


def pack(
    encode: Callable[[], Sequence[bytes]], parcels: int, count: int = 1
) -> tuple[list[Outgoing], Exception | None]:
    """Return what to send, and None; or, in each place, the reason why there is nothing, and the error.

    Args:
        encode: returns a payload for each parcel.
        parcels: how many.
        count: objects in each.
    """
    try:
        return [Outgoing(payload, count) for payload in encode()], None
    except Exception as error:  # of the objects' own code, too
        why = f"{type(error).__name__}: {error}".encode(errors="replace")[:_FIRST]
        return [Outgoing(why, count, failed=True)] * parcels, error


def records(size: int) -> list[Octets]:
    """Return what to receive records into."""
    return list(np.zeros((size, RECORD_BYTES), np.uint8))


def move_rests(
    comm: Communicator,
    sends: Sequence[tuple[int, Outgoing]],
    receives: Sequence[tuple[int, Incoming]],
    how: Callable[[bool], Options],
) -> None:
    """Send and receive what did not fit into records, point to point, and only between ranks that have something.

    Args:
        comm: the group.
        sends: group ranks, and what goes there; this rank itself is left out.
        receives: group ranks, and what comes from there.
        how: returns how to make a call, asynchronous or not.
    """
    works: list[Any] = []
    for rank, parcel in receives:
        if rank != comm.rank and parcel.rest.size:
            works.append(comm.receive(parcel.rest, comm.ranks[rank], parcel.tag, how(True)))
    for rank, outgoing in sends:
        if rank != comm.rank and outgoing.rest.size:
            works.append(comm.send(outgoing.rest, comm.ranks[rank], outgoing.tag, how(True)))
    for work in works:
        work.wait()
