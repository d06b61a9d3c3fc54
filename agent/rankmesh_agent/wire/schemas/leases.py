"""Bodies of the registration and the leases of standalone agents."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from rankmesh_agent.wire.fields import MAX_ADDRESSES, Integer, Name, Number, Rank, SchemaKeywords, Text, WorldSize

OFFER_SECONDS = 5.0
"""How long a free agent that was offered to one client is not offered to another."""


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
