"""Bodies of joins, heartbeats, health checks and the list of ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from rankmesh_agent.wire.errors import DistBackendError, GroupAbortedError, RankFailedError
from rankmesh_agent.wire.fields import Body, Epoch, Integer, Integers, Name, Rank, Text, Texts, WorldSize
from rankmesh_agent.wire.schemas.groups import GroupInfo
from rankmesh_agent.wire.schemas.hosts import HostTable

HEARTBEAT_SECONDS = 1.0
"""Interval of an agent's heartbeats to the gateway, unless a gateway with many ranks names a longer one."""
NO_HEARTBEAT = "no heartbeat"
"""Start of the reason of a rank that failed because it was silent."""
SUSPECT_SECONDS = 3.0
"""Seconds without a heartbeat after which a rank is suspect, at an interval of HEARTBEAT_SECONDS."""
FAILED_SECONDS = 10.0
"""Seconds without a heartbeat after which a rank has failed, at that interval."""
LISTED_MEMBERS = 64
"""Members, and missing ranks, that the reply to a join lists while the world is incomplete."""
LISTED_RANKS = 64
"""Size of a group up to which each member's heartbeat lists its ranks; the first member's lists those of any group."""
LONG_POLL_SECONDS = 20.0
"""Maximum duration of a long poll; a client that waits longer repeats the request."""
UNASSIGNED = -1
"""Rank of a joining process whose rank the gateway assigns."""


def suspect_seconds(interval: float) -> float:
    """Return the seconds without a heartbeat after which a rank with this interval is suspect: 3 intervals."""
    return SUSPECT_SECONDS * max(1.0, interval / HEARTBEAT_SECONDS)


def failed_seconds(interval: float) -> float:
    """Return the seconds without a heartbeat after which a rank with this interval has failed: 10 s, or 4 intervals."""
    return max(FAILED_SECONDS, 4 * interval)


@dataclass
class Member:
    """A process that holds a rank of a job.

    Attributes:
        rank: its rank; UNASSIGNED while it joins without one.
        instance: random name of this process and join; it distinguishes a restarted rank from its predecessor.
        host: host name, for users.
        host_id: equal for processes that can share memory, otherwise different.
        pid: process id on that host.
        addresses: ``host:port`` of the fast path, in the order in which peers should try them.
        http: base URL of the agent.
        eager_bytes: its RANKMESH_EAGER_BYTES, which must be equal on all ranks; -1 if unknown.
        transport: its RANKMESH_TRANSPORT: ``auto``, ``tcp`` or ``shm``; empty if unknown.
        full_mesh: its RANKMESH_FULL_MESH, which must be equal on all ranks; -1 if unknown.
        observed: whether it is a process under ``rankmesh observe``: it has no agent and no addresses, and ``http`` is
            that of its observer.
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
    full_mesh: Integer = -1
    observed: bool = False

    def described(self, number: int | None = None) -> str:
        """Return the member as text, for error messages, by default with its own rank."""
        rank = self.rank if number is None else number
        name = "a process without a rank yet" if rank == UNASSIGNED else f"rank {rank}"
        return f"{name} ({self.host}, pid {self.pid})"


@dataclass
class GrowingWorld:
    """The world that a rank of it grows: its epoch, its number of ranks, the id of its group of all ranks."""

    epoch: Epoch
    size: WorldSize
    group: Text


@dataclass
class JoinRequest(Body):
    """Join a job. A repeated request with the same ``member.instance`` has no further effect.

    Attributes:
        job: name of the job, unique at a gateway.
        world_size: number of ranks in the job.
        member: the joining process. The gateway assigns a rank to an UNASSIGNED member at the end, see JoinReply.
        wait: maximum seconds for which the gateway holds the response while ranks are missing, at most
            LONG_POLL_SECONDS.
        attempt: restarts of the job by its launcher before the member's process was started. The first join of a later
            attempt ends the epochs of the earlier ones, whose late joins are refused.
        awaits_growth: whether the member waits until the job's world grows. Its ``rank`` is UNASSIGNED, or that of a
            lost process, which it takes if the job's first world is not complete yet; otherwise it does not matter.
        growth: of a rank of the world that grows to ``world_size``: ``member`` is this rank in the next epoch, with an
            instance of its own. None otherwise.
        parent: job and rank (``job/0``) of the launcher's process that the member is, or descends from; empty without a
            launcher.
        ancestors: the member's nearest ancestors, as process ids, if it has such a parent.
    """

    job: Name
    world_size: WorldSize
    member: Member
    wait: float = LONG_POLL_SECONDS
    attempt: Integer = 0
    awaits_growth: bool = False
    growth: GrowingWorld | None = None
    parent: Text = ""
    ancestors: Integers = field(default_factory=list)


@dataclass
class JoinReply:
    """Progress of a join.

    The gateway assigns the ranks that no member has requested to the members without a rank, the lowest first, in the
    order of their joins. It does so when all members have joined, so that no later member can request an assigned rank.

    Attributes:
        complete: whether every rank has joined; if not, repeat the request.
        job: the job's name.
        epoch: counts the job's complete worlds, from 1.
        world_size: number of ranks in the job.
        members: until the world is complete, the first LISTED_MEMBERS that have joined, by rank, then those without a
            rank yet, in the order of their joins. After that, the member itself and its partners, see ``overlay``
            (all up to LISTED_MEMBERS ranks if its ``full_mesh`` is unknown); other members by MembersRequest.
        missing: ranks that no member has requested, the first LISTED_MEMBERS.
        grown: whether the world is an earlier one that has grown.
        joined: number of members that have joined.
        interval: seconds between the heartbeats that the gateway expects.
        store: id of the job's key-value store at the gateway, 32 hexadecimal digits, once the world is complete.
        hosts: hosts and process ids of all ranks, once the world is complete.
    """

    complete: bool
    job: str
    epoch: Integer
    world_size: Integer
    members: list[Member]
    missing: list[Integer]
    grown: bool = False
    joined: Integer = 0
    interval: float = HEARTBEAT_SECONDS
    store: str = ""
    hosts: HostTable | None = None


@dataclass
class LostRank:
    """A lost rank, as a connected peer reports it, and the error of the connection, or the launcher's report."""

    rank: Integer
    cause: str


