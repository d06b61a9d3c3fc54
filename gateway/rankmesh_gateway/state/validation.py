"""Validation of requests beyond the types of their fields, and limits of what a gateway keeps."""

from __future__ import annotations

from collections.abc import Mapping

from rankmesh_agent.wire.errors import DistNetworkError
from rankmesh_agent.wire.fields import MAX_ADDRESSES, MAX_NAME, MAX_WORLD_SIZE
from rankmesh_agent.wire.schemas import UNASSIGNED, AgentHeartbeat, Heartbeat, JoinRequest, LeaseRequest, Member

MAX_JOBS = 1024
"""Limit of the jobs that a gateway keeps."""
MAX_AGENTS = 4096
"""Limit of the standalone agents that a gateway keeps."""
MAX_LEASES = 16
"""Limit of the leases that one standalone agent reports."""
MAX_GROUPS = 1024
"""Limit of the groups that one rank reports."""
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
    """Raise InvalidRequestError unless the request has a job, and either a rank of its world or none."""
    _check_place(request.job, request.world_size, request.member, at_least=UNASSIGNED)


def check_heartbeat(beat: Heartbeat) -> None:
    """Raise InvalidRequestError unless the heartbeat's values are those of a rank that has joined."""
    _check_place(beat.job, beat.world_size, beat.member, at_least=0)
    if beat.epoch < 1:
        raise InvalidRequestError(
            f"epoch {beat.epoch}: epochs count from 1; send the epoch that the join was answered with"
        )
    if len(beat.groups) > MAX_GROUPS:
        raise InvalidRequestError(
            f"{beat.member.described()} reports {len(beat.groups)} groups, the gateway keeps {MAX_GROUPS} a rank; "
            "destroy groups that are no longer used"
        )
    _check_lost(beat)


def _check_lost(beat: Heartbeat) -> None:
    if len(beat.lost) > beat.world_size:
        raise InvalidRequestError(f"{len(beat.lost)} ranks are reported lost, in a world of {beat.world_size}")
    for lost in beat.lost:
        _check_rank(lost.rank, beat.world_size, at_least=0)


def check_agent(beat: AgentHeartbeat) -> None:
    """Raise InvalidRequestError unless the heartbeat's values are those of a standalone agent."""
    texts = {"id": beat.id, "name": beat.name, "host": beat.host, "host_id": beat.host_id}
    _check_given(id=beat.id, name=beat.name)
    _check_lengths(texts | {f"urls[{index}]": url for index, url in enumerate(beat.urls)})
    for what, count, most in (("URLs", len(beat.urls), MAX_ADDRESSES), ("leases", len(beat.leases), MAX_LEASES)):
        if count > most:
            raise InvalidRequestError(f"{count} {what} given, at most {most} are allowed")
    if not beat.urls:
        raise InvalidRequestError("urls is empty; no client could reach the agent")
    for index, lease in enumerate(beat.leases):
        name = f"leases[{index}]"
        _check_given(**{f"{name}.id": lease.id, f"{name}.job": lease.job})
        _check_lengths({f"{name}.id": lease.id, f"{name}.job": lease.job})
        if len(lease.holder) > MAX_REASON:
            raise InvalidRequestError(
                f"{name}.holder has {len(lease.holder)} characters, at most {MAX_REASON} are allowed"
            )
        _check_rank(lease.rank, lease.world_size, at_least=UNASSIGNED)


def check_lease(request: LeaseRequest) -> None:
    """Raise InvalidRequestError unless the request has a job, and either a rank of its world or none."""
    _check_given(job=request.job)
    _check_lengths({"job": request.job, "host_id": request.host_id})
    _check_rank(request.rank, request.world_size, at_least=UNASSIGNED)


def _check_place(job: str, world_size: int, member: Member, *, at_least: int) -> None:
    _check_given(**{"job": job, "member.instance": member.instance})
    texts = {"job": job, "member.instance": member.instance, "member.host": member.host}
    texts |= {"member.host_id": member.host_id, "member.http": member.http, "member.transport": member.transport}
    _check_lengths(texts | {f"member.addresses[{index}]": address for index, address in enumerate(member.addresses)})
    if len(member.addresses) > MAX_ADDRESSES:
        raise InvalidRequestError(f"{len(member.addresses)} addresses given, at most {MAX_ADDRESSES} are allowed")
    _check_rank(member.rank, world_size, at_least=at_least)


def _check_given(**texts: str) -> None:
    for what, text in texts.items():
        if not text.strip():
            raise InvalidRequestError(f"{what} is empty; give it a name")


def _check_lengths(texts: Mapping[str, str]) -> None:
    for what, text in texts.items():
        if len(text) > MAX_NAME:
            raise InvalidRequestError(f"{what} has {len(text)} characters, at most {MAX_NAME} are allowed")


def _check_rank(rank: int, world_size: int, *, at_least: int) -> None:
    if not 1 <= world_size <= MAX_WORLD_SIZE:
        raise InvalidRequestError(f"world size {world_size} is not between 1 and {MAX_WORLD_SIZE}; check WORLD_SIZE")
    if not at_least <= rank < world_size:
        raise InvalidRequestError(
            f"rank {rank} is not in a world of {world_size}: ranks go from 0 to {world_size - 1}; "
            "check RANK and WORLD_SIZE"
        )
