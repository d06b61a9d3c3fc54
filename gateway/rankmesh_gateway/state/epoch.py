"""One epoch of a job: its ranks, while they join and from then on."""

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
from rankmesh_gateway.state.rank import RankRecord

JOIN_SILENCE_SECONDS = LONG_POLL_SECONDS + 10.0
"""A joining process whose request does not come again for this long has died."""


@dataclass
class Epoch:
    """The world of one epoch.

    Attributes:
        job: the job's name.
        number: the epoch.
        size: the world size.
        records: the ranks that have joined, in the order in which they came.
        unassigned: the processes that joined without a rank, by instance, in the order in which they came; empty once
            the world is complete.
        waiters: the joins that wait for the world to be complete, each with the instance of its process.
        logged_groups: the ids of the groups in the event log, and whether it has their failure.
        grown: whether its world is an earlier one that has grown.
        since: the clock when the world was complete, or before that when the first rank joined.
    """

    job: str
    number: int
    size: int
    records: dict[int, RankRecord] = field(default_factory=dict)
    unassigned: dict[str, RankRecord] = field(default_factory=dict)
    waiters: dict[Future[JoinReply], str] = field(default_factory=dict)
    logged_groups: dict[str, bool] = field(default_factory=dict)
    grown: bool = False
    since: float | None = None

    def missing(self) -> list[int]:
        """Return the ranks that no process has joined as."""
        return [rank for rank in range(self.size) if rank not in self.records]

    @property
    def count(self) -> int:
        """Number of processes that have joined."""
        return len(self.records) + len(self.unassigned)

    @property
    def complete(self) -> bool:
        """True if every rank has joined."""
        return self.count == self.size

    def all_records(self) -> list[RankRecord]:
        """Return the records by rank, then those without a rank in the order in which they came."""
        return [*(self.records[rank] for rank in sorted(self.records)), *self.unassigned.values()]

    def find(self, rank: int, instance: str) -> RankRecord | None:
        """Return the record of a rank if this process holds it; of UNASSIGNED, the record of any rank it holds."""
        if rank == UNASSIGNED:
            return next((record for record in self.all_records() if record.member.instance == instance), None)
        record = self.records.get(rank)
        return record if record is not None and record.member.instance == instance else None

    def admit(self, member: Member, now: float) -> RankRecord:
        """Add a member at its rank, in place of an earlier holder; without a rank, among the unassigned."""
        record = RankRecord(member, now)
        if self.since is None:
            self.since = now
        if member.rank == UNASSIGNED:
            self.unassigned[member.instance] = record
        else:
            self.records[member.rank] = record
        return record

    def remove(self, record: RankRecord) -> None:
        """Free the place of a record."""
        self.unassigned.pop(record.member.instance, None)
        self.records.pop(record.member.rank, None)

    def live_ranks(self, now: float) -> int:
        """Return how many of the ranks have neither left nor failed."""
        return sum(record.is_live(now) for record in self.all_records())

    def failed(self) -> list[int]:
        """Return the ranks that have failed."""
        return sorted(rank for rank, record in self.records.items() if record.ended == "failed")

    def reply(self) -> JoinReply:
        """Return the reply to a join: the members, and the ranks that are missing."""
        members = [record.member for record in self.all_records()]
        return JoinReply(self.complete, self.job, self.number, self.size, members, self.missing(), self.grown)

    def infos(self, now: float) -> list[RankInfo]:
        """Return the ranks as the HTTP interface shows them, in rank order."""
        return [record.info(self.job, self.number, now) for record in self.all_records()]

    def summary(self, now: float, time_now: float) -> JobInfo:
        """Return the state of the world as a whole.

        Args:
            now: the clock.
            time_now: seconds since 1970.
        """
        ranks: Mapping[str, int] = collections.Counter(record.state(now) for record in self.all_records())
        since = time_now - (now - (self.since if self.since is not None else now))
        return JobInfo(self.job, self.number, self._state(ranks), self.size, dict(ranks), since)

    def _state(self, ranks: Mapping[str, int]) -> JobState:
        if any(record.joining for record in self.all_records()):
            return "forming"
        if sum(ranks.get(state, 0) for state in ("alive", "suspect")):
            return "failing" if ranks.get("failed") else "running"
        return "failed" if ranks.get("failed") else "ended"

    def start(self, now: float) -> None:
        """Assign the missing ranks, and count all as just seen: heartbeats are expected from now on."""
        for rank, record in zip(self.missing(), self.unassigned.values(), strict=True):
            record.member = replace(record.member, rank=rank)
            self.records[rank] = record
        self.unassigned = {}
        for record in self.records.values():
            record.joining, record.last_seen = False, now
        self.since = now

    def report_lost(self, reporter: RankRecord, lost: list[LostRank]) -> list[RankRecord]:
        """Record which ranks another one reports lost; a repeated report changes nothing.

        Returns:
            The ranks that have failed by this report.
        """
        before, reporter.lost_peers = reporter.lost_peers, frozenset(each.rank for each in lost)
        found = []
        for each in lost:
            record = self.records.get(each.rank)
            if record is None or each.rank in before:
                continue
            cause = f"{reporter.member.described()} lost its connection to it: {each.cause}"
            if record is not reporter and record.fail(cause):
                found.append(record)
        return found

    def expire(self, now: float) -> None:
        """Record the failure of the ranks that have been silent for FAILED_SECONDS and to which no peer is connected.

        A process that is stopped, or that holds the interpreter for long, sends no heartbeat; its connections stand,
        its peers wait for it, and it may go on.
        """
        silent = [each for each in self.records.values() if each.ended is None and each.silence(now) >= FAILED_SECONDS]
        for record in silent:
            if not self._has_connected_peer(record, now):
                record.fail()

    def _has_connected_peer(self, record: RankRecord, now: float) -> bool:
        """Return whether a rank that reports lost connections is heard, and has not reported this one's."""
        return any(
            peer.watches_peers
            and peer.ended is None
            and peer.silence(now) < FAILED_SECONDS
            and record.member.rank not in peer.lost_peers
            for peer in self.records.values()
            if peer is not record
        )

    def has_group(self, group: str, now: float) -> bool:
        """Return whether a live rank has a group; where no rank lives, whether one had it when it failed."""
        live = [record for record in self.records.values() if record.is_live(now)]
        return any(each.id == group for record in live or self.records.values() for each in record.groups)

    def is_present(self, rank: int) -> bool:
        """Return whether a rank is known and has not left."""
        return rank in self.records and self.records[rank].ended != "left"

    def drop_group(self, group: str) -> None:
        """Forget a group that ranks had when they failed."""
        for record in self.records.values():
            record.groups = [each for each in record.groups if each.id != group]

    def is_waiting(self, instance: str) -> bool:
        """Return whether a join of this process waits for the world."""
        return instance in self.waiters.values()

    def silent_joiners(self, now: float) -> list[RankRecord]:
        """Return the joiners without a waiting join or a recent one: their processes have died."""
        return [
            record
            for record in self.all_records()
            if now - record.last_seen > JOIN_SILENCE_SECONDS and not self.is_waiting(record.member.instance)
        ]

    def check_rank_free(self, member: Member, now: float) -> None:
        """Raise RankTakenError if another live process holds the member's rank."""
        record = self.records.get(member.rank)
        if record is None or record.member.instance == member.instance or not record.is_live(now):
            return
        holder = record.member
        silence = JOIN_SILENCE_SECONDS if record.joining else FAILED_SECONDS
        raise RankTakenError(
            f"{holder.described()} at {holder.http} already holds rank {member.rank} of job {self.job!r} "
            f"(epoch {self.number}, {record.state(now)}, last heard {now - record.last_seen:.1f} s ago), so process "
            f"{member.pid} on {member.host} cannot have it. Give each process its own RANK and each job its own "
            f"RANKMESH_JOB; if the holder has died, its rank is free after {silence:g} s of silence",
            ranks=[member.rank],
            address=holder.http,
        )

    def check_not_full(self, world_size: int, member: Member, now: float) -> None:
        """Raise RankTakenError if live processes hold all ranks, so that none is left for a member without a rank.

        A member that expects another world size belongs to the next epoch.
        """
        if member.rank != UNASSIGNED or world_size != self.size or self.live_ranks(now) < self.size:
            return
        first = self.records[0].member
        raise RankTakenError(
            f"all {self.size} ranks of job {self.job!r} (epoch {self.number}) are held by live processes, the first by "
            f"{first.described()} at {first.http}, so there is none left for process {member.pid} on {member.host}. "
            "Start no more processes than WORLD_SIZE and give each job its own RANKMESH_JOB or group_name; if the "
            f"holders have died, their ranks are free after {FAILED_SECONDS:g} s of silence",
            address=first.http,
        )

    def check_world_size(self, world_size: int, member: Member) -> None:
        """Raise WorldSizeMismatchError if the member expects another world size than the first one."""
        joined = [*self.records.values(), *self.unassigned.values()]
        if world_size == self.size or not joined:
            return
        first = joined[0].member
        raise WorldSizeMismatchError(
            f"{member.described()} says that job {self.job!r} has {world_size} ranks, but {first.described()} at "
            f"{first.http}, which came first, says {self.size}. Start all ranks with the same WORLD_SIZE, or give each "
            "job its own RANKMESH_JOB",
            ranks=[] if first.rank == UNASSIGNED else [first.rank],
            address=first.http,
        )
