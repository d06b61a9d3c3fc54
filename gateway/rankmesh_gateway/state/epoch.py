"""One epoch of a job: its ranks, while they join and from then on. No request scans the ranks."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

from rankmesh_agent.wire.errors import RankTakenError, WorldSizeMismatchError
from rankmesh_agent.wire.schemas import (
    HEARTBEAT_SECONDS,
    LISTED_MEMBERS,
    LONG_POLL_SECONDS,
    UNASSIGNED,
    HostTable,
    JoinReply,
    LostRank,
    Member,
    Process,
    RankInfo,
    failed_seconds,
    suspect_seconds,
)
from rankmesh_gateway.schemas import GroupInFlight, JobInfo, JobState
from rankmesh_gateway.state.group_reports import GroupReports
from rankmesh_gateway.state.rank import RankRecord
from rankmesh_gateway.stragglers.scores import RankScores

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
        groups: the groups that the ranks report.
        logged_groups: the ids of the groups in the event log, and whether it has their failure.
        logged_calls: the calls that the event log has as held up, by group and sequence number: the clock when each
            began, and the call as it was when it was logged.
        scores: those of its ranks.
        logged_slow: the ranks that are slow by the event log.
        grown: whether its world is an earlier one that has grown.
        since: the clock when the world was complete, or before that when the first rank joined.
        interval: seconds between the heartbeats that the ranks were told when the world was complete.
        store: id of the job's store; empty until the world is complete, and where the gateway was started after that.
    """

    job: str
    number: int
    size: int
    records: dict[int, RankRecord] = field(default_factory=dict)
    unassigned: dict[str, RankRecord] = field(default_factory=dict)
    groups: GroupReports = field(default_factory=GroupReports)
    logged_groups: dict[str, bool] = field(default_factory=dict)
    logged_calls: dict[tuple[str, int], tuple[float, GroupInFlight]] = field(default_factory=dict)
    scores: RankScores = field(default_factory=RankScores)
    logged_slow: set[int] = field(default_factory=set)
    grown: bool = False
    since: float | None = None
    interval: float = HEARTBEAT_SECONDS
    store: str = ""
    _by_instance: dict[str, RankRecord] = field(default_factory=dict)
    _ended: set[int] = field(default_factory=set)
    """The ranks that have left or failed."""
    _failed: set[int] = field(default_factory=set)
    _failures: list[int] = field(default_factory=list)
    """The ranks in the order of their failures; a version of the failed ranks is a number of its items."""
    _reply: JoinReply | None = None
    _due: float = float("-inf")
    """The earliest time at which a silent rank's state may change."""
    _joiners_due: float = float("inf")
    """The earliest time at which a joiner may have been silent for too long."""

    def missing(self, most: int | None = None) -> list[int]:
        """Return the ranks that no process has joined as; the first ones if there is a limit."""
        absent = (rank for rank in range(self.size) if rank not in self.records)
        return list(itertools.islice(absent, most))

    @property
    def count(self) -> int:
        """Number of processes that have joined."""
        return len(self.records) + len(self.unassigned)

    @property
    def complete(self) -> bool:
        """True if every rank has joined."""
        return len(self.records) + len(self.unassigned) == self.size

    def all_records(self) -> list[RankRecord]:
        """Return the records by rank, then those without a rank in the order in which they came."""
        return [*map(self.records.__getitem__, sorted(self.records)), *self.unassigned.values()]

    def find(self, rank: int, instance: str) -> RankRecord | None:
        """Return the record of a rank if this process holds it; of UNASSIGNED, the record of any rank it holds."""
        record = self._by_instance.get(instance) if rank == UNASSIGNED else self.records.get(rank)
        return record if record is not None and record.member.instance == instance else None

    def admit(self, member: Member, now: float) -> RankRecord:
        """Add a member at its rank, in place of an earlier holder; without a rank, among the unassigned."""
        known = self.find(member.rank, member.instance)
        if known is not None and known.joining and known.member == member:
            known.last_seen = now
            return known
        if self.since is None:
            self.since = now
        if known is None:
            return self.add(RankRecord(member, now))
        return self.add(RankRecord(member, now, logged_state=known.logged_state, waiters=known.waiters))

    def add(self, record: RankRecord) -> RankRecord:
        """Add a record; see ``admit``."""
        rank, instance = record.member.rank, record.member.instance
        if rank == UNASSIGNED:
            self.unassigned[instance] = record
        else:
            if rank in self.records:
                self._unlink(self.records[rank])
            self.records[rank] = record
        self._by_instance[instance] = record
        self._reply = None
        self._joiners_due = min(self._joiners_due, record.last_seen + JOIN_SILENCE_SECONDS)
        if not record.joining:
            self.heard(record)
            self.note_end(record)
        return record

    def remove(self, record: RankRecord) -> None:
        """Free the place of a record."""
        self._unlink(record)
        self.unassigned.pop(record.member.instance, None)
        self.records.pop(record.member.rank, None)
        self._reply = None

    def _unlink(self, record: RankRecord) -> None:
        rank, instance = record.member.rank, record.member.instance
        if self._by_instance.get(instance) is record:
            del self._by_instance[instance]
        self.groups.forget(record)
        self._ended.discard(rank)
        self._failed.discard(rank)

    def note_end(self, record: RankRecord) -> None:
        """Count a record among those that have left or failed if it has. After each change of its end."""
        if record.ended is not None:
            rank = record.member.rank
            self._ended.add(rank)
            if record.ended == "failed" and rank not in self._failed:
                self._failed.add(rank)
                self._failures.append(rank)
            if record.ended == "left":
                self._failed.discard(rank)
                self.groups.forget(record)

    def live_ranks(self) -> int:
        """Return how many of the ranks have neither left nor failed."""
        return len(self.records) + len(self.unassigned) - len(self._ended)

    def ended(self) -> list[RankRecord]:
        """Return the ranks that have left or failed, by rank."""
        return [self.records[rank] for rank in sorted(self._ended)]

    def failed(self, known: int = 0) -> tuple[list[int], int]:
        """Return the ranks that have failed since a version, and the version now."""
        version = len(self._failures)
        if not 0 < known <= version:
            return sorted(self._failed), version
        return sorted(self._failed.intersection(self._failures[known:])), version

    def reply(self) -> JoinReply:
        """Return the reply to a join, the same one until it changes; of a complete world, with all members."""
        if self._reply is None or self._reply.epoch != self.number:
            complete, most = self.complete, LISTED_MEMBERS
            records = self.all_records() if complete else itertools.islice(self._in_order(), most)
            self._reply = JoinReply(
                complete,
                self.job,
                self.number,
                self.size,
                [record.member for record in records],
                [] if complete else self.missing(most),
                self.grown,
                self.count,
                self.interval,
                self.store,
                self._hosts() if complete else None,
            )
        return self._reply

    def _hosts(self) -> HostTable:
        """Return the hosts and processes of all ranks."""
        numbers: dict[str, int] = {}
        members = [record.member for record in self.all_records()]
        return HostTable.of(
            [Process(each.host, numbers.setdefault(each.host_id, len(numbers)), each.pid) for each in members]
        )

    def members(self, ranks: Iterable[int]) -> list[Member]:
        """Return the members of those of some ranks that are known."""
        return [self.records[rank].member for rank in ranks if rank in self.records]

    def infos(self, now: float) -> list[RankInfo]:
        """Return the ranks as the HTTP interface shows them, in rank order."""
        scores, usage = self.scores.values, self.scores.usage()
        return [
            record.info(self.job, self.number, now, scores.get(record.member.rank, 0.0), usage.get(record.member.rank))
            for record in self.all_records()
        ]

    def summary(self, now: float, time_now: float) -> JobInfo:
        """Return the state of the world as a whole; ``time_now``: seconds since 1970."""
        ranks: Mapping[str, int] = collections.Counter(record.state(now) for record in self.all_records())
        since = time_now - (now - (self.since if self.since is not None else now))
        state = self._state(ranks)
        ended = None
        if state in ("ended", "failed"):
            ended = time_now - (now - max((record.last_seen for record in self.all_records()), default=now))
        return JobInfo(self.job, self.number, state, self.size, dict(ranks), since, ended)

    def _state(self, ranks: Mapping[str, int]) -> JobState:
        if any(record.joining for record in self.all_records()):
            return "forming"
        if sum(ranks.get(state, 0) for state in ("alive", "suspect")):
            return "failing" if ranks.get("failed") else "running"
        return "failed" if ranks.get("failed") else "ended"

    def start(self, now: float, interval: float) -> None:
        """Assign the missing ranks, and count all as just seen: heartbeats are expected from now on."""
        if self.unassigned:
            for rank, record in zip(self.missing(), self.unassigned.values(), strict=True):
                record.member = replace(record.member, rank=rank)
                self.records[rank] = record
            self.unassigned = {}
        for record in self.records.values():
            record.joining, record.last_seen = False, now
            record.interval = record.told_interval = interval
        self._due = min(self._due, now + suspect_seconds(interval))
        self.since, self.interval, self._reply = now, interval, None

    def heard(self, record: RankRecord) -> None:
        """Note that a sign of life of a rank has been recorded."""
        self._due = min(self._due, record.last_seen + suspect_seconds(record.interval))

    def report_lost(self, reporter: RankRecord, lost: list[LostRank], *, more: bool) -> list[RankRecord]:
        """Record which ranks another one reports lost; return those that have failed by this report."""
        if not lost and (more or not reporter.lost_peers):
            return []
        before, named = reporter.lost_peers, frozenset(each.rank for each in lost)
        reporter.lost_peers = before | named if more else named
        found = []
        for each in lost:
            record = self.records.get(each.rank)
            if record is None or each.rank in before:
                continue
            cause = f"{reporter.member.described()} lost its connection to it: {each.cause}"
            if record is not reporter and record.fail(cause):
                self.note_end(record)
                found.append(record)
        return found

    def expire(self, now: float) -> bool:
        """Record the failure of the ranks that have been silent for too long and to which no peer is connected.

        A process that is stopped, or that holds the interpreter for long, sends no heartbeat; its connections stand,
        its peers wait for it, and it may go on. Returns whether states may have changed; if not, no rank has been
        looked at.
        """
        if now < self._due:
            return False
        live = [record for record in self.records.values() if record.ended is None]
        watching = [record for record in live if record.watches_peers and record.is_heard(now)]
        lost_by = collections.Counter(rank for record in watching for rank in record.lost_peers)
        for record in live:
            if not record.is_heard(now) and lost_by[record.member.rank] >= len(watching):
                record.fail()
                self.note_end(record)
        self._due = min((record.next_change(now) for record in live if record.ended is None), default=float("inf"))
        return True

    def is_present(self, rank: int) -> bool:
        """Return whether a rank is known and has not left."""
        return rank in self.records and self.records[rank].ended != "left"

    def has_group(self, group: str) -> bool:
        """Return whether a live rank has a group; where no rank lives, whether one had it when it failed."""
        holders = self.groups.holders(group)
        return any(self.records[rank].is_live() for rank in holders) or (bool(holders) and not self.live_ranks())

    def waiters(self) -> list[Future[JoinReply]]:
        """Return the joins that wait for the world to be complete."""
        return [future for record in self.all_records() for future in record.waiters]

    def silent_joiners(self, now: float) -> list[RankRecord]:
        """Return the joiners without a waiting join or a recent one: their processes have died."""
        if now <= self._joiners_due:
            return []
        records = self.all_records()
        self._joiners_due = min((each.last_seen for each in records), default=now) + JOIN_SILENCE_SECONDS
        return [each for each in records if now - each.last_seen > JOIN_SILENCE_SECONDS and not each.waiters]

    def _in_order(self) -> Iterator[RankRecord]:
        ranks = (self.records[rank] for rank in range(self.size) if rank in self.records)
        return itertools.chain(ranks, self.unassigned.values())

    def check_rank_free(self, member: Member, now: float) -> None:
        """Raise RankTakenError if another live process holds the member's rank."""
        record = self.records.get(member.rank)
        if record is None or record.member.instance == member.instance or not record.is_live():
            return
        holder = record.member
        silence = JOIN_SILENCE_SECONDS if record.joining else failed_seconds(record.interval)
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
        if member.rank != UNASSIGNED or world_size != self.size or self.live_ranks() < self.size:
            return
        first = self.records[0].member
        raise RankTakenError(
            f"all {self.size} ranks of job {self.job!r} (epoch {self.number}) are held by live processes, the first by "
            f"{first.described()} at {first.http}, so there is none left for process {member.pid} on {member.host}. "
            "Start no more processes than WORLD_SIZE and give each job its own RANKMESH_JOB or group_name; if the "
            f"holders have died, their ranks are free after {failed_seconds(self.interval):g} s of silence",
            address=first.http,
        )

    def check_world_size(self, world_size: int, member: Member) -> None:
        """Raise WorldSizeMismatchError if the member expects another world size than the first one."""
        if world_size == self.size or not self.count:
            return
        first = next(itertools.chain(self.records.values(), self.unassigned.values())).member
        raise WorldSizeMismatchError(
            f"{member.described()} says that job {self.job!r} has {world_size} ranks, but {first.described()} at "
            f"{first.http}, which came first, says {self.size}. Start all ranks with the same WORLD_SIZE, or give each "
            "job its own RANKMESH_JOB",
            ranks=[] if first.rank == UNASSIGNED else [first.rank],
            address=first.http,
        )
