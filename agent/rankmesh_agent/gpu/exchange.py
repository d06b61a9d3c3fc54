"""Exchange of short values between the ranks of a group: descriptions of their GPUs, and ids of NCCL's communicators.

They travel as calls and messages of the group's communicator for arrays in host memory, so that missing ranks, lost
ranks and ranks that make another call are named as for any other call.
"""

from __future__ import annotations

import numpy as np

from rankmesh_agent.group.communicator import Communicator
from rankmesh_agent.group.options import Options
from rankmesh_agent.net.deadline import Deadline
from rankmesh_agent.wire.object_records import MIN_TAG
from rankmesh_agent.wire.ops import OpType

_TAGS = MIN_TAG - 4
"""First tag of the messages, behind those of objects: a receive of objects from any rank matches none of them."""
_BYTE = np.dtype(np.uint8)


def share(host: Communicator, value: bytes, size: int, subject: str, deadline: Deadline) -> list[bytes]:
    """Return the values of all ranks, by group rank; a synchronous collective call.

    Args:
        value: this rank's, of at most ``size`` bytes.
        size: bytes of a value; equal at all ranks, as the values are not.
    """
    mine = _padded(value, size)
    found = [np.empty_like(mine) for _ in range(host.size)]
    # The empty place of the arrays, host memory, keeps the call out of a batch that records calls of this thread.
    key = OpType.ALL_GATHER, _BYTE, size, None, None, None, subject, ""
    host.queue.submit(key, (found, mine), _within(deadline))
    return [each.tobytes().rstrip(b"\0") for each in found]


def broadcast(host: Communicator, value: bytes, subject: str, deadline: Deadline) -> bytes:
    """Return group rank 0's value; other ranks pass one of its size. A synchronous collective call, see ``share``."""
    array = _padded(value, len(value))
    key = OpType.BROADCAST, _BYTE, array.size, None, host.global_ranks[0], None, subject, ""
    host.queue.submit(key, (array, 0), _within(deadline))
    return array.tobytes()


def swap(host: Communicator, peer: int, value: bytes, size: int, deadline: Deadline) -> bytes:
    """Send a value to another group rank, and return that rank's; see ``share``."""
    theirs = np.empty(size, _BYTE)
    work = host.send(_padded(value, size), host.ranks[peer], _TAGS, _within(deadline)._replace(async_op=True))
    host.receive(theirs, host.ranks[peer], _TAGS, _within(deadline))
    assert work is not None  # as it is asynchronous
    work.wait()
    return theirs.tobytes().rstrip(b"\0")


def send(host: Communicator, peer: int, value: bytes, lane: int, deadline: Deadline) -> None:
    """Send a value to another group rank, which receives those of a lane (1, 2, …) in order."""
    host.send(_padded(value, len(value)), host.ranks[peer], _TAGS + lane, _within(deadline))


def receive(host: Communicator, peer: int, size: int, lane: int, deadline: Deadline) -> bytes:
    """Return a value from another group rank: see ``send``."""
    array = np.empty(size, _BYTE)
    host.receive(array, host.ranks[peer], _TAGS + lane, _within(deadline))
    return array.tobytes()


def _padded(value: bytes, size: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.frombuffer(bytearray(value.ljust(size, b"\0")), _BYTE)


def _within(deadline: Deadline) -> Options:
    return Options(max(deadline.remaining(), 1e-6))
