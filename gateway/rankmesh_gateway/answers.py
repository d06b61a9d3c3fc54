"""What ranks ask the gateway, as functions of the registry: the same answers with the web framework and without."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from http import HTTPStatus
from typing import Any

from rankmesh_agent.wire.errors import DistError
from rankmesh_agent.wire.guard import problem, problem_of
from rankmesh_agent.wire.schemas import LONG_POLL_SECONDS, GatewayHealth, JoinReply, JoinRequest, Problem
from rankmesh_agent.wire.version import __version__
from rankmesh_gateway.checks import GatewayClosingError, InvalidRequestError
from rankmesh_gateway.registry import Registry


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


def health(registry: Registry) -> GatewayHealth:
    """Say who this gateway is, and how many jobs and ranks are live."""
    jobs, ranks = registry.counts()
    return GatewayHealth("ok", "rankmesh-gateway", registry.id, __version__, jobs, ranks)


def refusal(error: DistError | InvalidRequestError) -> tuple[Problem, dict[str, str]]:
    """Return the problem document that a request is refused with, and the headers that go with it."""
    if isinstance(error, InvalidRequestError):
        return problem(HTTPStatus.UNPROCESSABLE_ENTITY, "invalid-request", str(error)), {}
    # Another request on the same connection would keep a gateway from ending.
    return problem_of(error), {"connection": "close"} if isinstance(error, GatewayClosingError) else {}


async def _wait(future: Future[JoinReply], receive: Callable[[], Awaitable[Any]], seconds: float) -> bool:
    """Wait until the future is done, the client is gone or the time is over; return whether the client is gone."""
    hang_up: asyncio.Future[Any] = asyncio.ensure_future(receive())
    complete: asyncio.Future[Any] = asyncio.wrap_future(future)
    try:
        await asyncio.wait({hang_up, complete}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        return hang_up.done()
    finally:
        hang_up.cancel()
