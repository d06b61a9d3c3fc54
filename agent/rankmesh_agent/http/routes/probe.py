"""Probes of an agent's host and of the network paths between agents, for ``rankmesh doctor``."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractContextManager
from typing import Annotated, Any

from anyio import CapacityLimiter, to_thread
from fastapi import APIRouter, Query, Request
from fastapi.responses import StreamingResponse

from rankmesh_agent.http.routes.dependencies import BEARER, ProberDep
from rankmesh_agent.http.routes.group_calls import CallSlots
from rankmesh_agent.http.routes.problems import problems
from rankmesh_agent.wire.errors import DistError
from rankmesh_agent.wire.schemas import MAX_PROBE_BYTES, HostReport, ProbeReply, ProbeRequest

router = APIRouter(prefix="/v1", tags=["probes"], dependencies=[BEARER], responses=problems(503))

MAX_CONCURRENT_PROBES = 8
"""Limit of concurrent probes of an agent, at either end: they compete with its rank."""
_PIECE = bytes(256 << 10)
_OCTETS: dict[int | str, dict[str, Any]] = {
    200: {"content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}}
}

HowMany = Annotated[int, Query(alias="bytes", ge=0, le=MAX_PROBE_BYTES, description="The number of bytes to send.")]


class ProbeBusyError(DistError, code="probe-busy", status=503):
    """There are MAX_CONCURRENT_PROBES probes at this agent already."""


def _hold_slot(app: Any, kind: str) -> AbstractContextManager[None]:
    slots: CallSlots = app.state.slots
    return slots.hold(kind, MAX_CONCURRENT_PROBES, ProbeBusyError)


@router.get("/host")
async def host(prober: ProberDep) -> HostReport:
    """Return the clock, versions and shared memory of the agent's host."""
    return await to_thread.run_sync(prober.host)


@router.get("/probe", response_class=StreamingResponse, responses={**_OCTETS, **problems(422)})
async def send_bytes(count: HowMany = 0) -> StreamingResponse:
    """Send zero bytes, for a client that measures the path to this agent."""

    async def pieces() -> AsyncIterator[bytes]:
        for begin in range(0, count, len(_PIECE)):
            yield _PIECE[: count - begin]

    return _SlottedResponse(pieces(), media_type="application/octet-stream", headers={"Content-Length": str(count)})


class _SlottedResponse(StreamingResponse):
    """A response that holds a slot while it is sent."""

    async def __call__(self, scope: Any, *arguments: Any) -> None:
        with _hold_slot(scope["app"], "answered probe"):
            await super().__call__(scope, *arguments)


@router.post("/probe", responses=problems(422, 502))
async def probe(body: ProbeRequest, request: Request, prober: ProberDep) -> ProbeReply:
    """Measure the path from here to another agent, one that the gateway lists, and report how far the probe came.

    The probe is HTTP over a TCP connection of its own: slower than the transports, but over the same network.
    """
    with _hold_slot(request.app, "probe"):
        return await to_thread.run_sync(prober.probe, body, limiter=CapacityLimiter(1))
