"""Bodies that describe groups, their calls and the stacks of a process."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from msgspec import Meta

from rankmesh_agent.wire.fields import Body, Integer, Ranks, Seconds

MAX_IN_FLIGHT = 64
"""Maximum number of calls and messages in flight in the description of a group."""


@dataclass
class InFlight:
    """A call of one member that has begun, or waits in the queue, and has not ended.

    Attributes:
        op: the call as text, ``all_reduce(float32[1024], SUM)`` or ``recv from rank 1 (tag 0)``.
        seq: its number in the group; 0 for a message between two ranks, and for the creation of the group, without one.
        age: seconds since it began, or was queued.
        bytes: bytes of its largest contribution; in an all_to_all, the total that this member contributes.
    """

    op: str
    seq: Integer
    age: float
    bytes: Integer


FlightState = Literal["in-flight", "completed", "failed"]


@dataclass
class FlightRecord:
    """A call or message in the flight recorder.

    Attributes:
        group, name: id and name of its group.
        seq: see InFlight.
        op: ``all_reduce``, ``send``, ...
        call: the operation with its arguments, as text.
        dtype: element type of its arrays, empty for calls without arrays.
        count: elements that each rank contributes or receives; -1 where every rank has its own splits.
        bytes: see InFlight.
        begin: unix time of its begin.
        end: unix time of its end, null while it is in flight.
        state: its state.
        error: reason of its failure, otherwise empty.
    """

    group: str
    name: str
    seq: Integer
    op: str
    call: str
    dtype: str
    count: Integer
    bytes: Integer
    begin: float
    end: float | None
    state: FlightState
    error: str


FrameOrigin = Literal["user", "library", "rankmesh"]


@dataclass
class StackFrame:
    """A call in a thread's stack: its location, and the source line if the file is readable.

    Attributes:
        file, line, function, code: see above.
        origin: ``rankmesh``; ``library``: the standard library or an installed package; else ``user``.
    """

    file: str
    line: Integer
    function: str
    code: str
    origin: FrameOrigin = "user"


@dataclass
class ThreadStack:
    """A thread's stack, from the outermost call inwards.

    Attributes:
        name, ident: the thread's name, and its number in Python.
        native_id: the thread's number in the operating system; 0 if unknown.
        daemon: whether the process ends without waiting for the thread.
        frames: the calls.
    """

    name: str
    ident: Integer
    native_id: Integer
    daemon: bool
    frames: list[StackFrame]


@dataclass
class GroupInfo:
    """A group as one of its members reports it.

    Attributes:
        id: the group's id, 16 hexadecimal digits, equal at all members.
        name: name for users, ``world`` for the default group.
        ranks: global ranks of the members, by group rank.
        seq: number of operations that this member has begun.
        medium: medium of its collectives: ``shm``, ``tcp``, ``shm+tcp`` (several hosts) or ``self`` (one rank).
        last: the last operation as text, empty if there was none.
        failure: the failure that ended the group, empty while the group is usable.
        bytes: total bytes of the operations that have ended at this member, as InFlight counts them.
        inflight: operations that have begun or wait in the queue: collectives in their order, then messages between two
            ranks, the oldest first; at most MAX_IN_FLIGHT.
        seconds: total time in operations at this member, that of the collective under way included.
    """

    id: str
    name: str
    ranks: list[Integer]
    seq: Integer
    medium: str
    last: str
    failure: str
    bytes: Integer = 0
    inflight: list[InFlight] = field(default_factory=list)
    seconds: float = 0.0


@dataclass
class RankGroupInfo:
    """A group as the gateway sees it: the data of GroupInfo, and the job of the members.

    Attributes:
        job, epoch: the group's job, and its epoch.
        id, name, ranks, medium: see GroupInfo.
        seqs: number of operations each member (global rank, as text) has begun, as last reported.
        failure: the first failure that a member reported, empty while there is none.
        operations_rate: operations per second, from the members' last two reports.
        bytes_rate: bytes per second in the arrays of all members together.
        ages: seconds since each member's report (global rank, as text), the age of its ``seqs``.
        busy: share of the time between its last two reports that each member (global rank, as text) spent in the
            group's operations. A member with a much smaller share than the others is the one they wait for.
    """

    job: str
    epoch: Integer
    id: str
    name: str
    ranks: list[Integer]
    medium: str
    seqs: dict[str, int]
    failure: str
    operations_rate: float = 0.0
    bytes_rate: float = 0.0
    ages: dict[str, float] = field(default_factory=dict, compare=False)
    busy: dict[str, float] = field(default_factory=dict, compare=False)


@dataclass
class GroupRequest(Body):
    """Create a group of some ranks of the job: every member's agent gets the same request.

    Attributes:
        ranks: global ranks of the members, by group rank.
        name: its name, unique among the members' groups.
        timeout: seconds to wait for the members, and the default of the group's calls; the world's if left out.
        instance: random name of this very group, equal at all members. With it, a request can be repeated, and a group
            that failed does not keep its successor from being created. Without it, the members count their attempts.
    """

    ranks: Ranks
    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$(?!\n)", max_length=64)]
    timeout: Seconds | None = None
    instance: Annotated[str, Meta(max_length=64)] = ""


@dataclass
class AbortBody(Body):
    """Abort a group at all members, for a ``reason``, which their errors have."""

    reason: Annotated[str, Meta(max_length=500)] = ""
