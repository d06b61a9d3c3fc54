"""State of one rank, as the gateway knows it."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Literal

from rankmesh_agent.wire.fields import MAX_REASON
from rankmesh_agent.wire.schemas import (
    HEARTBEAT_SECONDS,
    NO_HEARTBEAT,
    GroupInfo,
    Heartbeat,
    JoinReply,
    Member,
    RankInfo,
    RankState,
    ResourceUsage,
    failed_seconds,
    suspect_seconds,
)
from rankmesh_gateway.state.rates import Rates
from rankmesh_gateway.stragglers.scores import HeartbeatSample

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
        groups: its groups by id, as of the last report, without their ranks: see GroupReports.
        number: the number of that report.
        interval: seconds between its heartbeats, as far as it may know.
        told_interval: the seconds that the last reply named.
        reported_at: the clock at that report.
        rates: throughput of its groups.
        usage: see Heartbeat.
        failed_since: the clock at the first report of a group's failure, by group id.
        logged_state: its state in the event log.
        parent: see JoinRequest.
        waiters: the joins of its process that wait for its world to be complete.
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
    groups: dict[str, GroupInfo] = field(default_factory=dict)
    number: int = 0
    interval: float = HEARTBEAT_SECONDS
    told_interval: float = HEARTBEAT_SECONDS
    reported_at: float = 0.0
    rates: Rates = field(default_factory=Rates)
    usage: ResourceUsage | None = None
    failed_since: dict[str, float] = field(default_factory=dict)
    logged_state: RankState | None = None
    parent: str = ""
    waiters: set[Future[JoinReply]] = field(default_factory=set)

    def state(self, now: float) -> RankState:
        """Return the rank's state at ``now``."""
        if self.ended is not None:
            return self.ended
        if self.joining:
            return "joining"
        return "suspect" if self.silence(now) >= suspect_seconds(self.interval) else "alive"

    def silence(self, now: float) -> float:
        """Return the seconds since the last heartbeat."""
        return max(0.0, now - self.last_seen)

    def is_heard(self, now: float) -> bool:
        """Return whether a heartbeat has come within the time after which a silent rank has failed."""
        return self.silence(now) < failed_seconds(self.interval)

    def next_change(self, now: float) -> float:
        """Return when the state of a live rank changes if it stays silent; ``now`` if it may at any time."""
        seconds = (suspect_seconds(self.interval), failed_seconds(self.interval))
        return next((self.last_seen + each for each in seconds if self.silence(now) < each), now)

    def is_live(self) -> bool:
        """Return whether the rank is held by a process that has neither left nor failed."""
        return self.ended is None

    def heartbeat(self, beat: Heartbeat, interval: float, now: float) -> None:
        """Record a heartbeat, but for its groups; the reply with the interval may be lost: the longer one counts."""
        self.last_seen = self.reported_at = now
        self.joining = False
        self.watches_peers, self.usage = beat.watches_peers, beat.usage
        self.interval, self.told_interval = max(self.told_interval, interval), interval

    def report_groups(self, reported: Sequence[GroupInfo], ended: Sequence[GroupInfo], now: float) -> None:
        """Record the rates of the groups that a heartbeat names, and since when they have failed."""
        self.rates.update(reported, now)
        for group in ended:
            self.failed_since.pop(group.id, None)
            self.rates.end(group.id)
        for group in reported:
            if group.failure:
                self.failed_since.setdefault(group.id, now)
            else:
                self.failed_since.pop(group.id, None)

    def refuse_heartbeat(self, now: float) -> None:
        """Record that a heartbeat came after the rank's failure by silence."""
        if self.ended == "failed" and not self.reason:
            self.reason = f"{self._silent(now)}; the failure is final for its epoch, and later heartbeats are ignored"

    def fail(self, reason: str = "") -> bool:
        """Record a failure that the rank has not reported, by silence without a reason; return whether it is news."""
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

    def sample(self) -> HeartbeatSample:
        """Return its last heartbeat, for its score."""
        return HeartbeatSample(
            self.reported_at, self.usage, {id: (each.seq, each.seconds) for id, each in self.groups.items()}
        )

    def info(self, job: str, epoch: int, now: float, slow: float = 0.0, usage: ResourceUsage | None = None) -> RankInfo:
        """Return the record as the HTTP interface shows it."""
        state = self.state(now)
        usage = usage if state == "alive" else None  # that of a silent rank is old
        reason = self.reason or (self._silent(now) if state == "failed" else "")
        age = self.silence(now)
        return RankInfo(job, epoch, state, age, reason, self.member, self.failed_ranks, slow, usage)

    def _silent(self, now: float) -> str:
        return f"{NO_HEARTBEAT} for {self.silence(now):.1f} s"
