"""Handlers of the requests that ranks, launchers, agents and most commands send; ``routes`` has the others.

A handler is a function of some of these, by name: the ``services``; ``query``, the parameters in the request's path and
query; its ``body``; and the ``request``. Its docstring is its text in the OpenAPI document.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, replace
from typing import Annotated, Any, TypeVar

from msgspec import Meta

from rankmesh_agent.wire.errors import DistError, NoFreeAgentError
from rankmesh_agent.wire.fields import MAX_NAME, MAX_WORLD_SIZE
from rankmesh_agent.wire.schemas import (
    LONG_POLL_SECONDS,
    AgentEntry,
    AgentHeartbeat,
    AgentLeave,
    Done,
    EpochRequest,
    GatewayHealth,
    Heartbeat,
    HeartbeatReply,
    JoinReply,
    JoinRequest,
    LauncherHeartbeat,
    LauncherReply,
    LeaseOffer,
    LeaseRequest,
    Leave,
    Member,
    MembersRequest,
    RankGroupInfo,
    RankInfo,
)
from rankmesh_agent.wire.version import __version__
from rankmesh_gateway.clients.group_controller import GroupController
from rankmesh_gateway.diagnosis.service import PATIENCE_SECONDS, DiagnosisService
from rankmesh_gateway.http.dashboard_sessions import DashboardSessions
from rankmesh_gateway.http.replies import Request
from rankmesh_gateway.schemas import (
    Diagnosis,
    JobInfo,
    Overview,
    RankDetails,
    RateSample,
    RegistrySnapshot,
    StragglerReport,
    Timeline,
    WaitingProcess,
)
from rankmesh_gateway.snapshot import SnapshotCache
from rankmesh_gateway.state.job_stores import JobStores
from rankmesh_gateway.state.registry import Registry
from rankmesh_gateway.state.validation import GatewayClosingError

T = TypeVar("T")


@dataclass(frozen=True)
class Services:
    """Parts of the gateway that handlers use: the first argument of each."""

    registry: Registry
    stores: JobStores
    diagnosis: DiagnosisService
    snapshots: SnapshotCache
    controller: GroupController
    sessions: DashboardSessions


_Job = Annotated[str, Meta(max_length=MAX_NAME, description="Only this job; all when left out.")]
_Patience = Annotated[float, Meta(ge=0.1, le=60.0, description="Seconds in which an agent must answer.")]


@dataclass
class JobQuery:
    """Query of a list: only this job."""

    job: _Job | None = None


@dataclass
class DiagnosisQuery(JobQuery):
    """Query of a diagnosis."""

    patience: _Patience | None = None


@dataclass
class SnapshotsQuery(JobQuery):
    """Query of snapshots: only of these ranks."""

    rank: Annotated[tuple[int, ...], Meta(description="Only these ranks; all when left out.")] = ()
    patience: _Patience = PATIENCE_SECONDS
    records: Annotated[bool, Meta(description="With all calls that the flight recorders keep, for a trace.")] = False


@dataclass
class TimelineQuery(JobQuery):
    """Query of the calls of all ranks."""

    seconds: Annotated[float, Meta(ge=0.1, description="Only the calls of the last seconds count.")] = 60.0
    patience: _Patience = PATIENCE_SECONDS


@dataclass
class StragglersQuery(TimelineQuery):
    """Query of the ranks that make the others wait."""

    links: Annotated[bool, Meta(description="If no rank is late, watch for slow links, for a second.")] = False


@dataclass(kw_only=True)
class RankQuery(JobQuery):
    """Path and query of a request for one rank."""

    rank: Annotated[int, Meta(ge=0, lt=MAX_WORLD_SIZE, description="The rank.")]


_POLL_SECONDS = 0.25
"""Interval at which a request that waits for an agent looks for one."""
_RETRY_SECONDS = 1
"""Value of Retry-After where no agent is free."""


async def join(services: Services, body: JoinRequest, request: Request) -> JoinReply:
    """Join a job. The response is held back while ranks are missing, 20 s at most; repeat it until it is complete."""
    future = services.registry.join(body)
    seconds = min(LONG_POLL_SECONDS, max(0.0, body.wait))
    disconnect: asyncio.Future[Any] = asyncio.ensure_future(request.receive())
    complete: asyncio.Future[Any] = asyncio.wrap_future(future)
    try:
        await asyncio.wait({disconnect, complete}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        future.cancel()
        disconnected = disconnect.done()
        disconnect.cancel()
    if disconnected:
        services.registry.withdraw_join(body)
    return services.registry.join_status(body) if future.cancelled() else future.result()


def heartbeat(services: Services, body: Heartbeat) -> HeartbeatReply:
    """Report that a rank is alive, and the state of its groups, or what has changed since its last heartbeat.

    Sent every second; of more than 500 ranks less often: the reply has the `interval`. After 3 intervals without a
    heartbeat a rank is suspect; after 10 s, or 4 intervals, it has failed, unless a peer is connected to it.
    """
    return services.registry.heartbeat(body)


def leave(services: Services, body: Leave) -> Done:
    """Report that a rank leaves, with a reason if it has failed."""
    services.registry.leave(body)
    return Done()


def members(services: Services, body: MembersRequest) -> list[Member]:
    """Return members of an epoch of a job, by rank, with their addresses; those that are not known are left out."""
    return services.registry.addresses(body)


def ended(services: Services, body: EpochRequest) -> list[RankInfo]:
    """List the ranks of a job's epoch that have left or failed, by rank; for ranks that connect to each other."""
    return services.registry.ended_ranks(body)


