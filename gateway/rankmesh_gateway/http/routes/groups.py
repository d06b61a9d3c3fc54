"""Groups: one of them, calls in flight, and creation, abort, shrink and growth."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from msgspec import Meta

from rankmesh_agent.wire.fields import MAX_NAME, MAX_REASON, MAX_WORLD_SIZE, Body, Ranks
from rankmesh_agent.wire.schemas import RankGroupInfo
from rankmesh_gateway.clients.group_controller import MAKE_SECONDS
from rankmesh_gateway.http.handlers import JobQuery, Services
from rankmesh_gateway.schemas import FanOut, GroupChanged, GroupInFlight, GroupMade

_ID = "The group's id (16 hexadecimal digits), or its name if no other has it."
_Rank = Annotated[int, Meta(ge=0, lt=MAX_WORLD_SIZE)]
_Seconds = Annotated[float, Meta(gt=0, le=3600)]


@dataclass(kw_only=True)
class GroupQuery(JobQuery):
    """Path and query of a request for one group."""

    group: Annotated[str, Meta(max_length=MAX_NAME, description=_ID)]


@dataclass
class NewGroup(Body):
    """Create a group.

    Attributes:
        job: the job whose ranks they are.
        ranks: global ranks of the members, by group rank.
        name: a name that no other group of the job has; a new one if empty.
        timeout: seconds for the members to meet.
    """

    job: Annotated[str, Meta(min_length=1, max_length=MAX_NAME)]
    ranks: Ranks
    name: Annotated[str, Meta(pattern=r"^([A-Za-z0-9][A-Za-z0-9._-]*)?$(?!\n)", max_length=64)] = ""
    timeout: _Seconds = MAKE_SECONDS


@dataclass
class Abort(Body):
    """Abort a group, with a ``reason`` for its members' errors."""

    reason: Annotated[str, Meta(max_length=MAX_REASON)] = ""


@dataclass
class Shrink(Body):
    """Make a group smaller: ``without`` these members and those that have failed."""

    without: Annotated[list[_Rank], Meta(max_length=MAX_WORLD_SIZE)] = field(default_factory=list)
    timeout: _Seconds = MAKE_SECONDS


class Grow(Body):
    """Make a group larger, ``with`` these ranks behind its members."""

    timeout: _Seconds = MAKE_SECONDS


# No class statement can have such a field: ``with`` is a keyword.
Grow.__annotations__ = {"with": Ranks, "timeout": _Seconds}
dataclass(init=False, repr=False, eq=False)(Grow)


def group(services: Services, query: GroupQuery) -> RankGroupInfo:
    """Return one group."""
    return services.registry.find_group(query.group, query.job)[0]


def group_in_flight(services: Services, query: GroupQuery) -> list[GroupInFlight]:
    """List a group's calls in flight, the earliest first: which members have arrived, and which are missing."""
    found, _ = services.registry.find_group(query.group, query.job)
    calls = services.registry.in_flight(found.job)
    return [each for each in calls if (each.epoch, each.group) == (found.epoch, found.id)]


async def make_group(services: Services, body: NewGroup) -> GroupMade:
    """Create a group: the gateway asks the agents of all members at once, and all of them create it, or none."""
    return await services.controller.make(body.job, body.ranks, body.name, body.timeout)


async def abort_group(services: Services, query: GroupQuery, body: Abort | None) -> FanOut:
    """Abort a group at all members: its pending calls fail with the reason. Returns which agents fulfilled it."""
    reason = body.reason if body is not None else ""
    return await services.controller.abort(query.group, query.job, reason or "no reason was given")


async def shrink_group(services: Services, query: GroupQuery, body: Shrink | None) -> GroupChanged:
    """Create a group of the remaining members, under a new name, and end the old one at the live ones.

    A group that was not made over HTTP is aborted: its pending calls fail with the reason.
    """
    wanted = body or Shrink()
    return await services.controller.shrink(query.group, query.job, wanted.without, wanted.timeout)


async def grow_group(services: Services, query: GroupQuery, body: Grow) -> GroupChanged:
    """Create a group of the members and more ranks, under a new name, and end the old one.

    A group that was not made over HTTP is aborted: its pending calls fail with the reason.
    """
    return await services.controller.grow(query.group, query.job, getattr(body, "with"), body.timeout)
