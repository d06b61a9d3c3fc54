"""Ranks, nodes or gateway that a join waits for: in a line every few seconds, and in the error when its time is up."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from rankmesh_agent.config.settings import Settings
from rankmesh_agent.net.deadline import Deadline
from rankmesh_agent.wire.errors import GatewayUnreachableError, JoinTimeoutError
from rankmesh_agent.wire.ranges import named_ranks, ranges
from rankmesh_agent.wire.schemas import LISTED_MEMBERS, UNASSIGNED, JoinReply, Member

_log = logging.getLogger("rankmesh")

REPORT_SECONDS = 10.0
GATEWAY_SECONDS = 5.0
"""Seconds of failed attempts to reach the gateway before the first report of that."""
_MAX_HOSTS = 8
"""Hosts that a report names. Of a larger world the first hosts report, the others would repeat them."""


class MissingRanks:
    """What a join waits for, as text. One rank of a host logs it.

    Args:
        settings: of the job, with this process's place on its node.
        world_size: number of ranks in the job; None for a process that awaits the growth of the world.
        growing: number of ranks of the world that grows to ``world_size``, which must all come themselves; 0 otherwise.

    Attributes:
        fullest: the gateway's reply with the most ranks, None before the first: those whose time is up leave again.
    """

    def __init__(self, settings: Settings, world_size: int | None, deadline: Deadline, growing: int = 0) -> None:
        self._job = settings.job
        self._world_size = world_size
        self._growing = growing
        self._deadline = deadline
        self.fullest: JoinReply | None = None
        self._local_rank = settings.local_rank
        self._node_size = settings.local_size if (world_size or 0) % (settings.local_size or 1) == 0 else None
        self._next_of_gateway = Deadline(GATEWAY_SECONDS)
        self._next_of_ranks = Deadline(REPORT_SECONDS)

    def timeout_error(self, url: str, member: Member, failure: str) -> JoinTimeoutError | GatewayUnreachableError:
        """Return the error of a join whose time is up, or whose gateway does not answer because of a failure."""
        seconds, reply = self._deadline.seconds, self.fullest
        name = member.described() if member.rank == UNASSIGNED else f"rank {member.rank}"
        if reply is None:
            return GatewayUnreachableError(
                f"{name} could not reach the gateway at {url or 'an unknown address'} within {seconds:.0f} s: {failure}"
                ". The gateway runs in rank 0, or in the first process to come where ranks are left out, unless a "
                "launcher hosts it: is that running, and are MASTER_ADDR and MASTER_PORT (or the init_method) the same "
                "on every rank?",
                ranks=[] if member.rank == UNASSIGNED else [member.rank],
                address=url or None,
            )
        if self._world_size is None:
            return JoinTimeoutError(
                f"{name} waited {seconds:.1f} s for the ranks of job {self._job!r} to call grow_group(); is the job at "
                f"the gateway at {url}, and does its program grow its world?"
            )
        missing, count = _missing(reply, self._world_size)
        absent = [rank for rank in missing if rank < self._growing < self._world_size]
        if absent:  # no waiting process can take their places
            missing, awaited = absent, f"{named_ranks(absent)}, which have not called grow_group(),"
        elif any(each.rank == UNASSIGNED for each in reply.members):  # it may get any of the missing ranks
            missing, awaited = [], f"{max(1, count)} more process(es)"
        else:
            more = f" and {count - len(missing)} more" if count > len(missing) else ""
            awaited = f"{named_ranks(missing)}{more}"
        here = f"{reply.joined} have joined"
        if self._world_size <= LISTED_MEMBERS:
            here = f"joined: {', '.join(each.described() for each in reply.members)}"
        return JoinTimeoutError(
            f"{name} waited {seconds:.1f} s for {awaited} of job {self._job!r} to join (world size "
            f"{self._world_size}); {here}",
            ranks=missing,
        )

    def seconds_to_next(self) -> float:
        """Return the seconds until the next report of missing ranks."""
        return self._next_of_ranks.remaining()

    def gateway_missing(self, url: str | None, member: Member, failure: str) -> None:
        """Log, if it is time, that the gateway does not answer; see ``timeout_error``."""
        if self._next_of_gateway.expired() and not self._local_rank:
            self._next_of_gateway = Deadline(REPORT_SECONDS)
            where = url or "an unknown address"
            _log.warning(
                "%s still waits for the gateway at %s: %s; %s", member.described(), where, failure, self._passed()
            )

    def ranks_missing(self, url: str, member: Member, reply: JoinReply) -> None:
        """Record the gateway's reply to a joining rank; log, if it is time, which ranks are there or missing."""
        if self.fullest is None or reply.joined >= self.fullest.joined:
            self.fullest = reply
        if not self._next_of_ranks.expired():
            return
        self.skip()
        members, passed = reply.members, self._passed()
        if self._world_size is None:
            _log.warning(
                "%s waits for the ranks of job %r to call grow_group(), as do %d processes in all; %s; gateway %s",
                member.described(),
                self._job,
                len(members),
                passed,
                url,
            )
            return
        hosts: dict[str, list[Member]] = {}
        for each in members:
            hosts.setdefault(each.host_id, []).append(each)
        if member.instance not in [there[0].instance for there in hosts.values()][:_MAX_HOSTS]:
            return
        here = f"{reply.joined} are here" if reply.joined > len(members) else self._listed(hosts)
        awaited, which = self._awaited(reply, self._world_size)
        _log.warning("waiting for %s: %s%s; %s; gateway %s, job %r", awaited, here, which, passed, url, self._job)

    def skip(self) -> None:
        """Begin the interval before the next report of missing ranks."""
        self._next_of_ranks = Deadline(REPORT_SECONDS)

    def _awaited(self, reply: JoinReply, world_size: int) -> tuple[str, str]:
        """Return what is missing: how many nodes or ranks, and which."""
        missing, count = _missing(reply, world_size)
        if any(each.rank == UNASSIGNED for each in reply.members):  # any other process may get any missing rank
            return f"{count} of {world_size} processes", ""
        others = " and perhaps others" if count > len(missing) else ""
        which = f", {_ranks(missing)}{others} {'is' if count == 1 else 'are'} missing" if missing else ""
        size = self._node_size or 1
        nodes = sorted({rank // size for rank in missing})
        if self._node_size and len(nodes) * size == count and world_size > size:
            named = f"node {nodes[0]}" if len(nodes) == 1 else f"nodes {_ranges(nodes)}"
            return f"{len(nodes)} of {world_size // size} nodes", f"{which} ({named})"
        return f"{count} of {world_size} ranks", which

    def _listed(self, hosts: dict[str, list[Member]]) -> str:
        """Return the hosts and their ranks that have joined."""
        named = [self._describe(members) for members in list(hosts.values())[:_MAX_HOSTS]]
        if len(hosts) > _MAX_HOSTS:
            named.append(f"{len(hosts) - _MAX_HOSTS} more hosts")
        return f"{', '.join(named)} {'is' if len(hosts) == 1 else 'are'} here"

    def _describe(self, members: Sequence[Member]) -> str:
        ranks, size = [each.rank for each in members], self._node_size
        if UNASSIGNED in ranks:
            return f"{members[0].host} ({len(ranks)} process{'es' if len(ranks) > 1 else ''})"
        nodes = {rank // size for rank in ranks} if size else set()
        where = f"node {nodes.pop()} ({members[0].host}, " if len(nodes) == 1 else f"{members[0].host} ("
        return f"{where}{_ranks(ranks)})"

    def _passed(self) -> str:
        seconds = self._deadline.seconds
        return f"{min(self._deadline.elapsed(), seconds):.0f} s of {seconds:.0f} s have passed"


def _missing(reply: JoinReply, world_size: int) -> tuple[list[int], int]:
    """Return the missing ranks, of a large world the first ones, and the number of all."""
    joined = {each.rank for each in reply.members}
    missing = reply.missing
    if world_size <= LISTED_MEMBERS:
        missing = [rank for rank in range(world_size) if rank not in joined]
    return missing, world_size - max(reply.joined, len(reply.members))


def _ranks(numbers: Sequence[int]) -> str:
    return f"rank {numbers[0]}" if len(numbers) == 1 else f"ranks {_ranges(numbers)}"


def _ranges(numbers: Sequence[int]) -> str:
    """Return numbers as text: ``0-3, 7``; of many ranges the first."""
    named = ranges(numbers)
    return ", ".join(named[:_MAX_HOSTS]) + (", …" if len(named) > _MAX_HOSTS else "")
