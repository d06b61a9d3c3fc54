"""A world: the ranks of a job that come together in one epoch."""

from __future__ import annotations

import collections
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

from rankmesh_agent.wire.errors import RankTakenError, WorldSizeMismatchError
from rankmesh_agent.wire.schemas import (
    FAILED_SECONDS,
    LONG_POLL_SECONDS,
    UNASSIGNED,
    JoinReply,
    LostRank,
    Member,
    RankInfo,
)
from rankmesh_gateway.schemas import JobInfo, JobState
from rankmesh_gateway.state.event_writer import Chronicle
from rankmesh_gateway.state.rank import RankRecord

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
        unplaced: who is there without a rank, by instance, in the order they came; empty once the world is complete.
        waits: the joins that wait for it to be complete, each with the instance that waits.
        groups: the ids of its groups that the event log has, and whether it has their failure.
        since: the clock when it came together, or before that when the first rank came.
    """

    job: str
    epoch: int
    size: int
    chronicle: Chronicle
    records: dict[int, RankRecord] = field(default_factory=dict)
    unplaced: dict[str, RankRecord] = field(default_factory=dict)
    waits: dict[Future[JoinReply], str] = field(default_factory=dict)
    groups: dict[str, bool] = field(default_factory=dict)
    since: float | None = None

    def missing(self) -> list[int]:
        """The ranks that nobody came with."""
        return [rank for rank in range(self.size) if rank not in self.records]

    @property
    def count(self) -> int:
        """How many ranks have come."""
        return len(self.records) + len(self.unplaced)

    @property
    def complete(self) -> bool:
        """Whether every rank is there."""
        return self.count == self.size

    def everyone(self) -> list[RankRecord]:
        """The records by rank, then those without a rank in the order they came."""
        return [*(self.records[rank] for rank in sorted(self.records)), *self.unplaced.values()]

    def holder(self, rank: int, instance: str) -> RankRecord | None:
        """The record of a rank, if this very process holds it; of UNASSIGNED, whatever this very process holds."""
        if rank == UNASSIGNED:
            return next((record for record in self.everyone() if record.member.instance == instance), None)
        record = self.records.get(rank)
        return record if record is not None and record.member.instance == instance else None

    def admit(self, member: Member, now: float) -> RankRecord:
        """Put a member at its rank, in place of who held it before; without a rank, among those without one."""
        record = RankRecord(member, now)
        if self.since is None:
            self.since = now
        if member.rank == UNASSIGNED:
            self.unplaced[member.instance] = record
        else:
            self.records[member.rank] = record
        return record

    def remove(self, record: RankRecord) -> None:
        """Free the place of somebody who is there."""
        self.unplaced.pop(record.member.instance, None)
        self.records.pop(record.member.rank, None)
        self.chronicle.gave_up(self, record)

    def present(self, now: float) -> int:
        """How many of the ranks are neither gone nor failed."""
        return sum(record.present(now) for record in self.everyone())

    def failed(self, now: float) -> list[int]:
        """The ranks that have failed."""
        return sorted(rank for rank, record in self.records.items() if record.state(now) == "failed")

    def reply(self) -> JoinReply:
        """Where the coming together stands."""
        members = [record.member for record in self.everyone()]
        return JoinReply(self.complete, self.job, self.epoch, self.size, members, self.missing())

    def infos(self, now: float) -> list[RankInfo]:
        """The ranks as they are shown, in rank order."""
        return [record.info(self.job, self.epoch, now) for record in self.everyone()]

    def summary(self, now: float, time_now: float) -> JobInfo:
        """The world as a whole.

        Args:
            now: the clock.
            time_now: seconds since 1970.
        """
        ranks: Mapping[str, int] = collections.Counter(record.state(now) for record in self.everyone())
        since = time_now - (now - (self.since if self.since is not None else now))
        return JobInfo(self.job, self.epoch, self._state(ranks), self.size, dict(ranks), since)

    def _state(self, ranks: Mapping[str, int]) -> JobState:
        if any(record.joining for record in self.everyone()):
            return "forming"
        if sum(ranks.get(state, 0) for state in ("alive", "suspect")):
            return "failing" if ranks.get("failed") else "running"
        return "failed" if ranks.get("failed") else "ended"

    def begin(self, now: float) -> None:
        """Give a rank to those without one, and count all as just seen: from now on heartbeats are expected."""
        for rank, record in zip(self.missing(), self.unplaced.values(), strict=True):
            record.member = replace(record.member, rank=rank)
            self.records[rank] = record
        self.unplaced = {}
        for record in self.records.values():
            record.joining, record.seen = False, now
        self.since = now
        self.chronicle.complete(self)

    def lose(self, reporter: RankRecord, lost: list[LostRank], now: float) -> list[RankRecord]:
        """Take in which ranks another one says are gone; what it has said before is no news.

        Returns:
            The ranks that have failed by that.
        """
        before, reporter.lost = reporter.lost, frozenset(each.rank for each in lost)
        found = []
        for each in lost:
            record = self.records.get(each.rank)
            if record is None or each.rank in before:
                continue
            cause = f"{reporter.member.described()} lost its connection to it: {each.cause}"
            if record is not reporter and record.lose(cause, now):
                found.append(record)
        return found

    def has(self, group: str, now: float) -> bool:
        """Whether a rank that is there has a group; once none is, whether one had it when it failed."""
        there = [record for record in self.records.values() if record.present(now)]
        return any(each.id == group for record in there or self.records.values() for each in record.groups)

    def drop(self, group: str) -> None:
        """Forget a group that ranks had when they failed."""
        for record in self.records.values():
            record.groups = [each for each in record.groups if each.id != group]

    def awaited_by(self, instance: str) -> bool:
        """Whether this very process waits for the world at the moment."""
        return instance in self.waits.values()

    def drop_silent_joiners(self, now: float) -> None:
        """Forget joiners that neither wait nor asked again lately: their processes died."""
        for record in self.everyone():
            if now - record.seen > JOIN_SILENCE_SECONDS and not self.awaited_by(record.member.instance):
                self.remove(record)

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

    def refuse_one_too_many(self, world_size: int, member: Member, now: float) -> None:
        """Raise RankTakenError if processes that run hold all ranks, one of which a member without a rank could get.

        A member that expects another world size is not one too many: it belongs to the world that comes next.
        """
        if member.rank != UNASSIGNED or world_size != self.size or self.present(now) < self.size:
            return
        first = self.records[0].member
        raise RankTakenError(
            f"all {self.size} ranks of job {self.job!r} (epoch {self.epoch}) are held by processes that run, the first "
            f"by {first.described()} at {first.http}, so there is none left for process {member.pid} on {member.host}. "
            "Start no more processes than WORLD_SIZE and give each job its own RANKMESH_JOB or group_name; if the "
            f"holders have died, their ranks are free after {FAILED_SECONDS:g} s of silence",
            address=first.http,
        )

    def refuse_other_size(self, world_size: int, member: Member) -> None:
        """Raise WorldSizeMismatchError if the member does not expect as many ranks as those already here."""
        there = [*self.records.values(), *self.unplaced.values()]
        if world_size == self.size or not there:
            return
        first = there[0].member
        raise WorldSizeMismatchError(
            f"{member.described()} says that job {self.job!r} has {world_size} ranks, but {first.described()} at "
            f"{first.http}, which came first, says {self.size}. Start all ranks with the same WORLD_SIZE, or give each "
            "job its own RANKMESH_JOB",
            ranks=[] if first.rank == UNASSIGNED else [first.rank],
            address=first.http,
        )
