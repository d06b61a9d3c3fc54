"""Standalone agents: their signs of life and goodbyes, which are there, and which one a client may have."""

from __future__ import annotations

from fastapi import APIRouter, Request

from rankmesh_agent.wire.schemas import AgentEntry, AgentHeartbeat, AgentLeave, Done, LeaseOffer, LeaseRequest
from rankmesh_gateway.http import handlers
from rankmesh_gateway.http.routes.dependencies import BEARER, RegistryDep
from rankmesh_gateway.http.routes.problems import problems

router = APIRouter(prefix="/v1", tags=["agents"], dependencies=[BEARER], responses=problems(401, 403, 413, 421, 422))


@router.post("/agents", responses=problems(400, 503))
async def agent_beat(body: AgentHeartbeat, request: Request, registry: RegistryDep) -> Done:
    """Tell that a standalone agent lives, and to whom it is leased; the first time registers it.

    Sent each second, and when its lease changes. An agent that is silent is suspect after 3 s, has failed after 10 s,
    and is forgotten after 300 s, or as soon as another one of its name comes.
    """
    return await handlers.agent_heartbeat(registry, body, request.receive)


@router.post("/agents/leave", responses=problems(400))
async def agent_leave(body: AgentLeave, request: Request, registry: RegistryDep) -> Done:
    """Say goodbye; the agent is forgotten."""
    return await handlers.agent_leave(registry, body, request.receive)


@router.get("/agents")
async def agents(registry: RegistryDep) -> list[AgentEntry]:
    """List the standalone agents in the natural order of their names, and how they are."""
    return registry.agents.entries()


@router.post("/leases", responses=problems(400, 404, 503))
async def lease(body: LeaseRequest, request: Request, registry: RegistryDep) -> LeaseOffer:
    """Offer a free standalone agent. Held while none is free, for `wait` seconds and 20 s at most; then ask again.

    To take it is between the client and the agent. It is kept for this client for 5 s: rank r is offered the r-th
    agent in the natural order of names, or the next one that is free, those with the client's `host_id` before others.
    """
    return await handlers.lease(registry, body, request.receive)
