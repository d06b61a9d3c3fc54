"""Bodies of the registration and the leases of standalone agents."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from msgspec import Meta

from rankmesh_agent.wire.fields import MAX_ADDRESSES, MAX_REASON, Body, Integer, Name, Rank, Seconds, Text, WorldSize
from rankmesh_agent.wire.schemas.job import LONG_POLL_SECONDS, UNASSIGNED

OFFER_SECONDS = 5.0
"""Seconds for which the gateway offers a free agent to one client only."""
MAX_LEASES = 16


@dataclass
class Lease:
    """A lease of a standalone agent by the process or HTTP client that holds the agent's rank.

    Attributes:
        id: random name of the lease.
        job, world_size: the job that the agent joins, or has joined, for it, and the ranks in it.
        rank: the rank; UNASSIGNED until the gateway assigns one.
        holder: the process as text, for users.
    """

    id: Name
    job: Name
    rank: Rank
    world_size: WorldSize
    holder: Annotated[str, Meta(max_length=MAX_REASON)]


@dataclass
class LeaseState:
    """A standalone agent's lease: ``joining`` until the job's world is complete, then ``joined``."""

    lease: Lease
    state: Literal["joining", "joined"]


@dataclass
class LeaseBody(Body):
    """Acquire the agent for a client that speaks HTTP.

    Attributes:
        world_size: ranks in the job.
        rank: the rank; -1 to have one assigned.
        job: the job.
        timeout: seconds the join may take, and by default each operation.
        idle: seconds without a request for the job after which the lease ends.
        wait: seconds for which the response may be held back while the job's other ranks are missing.
    """

    world_size: WorldSize
    rank: Rank = UNASSIGNED
    job: Name = "default"
    timeout: Seconds = 300.0
    idle: Seconds = 600.0
    wait: Annotated[float, Meta(ge=0, le=LONG_POLL_SECONDS)] = LONG_POLL_SECONDS


@dataclass
class LeaseTerms:
    """Terms under which a client takes a standalone agent.

    Attributes:
        job, rank, world_size, holder: see Lease.
        timeout: seconds that each operation of the job may take by default.
        idle: seconds without use after which the lease ends; 0 for never, if the agent can detect the end of its
            holder.
        awaits_growth: whether the agent waits for the world of the job to grow; rank and world size do not matter then.
        join_seconds: seconds that the join may take; ``timeout`` if None.
    """

    job: str
    rank: Integer
    world_size: Integer
    timeout: Annotated[float, Meta(ge=0)]
    holder: Annotated[str, Meta(max_length=MAX_REASON)]
    idle: float = 0.0
    awaits_growth: bool = False
    join_seconds: Annotated[float, Meta(ge=0)] | None = None


@dataclass
class AgentHeartbeat(Body):
    """A standalone agent's heartbeat, each HEARTBEAT_SECONDS and when its lease changes; the first one registers it.

    Attributes:
        id: random name of the agent's process.
        name: its name, for users; it also determines the order in which clients lease agents.
        host, host_id, pid: see Member.
        urls: base URLs, in the order in which clients should try them.
        leases: its lease, or none.
    """

    id: Name
    name: Name
    host: Text
    host_id: Text
    pid: Integer
    urls: Annotated[list[Text], Meta(min_length=1, max_length=MAX_ADDRESSES)]
    leases: Annotated[list[Lease], Meta(max_length=MAX_LEASES)] = field(default_factory=list)


@dataclass
class AgentLeave(Body):
    """The goodbye of a standalone agent."""

    id: str


AgentState = Literal["free", "leased", "suspect", "failed"]


@dataclass
class AgentEntry:
    """A standalone agent as the gateway sees it: its last heartbeat, its state, and the heartbeat's age in seconds."""

    state: AgentState
    heartbeat_age: float
    agent: AgentHeartbeat


@dataclass
class LeaseRequest(Body):
    """Request a standalone agent from the gateway; the client then leases it from the agent itself (``POST
    /v1/lease``).

    Attributes:
        job, rank, world_size: see Lease.
        host_id: the gateway prefers an agent that shares memory with the client.
        wait: maximum seconds for which the gateway holds the response while no agent is free, at most
            LONG_POLL_SECONDS.
    """

    job: Name
    rank: Rank
    world_size: WorldSize
    host_id: Text = ""
    wait: float = 0.0


@dataclass
class LeaseOffer:
    """A free agent, reserved for the client for OFFER_SECONDS."""

    agent: AgentHeartbeat
