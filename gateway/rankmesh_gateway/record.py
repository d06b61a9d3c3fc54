"""What the gateway knows of one rank."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from rankmesh_agent.wire.schemas import FAILED_SECONDS, SUSPECT_SECONDS, GroupInfo, Member, RankInfo, RankState
from rankmesh_gateway.checks import MAX_REASON


@dataclass
class RankRecord:
    """A rank of one epoch.

    Attributes:
        member: who holds the rank.
        seen: the clock at its last sign of life.
        joining: whether its world is still incomplete.
        ended: ``left`` or ``failed`` once it, or somebody on its behalf, said so; silence alone does not end a rank.
        reason: why it ended, empty after an ordinary goodbye.
        groups: its groups as last reported.
        broken_since: the clock when it first reported a group's failure, by group id.
    """

    member: Member
    seen: float
    joining: bool = True
    ended: Literal["left", "failed"] | None = None
    reason: str = ""
    groups: list[GroupInfo] = field(default_factory=list)
    broken_since: dict[str, float] = field(default_factory=dict)

    def state(self, now: float) -> RankState:
        """How the rank is at ``now``."""
        if self.ended is not None:
            return self.ended
        if self.joining:
            return "joining"
        silence = now - self.seen
        if silence >= FAILED_SECONDS:
            return "failed"
        return "suspect" if silence >= SUSPECT_SECONDS else "alive"

    def present(self, now: float) -> bool:
        """Whether the rank is held by a process that, for all we know, runs."""
        return self.state(now) not in ("left", "failed")

    def beat(self, groups: list[GroupInfo], now: float) -> None:
        """Take in a heartbeat. One that was overtaken by the goodbye changes nothing."""
        if self.ended is not None:
            return
        self.seen = now
        self.joining = False
        self.groups = groups
        self.broken_since = {group.id: self.broken_since.get(group.id, now) for group in groups if group.failure}

    def end(self, reason: str, now: float) -> None:
        """Take in the goodbye: ``left`` without a reason, ``failed`` with one. The first one counts."""
        if self.ended is not None:
            return
        self.seen = now
        self.reason = reason[:MAX_REASON]
        self.ended = "failed" if reason else "left"
        if not reason:
            self.groups = []

    def info(self, job: str, epoch: int, now: float) -> RankInfo:
        """The record as it is shown."""
        state = self.state(now)
        silence = max(0.0, now - self.seen)
        reason = self.reason
        if state == "failed" and not reason:
            reason = f"no heartbeat for {silence:.1f} s"
        return RankInfo(job, epoch, state, silence, reason, self.member)