@dataclass
class ResourceUsage:
    """State of a process, and the resources that it has used, or uses in a second.

    Attributes:
        cpu: seconds of processor time of its threads.
        core_wait: seconds that its main thread was ready to run, and waited for a core.
        faults: how often its memory came from a disk.
        memory: its memory in RAM, in bytes.
        state: the state letter of its main thread, see ProcessView.
    """

    cpu: float
    core_wait: float
    faults: float
    memory: Integer = 0
    state: Text = ""


@dataclass
class Heartbeat(Body):
    """A rank's heartbeat. A restarted gateway learns the members of a job from it.

    A heartbeat is complete, or names the changes since an earlier one. Where the gateway has not recorded the earlier
    one, because it has been restarted, for example, its reply asks for a complete one.

    Attributes:
        job, epoch, world_size: its job, the epoch it joined, and the ranks in it.
        member: the rank's process.
        groups: the rank's groups, or those that have changed. A group's ``ranks`` are empty where the gateway knows
            them, or gets them from another member, see LISTED_RANKS.
        lost: ranks whose connections broke without a goodbye, or those that are new; one causes an early heartbeat.
        watches_peers: whether ``lost`` has had every rank that this one is no longer connected to.
        number: counts the process's heartbeats, from 1; 0 if they are not counted.
        changes_since: the number of the heartbeat that ``groups``, ``ended_groups`` and ``lost`` are the changes since;
            0 if this one is complete.
        ended_groups: the ids of the groups of that heartbeat that the rank no longer has.
        failed_version: the version of the failed ranks that the rank knows; 0 if it knows none, -1 to be told all.
        usage: what the rank's process has used; null if that is not known, or its calls are those of another process.
    """

    job: Name
    epoch: Epoch
    world_size: WorldSize
    member: Member
    groups: list[GroupInfo] = field(default_factory=list)
    lost: list[LostRank] = field(default_factory=list)
    watches_peers: bool = False
    number: Integer = 0
    changes_since: Integer = 0
    ended_groups: list[str] = field(default_factory=list)
    failed_version: Integer = -1
    usage: ResourceUsage | None = None


