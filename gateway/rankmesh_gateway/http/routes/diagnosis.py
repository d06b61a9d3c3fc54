"""Diagnosis: where a rank is."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Response

from rankmesh_agent.wire.fields import MAX_WORLD_SIZE
from rankmesh_gateway.http.routes.dependencies import BEARER, JobName, ServicesDep
from rankmesh_gateway.http.routes.problems import problems
from rankmesh_gateway.schemas import RankDetails

router = APIRouter(prefix="/v1", tags=["diagnosis"], dependencies=[BEARER], responses=problems(422, 503))

RankNumber = Annotated[int, Path(ge=0, lt=MAX_WORLD_SIZE, description="The rank.")]


@router.get("/ranks/{rank}/snapshot", responses=problems(404))
async def rank_snapshot(
    rank: RankNumber, services: ServicesDep, response: Response, job: JobName = None
) -> RankDetails:
    """Return what a rank does now: its calls, waits for keys, Python stacks and CPU time, as its agent describes them.

    If several jobs have such a rank, `job` selects one. The newest epoch of the job counts.
    """
    response.headers["cache-control"] = "no-store"
    return await services.diagnosis.details(rank, job)
