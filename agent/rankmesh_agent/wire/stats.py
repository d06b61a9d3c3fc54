"""Statistics of an agent, as its metrics report them."""

from __future__ import annotations

from dataclasses import dataclass, field

BOUNDS = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
"""Upper bounds of the durations' histogram, in seconds; the last bucket is for what takes longer."""


@dataclass
class OperationStats:
    """The calls, or messages, of one kind in one group.

    Attributes:
        group: the group's name.
        op: ``all_reduce``, ``send``, ...
        nbytes: of all that have ended.
        seconds: what they took together.
        failures: how many of them failed.
        buckets: how many took at most as long as each of BOUNDS, but longer than the one before; the last, longer.
        in_flight: how many have begun, or are queued, and not ended.
        oldest: seconds since the oldest of these began, or was queued; 0 if there are none.
    """

    group: str
    op: str
    nbytes: int = 0
    seconds: float = 0.0
    failures: int = 0
    buckets: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS) + 1))
    in_flight: int = 0
    oldest: float = 0.0

    def add(self, other: OperationStats) -> None:
        """Count another one's calls, too."""
        self.nbytes += other.nbytes
        self.seconds += other.seconds
        self.failures += other.failures
        self.buckets = [mine + theirs for mine, theirs in zip(self.buckets, other.buckets, strict=True)]
        self.in_flight += other.in_flight
        self.oldest = max(self.oldest, other.oldest)


@dataclass
class HeartbeatStats:
    """An agent's heartbeats.

    Attributes:
        answered: how many the gateway answered.
        unanswered: how many it did not.
        age: seconds since its last answer.
    """

    answered: int
    unanswered: int
    age: float


@dataclass
class StoreStats:
    """The store of the agent that owns the keys.

    Attributes:
        operations: how many calls there have been, by the call's name.
        keys: how many keys have values.
    """

    operations: dict[str, int]
    keys: int


@dataclass
class AgentStats:
    """What an agent has counted since it joined its job; nothing, for one that is in none.

    Attributes:
        operations: by group and kind.
        pulse: its heartbeats.
        store: of the agent that owns the keys, None of others.
        peers: how many peers are connected, by what carries point-to-point messages to them.
        lost: how many peers have gone without a goodbye.
    """

    operations: list[OperationStats] = field(default_factory=list)
    heartbeats: HeartbeatStats | None = None
    store: StoreStats | None = None
    peers: dict[str, int] = field(default_factory=dict)
    lost: int = 0
