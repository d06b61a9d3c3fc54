"""The JSON bodies of the HTTP interface, as dataclasses: servers check them, clients build them."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, Literal

from rankmesh_agent.wire.fields import (
    MAX_ADDRESSES,
    Base64,
    Epoch,
    Integer,
    Name,
    Number,
    Rank,
    SchemaKeywords,
    Text,
    Texts,
    WorldSize,
)

HEARTBEAT_SECONDS = 1.0
"""How often an agent reports to the gateway."""
SUSPECT_SECONDS = 3.0
"""A rank silent for this long is suspect."""
FAILED_SECONDS = 10.0
"""A rank silent for this long has failed."""
LONG_POLL_SECONDS = 20.0
"""The longest a request is held open; who wants to wait longer asks again."""
OFFER_SECONDS = 5.0
"""How long a free agent that was offered to one client is not offered to another."""
MOST_IN_FLIGHT = 64
"""How many calls and messages under way a group's description lists."""
MAX_PROBE_BYTES = 64 << 20
"""The most bytes that a probe fetches."""
MAX_PROBE_SECONDS = 20.0
"""The longest that a probe takes."""
MAX_KEY_BYTES = 1024
"""The longest key of the store, in UTF-8."""
StoreKey = Annotated[str, SchemaKeywords(minLength=1, maxLength=MAX_KEY_BYTES)]
"""A key of the store; the store checks it itself."""
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
    """

    rank: Rank
    instance: Name
    host: Text
    host_id: Text
    pid: Integer
    addresses: Texts
    http: Text

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
            between two ranks, the oldest first; at most MOST_IN_FLIGHT.
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
class Lease:
    """Who has a standalone agent: the process or HTTP client whose rank it is.

    Attributes:
        id: random name of the lease.
        job: the job the agent joins, or has joined, for it.
        rank: the rank; UNASSIGNED while the gateway has not given it one.
        world_size: ranks in the job.
        holder: the process in words, for people.
    """

    id: Name
    job: Name
    rank: Rank
    world_size: WorldSize
    holder: str


@dataclass
class LeaseState:
    """A standalone agent's lease: ``joining`` until the job's world is complete, then ``joined``."""

    lease: Lease
    state: Literal["joining", "joined"]


@dataclass
class LeaseTerms:
    """What somebody takes a standalone agent for.

    Attributes:
        job: the job it is to join.
        rank: as which rank; UNASSIGNED to be given one.
        world_size: ranks in the job.
        timeout: seconds the join may take, and by default each operation of the job.
        holder: who it is, in words.
        idle: seconds without use after which the lease ends; 0 for never, where the holder's end can be seen.
    """

    job: str
    rank: Integer
    world_size: Integer
    timeout: Number
    holder: str
    idle: Number = 0.0


@dataclass
class AgentHeartbeat:
    """A standalone agent's sign of life, each HEARTBEAT_SECONDS and when its lease changes; the first registers it.

    Attributes:
        id: random name of the agent's process.
        name: its name, for people, and for the order in which agents are leased.
        host: host name.
        host_id: equal for processes that can share memory, different otherwise.
        pid: process id on that host.
        urls: base URLs, in the order clients should try them.
        leases: the lease it has given, or none.
    """

    id: Name
    name: Name
    host: Text
    host_id: Text
    pid: Integer
    urls: Annotated[list[Text], SchemaKeywords(minItems=1, maxItems=MAX_ADDRESSES)]
    leases: list[Lease] = field(default_factory=list)


@dataclass
class AgentLeave:
    """A standalone agent ends."""

    id: str


AgentState = Literal["free", "leased", "suspect", "failed"]


@dataclass
class AgentEntry:
    """A standalone agent as the gateway sees it: its last sign of life, its state and the age of that in seconds."""

    state: AgentState
    heartbeat_age: Number
    agent: AgentHeartbeat


@dataclass
class LeaseRequest:
    """Ask the gateway for a standalone agent; to take it is between the client and the agent (``POST /v1/lease``).

    Attributes:
        job: the job it is to join.
        rank: the rank it is to have, or UNASSIGNED.
        world_size: ranks in the job.
        host_id: an agent that shares memory with the client is preferred.
        wait: seconds the gateway may hold the answer back while no agent is free, at most LONG_POLL_SECONDS.
    """

    job: Name
    rank: Rank
    world_size: WorldSize
    host_id: Text = ""
    wait: Number = 0.0


@dataclass
class LeaseOffer:
    """A free agent, kept for the asker for OFFER_SECONDS."""

    agent: AgentHeartbeat


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


@dataclass
class StoreAdd:
    """Add ``amount`` to the whole number stored, as decimal digits, under ``key``; a missing key counts as 0."""

    key: StoreKey
    amount: Integer = 1


@dataclass
class StoreNumber:
    """The number after an addition."""

    value: Integer


@dataclass
class StoreWait:
    """Wait until all ``keys`` exist, at most ``timeout`` seconds (cut to LONG_POLL_SECONDS)."""

    keys: list[StoreKey]
    timeout: Number = LONG_POLL_SECONDS


@dataclass
class StoreHealth:
    """The health of a store that is served on its own."""

    status: Literal["ok"]
    service: Literal["rankmesh-store"]
    version: str
    keys: Integer


@dataclass
class StoreKeys:
    """Some keys of the store."""

    keys: list[StoreKey]


@dataclass
class StoreFound:
    """Whether all the keys exist."""

    found: bool


@dataclass
class StoreCompareSet:
    """Replace the value ``expected`` of ``key`` by ``desired``, both in base64; no value is expected if it is empty."""

    key: StoreKey
    expected: Base64
    desired: Base64


@dataclass
class StoreValues:
    """Values by key, in base64."""

    values: dict[StoreKey, Base64]


@dataclass
class StoreQueue:
    """One of the store's queues, by its key."""

    key: StoreKey


