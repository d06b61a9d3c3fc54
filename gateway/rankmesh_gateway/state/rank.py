"""State of one rank, as the gateway knows it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from rankmesh_agent.wire.schemas import NO_HEARTBEAT, SUSPECT_SECONDS, GroupInfo, Heartbeat, Member, RankInfo, RankState
from rankmesh_gateway.state.rates import Rates
from rankmesh_gateway.state.validation import MAX_REASON

IN_TRANSIT_SECONDS = 0.25
"""A heartbeat that arrives this soon after a report that its sender is lost was sent before the loss."""


@dataclass
class RankRecord:
    """A rank of one epoch. A failure is final: later heartbeats change nothing.

    Attributes:
        member: the process that holds the rank.
        last_seen: the clock at its last heartbeat.
        joining: whether its world is incomplete.
        ended: ``left`` or ``failed`` once its process, its launcher, a peer or its silence says so.
        reason: why the rank has failed; empty after an orderly leave, and if its silence is the reason.
        exited: whether its own process or its launcher gave the reason; until then a better one replaces it.
        failed_ranks: the other ranks whose failure is the cause of its own, as far as it knows.
        lost_peers: the ranks that it reports lost.
        watches_peers: whether it reports each rank whose connection breaks.
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
    exited: bool = False
    failed_ranks: list[int] = field(default_factory=list)
    lost_peers: frozenset[int] = frozenset()
    watches_peers: bool = False
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
        return "suspect" if self.silence(now) >= SUSPECT_SECONDS else "alive"

    def silence(self, now: float) -> float:
        """Return the seconds since the last heartbeat."""
        return max(0.0, now - self.last_seen)

    def is_live(self, now: float) -> bool:
        """Return whether the rank is held by a process that has neither left nor failed."""
        return self.state(now) not in ("left", "failed")

    def heartbeat(self, beat: Heartbeat, now: float) -> None:
        """Record a heartbeat of a rank that has neither left nor failed."""
        self.last_seen = now
        self.joining = False
        self.groups = beat.groups
        self.watches_peers = beat.watches_peers
        self.reported_at = now
        self.rates.update(beat.groups, now)
        self.failed_since = {each.id: self.failed_since.get(each.id, now) for each in beat.groups if each.failure}

    def refuse_heartbeat(self, now: float) -> None:
        """Record that a heartbeat came after the rank's failure by silence."""
        if self.ended == "failed" and not self.reason:
            self.reason = f"{self._silent(now)}; the failure is final for its epoch, and later heartbeats are ignored"

    def fail(self, reason: str = "") -> bool:
        """Record a failure that the rank itself has not reported; the first one counts, and none after its leave.

        Args:
            reason: the reason; empty if that is the rank's silence.

        Returns:
            Whether the rank has failed by this.
        """
        if self.ended is not None or self.joining:
            return False
        self.ended = "failed"
        self.reason = reason[:MAX_REASON]
        return True

    def process_exited(self, reason: str, now: float) -> bool:
        """Record how the rank's process exited. Returns whether that is news."""
        if self.exited or self.joining:
            return False
        self.leave(reason, now)
        return True

    def leave(self, reason: str, now: float, failed_ranks: Sequence[int] = ()) -> None:
        """Record that the rank leaves: ``left`` without a reason, ``failed`` with one. The first time counts."""
        if self.exited:
            return
        self.exited = True
        self.last_seen = now
        self.reason = reason[:MAX_REASON]
        self.ended = "failed" if reason else "left"
        self.failed_ranks = list(failed_ranks)
        if not reason:
            self.groups = []

    def info(self, job: str, epoch: int, now: float) -> RankInfo:
        """Return the record as the HTTP interface shows it."""
        state = self.state(now)
        reason = self.reason or (self._silent(now) if state == "failed" else "")
        return RankInfo(job, epoch, state, self.silence(now), reason, self.member, self.failed_ranks)

    def _silent(self, now: float) -> str:
        return f"{NO_HEARTBEAT} for {self.silence(now):.1f} s"
