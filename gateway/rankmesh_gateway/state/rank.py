"""State of one rank, as the gateway knows it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from rankmesh_agent.wire.schemas import FAILED_SECONDS, SUSPECT_SECONDS, GroupInfo, Member, RankInfo, RankState
from rankmesh_gateway.state.rates import Rates
from rankmesh_gateway.state.validation import MAX_REASON

IN_TRANSIT_SECONDS = 0.25
"""A heartbeat that arrives this soon after a report that its sender is lost was sent before the loss."""


@dataclass
class RankRecord:
    """A rank of one epoch.

    Attributes:
        member: the process that holds the rank.
        last_seen: the clock at its last heartbeat.
        joining: whether its world is incomplete.
        ended: ``left`` or ``failed`` once its process reported so; silence alone does not end a rank.
        reason: why the rank has ended or is lost; empty after an orderly leave.
        lost_at: the clock when a peer reported the rank lost; None without such a report, or after a later heartbeat:
            only a connection had broken.
        lost_peers: the ranks that it reports lost.
        groups: its groups, as of the last report.
        reported_at: the clock at that report.
        rates: throughput of its groups.
        failed_since: the clock at the first report of a group's failure, by group id.
        logged_state: its state in the event log.
    """

    member: Member
    last_seen: float
    joining: bool = True
    ended: Literal["left", "failed"] | None = None
    reason: str = ""
    lost_at: float | None = None
    lost_peers: frozenset[int] = frozenset()
    groups: list[GroupInfo] = field(default_factory=list)
    reported_at: float = 0.0
    rates: Rates = field(default_factory=Rates)
    failed_since: dict[str, float] = field(default_factory=dict)
    logged_state: RankState | None = None

    def state(self, now: float) -> RankState:
        """Return the rank's state at ``now``."""
        if self.ended is not None:
            return self.ended
        if self.joining:
            return "joining"
        if self.lost_at is not None:
            return "failed"
        silence = now - self.last_seen
        if silence >= FAILED_SECONDS:
            return "failed"
        return "suspect" if silence >= SUSPECT_SECONDS else "alive"

    def is_live(self, now: float) -> bool:
        """Return whether the rank is held by a process that has neither left nor failed."""
        return self.state(now) not in ("left", "failed")

    def heartbeat(self, groups: list[GroupInfo], now: float) -> None:
        """Record a heartbeat. One that arrives after the rank has left changes nothing."""
        if self.ended is not None:
            return
        if self.lost_at is not None and now - self.lost_at >= IN_TRANSIT_SECONDS:
            self.lost_at, self.reason = None, ""
        self.last_seen = now
        self.joining = False
        self.groups = groups
        self.reported_at = now
        self.rates.update(groups, now)
        self.failed_since = {group.id: self.failed_since.get(group.id, now) for group in groups if group.failure}

    def report_lost(self, cause: str, now: float) -> bool:
        """Record that a peer lost the rank. The first report counts, and none after the rank's own leave.

        Returns:
            Whether the rank has failed by this report.
        """
        if self.ended is not None or self.joining or self.lost_at is not None:
            return False
        self.lost_at = now
        self.reason = cause[:MAX_REASON]
        return True

    def process_exited(self, reason: str, now: float) -> bool:
        """Record how the rank's process exited; its later heartbeats are ignored. Returns whether the rank ended so."""
        if self.ended is not None or self.joining:
            return False
        self.leave(reason, now)
        return True

    def leave(self, reason: str, now: float) -> None:
        """Record that the rank leaves: ``left`` without a reason, ``failed`` with one. The first time counts."""
        if self.ended is not None:
            return
        self.last_seen = now
        self.lost_at = None
        self.reason = reason[:MAX_REASON]
        self.ended = "failed" if reason else "left"
        if not reason:
            self.groups = []

    def info(self, job: str, epoch: int, now: float) -> RankInfo:
        """Return the record as the HTTP interface shows it."""
        state = self.state(now)
        silence = max(0.0, now - self.last_seen)
        reason = self.reason
        if state == "failed" and not reason:
            reason = f"no heartbeat for {silence:.1f} s"
        return RankInfo(job, epoch, state, silence, reason, self.member)
