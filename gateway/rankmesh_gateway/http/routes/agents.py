"""Standalone agents: heartbeat, leave, the list of agents, and offers of free ones."""

from __future__ import annotations

from fastapi import APIRouter, Request

from rankmesh_agent.wire.schemas import AgentEntry, AgentHeartbeat, AgentLeave, Done, LeaseOffer, LeaseRequest
from rankmesh_gateway.http import handlers
from rankmesh_gateway.http.routes.dependencies import BEARER, JobName, JobOfBody, RegistryDep, ServicesDep
from rankmesh_gateway.http.routes.problems import problems

router = APIRouter(prefix="/v1", tags=["agents"], dependencies=[BEARER], responses=problems(422, 503))


@router.post("/agents")
async def agent_beat(body: AgentHeartbeat, request: Request, services: ServicesDep) -> Done:
    """Report that a standalone agent is alive, and its lease; the first heartbeat registers it.

    Sent every second, and when the lease changes. A silent agent is suspect after 3 s, failed after 10 s, and
    forgotten after 300 s or as soon as another one of its name registers.
    """
    return await handlers.agent_heartbeat(services, body, request.receive)


@router.post("/agents/leave")
async def agent_leave(body: AgentLeave, request: Request, services: ServicesDep) -> Done:
    """Report that a standalone agent ends; the gateway forgets it."""
    return await handlers.agent_leave(services, body, request.receive)


@router.get("/agents")
async def agents(registry: RegistryDep, job: JobName = None) -> list[AgentEntry]:
    """List the standalone agents and their states, in the natural order of their names; of a job, and the free ones."""
    return registry.agents.entries(job)


@router.post("/leases", responses=problems(404))
async def lease(body: LeaseRequest, request: Request, services: ServicesDep, job: JobOfBody) -> LeaseOffer:
    """Offer a free standalone agent. The response is held back while none is free, `wait` seconds and 20 s at most.

    The client acquires the lease from the agent, which is reserved for it for 5 s. Rank r is offered the r-th agent in
    the natural order of names, or the next one that is free, agents with the client's `host_id` before others.
    """
    return await handlers.lease(services, body, request.receive, job)
