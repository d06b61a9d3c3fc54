"""JSON bodies that only the gateway makes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rankmesh_agent.wire.schemas import AgentEntry, RankGroupInfo, RankInfo

JobState = Literal["forming", "running", "failing", "failed", "ended"]


@dataclass
class JobInfo:
    """A world of a job: its ranks in one epoch.

    Attributes:
        job: the job's name.
        epoch: counts the times the job's world came together, from 1.
        state: ``forming`` while ranks are missing; ``running``; ``failing`` when some have failed and others live;
            when none lives, ``failed`` if some have failed, else ``ended``.
        world_size: how many ranks it has when complete.
        ranks: how many ranks are in each state.
        since: when it came together, or when the first rank came, in seconds since 1970.
    """

    job: str
    epoch: int
    state: JobState
    world_size: int
    ranks: dict[str, int]
    since: float


@dataclass
class GroupInFlight:
    """A call of a group that some members have begun and not ended: who holds up whom.

    Attributes:
        job: the job it belongs to.
        epoch: the job's epoch.
        group: the group's id.
        name: the group's name for people.
        op: the call in words, as the first of those that arrived described it.
        seq: its number in the group.
        age: seconds since the first of them began it.
        bytes: what a member's arrays hold, at most.
        arrived: the global ranks that are in the call, as last reported.
        missing: the global ranks that have not begun it, as last reported.
        differing: the call in words at members (global rank, as text) where it is another one.
    """

    job: str
    epoch: int
    group: str
    name: str
    op: str
    seq: int
    age: float
    bytes: int
    arrived: list[int]
    missing: list[int]
    differing: dict[str, str]


@dataclass
class GatewayInfo:
    """The gateway: ``id`` is random for each process; ``uptime`` is in seconds."""

    id: str
    version: str
    uptime: float


@dataclass
class TotalRates:
    """What all groups do in a second."""

    operations: float
    bytes: float


@dataclass
class JobStore:
    """What is in a job's store: how many keys, and the first names, at most 100."""

    job: str
    keys: int
    names: list[str]


@dataclass
class Overview:
    """All that there is to see; ``time`` is in seconds since 1970."""

    time: float
    gateway: GatewayInfo
    ranks: list[RankInfo]
    agents: list[AgentEntry]
    groups: list[RankGroupInfo]
    inflight: list[GroupInFlight]
    rates: TotalRates
    store: list[JobStore]


@dataclass
class GroupMade:
    """A group that all its members have.

    Attributes:
        job: the job it belongs to.
        epoch: the job's epoch.
        id: the group's id.
        name: the group's name.
        ranks: global ranks of the members, by group rank.
    """

    job: str
    epoch: int
    id: str
    name: str
    ranks: list[int]


@dataclass
class NoAnswer:
    """A member that did not do as it was asked, and why."""

    rank: int
    detail: str


@dataclass
class FanOut:
    """Which members' agents did as they were asked.

    Attributes:
        id: the group's id.
        name: the group's name.
        asked: the members that were asked: all that have not left.
        answered: those that did so.
        failed: those that did not.
    """

    id: str
    name: str
    asked: list[int]
    answered: list[int]
    failed: list[NoAnswer]


@dataclass
class GroupChanged:
    """A group that has taken the place of another: the new one, and at which members the old one has ended."""

    made: GroupMade
    ended: FanOut
