"""Health of the gateway, without a token."""

from __future__ import annotations

from fastapi import APIRouter, Request

from rankmesh_agent.wire.schemas import Done, GatewayHealth
from rankmesh_gateway.http import handlers
from rankmesh_gateway.http.routes.dependencies import ServicesDep
from rankmesh_gateway.http.routes.problems import problems

router = APIRouter(tags=["health"])


@router.get("/health")
async def health(request: Request, services: ServicesDep) -> GatewayHealth:
    """Return the gateway's id, and the number of live jobs and ranks."""
    return await handlers.health(services, None, request.receive)


@router.get("/livez", responses=problems(503))
async def livez() -> Done:
    """Answer while the process runs."""
    return Done()


@router.get("/readyz", responses=problems(503))
async def readyz() -> Done:
    """Answer while requests are served; a gateway depends on no other service."""
    return Done()
