"""What the gateway knows of one rank."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from rankmesh_agent.wire.schemas import FAILED_SECONDS, SUSPECT_SECONDS, GroupInfo, Member, RankInfo, RankState
from rankmesh_gateway.state.rates import Rates
from rankmesh_gateway.state.validation import MAX_REASON

IN_TRANSIT_SECONDS = 0.25
"""A sign of life that comes so soon after word that its sender is gone was sent before."""


@dataclass
class RankRecord:
    """A rank of one epoch.

    Attributes:
        member: who holds the rank.
        seen: the clock at its last sign of life.
        joining: whether its world is still incomplete.
        ended: ``left`` or ``failed`` once it said so; silence alone does not end a rank.
        reason: why it ended or is lost, empty after an ordinary goodbye.
        lost_at: the clock when somebody else said that it is gone, None while nobody has, or when it has been heard
            again: it was only cut off.
        lost: the ranks that it says are gone.
        groups: its groups as last reported.
        reported_at: the clock when it reported them.
        rates: how much its groups do.
        broken_since: the clock when it first reported a group's failure, by group id.
        told: its state as the event log has it.
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
        """How the rank is at ``now``."""
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
        """Whether the rank is held by a process that, for all we know, runs."""
        return self.state(now) not in ("left", "failed")

    def heartbeat(self, groups: list[GroupInfo], now: float) -> None:
        """Take in a heartbeat. One that was overtaken by the goodbye changes nothing."""
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
        """Take in that somebody else saw it go; the first one counts, and so does its own goodbye.

        Returns:
            Whether that is news.
        """
        if self.ended is not None or self.joining or self.lost_at is not None:
            return False
        self.lost_at = now
        self.reason = cause[:MAX_REASON]
        return True

    def process_exited(self, reason: str, now: float) -> bool:
        """Take in how its process ended, after which it is not heard again; return whether that is news."""
        if self.ended is not None or self.joining:
            return False
        self.leave(reason, now)
        return True

    def leave(self, reason: str, now: float) -> None:
        """Take in the goodbye: ``left`` without a reason, ``failed`` with one. The first one counts."""
        if self.ended is not None:
            return
        self.last_seen = now
        self.lost_at = None
        self.reason = reason[:MAX_REASON]
        self.ended = "failed" if reason else "left"
        if not reason:
            self.groups = []

    def info(self, job: str, epoch: int, now: float) -> RankInfo:
        """The record as it is shown."""
        state = self.state(now)
        silence = max(0.0, now - self.last_seen)
        reason = self.reason
        if state == "failed" and not reason:
            reason = f"no heartbeat for {silence:.1f} s"
        return RankInfo(job, epoch, state, silence, reason, self.member)
