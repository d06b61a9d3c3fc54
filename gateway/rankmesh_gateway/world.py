"""A world: the ranks of a job that come together in one epoch."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field

from rankmesh_agent.wire.errors import RankTakenError, WorldSizeMismatchError
from rankmesh_agent.wire.schemas import FAILED_SECONDS, LONG_POLL_SECONDS, JoinReply, Member, RankInfo
from rankmesh_gateway.record import RankRecord

JOIN_SILENCE_SECONDS = LONG_POLL_SECONDS + 10.0
"""A joiner that has not asked again for this long is taken for dead."""


@dataclass
class World:
    """The ranks of one epoch.

    Attributes:
        job: the job's name.
        epoch: the job's epoch.
        size: how many ranks it has when complete.
        records: the ranks that are there, in the order they came.
        waits: the joins that wait for it to be complete, each with the instance that waits.
    """

    job: str
    epoch: int
    size: int
    records: dict[int, RankRecord] = field(default_factory=dict)
    waits: dict[Future[JoinReply], str] = field(default_factory=dict)

    def missing(self) -> list[int]:
        """The ranks that are not there."""
        return [rank for rank in range(self.size) if rank not in self.records]

    @property
    def complete(self) -> bool:
        """Whether every rank is there."""
        return len(self.records) == self.size

    def holder(self, rank: int, instance: str) -> RankRecord | None:
        """The record of a rank, if this very process holds it."""
        record = self.records.get(rank)
        return record if record is not None and record.member.instance == instance else None

    def admit(self, member: Member, now: float) -> RankRecord:
        """Put a member at its rank, in place of who held it before."""
        record = self.records[member.rank] = RankRecord(member, now)
        return record

    def present(self, now: float) -> int:
        """How many of the ranks are neither gone nor failed."""
        return sum(record.present(now) for record in self.records.values())

    def failed(self, now: float) -> list[int]:
        """The ranks that have failed."""
        return sorted(rank for rank, record in self.records.items() if record.state(now) == "failed")

    def reply(self) -> JoinReply:
        """Where the coming together stands."""
        members = [self.records[rank].member for rank in sorted(self.records)]
        return JoinReply(self.complete, self.job, self.epoch, self.size, members, self.missing())

    def infos(self, now: float) -> list[RankInfo]:
        """The ranks as they are shown, in rank order."""
        return [self.records[rank].info(self.job, self.epoch, now) for rank in sorted(self.records)]

    def begin(self, now: float) -> None:
        """Count every rank as just seen: from now on heartbeats are expected of them."""
        for record in self.records.values():
            record.joining, record.seen = False, now

    def awaited_by(self, instance: str) -> bool:
        """Whether this very process waits for the world at the moment."""
        return instance in self.waits.values()

    def drop_silent_joiners(self, now: float) -> None:
        """Forget joiners that neither wait nor asked again lately: their processes died."""
        self.records = {
            rank: record
            for rank, record in self.records.items()
            if now - record.seen <= JOIN_SILENCE_SECONDS or self.awaited_by(record.member.instance)
        }

    def refuse_taken_rank(self, member: Member, now: float) -> None:
        """Raise RankTakenError if another process that runs holds the member's rank."""
        record = self.records.get(member.rank)
        if record is None or record.member.instance == member.instance or not record.present(now):
            return
        holder = record.member
        silence = JOIN_SILENCE_SECONDS if record.joining else FAILED_SECONDS
        raise RankTakenError(
            f"{holder.described()} at {holder.http} already holds rank {member.rank} of job {self.job!r} "
            f"(epoch {self.epoch}, {record.state(now)}, last heard {now - record.seen:.1f} s ago), so process "
            f"{member.pid} on {member.host} cannot have it. Give each process its own RANK and each job its own "
            f"RANKMESH_JOB; if the holder has died, its rank is free after {silence:g} s of silence",
            ranks=[member.rank],
            address=holder.http,
        )

    def refuse_other_size(self, world_size: int, member: Member) -> None:
        """Raise WorldSizeMismatchError if the member does not expect as many ranks as those already here."""
        if world_size == self.size or not self.records:
            return
        first = next(iter(self.records.values())).member
        raise WorldSizeMismatchError(
            f"{member.described()} says that job {self.job!r} has {world_size} ranks, but {first.described()} at "
            f"{first.http}, which came first, says {self.size}. Start all ranks with the same WORLD_SIZE, or give each "
            "job its own RANKMESH_JOB",
            ranks=[first.rank],
            address=first.http,
        )
