"""The agent's identity, the groups of its rank, and groups that are created over HTTP."""

from __future__ import annotations

import asyncio
import re
from http import HTTPStatus

from fastapi import APIRouter, Request, Response
from starlette.requests import ClientDisconnect

from rankmesh_agent.group.local import LocalCommunicator
from rankmesh_agent.http.routes.dependencies import BEARER, AgentDep, AgentStateDep, CurrentAgent
from rankmesh_agent.http.routes.group_calls import CallSlots, GroupDep, in_thread, until_disconnect
from rankmesh_agent.http.routes.problems import problems
from rankmesh_agent.http.routes.tensor_io import InvalidCallError
from rankmesh_agent.wire.errors import GroupAbortedError
from rankmesh_agent.wire.schemas import AbortBody, AgentInfo, GroupInfo, GroupRequest

router = APIRouter(prefix="/v1", tags=["groups"], dependencies=[BEARER], responses=problems(503))

_LIKE_AN_ID = re.compile("[0-9a-f]{16}")


@router.get("/info")
async def info(agent: AgentStateDep) -> AgentInfo:
    """Return the agent's rank, job and addresses, and its transports to its peers."""
    return agent.info()


@router.get("/groups")
async def groups(agent: AgentStateDep) -> list[GroupInfo]:
    """List the groups this rank is a member of."""
    return agent.groups()


@router.get("/groups/{group_id}", responses=problems(404, 422))
async def group(found: GroupDep) -> GroupInfo:
    """Return one group."""
    return found.info()


@router.post(
    "/groups",
    status_code=HTTPStatus.CREATED,
    responses={
        200: {"model": GroupInfo, "description": "This very group, by its instance, exists."},
        201: {"headers": {"Location": {"description": "The group.", "schema": {"type": "string"}}}},
        **problems(409, 410, 422, 500, 504),
    },
)
async def make_group(body: GroupRequest, request: Request, response: Response, agent: AgentDep) -> GroupInfo:
    """Create a group at this rank; the response comes when all members' agents have had the request and have met."""
    _check(body, agent.info())
    made, is_new = await _make(body, request, agent)
    response.status_code = HTTPStatus.CREATED if is_new else HTTPStatus.OK
    if is_new:
        response.headers["Location"] = f"/v1/groups/{made.id:016x}"
    return made.info()


@router.delete(
    "/groups/{group_id}", status_code=HTTPStatus.NO_CONTENT, response_class=Response, responses=problems(404, 409, 422)
)
async def delete_group(found: GroupDep, agent: AgentDep) -> None:
    """End a group that was made over HTTP, at this rank; the other members' agents need the same request."""
    await asyncio.to_thread(agent.group_registry.drop_over_http, found)


@router.post("/groups/{group_id}/abort", responses=problems(404, 422))
async def abort_group(found: GroupDep, body: AbortBody | None = None) -> GroupInfo:
    """Abort a group at all members: its pending calls fail with the reason. Aborting the world ends the job."""
    rank = found.global_ranks[found.rank]
    why = body.reason if body is not None and body.reason else "no reason was given"
    text = f"group {found.name!r} was aborted over HTTP at rank {rank}: {why}"
    await asyncio.to_thread(found.abort, GroupAbortedError(text, group=found.name))
    return found.info()


async def _make(wanted: GroupRequest, request: Request, agent: CurrentAgent) -> tuple[LocalCommunicator, bool]:
    """Create a group; abort it when the client disconnects."""
    begun: list[LocalCommunicator] = []
    slots: CallSlots = request.app.state.slots
    with slots.hold("group"):
        try:
            make, timeout = agent.group_registry.make_over_http, wanted.timeout or agent.world.timeout
            return await until_disconnect(request, in_thread(lambda: make(wanted, timeout, begun.append)))
        except ClientDisconnect:
            error = GroupAbortedError(f"the HTTP client that made group {wanted.name!r} went away", group=wanted.name)
            for group in begun:
                await asyncio.to_thread(group.abort, error)
            raise


def _check(wanted: GroupRequest, info: AgentInfo) -> None:
    """Raise InvalidCallError for ranks that cannot be a group's."""
    ranks, size = wanted.ranks, info.world_size
    if len(set(ranks)) != len(ranks):
        raise InvalidCallError(f"ranks has a rank twice: {ranks}")
    if ranks and max(ranks) >= size:
        raise InvalidCallError(f"ranks={ranks}, but the job's ranks are 0 to {size - 1}")
    if info.member.rank not in ranks:
        raise InvalidCallError(
            f"this agent's rank, {info.member.rank}, is not among ranks={ranks}; each member's agent needs the request"
        )
    if _LIKE_AN_ID.fullmatch(wanted.name):
        raise InvalidCallError(f"the name {wanted.name!r} could be mistaken for an id; take another")
