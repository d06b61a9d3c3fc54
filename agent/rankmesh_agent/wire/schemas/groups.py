"""Bodies that describe groups, their calls and the stacks of a process."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from rankmesh_agent.wire.fields import Integer, Number

MAX_IN_FLIGHT = 64
"""How many calls and messages under way a group's description lists."""


@dataclass
class InFlight:
    """A call of one member that has begun, or waits in the queue, and has not ended.

    Attributes:
        op: the call in words, ``all_reduce(float32[1024], SUM)`` or ``recv from rank 1 (tag 0)``.
        seq: its number in the group; 0 for a message between two ranks, and for making the group, which have none.
        age: seconds since it began, or was queued.
        bytes: of its largest contribution; in an all_to_all, of all that this member gives.
    """

    op: str
    seq: Integer
    age: Number
    bytes: Integer


FlightState = Literal["in-flight", "completed", "failed"]


@dataclass
class FlightRecord:
    """A call or message that the flight recorder remembers.

    Attributes:
        group: id of its group.
        name: name of its group.
        seq: see InFlight.
        op: ``all_reduce``, ``send``, ...
        call: the same with its arguments, in words.
        dtype: element type of its arrays, empty where there are none.
        count: elements each rank contributes, or gets; -1 where every rank has its own splits.
        bytes: see InFlight.
        begin: unix time at which it began.
        end: unix time at which it ended, null while it is in flight.
        state: how it is.
        error: why it failed, empty otherwise.
    """

    group: str
    name: str
    seq: Integer
    op: str
    call: str
    dtype: str
    count: Integer
    bytes: Integer
    begin: Number
    end: Number | None
    state: FlightState
    error: str


@dataclass
class StackFrame:
    """A call in a thread's stack: where it is, and the source line if the file can be read."""

    file: str
    line: Integer
    function: str
    code: str


@dataclass
class ThreadStack:
    """A thread's stack, from the outermost call inwards.

    Attributes:
        name: the thread's name.
        ident: Python's number for it.
        native_id: the system's; 0 if it is not known.
        daemon: whether the process ends without waiting for it.
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
        id: the group's id, 16 hexadecimal digits, the same at all members.
        name: name for people, ``world`` for the default group.
        ranks: global ranks of the members, by group rank.
        seq: how many operations this member has begun.
        medium: what carries its collectives: ``shm``, ``tcp``, ``shm+tcp`` (several hosts) or ``self`` (one rank).
        last: the last operation in words, empty when there was none.
        failure: why the group cannot be used any more, empty while it can.
        bytes: of all its operations that have ended at this member together, as InFlight counts them.
        inflight: its operations that have begun or wait in the queue: collectives in their order, then messages
            between two ranks, the oldest first; at most MAX_IN_FLIGHT.
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


@dataclass
class RankGroupInfo:
    """A group as the gateway sees it: the same data as GroupInfo, plus who reported.

    Attributes:
        job: the job it belongs to.
        epoch: the job's epoch.
        id: the group's id.
        name: name for people.
        ranks: global ranks of the members, by group rank.
        medium: what carries its collectives.
        seqs: how many operations each member (global rank, as text) has begun, as last reported.
        failure: the first failure a member reported, empty while there is none.
        operations_rate: operations a second, from the members' last two reports.
        bytes_rate: bytes a second in the arrays of all members together.
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


@dataclass
class GroupRequest:
    """Make a group of some ranks of the job. Every member's agent is asked the same, and all answer when all have come.

    Attributes:
        ranks: global ranks of the members, by group rank.
        name: its name, which no other group of the members has.
        timeout: seconds to wait for the members, and the default of the group's calls; the world's if left out.
        instance: random name of this very group, equal at all members: asking again is harmless then, and a group that
            failed does not stand in the way of its successor. Left out, the members count the groups they make.
    """

    ranks: list[int]
    name: str
    timeout: float | None = None
    instance: str = ""


@dataclass
class GroupAbort:
    """End a group at all members.

    Attributes:
        reason: why, for their errors.
    """

    reason: str = ""