def launchers(services: Services, body: LauncherHeartbeat) -> LauncherReply:
    """Report how the ranks of a node do; the reply says whether the job has been restarted."""
    return services.registry.launchers.heartbeat(body)


def waiting(services: Services, query: JobQuery) -> list[WaitingProcess]:
    """List the processes that wait for the worlds of jobs to grow, by job, in the order in which they came."""
    return services.registry.waiting(query.job)


def snapshot(services: Services, query: JobQuery) -> RegistrySnapshot:
    """Return the ranks and groups of one job or of all, for `rankmesh diagnose`."""
    return RegistrySnapshot(services.registry.ranks(query.job), services.registry.groups(query.job))


def ranks(services: Services, query: JobQuery) -> list[RankInfo]:
    """List the ranks and their states by job, epoch and rank."""
    return services.registry.ranks(query.job)


def agent_beat(services: Services, body: AgentHeartbeat) -> Done:
    """Report that a standalone agent is alive, and its lease; the first heartbeat registers it.

    Sent every second, and when the lease changes. A silent agent is suspect after 3 s, failed after 10 s, and
    forgotten after 300 s or as soon as another one of its name registers.
    """
    services.registry.agents.heartbeat(body)
    return Done()


def agent_leave(services: Services, body: AgentLeave) -> Done:
    """Report that a standalone agent ends; the gateway forgets it."""
    services.registry.agents.leave(body)
    return Done()


def agents(services: Services, query: JobQuery) -> list[AgentEntry]:
    """List the standalone agents and their states, in the natural order of their names; of a job, and the free ones."""
    return services.registry.agents.entries(query.job)


async def lease(services: Services, body: LeaseRequest, request: Request) -> LeaseOffer:
    """Offer a free standalone agent. The response is held back while none is free, `wait` seconds and 20 s at most.

    The client acquires the lease from the agent, which is reserved for it for 5 s. Rank r is offered the r-th agent in
    the natural order of names, or the next one that is free, agents with the client's `host_id` before others.
    """
    agents, disconnect = services.registry.agents, asyncio.ensure_future(request.receive())
    until = time.monotonic() + min(LONG_POLL_SECONDS, max(0.0, body.wait))
    try:
        while (offer := agents.offer(body)) is None:
            left = until - time.monotonic()
            await asyncio.wait({disconnect}, timeout=max(0.0, min(left, _POLL_SECONDS)))
            if left <= 0 or disconnect.done():
                raise agents.none_free_error(body, request.job)
        return offer
    finally:
        disconnect.cancel()


