"""Membership of ranks: join, heartbeat, leave, and the list of ranks."""

from __future__ import annotations

from fastapi import APIRouter, Request

from rankmesh_agent.wire.schemas import (
    Done,
    EpochRequest,
    Heartbeat,
    HeartbeatReply,
    JoinReply,
    JoinRequest,
    LauncherHeartbeat,
    LauncherReply,
    Leave,
    Member,
    MembersRequest,
    RankInfo,
)
from rankmesh_gateway.http import handlers
from rankmesh_gateway.http.routes.dependencies import BEARER, JobName, RegistryDep, ServicesDep
from rankmesh_gateway.http.routes.problems import problems
from rankmesh_gateway.schemas import RegistrySnapshot, WaitingProcess

router = APIRouter(prefix="/v1", tags=["membership"], dependencies=[BEARER], responses=problems(422, 503))


@router.post("/join", responses=problems(409, 410))
async def join(body: JoinRequest, request: Request, services: ServicesDep) -> JoinReply:
    """Join a job. The response is held back while ranks are missing, 20 s at most; repeat it until it is complete."""
    return await handlers.join(services, body, request.receive)


@router.post("/heartbeat", response_model_exclude_defaults=True, responses=problems(409))
async def heartbeat(body: Heartbeat, request: Request, services: ServicesDep) -> HeartbeatReply:
    """Report that a rank is alive, and the state of its groups, or what has changed since its last heartbeat.

    Sent every second; of more than 500 ranks less often: the reply has the `interval`. After 3 intervals without a
    heartbeat a rank is suspect; after 10 s, or 4 intervals, it has failed, unless a peer is connected to it.
    """
    return await handlers.heartbeat(services, body, request.receive)


@router.post("/leave")
async def leave(body: Leave, request: Request, services: ServicesDep) -> Done:
    """Report that a rank leaves, with a reason if it has failed."""
    return await handlers.leave(services, body, request.receive)


@router.post("/members")
async def members(body: MembersRequest, request: Request, services: ServicesDep) -> list[Member]:
    """Return members of an epoch of a job, by rank, with their addresses; those that are not known are left out."""
    return await handlers.members(services, body, request.receive)


@router.get("/waiting")
async def waiting(request: Request, services: ServicesDep, job: JobName = None) -> list[WaitingProcess]:
    """List the processes that wait for the worlds of jobs to grow, by job, in the order in which they came."""
    return await handlers.waiting(services, handlers.JobQuery(job), request.receive)


@router.get("/snapshot")
async def snapshot(request: Request, services: ServicesDep, job: JobName = None) -> RegistrySnapshot:
    """Return the ranks and groups of one job or of all, for `rankmesh diagnose`."""
    return await handlers.snapshot(services, handlers.JobQuery(job), request.receive)


@router.post("/ended")
async def ended(body: EpochRequest, request: Request, services: ServicesDep) -> list[RankInfo]:
    """List the ranks of a job's epoch that have left or failed, by rank; for ranks that connect to each other."""
    return await handlers.ended_ranks(services, body, request.receive)


@router.post("/launchers", responses=problems(409))
async def launchers(body: LauncherHeartbeat, request: Request, services: ServicesDep) -> LauncherReply:
    """Report how the ranks of a node do; the reply says whether the job has been restarted."""
    return await handlers.launcher_heartbeat(services, body, request.receive)


@router.get("/ranks")
async def ranks(registry: RegistryDep, job: JobName = None) -> list[RankInfo]:
    """List the ranks and their states by job, epoch and rank."""
    return registry.ranks(job)
