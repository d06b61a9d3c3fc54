"""Diagnosis: why jobs are stuck, and where a rank is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from fastapi import APIRouter, Path, Query, Response

from rankmesh_agent.wire.fields import MAX_WORLD_SIZE
from rankmesh_gateway.diagnosis.service import PATIENCE_SECONDS
from rankmesh_gateway.http.routes.dependencies import BEARER, JobName, ServicesDep
from rankmesh_gateway.http.routes.problems import problems
from rankmesh_gateway.schemas import Diagnosis, RankDetails

router = APIRouter(prefix="/v1", tags=["diagnosis"], dependencies=[BEARER], responses=problems(422, 503))

RankNumber = Annotated[int, Path(ge=0, lt=MAX_WORLD_SIZE, description="The rank.")]
Ranks = Annotated[Sequence[int], Query(description="Only these ranks; all when left out.")]
Patience = Annotated[float, Query(ge=0.1, le=60.0, description="Seconds in which an agent must answer.")]


@router.get("/diagnosis")
async def diagnosis(
    services: ServicesDep, response: Response, job: JobName = None, patience: Patience | None = None
) -> Diagnosis:
    """Say in words why jobs are stuck: the findings of `rankmesh diagnose`.

    The gateway asks the agents of all ranks at once; one that does not answer within `patience` seconds is part of the
    findings. Without `patience`, it is a second, and a diagnosis serves all clients for two seconds, or 20 ms for each
    rank if that is longer.
    """
    response.headers["cache-control"] = "no-store"
    return await services.diagnosis.diagnose(job, patience)


@router.get("/ranks/snapshots")
async def rank_snapshots(
    services: ServicesDep,
    response: Response,
    job: JobName = None,
    rank: Ranks = (),
    patience: Patience = PATIENCE_SECONDS,
) -> list[RankDetails]:
    """Return what ranks of the newest epoch of each job do now; see `/v1/ranks/{rank}/snapshot`."""
    response.headers["cache-control"] = "no-store"
    return await services.diagnosis.snapshots(job, rank, patience)


@router.get("/ranks/{rank}/snapshot", responses=problems(404))
async def rank_snapshot(
    rank: RankNumber, services: ServicesDep, response: Response, job: JobName = None
) -> RankDetails:
    """Return what a rank does now: its calls, waits for keys, Python stacks and CPU time, as its agent describes them.

    If several jobs have such a rank, `job` selects one. The newest epoch of the job counts.
    """
    response.headers["cache-control"] = "no-store"
    return await services.diagnosis.details(rank, job)
