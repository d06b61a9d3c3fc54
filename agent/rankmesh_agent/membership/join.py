"""Join of a rank at the gateway, which is complete once all ranks have come."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from rankmesh_agent.config.settings import Settings
from rankmesh_agent.membership.gateway_client import (
    ANY_EPOCH,
    RESPONSE_SECONDS,
    RETRY_SECONDS,
    GatewayClient,
    UnavailableError,
)
from rankmesh_agent.membership.missing import MissingRanks
from rankmesh_agent.net.deadline import Deadline
from rankmesh_agent.wire.errors import DistNetworkError
from rankmesh_agent.wire.schemas import LISTED_MEMBERS, LONG_POLL_SECONDS, JoinReply, JoinRequest, Leave, Member

_MAX_RETRY_SECONDS = 5.0
_MIN_POLL_SECONDS = 0.05
JOINS_A_SECOND = 2000
"""First requests of a large world in a second."""
_CHECK_SECONDS = 0.5
_MAX_NAMED = 4
_COMMON_SETTINGS = {
    "RANKMESH_EAGER_BYTES": "eager_bytes",
    "RANKMESH_FULL_MESH": "full_mesh",
    "RANKMESH_TRANSPORT": "transport",
}


def join(
    gateway: GatewayClient,
    request: JoinRequest,
    deadline: Deadline,
    settings: Settings,
    check: Callable[[], None] | None = None,
) -> JoinReply:
    """Join a job and wait until all ranks have joined; log from time to time what is missing.

    Args:
        gateway: client of the gateway, which is located again after each failure: it may have moved.
        request: of the rank; its ``wait`` does not matter.
        deadline: end of the attempts, also of those to reach the gateway.
        settings: of the job, with this process's place on its node.
        check: called between requests, every _CHECK_SECONDS in worlds of up to LISTED_MEMBERS ranks, less often in
            larger ones; raises if the join has no point any more.

    Raises:
        GatewayUnreachableError: no gateway answers before the deadline.
        JoinTimeoutError: ranks are missing at the deadline; names them.
        RankTakenError, WorldSizeMismatchError: the gateway refuses.
    """
    size = None if request.awaits_growth else request.world_size
    missing = MissingRanks(settings, size, deadline, 0 if request.growth is None else request.growth.size)
    try:
        return _join_until(gateway, request, deadline, missing, check)
    except BaseException as error:
        if missing.fullest is not None:  # frees the rank for the next attempt
            member, reason = request.member, f"it gave up joining: {type(error).__name__}"
            gateway.leave(Leave(request.job, ANY_EPOCH, member.rank, member.instance, reason))
        raise


def _join_until(
    gateway: GatewayClient,
    request: JoinRequest,
    deadline: Deadline,
    missing: MissingRanks,
    check: Callable[[], None] | None,
) -> JoinReply:
    failure = "its address is not known yet"
    url: str | None = None
    scale = max(1.0, request.world_size / LISTED_MEMBERS)  # the gateway serves all ranks: each may ask less often
    large = scale > 1
    retry = RETRY_SECONDS
    interval = _CHECK_SECONDS * scale if check is not None else math.inf
    if large:
        time.sleep(min(random.random() * request.world_size / JOINS_A_SECOND, deadline.remaining() / 2))
    while not deadline.expired():
        if check is not None:
            check()
        url = url or gateway.find()
        if url is not None:
            gateway.url = url
            # A rank that gives up earlier, perhaps with the gateway in its process, has joined all the same: the first
            # request does not wait, and the last ones follow each other closely. Of many ranks, each sends as few
            # requests as it can.
            next_report = LONG_POLL_SECONDS * random.uniform(0.75, 1.0) if large else missing.seconds_to_next()
            most = min(LONG_POLL_SECONDS, deadline.remaining() / 2, next_report, interval)
            wait = max(_MIN_POLL_SECONDS, most) if missing.fullest is not None or large else 0.0
            limit = min(wait, deadline.remaining()) + RESPONSE_SECONDS + request.world_size / JOINS_A_SECOND
            try:
                reply = gateway.read(JoinReply, "join", replace(request, wait=wait), limit)
            except UnavailableError as error:
                failure = str(error)
            else:
                if reply.complete:
                    return reply
                retry = RETRY_SECONDS
                missing.ranks_missing(url, request.member, reply)
                time.sleep(min(_MIN_POLL_SECONDS, deadline.remaining()) if wait else 0)
                continue
        missing.gateway_missing(url, request.member, failure)
        url = None
        time.sleep(min(retry * random.uniform(0.5, 1.0) if large else retry, deadline.remaining()))
        retry = min(2 * retry, RETRY_SECONDS * scale, _MAX_RETRY_SECONDS)
    raise missing.timeout_error(gateway.url, request.member, failure)


def all_members(reply: JoinReply) -> dict[int, Member]:
    """Return all ranks of a complete world, by rank.

    Those that the reply does not list have no addresses and no instance, and their ``host_id`` is a number of the
    host, unless it has a rank that the reply lists.
    """
    listed = {member.rank: member for member in reply.members}
    processes = list(reply.hosts.processes()) if reply.hosts is not None else []
    ids = {processes[rank].number: member.host_id for rank, member in listed.items()}
    return {
        rank: listed.get(rank) or Member(rank, "", host, ids.get(number, f"#{number}"), pid, [], "")
        for rank, (host, number, pid) in enumerate(processes)
    }


def check_settings(members: Sequence[Member]) -> None:
    """Check that the settings that must be the same on all ranks are the same."""
    for variable, name in _COMMON_SETTINGS.items():
        found: dict[object, list[Member]] = {}
        for member in members:
            if (value := getattr(member, name)) not in (-1, "", "auto"):  # auto is compatible with both transports
                found.setdefault(value, []).append(member)
        if len(found) > 1:
            values = "; ".join(f"{value} on {_described(having)}" for value, having in found.items())
            raise DistNetworkError(
                f"{variable} differs between ranks: {values}. Set it to the same value on every rank, or unset it.",
                ranks=[member.rank for member in min(found.values(), key=len)],
            )


def _described(members: Sequence[Member]) -> str:
    """Return descriptions of the members, at most _MAX_NAMED of them."""
    more = len(members) - _MAX_NAMED
    named = ", ".join(member.described() for member in members[:_MAX_NAMED])
    return f"{named} and {more} more" if more > 0 else named
