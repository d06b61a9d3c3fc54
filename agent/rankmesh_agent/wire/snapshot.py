"""Snapshot of one rank for diagnosis, and the dump, which has that of the moment in which a group failed.

A client connects to the agent's port (``wire.hello``), and the agent sends the JSON document and closes the connection:
this needs no web framework, whose import takes longer than an operator of a stuck job should wait.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

from rankmesh_agent.wire.schemas import ThreadStack

MAX_CALLS = 64
"""Maximum number of calls in flight, and of waits for keys, in a snapshot."""
MAX_ENDED = 16
"""Maximum number of ended calls of each group in a snapshot."""
MAX_DUMPED = 1000
"""Maximum number of ended calls of each group in a dump, and in a record for a trace."""
WATCH_SECONDS = 1.0
MAX_SNAPSHOT_BYTES = 16 << 20
_RANK = struct.Struct("!q")
RANK_BYTES = _RANK.size
RUNNING = ("R", "S", "D")
"""State letters of a process that is not stopped, and has not ended."""
DUMP_FORMAT = "rankmesh-dump/1"


@dataclass
class SnapshotGroup:
    """A group of the rank: its members, by their ranks in the job, and the number of its latest collective here."""

    id: str
    name: str
    ranks: list[int]
    seq: int


@dataclass
class SnapshotCall:
    """A call or message of a group.

    Attributes:
        group: id of the group.
        op: name of the operation.
        call: the operation with its arguments, as text.
        age: seconds since it began, or, if it has ended, since its end.
        peer: for a message, the rank at its other end; -1 for any rank.
        tag: tag of a message.
        awaited: whether a thread waits for the message; always for a collective.
        error: of an ended call, the reason of its failure; empty if it succeeded.
        seconds: of an ended call, how long it took.
        nbytes: of the array.
        algorithm: of a collective that has been planned, see docs/algorithms.md; else empty.
    """

    group: str
    seq: int
    op: str
    call: str
    age: float
    peer: int | None = None
    tag: int = 0
    awaited: bool = True
    error: str = ""
    seconds: float = 0.0
    nbytes: int = 0
    algorithm: str = ""


@dataclass
class SnapshotStoreWait:
    """A call of the job's store that waits for keys, of which 10 are listed; its age and its timeout in seconds."""

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
        cpu_seconds: seconds of CPU time that its threads have used.
        monotonic: the moment by the monotonic clock, which all processes of its host share.
        unchanged: of an observed rank, whose calls are not known, seconds for which each look at its main thread has
            found the same stack; None of others.
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
    cpu_seconds: float = 0.0
    monotonic: float = 0.0
    unchanged: float | None = None


@dataclass
class ProcessView:
    """A process without an agent, or whose agent does not answer, as another process of its host sees it.

    Attributes:
        state: its state letter, as in /proc/PID/stat: ``T`` stopped, ``R`` running; ``-`` if there is no such process;
            empty if it is on another host, or the system does not tell.
        frozen: the control group that freezes it; empty if none does.
        wchan: the function of the kernel in which its main thread waits; empty if it does not, or none is known.
        swap_bytes: its memory in swap, if that is 64 MiB or more.
        cpu: processor time that its threads use, in cores.
        stacks: those of its Python threads, the main thread's first.
        no_stacks: why there are none, and what helps; empty if there are some.
        unchanged: see RankSnapshot.
    """

    state: str = ""
    frozen: str = ""
    wchan: str = ""
    swap_bytes: int = 0
    cpu: float = 0.0
    stacks: list[ThreadStack] = field(default_factory=list)
    no_stacks: str = ""
    unchanged: float = 0.0


@dataclass
class RankWaits:
    """The ranks that a rank waits for in collectives: for each, by call, for which share of WATCH_SECONDS.

    Attributes:
        shares: by the rank as text, then by the call, its group's id and its number.
    """

    shares: dict[str, dict[str, float]]


@dataclass
class RankDump(RankSnapshot):
    """Snapshot of a rank at the moment in which a group failed.

    Attributes:
        format: DUMP_FORMAT.
        time: the moment, in seconds since 1970.
        host, pid: the process.
        world_size: number of ranks in the job.
        failure: the error.
        failed_ranks: the ranks that it names.
    """

    format: str = DUMP_FORMAT
    time: float = 0.0
    host: str = ""
    pid: int = 0
    world_size: int = 0
    failure: str = ""
    failed_ranks: list[int] = field(default_factory=list)


def rank_attachment(rank: int) -> bytes:
    """Return the attachment of a client that asks for the ProcessView of a rank."""
    return _RANK.pack(rank)


def attached_rank(attachment: bytes) -> int:
    """Return the rank in a client's attachment."""
    return int(_RANK.unpack(attachment)[0])
