"""Handlers of what ranks and standalone agents request: functions of the registry, without the web framework."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from typing import Any, TypeVar

from rankmesh_agent.http.middleware import Receive
from rankmesh_agent.wire.errors import DistError, NoFreeAgentError
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
from rankmesh_gateway.schemas import RegistrySnapshot, WaitingProcess
from rankmesh_gateway.state.registry import Registry
from rankmesh_gateway.state.validation import GatewayClosingError

T = TypeVar("T")
Handler = Callable[[Registry, Any, Receive, str | None], Awaitable[object]]
"""Function of the registry, the request's body, the rest of its messages, and the only job that it may see, None for
all; returns the response's body."""

_POLL_SECONDS = 0.25
"""Interval at which a request that waits for an agent checks whether another's offer has expired."""
_RETRY_SECONDS = 1
"""Value of Retry-After where no agent is free."""


async def join(registry: Registry, body: JoinRequest, receive: Receive, _: str | None = None) -> JoinReply:
    """Register a rank, and wait until its world is complete, the client disconnects or its time is up."""
    future = registry.join(body)
    try:
        disconnected = await _wait(future, receive, min(LONG_POLL_SECONDS, max(0.0, body.wait)))
    finally:
        future.cancel()
    if disconnected:
        registry.withdraw_join(body)
    return registry.join_status(body) if future.cancelled() else future.result()


async def heartbeat(registry: Registry, body: Heartbeat, _: Receive, __: str | None = None) -> HeartbeatReply:
    """Record the heartbeat of a rank."""
    return registry.heartbeat(body)


async def leave(registry: Registry, body: Leave, _: Receive, __: str | None = None) -> Done:
    """Record that a rank leaves."""
    registry.leave(body)
    return Done()


async def members(registry: Registry, body: MembersRequest, _: Receive, __: str | None = None) -> list[Member]:
    """Return members of an epoch, whose addresses a rank needs."""
    return registry.addresses(body)


async def ended_ranks(registry: Registry, body: EpochRequest, _: Receive, __: str | None = None) -> list[RankInfo]:
    """Return the ranks of an epoch that have left or failed."""
    return registry.ended_ranks(body)


async def launcher_heartbeat(
    registry: Registry, body: LauncherHeartbeat, _: Receive, __: str | None = None
) -> LauncherReply:
    """Record the heartbeat of a launcher."""
    return registry.launchers.heartbeat(body)


async def agent_heartbeat(registry: Registry, body: AgentHeartbeat, _: Receive, __: str | None = None) -> Done:
    """Record the heartbeat of a standalone agent."""
    registry.agents.heartbeat(body)
    return Done()


async def agent_leave(registry: Registry, body: AgentLeave, _: Receive, __: str | None = None) -> Done:
    """Forget a standalone agent."""
    registry.agents.leave(body)
    return Done()


async def lease(registry: Registry, body: LeaseRequest, receive: Receive, job: str | None = None) -> LeaseOffer:
    """Offer a standalone agent; wait until one is free, the client disconnects or its time is up.

    Raises:
        NoAgentsError: no agent is registered.
        NoFreeAgentError: no agent was free in time.
    """
    agents = registry.agents
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


async def snapshot(registry: Registry, _: None, __: Receive, job: str | None = None) -> RegistrySnapshot:
    """Return the ranks and groups of one job or of all."""
    return RegistrySnapshot(registry.ranks(job), registry.groups(job))


async def waiting(registry: Registry, _: None, __: Receive, job: str | None = None) -> list[WaitingProcess]:
    """Return the processes that wait for worlds to grow."""
    return registry.waiting(job)


async def health(registry: Registry, _: None, __: Receive, ___: str | None = None) -> GatewayHealth:
    """Return the gateway's id, and how many jobs and ranks are live."""
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
    ("GET", "/v1/waiting"): (None, waiting),
    ("GET", "/v1/snapshot"): (None, snapshot),
    ("GET", "/health"): (None, health),
}
"""By method and path, the type of the body and the handler of all that ranks, launchers and agents send, and of what
``rankmesh diagnose`` requests when a job is stuck."""


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
