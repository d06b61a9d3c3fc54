"""Handlers of what ranks, standalone agents and the command line request, without the web framework."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar

from msgspec import Meta

from rankmesh_agent.http.middleware import Receive
from rankmesh_agent.wire.errors import DistError, NoFreeAgentError
from rankmesh_agent.wire.fields import MAX_NAME
from rankmesh_agent.wire.schemas import (
    LONG_POLL_SECONDS,
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
    RankInfo,
)
from rankmesh_agent.wire.version import __version__
from rankmesh_gateway.diagnosis.service import PATIENCE_SECONDS, DiagnosisService
from rankmesh_gateway.schemas import Diagnosis, Overview, RankDetails, RegistrySnapshot, WaitingProcess
from rankmesh_gateway.snapshot import SnapshotCache
from rankmesh_gateway.state.registry import Registry
from rankmesh_gateway.state.validation import GatewayClosingError

T = TypeVar("T")


@dataclass(frozen=True)
class Services:
    """What the gateway's endpoints are functions of."""

    registry: Registry
    diagnosis: DiagnosisService
    snapshots: SnapshotCache


Handler = Callable[[Services, Any, Receive, str | None], Awaitable[object]]
"""Function of the services, the request's body or query, the rest of its messages, and the only job that it may see,
None for all; returns the response's body."""

_Patience = Annotated[float, Meta(ge=0.1, le=60.0)]
_Job = Annotated[str, Meta(max_length=MAX_NAME)]


@dataclass
class JobQuery:
    """Query of a list: only this job."""

    job: _Job | None = None


@dataclass
class DiagnosisQuery(JobQuery):
    """Query of a diagnosis, with the seconds in which an agent must answer."""

    patience: _Patience | None = None


@dataclass
class SnapshotsQuery(JobQuery):
    """Query of snapshots: only of these ranks, and the seconds in which an agent must answer."""

    rank: list[int] = field(default_factory=list)
    patience: _Patience = PATIENCE_SECONDS


_POLL_SECONDS = 0.25
"""Interval at which a request that waits for an agent checks whether another's offer has expired."""
_RETRY_SECONDS = 1
"""Value of Retry-After where no agent is free."""


async def join(services: Services, body: JoinRequest, receive: Receive, _: str | None = None) -> JoinReply:
    """Register a rank, and wait until its world is complete, the client disconnects or its time is up."""
    future = services.registry.join(body)
    try:
        disconnected = await _wait(future, receive, min(LONG_POLL_SECONDS, max(0.0, body.wait)))
    finally:
        future.cancel()
    if disconnected:
        services.registry.withdraw_join(body)
    return services.registry.join_status(body) if future.cancelled() else future.result()


async def heartbeat(services: Services, body: Heartbeat, _: Receive, __: str | None = None) -> HeartbeatReply:
    """Record the heartbeat of a rank."""
    return services.registry.heartbeat(body)


async def leave(services: Services, body: Leave, _: Receive, __: str | None = None) -> Done:
    """Record that a rank leaves."""
    services.registry.leave(body)
    return Done()


async def members(services: Services, body: MembersRequest, _: Receive, __: str | None = None) -> list[Member]:
    """Return members of an epoch, whose addresses a rank needs."""
    return services.registry.addresses(body)


async def ended_ranks(services: Services, body: EpochRequest, _: Receive, __: str | None = None) -> list[RankInfo]:
    """Return the ranks of an epoch that have left or failed."""
    return services.registry.ended_ranks(body)


async def launcher_heartbeat(
    services: Services, body: LauncherHeartbeat, _: Receive, __: str | None = None
) -> LauncherReply:
    """Record the heartbeat of a launcher."""
    return services.registry.launchers.heartbeat(body)


async def agent_heartbeat(services: Services, body: AgentHeartbeat, _: Receive, __: str | None = None) -> Done:
    """Record the heartbeat of a standalone agent."""
    services.registry.agents.heartbeat(body)
    return Done()


async def agent_leave(services: Services, body: AgentLeave, _: Receive, __: str | None = None) -> Done:
    """Forget a standalone agent."""
    services.registry.agents.leave(body)
    return Done()


async def lease(services: Services, body: LeaseRequest, receive: Receive, job: str | None = None) -> LeaseOffer:
    """Offer a standalone agent; wait until one is free, the client disconnects or its time is up.

    Raises:
        NoAgentsError: no agent is registered.
        NoFreeAgentError: no agent was free in time.
    """
    agents = services.registry.agents
    future = agents.request_lease(body)
    try:
        disconnected = await _wait(future, receive, min(LONG_POLL_SECONDS, max(0.0, body.wait)), agents.expire_offers)
    finally:
        future.cancel()
    if future.cancelled():
        raise agents.unavailable_error(body, job)
    if disconnected:
        agents.withdraw_offer(future.result())
    return future.result()


