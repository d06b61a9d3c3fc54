"""Health of a store without an agent, without a token."""

from __future__ import annotations

from fastapi import APIRouter

from rankmesh_agent.http.routes.dependencies import StoreDep
from rankmesh_agent.http.routes.problems import problems
from rankmesh_agent.store.commands import Count
from rankmesh_agent.wire.schemas import StoreHealth
from rankmesh_agent.wire.version import __version__

router = APIRouter(tags=["health"], responses=problems(403, 413, 421))


@router.get("/health")
async def health(store: StoreDep) -> StoreHealth:
    """Return the store's version and number of keys."""
    return StoreHealth("ok", "rankmesh-store", __version__, await store.execute(Count()))