@dataclass
class HeartbeatReply:
    """The gateway's response: the failed ranks of this epoch. A rank that finds itself among them stays failed.

    Attributes:
        failed: the failed ranks, or those that are new since the heartbeat's ``failed_version``.
        failed_version: the version with them.
        interval: seconds until the next heartbeat.
        resend: whether the gateway needs a complete heartbeat.
        unknown_groups: groups of which the gateway needs the ranks.
        dropped_groups: how many groups the gateway has left out, as there are too many.
        restart: reason if the nodes of the job have changed: this rank's attempt ends, all ranks start again.
        lost_ranks: then, the ranks of a node that is lost; empty if a node joins.
    """

    failed: list[Integer]
    failed_version: Integer = 0
    interval: float = HEARTBEAT_SECONDS
    resend: bool = False
    unknown_groups: list[str] = field(default_factory=list)
    dropped_groups: Integer = 0
    restart: str = ""
    lost_ranks: list[Integer] | None = None

    def restart_error(self) -> DistBackendError:
        """Return the error of the calls that a restart ends."""
        if self.lost_ranks:
            ranks = ", ".join(map(str, self.lost_ranks))
            return RankFailedError(f"rank(s) {ranks} failed: {self.restart}", ranks=self.lost_ranks)
        return GroupAbortedError(self.restart)


@dataclass
class Leave(Body):
    """A rank's goodbye.

    Attributes:
        job, epoch: its job, and the epoch it joined.
        rank, instance: see Member.
        reason: empty after success, and the cause after a failure.
        failed_ranks: other ranks whose failure is the cause, as far as this rank knows.
    """

    job: str
    epoch: Integer
    rank: Integer
    instance: str
    reason: str = ""
    failed_ranks: list[Integer] = field(default_factory=list)


@dataclass
class EpochRequest(Body):
    """A request about one epoch of a job."""

    job: Name
    epoch: Epoch


@dataclass
class MembersRequest(EpochRequest):
    """A request for some members of an epoch, by rank."""

    ranks: list[Integer]


@dataclass
class Done:
    """The response to a request without a result."""

    ok: bool = True


RankState = Literal["joining", "alive", "suspect", "failed", "left"]


@dataclass
class RankInfo:
    """A rank as the gateway sees it.

    Attributes:
        job, epoch: its job, and the epoch it joined.
        state: ``joining`` until its world is complete; ``alive``, or ``suspect`` after SUSPECT_SECONDS without a
            heartbeat; ``left`` after a goodbye; ``failed`` after a report of it, a peer or its launcher, or after
            FAILED_SECONDS without a heartbeat if no peer is known to be connected to it. The last two are final.
        heartbeat_age: seconds since its last heartbeat.
        reason: cause of its leave or failure, otherwise empty.
        member: the rank's process.
        failed_ranks: the other ranks whose failure is the cause of its own, as far as it knows.
        slow: share of the last seconds that the others have waited for it and for no other rank.
        usage: what its process has used in a second of the last ten; null if that is not known.
    """

    job: str
    epoch: Integer
    state: RankState
    heartbeat_age: float
    reason: str
    member: Member
    failed_ranks: list[Integer] = field(default_factory=list)
    slow: float = 0.0
    usage: ResourceUsage | None = None


@dataclass
class GatewayHealth:
    """The gateway's health.

    ``id`` is random for each gateway process. ``hosted``: a rank has started it, and a rank may start the next one.
    """

    status: Literal["ok"]
    service: Literal["rankmesh-gateway"]
    id: str
    version: str
    jobs: Integer
    ranks: Integer
    hosted: bool = False


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
    """An agent's report of itself.

    Attributes:
        job, epoch, world_size: its job, the epoch it joined, and the ranks in it.
        member: its process, as its peers know it.
        gateway: the gateway's URL.
        transports: transport of point-to-point messages to each connected peer (global rank, as text): ``segment`` or
            ``tcp``.
        uptime: seconds since it joined.
        version: RankMesh's version.
    """

    job: str
    epoch: Integer
    world_size: Integer
    member: Member
    gateway: str
    transports: dict[str, str]
    uptime: float
    version: str
