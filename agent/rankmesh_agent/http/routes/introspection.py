"""Introspection of an agent: calls in flight, the flight recorder, and the stacks of its threads."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse

from rankmesh_agent.diagnostics.stacks import as_text, stacks
from rankmesh_agent.http.routes.dependencies import BEARER, AgentStateDep
from rankmesh_agent.http.routes.group_calls import GroupName, GroupNotFoundError
from rankmesh_agent.http.routes.problems import problems
from rankmesh_agent.wire.fields import MAX_NAME
from rankmesh_agent.wire.schemas import FlightRecord, InFlight, ThreadStack

router = APIRouter(prefix="/v1", tags=["watching"], dependencies=[BEARER], responses=problems(503))

OfGroup = Annotated[
    str | None, Query(alias="group", max_length=MAX_NAME, description="Only this group's: its id, or its name.")
]
Last = Annotated[
    int | None, Query(ge=0, description="The number of operations, the latest ones; all that are kept if left out.")
]

_PLAIN: dict[int | str, dict[str, Any]] = {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}}


@router.get("/groups/{group_id}/inflight", responses=problems(404, 422))
async def in_flight(group_id: GroupName, agent: AgentStateDep) -> list[InFlight]:
    """List a group's operations that are queued or in flight, also of a group that is being created."""
    found = agent.recorder.in_flight(group_id)
    if found is None:
        raise GroupNotFoundError(f"this rank is in no group {group_id!r}; /v1/groups lists those it is in")
    return found


@router.get("/flight-recorder", responses=problems(422))
async def flight_recorder(agent: AgentStateDep, of_group: OfGroup = None, last: Last = None) -> list[FlightRecord]:
    """List the latest operations of all groups: those that have completed, in that order, then those in flight."""
    return agent.recorder.records(of_group, last)


@router.get("/stacks", response_model=list[ThreadStack], responses=_PLAIN)
async def thread_stacks(request: Request) -> Response:
    """Return the Python stacks of all threads of the process; as text to a client that accepts text and no JSON."""
    found, accept = stacks(), request.headers.get("accept", "").lower()
    if "text/" in accept and "json" not in accept:
        return PlainTextResponse(as_text(found))
    return JSONResponse([asdict(each) for each in found])
