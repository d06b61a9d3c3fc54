"""Joining a job, signs of life, goodbyes, and who is there."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request

from rankmesh_agent.wire.fields import MAX_NAME
from rankmesh_agent.wire.schemas import (
    Done,
    Heartbeat,
    HeartbeatReply,
    JoinReply,
    JoinRequest,
    Leave,
    RankInfo,
)
from rankmesh_gateway.http import handlers
from rankmesh_gateway.http.routes.dependencies import BEARER, TheRegistry
from rankmesh_gateway.http.routes.problems import documented

router = APIRouter(
    prefix="/v1", tags=["membership"], dependencies=[BEARER], responses=documented(401, 403, 413, 421, 422)
)

JobName = Annotated[str | None, Query(max_length=MAX_NAME, description="Only this job; all when left out.")]


@router.post("/join", responses=documented(400, 409, 503))
async def join(body: JoinRequest, request: Request, registry: TheRegistry) -> JoinReply:
    """Join a job's world. Held while ranks are missing, 20 s at most; ask again while the answer is not complete."""
    return await handlers.join(registry, body, request.receive)


@router.post("/heartbeat", responses=documented(400, 409, 503))
async def heartbeat(body: Heartbeat, registry: TheRegistry) -> HeartbeatReply:
    """Tell that a rank lives, and how its groups are."""
    return registry.heartbeat(body)


@router.post("/leave", responses=documented(400))
async def leave(body: Leave, registry: TheRegistry) -> Done:
    """Say goodbye."""
    registry.leave(body)
    return Done()


@router.get("/ranks")
async def ranks(registry: TheRegistry, job: JobName = None) -> list[RankInfo]:
    """List the ranks by job, epoch and rank, and how they are."""
    return registry.ranks(job)
