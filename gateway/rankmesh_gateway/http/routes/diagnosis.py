"""Diagnosis: why jobs are stuck, and where a rank is."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Response

from rankmesh_agent.wire.fields import MAX_WORLD_SIZE
from rankmesh_gateway.http.routes.dependencies import BEARER, DiagnosisDep, JobName
from rankmesh_gateway.http.routes.problems import problems
from rankmesh_gateway.schemas import Diagnosis, RankDetails

router = APIRouter(prefix="/v1", tags=["diagnosis"], dependencies=[BEARER], responses=problems(422, 503))

RankNumber = Annotated[int, Path(ge=0, lt=MAX_WORLD_SIZE, description="The rank.")]


@router.get("/diagnosis")
async def diagnosis(service: DiagnosisDep, response: Response, job: JobName = None) -> Diagnosis:
    """Say in words why jobs are stuck: the findings of `rankmesh diagnose`.

    The gateway asks the agents of all ranks at once; one that does not answer within a second is part of the findings.
    A diagnosis serves all clients for two seconds, or 20 ms for each rank if that is longer.
    """
    response.headers["cache-control"] = "no-store"
    return await service.diagnose(job)


@router.get("/ranks/{rank}/snapshot", responses=problems(404))
async def rank_snapshot(
    rank: RankNumber, service: DiagnosisDep, response: Response, job: JobName = None
) -> RankDetails:
    """Return what a rank does now: its calls, waits for keys, Python stacks and CPU time, as its agent describes them.

    If several jobs have such a rank, `job` selects one. The newest epoch of the job counts.
    """
    response.headers["cache-control"] = "no-store"
    return await service.details(rank, job)