@dataclass
class StorePop:
    """Take the first value of a queue, waiting at most ``timeout`` seconds for one (cut to LONG_POLL_SECONDS)."""

    key: StoreKey
    timeout: Number = 0.0


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


@dataclass
class HostReport:
    """What an agent's host has, as the agent's process sees it.

    Attributes:
        host: host name.
        host_id: equal for processes that can share memory, different otherwise.
        time: seconds since 1970, by the host's clock.
        version: RankMesh's version.
        python: Python's version.
        kernel: the operating system and its version.
        cpus: processors the process may use.
        transport: what RANKMESH_TRANSPORT says: ``auto``, ``tcp`` or ``shm``.
        shm_dir: where shared memory is made.
        shm_total: bytes of that file system, None if there is no such directory.
        shm_free: bytes of it that are free.
        shm_trouble: why memory cannot be shared there, empty if it can.
        slot_bytes: bytes of one rank's slot in a group's shared memory.
        token: whether a token is asked for.
    """

    host: str
    host_id: str
    time: Number
    version: str
    python: str
    kernel: str
    cpus: Integer
    transport: str
    shm_dir: str
    shm_total: Integer | None
    shm_free: Integer | None
    shm_trouble: str
    slot_bytes: Integer
    token: bool


@dataclass
class ProbeRequest:
    """Ask an agent to measure its way to another one.

    Attributes:
        url: the other's base URL, one of those that the gateway lists.
        bytes: how many to fetch from there, cut to MAX_PROBE_BYTES; 0 measures only how long a question takes.
        seconds: how long it may take, cut to MAX_PROBE_SECONDS.
    """

    url: str
    bytes: Integer = 0
    seconds: Number = 5.0


ProbeStage = Literal["", "name", "refused", "route", "connect", "answer", "token", "stranger", "transfer"]
"""Where a probe came to its end: the host's name, connecting, the first answer, the bytes; empty if it did not."""


@dataclass
class ProbeReply:
    """The way from one agent to another, by HTTP over a TCP connection of its own: not the data plane's.

    Attributes:
        url: the other's base URL.
        reached: whether all went well.
        stage: where it did not.
        error: why not, in a sentence; empty if it did.
        connect: seconds to connect: one round trip of packets; None if that did not happen.
        round_trip: seconds from a question to its answer, the least of several.
        bytes: how many were fetched.
        seconds: how long they took, without the round trip.
    """

    url: str
    reached: bool
    stage: ProbeStage = ""
    error: str = ""
    connect: Number | None = None
    round_trip: Number | None = None
    bytes: Integer = 0
    seconds: Number | None = None


@dataclass
class Problem:
    """An error body, ``application/problem+json`` (RFC 9457), with the extension members RankMesh uses.

    Attributes:
        type: ``about:blank``, as the code says it all.
        title: the HTTP status in words.
        status: the HTTP status.
        detail: what happened, where, and what to do.
        code: stable name of the error for programs.
        ranks: the ranks concerned.
        op: the operation concerned.
        group: the group concerned.
        seq: the operation's sequence number.
        address: the address concerned.
        missing_ranks: the ranks that did not come in time.
        first_failure: what ended the group, where that was before this request.
        retryable: true where the same request may succeed later; left out otherwise.
    """

    type: str
    title: str
    status: Integer
    detail: str
    code: str
    ranks: list[Integer] | None = None
    op: str | None = None
    group: str | None = None
    seq: Integer | None = None
    address: str | None = None
    missing_ranks: list[int] | None = None
    first_failure: str | None = None
    retryable: bool | None = None

    def body(self) -> dict[str, Any]:
        """The members that are set."""
        return {name: value for name, value in asdict(self).items() if value is not None}
