"""Statistics of an agent for its metrics."""

from __future__ import annotations

from dataclasses import dataclass, field

BOUNDS = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
"""Upper bounds of the histogram of durations, in seconds; one more bucket counts longer calls."""


@dataclass
class OpStats:
    """The calls, or messages, of one operation that have ended.

    Attributes:
        buckets: number of calls in each bucket of BOUNDS; the last bucket counts longer calls.
    """

    nbytes: int = 0
    seconds: float = 0.0
    failures: int = 0
    buckets: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS) + 1))

    def add(self, other: OpStats) -> None:
        """Add the statistics of another instance."""
        self.nbytes += other.nbytes
        self.seconds += other.seconds
        self.failures += other.failures
        self.buckets = [mine + theirs for mine, theirs in zip(self.buckets, other.buckets, strict=True)]


@dataclass
class GroupOpStats(OpStats):
    """The calls, or messages, of one operation in one group.

    Attributes:
        in_flight: number of calls that have begun, or are queued, and have not ended.
        oldest: seconds since the oldest call in flight began, or was queued; 0 if there is none.
    """

    group: str = ""
    op: str = ""
    in_flight: int = 0
    oldest: float = 0.0


@dataclass
class HeartbeatStats:
    """An agent's heartbeats with and without a response of the gateway, and the seconds since the last response."""

    answered: int
    unanswered: int
    age: float


@dataclass
class AgentStats:
    """Statistics of an agent since it joined its job; empty for an agent without a job.

    Attributes:
        operations: calls by group and operation.
        peers: number of connected peers, by the transport of point-to-point messages to them.
        lost: number of peers whose connection broke without a goodbye.
    """

    operations: list[GroupOpStats] = field(default_factory=list)
    heartbeats: HeartbeatStats | None = None
    peers: dict[str, int] = field(default_factory=dict)
    lost: int = 0
