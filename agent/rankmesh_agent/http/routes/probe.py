"""What an agent's host has, and the ways between agents: what ``rankmesh doctor`` asks for."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from typing import Annotated, Any

from anyio import CapacityLimiter, to_thread
from fastapi import APIRouter, Query
from fastapi.responses import StreamingResponse

from rankmesh_agent.http.routes.dependencies import BEARER, ProberDep
from rankmesh_agent.http.routes.problems import problems
from rankmesh_agent.wire.errors import DistError
from rankmesh_agent.wire.schemas import MAX_PROBE_BYTES, HostReport, ProbeReply, ProbeRequest

router = APIRouter(prefix="/v1", tags=["probes"], dependencies=[BEARER], responses=problems(401, 403, 413, 421))

MAX_CONCURRENT_PROBES = 8
"""How many probes an agent takes part in at a time, at either end: a rank has something else to do."""
_PIECE = bytes(256 << 10)
_OCTETS: dict[int | str, dict[str, Any]] = {
    200: {"content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}}
}

HowMany = Annotated[int, Query(alias="bytes", ge=0, le=MAX_PROBE_BYTES, description="How many bytes to send.")]


class ProbeBusyError(DistError):
    """As many probes are under way as there may be."""

    code = "probe-busy"
    status = 503


class _ProbeSlots:
    """So many probes may be under way; the next one is told to come again."""

    def __init__(self) -> None:
        self._free = threading.BoundedSemaphore(MAX_CONCURRENT_PROBES)

    def acquire(self) -> None:
        if not self._free.acquire(blocking=False):
            raise ProbeBusyError(f"{MAX_CONCURRENT_PROBES} probes are under way at this agent; ask again in a moment")

    def release(self) -> None:
        self._free.release()


_asked, _sent = _ProbeSlots(), _ProbeSlots()


@router.get("/host")
async def host(prober: ProberDep) -> HostReport:
    """Say what the agent's host has: its clock, versions, and room for shared memory."""
    return await to_thread.run_sync(prober.host)


@router.get("/probe", response_class=StreamingResponse, responses={**_OCTETS, **problems(422, 503)})
async def send_bytes(count: HowMany = 0) -> StreamingResponse:
    """Send so many zero bytes, for whoever measures the way to here."""

    async def pieces() -> AsyncIterator[bytes]:
        for begin in range(0, count, len(_PIECE)):
            yield _PIECE[: count - begin]

    return _SlottedResponse(pieces(), media_type="application/octet-stream", headers={"Content-Length": str(count)})


class _SlottedResponse(StreamingResponse):
    """An answer that has a place while it lasts."""

    async def __call__(self, *arguments: Any) -> None:
        _sent.acquire()
        try:
            await super().__call__(*arguments)
        finally:
            _sent.release()


@router.post("/probe", responses=problems(400, 422, 502, 503))
async def probe(body: ProbeRequest, prober: ProberDep) -> ProbeReply:
    """Measure the way from here to another agent, one that the gateway lists, and say how far it came.

    That is HTTP over a TCP connection of its own: slower than what carries collectives, but over the same network.
    """
    _asked.acquire()
    try:
        return await to_thread.run_sync(prober.probe, body, limiter=CapacityLimiter(1))
    finally:
        _asked.release()
