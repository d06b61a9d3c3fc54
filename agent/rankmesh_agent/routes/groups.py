"""Who the agent is, and the groups its rank is in."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path

from rankmesh_agent.routes.problems import documented
from rankmesh_agent.routes.view import BEARER, TheAgent
from rankmesh_agent.wire.errors import DistError
from rankmesh_agent.wire.schemas import AgentInfo, GroupInfo

router = APIRouter(prefix="/v1", tags=["groups"], dependencies=[BEARER], responses=documented(401, 403, 413, 421))

GroupId = Annotated[str, Path(pattern="^[0-9a-f]{16}$", description="The group's id: 16 hexadecimal digits.")]


class GroupNotFoundError(DistError):
    """The rank is in no group with this id."""

    code = "group-not-found"
    status = 404


@router.get("/info")
async def info(agent: TheAgent) -> AgentInfo:
    """Say who this agent is, and how it reaches its peers."""
    return agent.info()


@router.get("/groups")
async def groups(agent: TheAgent) -> list[GroupInfo]:
    """List the groups this rank is a member of."""
    return agent.groups()


@router.get("/groups/{group_id}", responses=documented(404, 422))
async def group(group_id: GroupId, agent: TheAgent) -> GroupInfo:
    """Describe one group."""
    for found in agent.groups():
        if found.id == group_id:
            return found
    raise GroupNotFoundError(f"this rank is in no group {group_id!r}; /v1/groups lists those it is in", group=group_id)
