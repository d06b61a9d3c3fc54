"""Reports of a join that waits: every few seconds, which ranks, nodes or gateway are missing, and which are there."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from rankmesh_agent.net.deadline import Deadline
from rankmesh_agent.wire.ranges import ranges
from rankmesh_agent.wire.schemas import UNASSIGNED, Member

_log = logging.getLogger("rankmesh")

REPORT_SECONDS = 10.0
"""Interval of the reports."""
GATEWAY_SECONDS = 5.0
"""Seconds of failed attempts to reach the gateway before the first report of that."""
_MAX_HOSTS = 8
"""Hosts that a report names. Of a larger world the first hosts report, the others would repeat them."""


@dataclass(frozen=True)
class LocalRankInfo:
    """This process's place among those that a launcher started on the same node.

    Attributes:
        local_rank: its rank on the node, None without a launcher.
        local_size: ranks on each node, None if unknown.
        parent, ancestors: see JoinRequest.
    """

    local_rank: int | None = None
    local_size: int | None = None
    parent: str = ""
    ancestors: Sequence[int] = ()


NOT_LAUNCHED = LocalRankInfo()


class JoinReporter:
    """Logs what a join waits for, at one rank of a host.

    Args:
        job: the job's name.
        world_size: number of ranks in the job; None for a process that awaits the growth of the world.
        deadline: end of the join.
        launched: the process's place on its node.
    """

    def __init__(self, job: str, world_size: int | None, deadline: Deadline, launched: LocalRankInfo) -> None:
        self._job = job
        self._world_size = world_size
        self._deadline = deadline
        self._local_rank = launched.local_rank
        self._node_size = launched.local_size if (world_size or 0) % (launched.local_size or 1) == 0 else None
        self._next_of_gateway = Deadline(GATEWAY_SECONDS)
        self._next_of_ranks = Deadline(REPORT_SECONDS)

    def seconds_to_next(self) -> float:
        """Return the seconds until the next report of missing ranks."""
        return self._next_of_ranks.remaining()

    def gateway_missing(self, url: str | None, member: Member, failure: str) -> None:
        """Log, if it is time, that the gateway does not answer.

        Args:
            url: the gateway's URL, None if it is unknown.
            member: the joining rank.
            failure: why it does not answer.
        """
        if self._next_of_gateway.expired() and not self._local_rank:
            self._next_of_gateway = Deadline(REPORT_SECONDS)
            where = url or "an unknown address"
            _log.warning(
                "%s still waits for the gateway at %s: %s; %s", member.described(), where, failure, self._passed()
            )

    def ranks_missing(
        self, url: str, member: Member, members: Sequence[Member], joined: int = 0, missing: Sequence[int] = ()
    ) -> None:
        """Log, if it is time, which ranks have joined, and which are missing.

        Args:
            url: the gateway's URL.
            member: the joining rank.
            members: all that have joined, by rank, or the first ones.
            joined: how many have joined; 0 if ``members`` are all.
            missing: the missing ranks, or the first ones, where ``members`` are not all.
        """
        if not self._next_of_ranks.expired():
            return
        self.skip()
        if self._world_size is None:
            _log.warning(
                "%s waits for the ranks of job %r to call grow_group(), as do %d processes in all; %s; gateway %s",
                member.described(),
                self._job,
                len(members),
                self._passed(),
                url,
            )
            return
        hosts: dict[str, list[Member]] = {}
        for each in members:
            hosts.setdefault(each.host_id, []).append(each)
        reporters = [there[0].instance for there in hosts.values()]
        if member.instance in reporters[:_MAX_HOSTS]:
            if joined > len(members):
                awaited, here = f"{self._world_size - joined} of {self._world_size} ranks", f"{joined} are here"
                which = f", {_ranks(missing)} and perhaps others are missing" if missing else ""
            else:
                here = self._listed(hosts)
                awaited, which = self._awaited(
                    {each.rank for each in members}, self._world_size, self._world_size - len(members)
                )
            _log.warning(
                "waiting for %s: %s%s; %s; gateway %s, job %r",
                awaited,
                here,
                which,
                self._passed(),
                url,
                self._job,
            )

    def skip(self) -> None:
        """Begin the interval before the next report of missing ranks."""
        self._next_of_ranks = Deadline(REPORT_SECONDS)

    def _awaited(self, joined: AbstractSet[int], world_size: int, count: int) -> tuple[str, str]:
        """Return what is missing: how many nodes or ranks, and which."""
        if UNASSIGNED in joined:  # any other process may get any missing rank
            return f"{count} of {world_size} processes", ""
        missing = [rank for rank in range(world_size) if rank not in joined]
        which = f", {_ranks(missing)} {'is' if count == 1 else 'are'} missing"
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


def _ranks(numbers: Sequence[int]) -> str:
    return f"rank {numbers[0]}" if len(numbers) == 1 else f"ranks {_ranges(numbers)}"


def _ranges(numbers: Iterable[int]) -> str:
    """Return numbers as text: ``0-3, 7``; of many ranges the first."""
    named = ranges(numbers)
    return ", ".join(named[:_MAX_HOSTS]) + (", …" if len(named) > _MAX_HOSTS else "")
