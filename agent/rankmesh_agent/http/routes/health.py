"""Health of the agent, and of a store without an agent: without a token, but then without the reasons of failures."""

from __future__ import annotations

from dataclasses import replace
from http import HTTPStatus

from fastapi import APIRouter, Request, Response

from rankmesh_agent.http.routes.dependencies import AgentStateDep, StoreDep
from rankmesh_agent.http.routes.problems import problems
from rankmesh_agent.store.commands import Count
from rankmesh_agent.wire.errors import DistError
from rankmesh_agent.wire.schemas import AgentHealth, Done, StoreHealth
from rankmesh_agent.wire.version import __version__

router = APIRouter(tags=["health"])
store_router = APIRouter(tags=["health"])

_WITHHELD = "a group has failed; the reasons need the job's token"


class NotReadyError(DistError, code="not-ready", status=503):
    """The rank has not joined, is leaving, or has a failed group."""


@router.get("/health", responses={503: {"model": AgentHealth, "description": "The agent fails; the reasons say why."}})
async def health(agent: AgentStateDep, request: Request, response: Response) -> AgentHealth:
    """Return whether the rank can do its work; if not, why, to clients with the job's token."""
    found = agent.health()
    if found.reasons and not getattr(request.state, "details", True):
        found = replace(found, reasons=[_WITHHELD])
    if found.status == "failing":
        response.status_code = HTTPStatus.SERVICE_UNAVAILABLE
    return found


@router.get("/livez")
async def livez() -> Done:
    """Answer while the process runs, whatever the state of its peers."""
    return Done()


@router.get("/readyz", responses=problems(503))
async def readyz(agent: AgentStateDep) -> Done:
    """Answer 200 when the rank has joined, its groups work and it is not leaving."""
    if not agent.ready():
        raise NotReadyError("the rank has not joined, is leaving, or has a failed group; /health says which group")
    return Done()


@store_router.get("/health", name="health")
async def store_health(store: StoreDep) -> StoreHealth:
    """Return the store's version and number of keys."""
    return StoreHealth("ok", "rankmesh-store", __version__, await store.submit(Count()))
