"""Snapshot of one rank for diagnosis: the JSON document, and the HTTP Upgrade by which a client requests it.

The connection is upgraded, both sides prove that they know the job's token (``wire.handshake``), and the agent sends
the document and closes the connection. Unlike an HTTP request, this needs no web framework, whose import takes longer
than an operator of a stuck job should wait; and all parts of the document are of one moment.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rankmesh_agent.wire.schemas import ThreadStack
from rankmesh_agent.wire.upgrade import Upgrade

UPGRADE = Upgrade(b"/v1/snapshot", b"rankmesh-snapshot/1")
MAX_CALLS = 64
"""Maximum number of calls in flight, and of waits for keys, in a snapshot."""
MAX_ENDED = 16
"""Maximum number of ended calls of each group in a snapshot."""
MAX_SNAPSHOT_BYTES = 16 << 20


@dataclass
class SnapshotGroup:
    """A group of the rank.

    Attributes:
        id, name: see GroupInfo.
        ranks: the members, by their ranks in the job.
        seq: number of the latest collective that this rank has begun.
    """

    id: str
    name: str
    ranks: list[int]
    seq: int


@dataclass
class SnapshotCall:
    """A call or message of a group.

    Attributes:
        group: id of the group.
        seq: see InFlight.
        op: name of the operation.
        call: the operation with its arguments, as text.
        age: seconds since it began, or, if it has ended, since its end.
        peer: for a message, the rank at its other end; -1 for any rank.
        tag: tag of a message.
        awaited: whether a thread waits for the message; always for a collective.
    """

    group: str
    seq: int
    op: str
    call: str
    age: float
    peer: int | None = None
    tag: int = 0
    awaited: bool = True


@dataclass
class SnapshotStoreWait:
    """A call of the job's store that waits for keys.

    Attributes:
        op: name of the call.
        keys: the keys, at most 10.
        age: seconds since it began.
        seconds: its timeout.
    """

    op: str
    keys: list[str]
    age: float
    seconds: float


@dataclass
class RankSnapshot:
    """One rank at one moment.

    Attributes:
        job, epoch, rank: the rank.
        attached: whether its calls are those of another process, attached to this standalone agent; the stacks are the
            agent's then.
        groups: its groups, also those that are being created.
        calls: calls and messages in flight, collectives of a group in their order.
        ended: the latest calls of each group that have ended, the latest last.
        store_waits: calls of the job's store that wait.
        stacks: stacks of all threads.
    """

    job: str
    epoch: int
    rank: int
    attached: bool
    groups: list[SnapshotGroup] = field(default_factory=list)
    calls: list[SnapshotCall] = field(default_factory=list)
    ended: list[SnapshotCall] = field(default_factory=list)
    store_waits: list[SnapshotStoreWait] = field(default_factory=list)
    stacks: list[ThreadStack] = field(default_factory=list)
