"""Lease of a standalone agent, for clients that speak HTTP."""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.requests import ClientDisconnect

from rankmesh_agent.http.routes.dependencies import BEARER, Leases, LeasesDep, grant_of
from rankmesh_agent.http.routes.group_calls import until_disconnect
from rankmesh_agent.http.routes.problems import problems
from rankmesh_agent.wire.errors import ForbiddenJobError, LeaseEndedError
from rankmesh_agent.wire.schemas import LONG_POLL_SECONDS, Done, LeaseBody, LeaseState, LeaseTerms

router = APIRouter(prefix="/v1", tags=["lease"], dependencies=[BEARER], responses=problems(503))


@router.post(
    "/lease",
    status_code=HTTPStatus.CREATED,
    responses={
        202: {
            "model": LeaseState,
            "description": "Other ranks of the job are missing; GET /v1/lease returns the lease's state.",
        },
        **problems(409, 410, 422, 502, 504),
    },
)
async def acquire_lease(body: LeaseBody, request: Request, response: Response, leases: LeasesDep) -> LeaseState:
    """Acquire the agent for a rank of a job, until DELETE or until it is idle for too long."""
    grant = grant_of(request)
    if grant is not None:
        grant.require(body.job)
        if grant.lease:
            raise ForbiddenJobError("the credential of a lease takes no other lease: send the job's")
    if body.rank >= body.world_size:
        wrong = f"rank {body.rank} is not in a world of {body.world_size}: ranks go from 0 to {body.world_size - 1}"
        raise RequestValidationError([{"loc": ("body", "rank"), "msg": wrong}])
    peer = f" at {request.client.host}" if request.client is not None else ""
    wanted = LeaseTerms(body.job, body.rank, body.world_size, body.timeout, f"an HTTP client{peer}", body.idle)
    active = leases.acquire(wanted)
    joining = asyncio.wrap_future(active.joining)
    joining.add_done_callback(lambda done: done.cancelled() or done.exception())  # retrieved in any case
    try:
        await until_disconnect(request, asyncio.wait({joining}, timeout=body.wait))
    except ClientDisconnect:
        await asyncio.to_thread(leases.release, active.lease.id, "its HTTP client went away while it joined")
        raise
    if joining.done():
        joining.result()
        return LeaseState(active.lease, "joined")
    response.status_code = HTTPStatus.ACCEPTED
    return LeaseState(active.lease, "joining")


@router.get("/lease", responses=problems(422))
async def lease(
    request: Request,
    leases: LeasesDep,
    wait: Annotated[
        float, Query(ge=0, le=LONG_POLL_SECONDS, description="Seconds to wait while the agent joins the job.")
    ] = 0.0,
) -> LeaseState:
    """Return the lease, and whether the agent has joined the job."""
    loop = asyncio.get_running_loop()
    until = loop.time() + wait
    while (found := _own_lease(request, leases)).state == "joining" and loop.time() < until:
        await asyncio.sleep(0.05)
    return found


@router.delete("/lease", responses=problems(410, 422))
async def release_lease(
    request: Request,
    leases: LeasesDep,
    id: Annotated[
        str | None, Query(max_length=64, description="The lease's id; the current lease if left out.")
    ] = None,
) -> Done:
    """End the lease: the agent leaves the job and is free."""
    own = id if id is not None and grant_of(request) is None else _own_lease(request, leases).lease.id
    if id not in (None, own) or not await asyncio.to_thread(leases.release, own, ""):
        raise LeaseEndedError(f"there is no lease {id or own!r} at this agent any more")
    return Done()


def _own_lease(request: Request, leases: Leases) -> LeaseState:
    """Return the agent's lease, as the request's credential permits."""
    found, grant = leases.state(), grant_of(request)
    if grant is not None:
        grant.require_lease(found.lease.job, found.lease.id)
    return found
