"""Groups: one of them, calls in flight, and creation, abort, shrink and growth."""

from __future__ import annotations

from dataclasses import field
from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Path
from pydantic import Field
from pydantic.dataclasses import dataclass

from rankmesh_agent.http.application import NUMBER
from rankmesh_agent.wire.fields import MAX_NAME, MAX_REASON, MAX_WORLD_SIZE
from rankmesh_agent.wire.schemas import RankGroupInfo
from rankmesh_gateway.clients.group_controller import MAKE_SECONDS
from rankmesh_gateway.http.routes.dependencies import BEARER, JobName, ServicesDep
from rankmesh_gateway.http.routes.problems import problems
from rankmesh_gateway.schemas import FanOut, GroupChanged, GroupInFlight, GroupMade

router = APIRouter(prefix="/v1", tags=["groups"], dependencies=[BEARER], responses=problems(422, 503))

GroupName = Annotated[
    str,
    Path(max_length=MAX_NAME, description="The group's id (16 hexadecimal digits), or its name if no other has it."),
]

_Ranks = list[Annotated[int, Field(ge=0, lt=MAX_WORLD_SIZE), NUMBER]]
_SomeRanks = Annotated[_Ranks, Field(min_length=1, max_length=MAX_WORLD_SIZE)]
_Seconds = Annotated[float, Field(gt=0, le=3600), NUMBER]


@dataclass
class NewGroup:
    """Create a group.

    Attributes:
        job: the job whose ranks they are.
        ranks: global ranks of the members, by group rank.
        name: a name that no other group of the job has; a new one if empty.
        timeout: seconds for the members to meet.
    """

    job: Annotated[str, Field(min_length=1, max_length=MAX_NAME)]
    ranks: _SomeRanks
    name: Annotated[str, Field(pattern="^([A-Za-z0-9][A-Za-z0-9._-]*)?$", max_length=64)] = ""
    timeout: _Seconds = MAKE_SECONDS


@dataclass
class Abort:
    """Abort a group, with a ``reason`` for its members' errors."""

    reason: Annotated[str, Field(max_length=MAX_REASON)] = ""


@dataclass
class Shrink:
    """Make a group smaller: ``without`` these members and those that have failed."""

    without: Annotated[_Ranks, Field(max_length=MAX_WORLD_SIZE)] = field(default_factory=list)
    timeout: _Seconds = MAKE_SECONDS


@dataclass
class Grow:
    """Make a group larger, ``with`` these ranks behind its members."""

    ranks: Annotated[_SomeRanks, Field(alias="with")]
    timeout: _Seconds = MAKE_SECONDS


@router.get("/groups/{group}", responses=problems(404))
async def group(group: GroupName, services: ServicesDep, job: JobName = None) -> RankGroupInfo:
    """Return one group."""
    return services.registry.find_group(group, job)[0]


@router.get("/groups/{group}/inflight", responses=problems(404))
async def group_in_flight(group: GroupName, services: ServicesDep, job: JobName = None) -> list[GroupInFlight]:
    """List a group's calls in flight, the earliest first: which members have arrived, and which are missing."""
    found, _ = services.registry.find_group(group, job)
    calls = services.registry.in_flight(found.job)
    return [each for each in calls if (each.epoch, each.group) == (found.epoch, found.id)]


@router.post("/groups", status_code=HTTPStatus.CREATED, responses=problems(404, 409, 502))
async def make_group(body: NewGroup, services: ServicesDep) -> GroupMade:
    """Create a group: the gateway asks the agents of all members at once, and all of them create it, or none."""
    return await services.controller.make(body.job, body.ranks, body.name, body.timeout)


@router.post("/groups/{group}/abort", responses=problems(404, 502))
async def abort_group(
    group: GroupName, services: ServicesDep, body: Abort | None = None, job: JobName = None
) -> FanOut:
    """Abort a group at all members: its pending calls fail with the reason. Returns which agents fulfilled it."""
    return await services.controller.abort(group, job, (body or Abort()).reason or "no reason was given")


@router.post("/groups/{group}/shrink", responses=problems(404, 409, 502))
async def shrink_group(
    group: GroupName, services: ServicesDep, body: Shrink | None = None, job: JobName = None
) -> GroupChanged:
    """Create a group of the remaining members, under a new name, and end the old one at the live ones.

    A group that was not made over HTTP is aborted: its pending calls fail with the reason.
    """
    wanted = body or Shrink()
    return await services.controller.shrink(group, job, wanted.without, wanted.timeout)


@router.post("/groups/{group}/grow", responses=problems(404, 409, 502))
async def grow_group(body: Grow, group: GroupName, services: ServicesDep, job: JobName = None) -> GroupChanged:
    """Create a group of the members and more ranks, under a new name, and end the old one.

    A group that was not made over HTTP is aborted: its pending calls fail with the reason.
    """
    return await services.controller.grow(group, job, body.ranks, body.timeout)