async def snapshot(services: Services, query: JobQuery, __: Receive, ___: str | None = None) -> RegistrySnapshot:
    """Return the ranks and groups of one job or of all."""
    return RegistrySnapshot(services.registry.ranks(query.job), services.registry.groups(query.job))


async def waiting(services: Services, query: JobQuery, __: Receive, ___: str | None = None) -> list[WaitingProcess]:
    """Return the processes that wait for worlds to grow."""
    return services.registry.waiting(query.job)


async def overview(services: Services, query: JobQuery, __: Receive, ___: str | None = None) -> Overview:
    """Return a snapshot of the whole gateway."""
    return services.snapshots.build(query.job)


async def diagnosis(services: Services, query: DiagnosisQuery, __: Receive, ___: str | None = None) -> Diagnosis:
    """Return why jobs are stuck."""
    return await services.diagnosis.diagnose(query.job, query.patience)


async def snapshots(
    services: Services, query: SnapshotsQuery, __: Receive, ___: str | None = None
) -> list[RankDetails]:
    """Return what the agents of ranks describe."""
    return await services.diagnosis.snapshots(query.job, query.rank, query.patience)


async def health(services: Services, _: None, __: Receive, ___: str | None = None) -> GatewayHealth:
    """Return the gateway's id, and how many jobs and ranks are live."""
    registry = services.registry
    jobs, ranks = registry.counts()
    return GatewayHealth("ok", "rankmesh-gateway", registry.id, __version__, jobs, ranks)


FREQUENT: Mapping[tuple[str, str], tuple[type[Any] | None, Handler]] = {
    ("POST", "/v1/join"): (JoinRequest, join),
    ("POST", "/v1/heartbeat"): (Heartbeat, heartbeat),
    ("POST", "/v1/leave"): (Leave, leave),
    ("POST", "/v1/members"): (MembersRequest, members),
    ("POST", "/v1/ended"): (EpochRequest, ended_ranks),
    ("POST", "/v1/launchers"): (LauncherHeartbeat, launcher_heartbeat),
    ("POST", "/v1/agents"): (AgentHeartbeat, agent_heartbeat),
    ("POST", "/v1/agents/leave"): (AgentLeave, agent_leave),
    ("POST", "/v1/leases"): (LeaseRequest, lease),
    ("GET", "/v1/waiting"): (JobQuery, waiting),
    ("GET", "/v1/snapshot"): (JobQuery, snapshot),
    ("GET", "/v1/overview"): (JobQuery, overview),
    ("GET", "/v1/diagnosis"): (DiagnosisQuery, diagnosis),
    ("GET", "/v1/ranks/snapshots"): (SnapshotsQuery, snapshots),
    ("GET", "/health"): (None, health),
}
"""By method and path, the type of the body or query and the handler of all that ranks, launchers and agents send, and
of what ``rankmesh status``, ``diagnose`` and ``stacks`` request."""


def problem_headers(error: DistError) -> dict[str, str]:
    """Return the headers of the response to a rejected request."""
    # Another request on the same connection would keep a gateway from ending.
    headers = {"connection": "close"} if isinstance(error, GatewayClosingError) else {}
    if isinstance(error, NoFreeAgentError):
        headers["retry-after"] = str(_RETRY_SECONDS)
    return headers


async def _wait(future: Future[T], receive: Receive, seconds: float, poll: Callable[[], None] | None = None) -> bool:
    """Wait until the future is done, the client has disconnected or the time is up.

    Args:
        future: the result to wait for.
        receive: returns when the client has disconnected, as the body has been received.
        seconds: the time.
        poll: called every _POLL_SECONDS; it may complete the future.

    Returns:
        Whether the client has disconnected.
    """
    disconnect: asyncio.Future[Any] = asyncio.ensure_future(receive())
    complete: asyncio.Future[Any] = asyncio.wrap_future(future)
    loop = asyncio.get_running_loop()
    until = loop.time() + seconds
    try:
        while True:
            remaining = until - loop.time()
            timeout = remaining if poll is None else min(remaining, _POLL_SECONDS)
            await asyncio.wait({disconnect, complete}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if disconnect.done() or complete.done() or loop.time() >= until:
                return disconnect.done()
            if poll is not None:
                poll()
    finally:
        disconnect.cancel()
