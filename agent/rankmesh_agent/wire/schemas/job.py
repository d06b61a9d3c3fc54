"""Bodies of joins, heartbeats, health checks and the list of ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from rankmesh_agent.wire.fields import Epoch, Integer, Name, Number, Rank, Text, Texts, WorldSize
from rankmesh_agent.wire.schemas.groups import GroupInfo

HEARTBEAT_SECONDS = 1.0
"""How often an agent reports to the gateway."""
SUSPECT_SECONDS = 3.0
"""A rank silent for this long is suspect."""
FAILED_SECONDS = 10.0
"""A rank silent for this long has failed."""
LONG_POLL_SECONDS = 20.0
"""The longest a request is held open; who wants to wait longer asks again."""
UNASSIGNED = -1
"""The rank of a joiner that leaves it to the gateway which one it gets."""


@dataclass
class Member:
    """One process that holds a rank of a job.

    Attributes:
        rank: its rank; UNASSIGNED while it joins and has not been given one.
        instance: random name of this very process and join, so that a restarted rank is told from its predecessor.
        host: host name, for people.
        host_id: equal for processes that can share memory, different otherwise.
        pid: process id on that host.
        addresses: ``host:port`` of the fast path, in the order peers should try them.
        http: base URL of the agent.
        eager_bytes: its RANKMESH_EAGER_BYTES, which has to be the same on all ranks; -1 if it is not known.
        transport: its RANKMESH_TRANSPORT: ``auto``, ``tcp`` or ``shm``; empty if it is not known.
    """

    rank: Rank
    instance: Name
    host: Text
    host_id: Text
    pid: Integer
    addresses: Texts
    http: Text
    eager_bytes: Integer = -1
    transport: Text = ""

    def described(self) -> str:
        """The member in words, for error messages."""
        who = "a process without a rank yet" if self.rank == UNASSIGNED else f"rank {self.rank}"
        return f"{who} ({self.host}, pid {self.pid})"


@dataclass
class JoinRequest:
    """What a rank says to join a job. Repeating it with the same ``member.instance`` changes nothing.

    Attributes:
        job: name that keeps jobs at one gateway apart.
        world_size: how many ranks the job has.
        member: who joins. With the rank UNASSIGNED it is given one when everyone is there, see JoinReply.
        wait: seconds the gateway may hold the answer back while ranks are missing, at most LONG_POLL_SECONDS.
    """

    job: Name
    world_size: WorldSize
    member: Member
    wait: Number = LONG_POLL_SECONDS


@dataclass
class JoinReply:
    """Where the join stands.

    Those that came without a rank get the ranks that nobody came with, the lowest first, in the order they came. That
    is settled when everyone is there, so that no rank is given away which somebody comes with later.

    Attributes:
        complete: whether every rank is there; if not, ask again.
        job: the job's name.
        epoch: counts the times this job's world came together, from 1.
        world_size: how many ranks the job has.
        members: who has joined, by rank, and after them those without a rank yet, in the order they came.
        missing: the ranks that nobody came with.
    """

    complete: bool
    job: str
    epoch: Integer
    world_size: Integer
    members: list[Member]
    missing: list[Integer]


@dataclass
class LostRank:
    """A rank that is gone, as one that was connected to it saw.

    Attributes:
        rank: which.
        cause: how: what the connection said, or the launcher.
    """

    rank: Integer
    cause: str


@dataclass
class Heartbeat:
    """A rank's sign of life. It says everything, so that a gateway that was restarted learns who is there.

    Attributes:
        job: its job.
        epoch: the epoch it joined.
        world_size: ranks in the job.
        member: who it is.
        groups: the groups it is in.
        lost: the ranks whose connections broke without a goodbye; sent at once when there is a new one.
    """

    job: Name
    epoch: Epoch
    world_size: WorldSize
    member: Member
    groups: list[GroupInfo] = field(default_factory=list)
    lost: list[LostRank] = field(default_factory=list)


@dataclass
class HeartbeatReply:
    """The gateway's answer: the ranks of this job that it holds for failed."""

    failed: list[Integer]


@dataclass
class Leave:
    """A rank's goodbye; ``reason`` is empty when it is done, and says why when it failed."""

    job: str
    epoch: Integer
    rank: Integer
    instance: str
    reason: str = ""


@dataclass
class Done:
    """The answer to a request that has nothing else to say."""

    ok: bool = True


RankState = Literal["joining", "alive", "suspect", "failed", "left"]


@dataclass
class RankInfo:
    """A rank as the gateway sees it.

    Attributes:
        job: its job.
        epoch: the epoch it joined.
        state: ``joining`` until its world is complete, then by the age of its last heartbeat; ``left`` after a goodbye.
        heartbeat_age: seconds since its last sign of life.
        reason: why it left or failed, empty otherwise.
        member: who it is.
    """

    job: str
    epoch: Integer
    state: RankState
    heartbeat_age: Number
    reason: str
    member: Member


@dataclass
class GatewayHealth:
    """The gateway's health. ``id`` is random for each gateway process."""

    status: Literal["ok"]
    service: Literal["rankmesh-gateway"]
    id: str
    version: str
    jobs: Integer
    ranks: Integer


@dataclass
class AgentHealth:
    """An agent's health: ``ok``, or ``failing`` with the reasons (and HTTP status 503)."""

    status: Literal["ok", "failing"]
    service: Literal["rankmesh-agent"]
    rank: Integer
    world_size: Integer
    version: str
    reasons: list[str]


@dataclass
class AgentInfo:
    """What an agent says of itself.

    Attributes:
        job: its job.
        epoch: the epoch it joined.
        world_size: ranks in the job.
        member: who it is, as its peers know it.
        gateway: the gateway's URL.
        transports: what carries point-to-point traffic to each peer (global rank, as text): ``segment`` or ``tcp``.
        uptime: seconds since it joined.
        version: RankMesh's version.
    """

    job: str
    epoch: Integer
    world_size: Integer
    member: Member
    gateway: str
    transports: dict[str, str]
    uptime: Number
    version: str
