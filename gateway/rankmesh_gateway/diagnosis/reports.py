"""Report on a rank: what the gateway, its agent and this host's kernel know of it."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

from rankmesh_agent.wire.schemas import RankInfo
from rankmesh_agent.wire.snapshot import ProcessView
from rankmesh_gateway.diagnosis.frames import SourceLocation

Snapshot = dict[str, Any]
"""The JSON of wire.snapshot.RankSnapshot."""
DUMPED = "dumped"
NO_DUMP = "no-dump"
"""States of ranks whose job is over: whether there is a dump."""


@dataclass
class RankReport:
    """A rank, as the gateway, its agent and this host's kernel report it.

    Attributes:
        job, epoch, rank, host, pid, url: the rank.
        state, reason, heartbeat_age: see RankInfo; or ``state`` is DUMPED or NO_DUMP.
        host_id: id of its host.
        local: whether it is on this host.
        observed: see Member.
        snapshot: of the agent, None if it does not answer.
        error: the reason why it does not.
        asked, answered: when it was, in seconds since 1970.
        outside: its process as this host, its observer, or a rank of its job on its host, sees it.
        place: where its call in flight was made, if a dump has no stacks.
        last: its last operation, if a dump has neither stacks nor calls in flight.
        failed_ranks: see RankInfo.
    """

    job: str
    epoch: int
    rank: int
    host: str
    pid: int
    url: str
    state: str
    reason: str = ""
    heartbeat_age: float = 0.0
    host_id: str = ""
    local: bool = False
    observed: bool = False
    snapshot: Snapshot | None = None
    error: str = ""
    asked: float = 0.0
    answered: float = 0.0
    outside: ProcessView = field(default_factory=ProcessView)
    place: SourceLocation | None = None
    last: str = ""
    failed_ranks: Collection[int] = ()

    @property
    def name(self) -> str:
        """The rank as text."""
        return f"rank {self.rank} ({self.host}, pid {self.pid})"


def newest_ranks(listed: Iterable[RankInfo], here: str = "", ranks: Collection[int] = ()) -> list[RankReport]:
    """Return a report, without a snapshot, on the ranks of each job's newest epoch that have not left."""
    infos = list(listed)
    newest: dict[str, int] = {}
    for each in infos:
        newest[each.job] = max(each.epoch, newest.get(each.job, 0))
    found = []
    for each in infos:
        member = each.member
        if each.epoch == newest[each.job] and each.state != "left" and (not ranks or member.rank in ranks):
            place = each.job, each.epoch, member.rank, member.host, member.pid, member.http
            health = each.state, each.reason, each.heartbeat_age
            local = member.host_id == here
            found.append(
                RankReport(*place, *health, member.host_id, local, member.observed, failed_ranks=each.failed_ranks)
            )
    return found
