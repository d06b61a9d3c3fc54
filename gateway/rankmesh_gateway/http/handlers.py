"""What ranks ask the gateway, as functions of the registry: the same answers with the web framework and without."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from http import HTTPStatus
from typing import Any, TypeVar

from rankmesh_agent.http.middleware import problem, problem_of
from rankmesh_agent.wire.errors import DistError, NoFreeAgentError
from rankmesh_agent.wire.schemas import (
    LONG_POLL_SECONDS,
    GatewayHealth,
    JoinReply,
    JoinRequest,
    LeaseOffer,
    LeaseRequest,
    Problem,
)
from rankmesh_agent.wire.version import __version__
from rankmesh_gateway.state.registry import Registry
from rankmesh_gateway.state.validation import GatewayClosingError, InvalidRequestError

T = TypeVar("T")

_LOOK_SECONDS = 0.25
"""How often somebody who waits for an agent has the gateway look whether an offer to another has run out."""
_RETRY_SECONDS = 1
"""After how long to ask again for an agent."""


async def join(registry: Registry, body: JoinRequest, receive: Callable[[], Awaitable[Any]]) -> JoinReply:
    """Enter a rank, and wait until its world is complete, the client is gone or its time is over.

    Args:
        registry: where.
        body: who.
        receive: returns when the client has hung up, the body having been received.
    """
    future = registry.join(body)
    try:
        gone = await _wait(future, receive, min(LONG_POLL_SECONDS, max(0.0, body.wait)))
    finally:
        future.cancel()
    if gone:
        registry.withdraw(body)
    return registry.pending(body) if future.cancelled() else future.result()


async def lease(registry: Registry, body: LeaseRequest, receive: Callable[[], Awaitable[Any]]) -> LeaseOffer:
    """Offer a standalone agent; wait until one is free, the client is gone or its time is over.

    Args:
        registry: where.
        body: for what.
        receive: returns when the client has hung up, the body having been received.

    Raises:
        NoAgentsError: none is registered.
        NoFreeAgentError: none was free in time.
    """
    agents = registry.agents
    future = agents.ask(body)
    try:
        gone = await _wait(future, receive, min(LONG_POLL_SECONDS, max(0.0, body.wait)), agents.look)
    finally:
        future.cancel()
    if future.cancelled():
        raise agents.refuse(body)
    if gone:
        agents.take_back(future.result())
    return future.result()


def health(registry: Registry) -> GatewayHealth:
    """Say who this gateway is, and how many jobs and ranks are live."""
    jobs, ranks = registry.counts()
    return GatewayHealth("ok", "rankmesh-gateway", registry.id, __version__, jobs, ranks)


def refusal(error: DistError | InvalidRequestError) -> tuple[Problem, dict[str, str]]:
    """Return the problem document that a request is refused with, and the headers that go with it."""
    if isinstance(error, InvalidRequestError):
        return problem(HTTPStatus.UNPROCESSABLE_ENTITY, "invalid-request", str(error)), {}
    # Another request on the same connection would keep a gateway from ending.
    headers = {"connection": "close"} if isinstance(error, GatewayClosingError) else {}
    if isinstance(error, NoFreeAgentError):
        headers["retry-after"] = str(_RETRY_SECONDS)
    return problem_of(error), headers


async def _wait(
    future: Future[T], receive: Callable[[], Awaitable[Any]], seconds: float, look: Callable[[], None] | None = None
) -> bool:
    """Wait until the future is done, the client is gone or the time is over; return whether the client is gone.

    Args:
        future: what is waited for.
        receive: returns when the client has hung up.
        seconds: how long at most.
        look: called now and then: it may get the future done.
    """
    hang_up: asyncio.Future[Any] = asyncio.ensure_future(receive())
    complete: asyncio.Future[Any] = asyncio.wrap_future(future)
    loop = asyncio.get_running_loop()
    until = loop.time() + seconds
    try:
        while True:
            remaining = until - loop.time()
            slice_ = remaining if look is None else min(remaining, _LOOK_SECONDS)
            await asyncio.wait({hang_up, complete}, timeout=slice_, return_when=asyncio.FIRST_COMPLETED)
            if hang_up.done() or complete.done() or loop.time() >= until:
                return hang_up.done()
            if look is not None:
                look()
    finally:
        hang_up.cancel()
