"""Validation of requests beyond the bounds of their fields, and limits of what a gateway keeps."""

from __future__ import annotations

from rankmesh_agent.wire.errors import DistError, DistNetworkError
from rankmesh_agent.wire.schemas import (
    NO_NODE,
    STARTING,
    UNASSIGNED,
    AgentHeartbeat,
    Heartbeat,
    JoinRequest,
    LauncherHeartbeat,
    LeaseRequest,
)

MAX_JOBS = 1024
"""Limit of the jobs that a gateway keeps."""
MAX_AGENTS = 4096
"""Limit of the standalone agents that a gateway keeps."""
MAX_GROUPS = 1024
"""Limit of the groups that one rank reports."""


class InvalidRequestError(DistError):
    """A request whose fields have the right types but invalid values."""

    code = "invalid-request"
    status = 422


class GatewayClosingError(DistNetworkError):
    """The gateway is about to end and accepts no more joins; the job's next one may be at the same address."""

    code = "gateway-closing"
    status = 503


class GatewayFullError(DistNetworkError):
    """The gateway has reached its limit of jobs or standalone agents, and all of them are live."""

    code = "gateway-full"
    status = 503


def closing_error() -> GatewayClosingError:
    """Return the error that rejects requests of a gateway that is about to end."""
    return GatewayClosingError("this gateway is about to end; ask again, the job's next one may be at the same address")


def check_join(request: JoinRequest) -> None:
    """Raise InvalidRequestError unless the request has a rank of its world or none, as its kind requires."""
    rank, growth = request.member.rank, request.growth
    _check_rank(rank, request.world_size)
    if request.awaits_growth and growth is not None:
        raise InvalidRequestError(
            "a rank of the world that grows does not await its growth; send awaits_growth or growth, not both"
        )
    if growth is not None and not 0 <= rank < growth.size <= request.world_size:
        raise InvalidRequestError(
            f"rank {rank} of epoch {growth.epoch} cannot grow a world of {growth.size} ranks to {request.world_size}: "
            "send a rank of that world, and no smaller size"
        )


def check_heartbeat(beat: Heartbeat) -> None:
    """Raise InvalidRequestError unless the heartbeat is that of a rank that has joined, whatever groups it has."""
    _check_rank(beat.member.rank, beat.world_size, at_least=0)
    if len(beat.lost) > beat.world_size:
        raise InvalidRequestError(f"{len(beat.lost)} ranks are reported lost, in a world of {beat.world_size}")
    for lost in beat.lost:
        _check_rank(lost.rank, beat.world_size, at_least=0)


def check_agent(beat: AgentHeartbeat) -> None:
    """Raise InvalidRequestError unless each lease has a rank of its world or none."""
    for lease in beat.leases:
        _check_rank(lease.rank, lease.world_size)


def check_launcher(beat: LauncherHeartbeat) -> None:
    """Raise InvalidRequestError unless the heartbeat's values are those of the launcher of a node."""
    if beat.min_nodes > beat.nodes:
        raise InvalidRequestError(f"{beat.min_nodes} to {beat.nodes} nodes are no nodes of a job; check --nnodes")
    if not (NO_NODE if beat.attempt == STARTING else 0) <= beat.node < beat.nodes:
        raise InvalidRequestError(f"node {beat.node} is not in a job of {beat.nodes}; check --nnodes and --node-rank")
    if beat.attempt_nodes > beat.nodes:
        raise InvalidRequestError(f"the attempt has {beat.attempt_nodes} nodes, of a job of {beat.nodes}")


def check_lease(request: LeaseRequest) -> None:
    """Raise InvalidRequestError unless the request has a rank of its world or none."""
    _check_rank(request.rank, request.world_size)


def _check_rank(rank: int, world_size: int, *, at_least: int = UNASSIGNED) -> None:
    if not at_least <= rank < world_size:
        raise InvalidRequestError(
            f"rank {rank} is not in a world of {world_size}: ranks go from 0 to {world_size - 1}; "
            "check RANK and WORLD_SIZE"
        )
