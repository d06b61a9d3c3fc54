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
    found = agent.in_flight(group_id)
    if found is None:
        raise GroupNotFoundError(f"this rank is in no group {group_id!r}; /v1/groups lists those it is in")
    return found


@router.get("/flight-recorder", responses=problems(422))
async def flight_recorder(agent: AgentStateDep, of_group: OfGroup = None, last: Last = None) -> list[FlightRecord]:
    """List the latest operations of all groups: those that have completed, in that order, then those in flight."""
    return agent.flight_records(of_group, last)


@router.get("/stacks", response_model=list[ThreadStack], responses=_PLAIN)
async def thread_stacks(request: Request) -> Response:
    """Return the Python stacks of all threads of the agent's process; as text if the Accept header prefers that."""
    found, accept = stacks(), ", ".join(request.headers.getlist("accept"))
    if _quality(accept, "text/plain") > _quality(accept, "application/json"):
        return PlainTextResponse(as_text(found))
    return JSONResponse([asdict(each) for each in found])


def _quality(accept: str, media_type: str) -> float:
    """Return the quality value of a media type (RFC 9110, section 12.5.1), 0 to 1; 1 for an empty header."""
    ranges = {media_type: 2, media_type.partition("/")[0] + "/*": 1, "*/*": 0}
    best, found = -1, 0.0 if accept.strip() else 1.0
    for each in accept.split(","):
        name, *parameters = (part.strip().lower() for part in each.split(";"))
        if ranges.get(name, -1) > best:
            best = ranges[name]
            value = next((part[2:] for part in parameters if part.startswith("q=")), "1")
            found = float(value) if value.replace(".", "", 1).isdecimal() else 0.0
    return found
