"""A clock that tests turn by hand, and the requests of ranks and agents with defaults."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rankmesh_agent.wire.schemas import (
    UNASSIGNED,
    AgentHeartbeat,
    GroupInfo,
    GrowingWorld,
    Heartbeat,
    JoinRequest,
    Lease,
    LeaseRequest,
    Leave,
    Member,
)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


class Requests:
    """Makes what ranks send; ``life`` tells one process that holds a rank from the next."""

    def member(self, rank: int, life: int = 1) -> Member:
        port = 9000 + rank
        return Member(
            rank,
            f"r{rank}-{life}",
            f"host{rank}",
            "h",
            100 * life + rank,
            [f"10.0.0.1:{port}"],
            f"http://10.0.0.1:{port}",
        )

    def join(
        self, rank: int, world_size: int = 2, *, life: int = 1, job: str = "job", wait: float = 20.0, attempt: int = 0
    ) -> JoinRequest:
        return JoinRequest(job, world_size, self.member(rank, life), wait, attempt)

    def child(
        self, parent: int, rank: int, world_size: int = 2, *, pid: int, ancestors: Sequence[int] = ()
    ) -> JoinRequest:
        """A join of a process that descends from a launcher's rank."""
        request = self.join(rank, world_size, life=pid)
        member = replace(request.member, pid=pid)
        return replace(request, member=member, parent=f"job/{parent}", ancestors=[*ancestors, 1000 + parent])

    def join_unassigned(self, number: int, world_size: int = 2, *, life: int = 1, job: str = "job") -> JoinRequest:
        """A join of process ``number`` that leaves its rank to the gateway."""
        return JoinRequest(job, world_size, replace(self.member(number, life), rank=UNASSIGNED))

    def waiting(self, number: int, *, life: int = 1, job: str = "job") -> JoinRequest:
        """A join of process ``number`` that waits for the world to grow."""
        return replace(self.join_unassigned(number, 1, life=life, job=job), awaits_growth=True)

    def growth(self, rank: int, world_size: int, *, size: int = 2, epoch: int = 1, life: int = 2) -> JoinRequest:
        """A join of rank ``rank`` of a world of ``size`` that grows it to ``world_size``."""
        return replace(self.join(rank, world_size, life=life), growth=GrowingWorld(epoch, size, "world"))

    def leave_unassigned(self, number: int, *, life: int = 1, job: str = "job", reason: str = "") -> Leave:
        return Leave(job, 1, UNASSIGNED, self.member(number, life).instance, reason)

    def heartbeat(
        self, rank: int, world_size: int = 2, *groups: GroupInfo, life: int = 1, epoch: int = 1, job: str = "job"
    ) -> Heartbeat:
        return Heartbeat(job, epoch, world_size, self.member(rank, life), list(groups))

    def leave(self, rank: int, *, life: int = 1, epoch: int = 1, job: str = "job", reason: str = "") -> Leave:
        return Leave(job, epoch, rank, self.member(rank, life).instance, reason)

    def agent(
        self, number: int, *, life: int = 1, host: str = "h", leased_to: str = "", job: str = "job"
    ) -> AgentHeartbeat:
        """A sign of life of the standalone agent ``agent-<number>``, which ``leased_to`` has, if anybody."""
        leases = [Lease(f"lease-{number}", job, number, number + 1, leased_to)] if leased_to else []
        url = f"http://10.0.0.2:{8700 + number}"
        return AgentHeartbeat(f"a{number}-{life}", f"agent-{number}", f"host{number}", host, 50 + number, [url], leases)

    def lease(
        self, rank: int = UNASSIGNED, world_size: int = 4, *, job: str = "job", host: str = "", wait: float = 0.0
    ) -> LeaseRequest:
        return LeaseRequest(job, rank, world_size, host, wait)