def jobs(services: Services, query: JobQuery) -> list[JobInfo]:
    """List the jobs' epochs by job and number."""
    return services.registry.jobs(query.job)


def groups(services: Services, query: JobQuery) -> list[RankGroupInfo]:
    """List the groups by job, epoch and id, as their members last reported them."""
    return services.registry.groups(query.job)


def rates(services: Services, query: JobQuery) -> list[RateSample]:
    """List the total rates of the last five minutes, the oldest first: a sample every two seconds, or fewer."""
    return services.registry.rate_history(query.job)


def overview(services: Services, query: JobQuery) -> Overview:
    """Return a snapshot: ranks, agents, groups, calls in flight, rates, and the keys of the jobs' stores."""
    return services.snapshots.build(query.job)


async def diagnosis(services: Services, query: DiagnosisQuery) -> Diagnosis:
    """Say in words why jobs are stuck: the problems of `rankmesh diagnose`.

    The gateway asks the agents of all ranks at once; one that does not answer within `patience` seconds is one of the
    problems. Without `patience`, it is a second, and a diagnosis serves all clients for two seconds, or 20 ms for each
    rank if that is longer.
    """
    found = await services.diagnosis.diagnose(query.job, query.patience)
    return replace(found, problems=services.snapshots.build(query.job, found.problems).problems)


async def stragglers(services: Services, query: StragglersQuery) -> StragglerReport:
    """Say which ranks make the others wait, how long, since when, and why: what `rankmesh stragglers` prints.

    The gateway asks the agents of all ranks for the calls that their flight recorders keep.
    """
    return await services.diagnosis.stragglers(query.job, query.seconds, query.patience, links=query.links)


async def timelines(services: Services, query: TimelineQuery) -> list[Timeline]:
    """Say what the ranks of each job have spent the last seconds on: waits for other ranks, and operations.

    The gateway asks the agents of all ranks for the calls that their flight recorders keep.
    """
    return await services.diagnosis.timelines(query.job, query.seconds, query.patience)


async def rank_snapshots(services: Services, query: SnapshotsQuery) -> list[RankDetails]:
    """Return what ranks of the newest epoch of each job do now; see `/v1/ranks/{rank}/snapshot`."""
    return await services.diagnosis.snapshots(query.job, query.rank, query.patience, records=query.records)


async def rank_snapshot(services: Services, query: RankQuery) -> RankDetails:
    """Return what a rank does now: its calls, waits for keys, Python stacks and CPU time, as its agent describes them.

    If several jobs have such a rank, `job` selects one. The newest epoch of the job counts.
    """
    return await services.diagnosis.details(query.rank, query.job)


def health(services: Services) -> GatewayHealth:
    """Return the gateway's id, and the number of live jobs and ranks."""
    registry = services.registry
    jobs, ranks = registry.counts()
    return GatewayHealth("ok", "rankmesh-gateway", registry.id, __version__, jobs, ranks, registry.hosted)


def livez(_: Services) -> Done:
    """Answer while the process runs."""
    return Done()


def readyz(_: Services) -> Done:
    """Answer while requests are served; a gateway depends on no other service."""
    return Done()


def problem_headers(error: DistError) -> dict[str, str]:
    """Return the headers of the response to a rejected request."""
    # Another request on the same connection would keep a gateway from ending.
    headers = {"connection": "close"} if isinstance(error, GatewayClosingError) else {}
    if isinstance(error, NoFreeAgentError):
        headers["retry-after"] = str(_RETRY_SECONDS)
    return headers
