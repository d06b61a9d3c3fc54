"""Validation of requests beyond the types of their fields, and limits of what a gateway keeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from rankmesh_agent.wire.errors import DistNetworkError
from rankmesh_agent.wire.fields import MAX_ADDRESSES, MAX_NAME, MAX_WORLD_SIZE
from rankmesh_agent.wire.schemas import (
    NO_NODE,
    STARTING,
    UNASSIGNED,
    AgentHeartbeat,
    EpochRequest,
    Heartbeat,
    JoinRequest,
    LauncherHeartbeat,
    LeaseRequest,
    Member,
)

T = TypeVar("T")

MAX_JOBS = 1024
"""Limit of the jobs that a gateway keeps."""
MAX_AGENTS = 4096
"""Limit of the standalone agents that a gateway keeps."""
MAX_LEASES = 16
"""Limit of the leases that one standalone agent reports."""
MAX_GROUPS = 1024
"""Limit of the groups that one rank reports."""
_MAX_EPOCH = 1 << 31
MAX_REASON = 4096
"""Limit of the characters of a reason, and of a lease's holder."""


class InvalidRequestError(ValueError):
    """A request whose fields have the right types but invalid values. HTTP status 422."""


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
    """Raise InvalidRequestError unless the request has a job, and a rank of its world or none, as its kind requires."""
    rank, growth = request.member.rank, request.growth
    _check_place(request.job, request.world_size, request.member, at_least=UNASSIGNED)
    _check_lengths({"parent": request.parent})
    _check_count("ancestors", request.ancestors, MAX_ADDRESSES)
    if request.awaits_growth and growth is not None:
        raise InvalidRequestError(
            "a rank of the world that grows does not await its growth; send awaits_growth or growth, not both"
        )
    if growth is not None:
        _check_lengths({"growth.group": growth.group})
    if growth is not None and not (0 < growth.epoch < _MAX_EPOCH and 0 <= rank < growth.size <= request.world_size):
        raise InvalidRequestError(
            f"rank {rank} of epoch {growth.epoch} cannot grow a world of {growth.size} ranks to {request.world_size}: "
            "send a rank of that world, an epoch from 1, and no smaller size"
        )


def check_heartbeat(beat: Heartbeat) -> None:
    """Raise InvalidRequestError unless the heartbeat is that of a rank that has joined, whatever groups it has."""
    _check_place(beat.job, beat.world_size, beat.member, at_least=0)
    _check_epoch(beat.epoch)
    if len(beat.lost) > beat.world_size:
        raise InvalidRequestError(f"{len(beat.lost)} ranks are reported lost, in a world of {beat.world_size}")
    for lost in beat.lost:
        _check_rank(lost.rank, beat.world_size, at_least=0)


def check_epoch(request: EpochRequest) -> None:
    """Raise InvalidRequestError unless the request is about an epoch of a job."""
    _check_given({"job": request.job})
    _check_epoch(request.epoch)


def check_agent(beat: AgentHeartbeat) -> None:
    """Raise InvalidRequestError unless the heartbeat's values are those of a standalone agent."""
    _check_given({"id": beat.id, "name": beat.name})
    _check_lengths({"host": beat.host, "host_id": beat.host_id} | _items("urls", beat.urls))
    _check_count("URLs", beat.urls, MAX_ADDRESSES)
    _check_count("leases", beat.leases, MAX_LEASES)
    if not beat.urls:
        raise InvalidRequestError("urls is empty; no client could reach the agent")
    for name, lease in _items("leases", beat.leases).items():
        _check_given({f"{name}.id": lease.id, f"{name}.job": lease.job})
        _check_lengths({f"{name}.holder": lease.holder}, MAX_REASON)
        _check_rank(lease.rank, lease.world_size, at_least=UNASSIGNED)


def check_launcher(beat: LauncherHeartbeat) -> None:
    """Raise InvalidRequestError unless the heartbeat's values are those of the launcher of a node."""
    _check_given({"job": beat.job, "instance": beat.instance})
    _check_lengths({"host": beat.host})
    if not 0 <= beat.min_nodes <= beat.nodes <= MAX_WORLD_SIZE or not beat.nodes:
        raise InvalidRequestError(f"{beat.min_nodes} to {beat.nodes} nodes are no nodes of a job; check --nnodes")
    if not (NO_NODE if beat.attempt == STARTING else 0) <= beat.node < beat.nodes:
        raise InvalidRequestError(f"node {beat.node} is not in a job of {beat.nodes}; check --nnodes and --node-rank")
    if beat.attempt < STARTING:
        raise InvalidRequestError(f"attempt {beat.attempt}: attempts count from 0, and {STARTING} is before the first")
    if not (0 <= beat.attempt_nodes <= beat.nodes and beat.restarts >= 0 and beat.nproc >= 0 and beat.last_call >= 0):
        raise InvalidRequestError("attempt_nodes, restarts, nproc and last_call are not negative")


def check_lease(request: LeaseRequest) -> None:
    """Raise InvalidRequestError unless the request has a job, and either a rank of its world or none."""
    _check_given({"job": request.job})
    _check_lengths({"host_id": request.host_id})
    _check_rank(request.rank, request.world_size, at_least=UNASSIGNED)


def _check_epoch(epoch: int) -> None:
    if epoch < 1:
        raise InvalidRequestError(f"epoch {epoch}: epochs count from 1; send the epoch that the join was answered with")


def _check_place(job: str, world_size: int, member: Member, *, at_least: int) -> None:
    _check_given({"job": job, "member.instance": member.instance})
    _check_lengths({f"member.{name}": getattr(member, name) for name in ("host", "host_id", "http", "transport")})
    _check_lengths(_items("member.addresses", member.addresses))
    _check_count("addresses", member.addresses, MAX_ADDRESSES)
    _check_rank(member.rank, world_size, at_least=at_least)


def _items(name: str, values: Sequence[T]) -> dict[str, T]:
    """Return the values under the names that errors give them."""
    return {f"{name}[{index}]": value for index, value in enumerate(values)}


def _check_given(texts: Mapping[str, str]) -> None:
    for what, text in texts.items():
        if not text.strip():
            raise InvalidRequestError(f"{what} is empty; give it a name")
    _check_lengths(texts)


def _check_lengths(texts: Mapping[str, str], most: int = MAX_NAME) -> None:
    for what, text in texts.items():
        if len(text) > most:
            raise InvalidRequestError(f"{what} has {len(text)} characters, at most {most} are allowed")


def _check_count(what: str, values: Sequence[object], most: int) -> None:
    if len(values) > most:
        raise InvalidRequestError(f"{len(values)} {what} given, at most {most} are allowed")


def _check_rank(rank: int, world_size: int, *, at_least: int) -> None:
    if not 1 <= world_size <= MAX_WORLD_SIZE:
        raise InvalidRequestError(f"world size {world_size} is not between 1 and {MAX_WORLD_SIZE}; check WORLD_SIZE")
    if not at_least <= rank < world_size:
        raise InvalidRequestError(
            f"rank {rank} is not in a world of {world_size}: ranks go from 0 to {world_size - 1}; "
            "check RANK and WORLD_SIZE"
        )
