"""A job: its epochs, the rules by which ranks join them, and the interval of heartbeats."""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import NamedTuple

from rankmesh_agent.wire.errors import JobEndedError, RankTakenError
from rankmesh_agent.wire.schemas import (
    HEARTBEAT_SECONDS,
    UNASSIGNED,
    Heartbeat,
    JoinReply,
    JoinRequest,
    Leave,
    Member,
    RankInfo,
)
from rankmesh_agent.wire.store_frames import STORE_ID_BYTES
from rankmesh_gateway.state.child_processes import ChildProcesses
from rankmesh_gateway.state.epoch import Epoch
from rankmesh_gateway.state.event_writer import EventWriter
from rankmesh_gateway.state.group_reports import GroupChanges
from rankmesh_gateway.state.growth import Growth
from rankmesh_gateway.state.rank import RankRecord


class HeartbeatOutcome(NamedTuple):
    """Outcome of a heartbeat: its epoch, None if that is over; the ranks that have failed by it; its groups."""

    epoch: Epoch | None
    lost: Sequence[RankRecord] = ()
    groups: GroupChanges = GroupChanges()


class Job:
    """The epochs of one job.

    Attributes:
        epochs: the epochs whose world was complete, by number; old ones are dropped once no rank of them is live.
        growth: the processes that wait for the world to grow, and its ranks while they grow it.
        holds_ranks: whether the live ranks of its latest world are refused to other processes.
    """

    def __init__(self, name: str, writer: EventWriter, pace: HeartbeatPace) -> None:
        self.name = name
        self._writer = writer
        self._pace = pace
        self.epochs: dict[int, Epoch] = {}
        self.forming: Epoch | None = None
        self.growth = Growth(name)
        self._children = ChildProcesses(name)
        self.holds_ranks = True
        self.attempt = 0
        self.before: list[RankInfo] = []
        self._last_ended = self._last_used = 0
        self._restarted_at = float("-inf")

    def __iter__(self) -> Iterator[Epoch]:
        """Yield the epochs from the oldest to the forming one."""
        yield from (self.epochs[number] for number in sorted(self.epochs))
        if self.forming is not None:
            yield self.forming

    def join(self, request: JoinRequest, now: float) -> Epoch:
        """Admit a rank to the forming epoch, whose world may be complete by that; return the rank's epoch.

        That is one that is complete if this very process joined it earlier.
        """
        self._check_attempt(request)
        if request.awaits_growth:
            request = self._resolved(request)
        member = request.member
        joined = self.epoch_of(member)
        if joined is not None:
            return joined
        if request.awaits_growth or request.growth is not None:
            return self._join_growth(request, now)
        latest = self.latest()
        if request.parent:
            self._check_parent(request, latest, now)
        if latest is not None and self.holds_ranks:
            latest.check_rank_free(member, now)
            latest.check_not_full(request.world_size, member, now)
        if self.forming is not None:
            self.drop_silent_joiners(now)
        epoch = self.forming or self._next_epoch(request.world_size)
        epoch.check_world_size(request.world_size, member)
        epoch.check_rank_free(member, now)
        record = epoch.admit(member, now)
        if request.parent:
            self._children.add(request, record)
        if record.logged_state is None:
            self._writer.rank_joining(epoch, record)
        self.forming = epoch
        if epoch.complete:
            self.forming = None
            self._start(epoch, now)
        return epoch

    def _check_parent(self, request: JoinRequest, latest: Epoch | None, now: float) -> None:
        """Raise RankTakenError if a join is of another job than the members that are there; see ChildProcesses."""
        record = self._children.dispute(request, self.forming, latest)
        if record is None:
            return
        error = self._children.refusal(request)
        if record.fail(error.message):
            assert latest is not None, "only the ranks of a complete world fail"
            latest.note_end(record)
            self._writer.state_changes(latest, [record], now)
        elif self.forming is not None:
            self._remove(self.forming, record)
        raise error

    def _resolved(self, request: JoinRequest) -> JoinRequest:
        """Return the request of a process that awaits the growth as what it is by now.

        One that has the rank of a lost process holds this rank in the first world, until that is complete.
        """
        if not request.awaits_growth or request.member.rank == UNASSIGNED:
            return request
        if self.epochs:
            return replace(request, member=replace(request.member, rank=UNASSIGNED))
        return replace(request, awaits_growth=False)

    def _join_growth(self, request: JoinRequest, now: float) -> Epoch:
        """Admit a process that awaits the growth, or a rank of the world that grows; see Growth."""
        self.drop_silent_joiners(now)
        if request.awaits_growth and self.has_ended():
            raise JobEndedError(
                f"all ranks of job {self.name!r} have left: there is no world that {request.member.described()} could "
                "join. Start the job again, or this process without join=True"
            )
        if request.growth is not None:  # of a world that may have been complete at an earlier gateway
            self._last_used = max(self._last_used, request.growth.epoch)
        known = self.growth.epoch_of(request.member).find(request.member.rank, request.member.instance)
        epoch = self.growth.join(request, self._next_number(), now)
        record = epoch.find(request.member.rank, request.member.instance)
        if request.awaits_growth and known is None and record is not None:
            self._writer.rank_waiting(epoch, record)
        if epoch.complete and epoch is self.growth.forming:
            self.growth.forming = None
            self._start(epoch, now)
        return epoch

    def _start(self, epoch: Epoch, now: float) -> None:
        self.holds_ranks = True
        epoch.number = self._last_used = self._next_number()
        grown = self.epochs.get(self.growth.grown_from) if epoch.grown else None
        epoch.store = grown.store if grown is not None and grown.store else secrets.token_hex(STORE_ID_BYTES)
        epoch.start(now, self._pace.add_ranks(epoch.size))
        self._writer.world_complete(epoch)
        self.epochs[epoch.number] = epoch
        self._renumber()
        self._drop_old_epochs(now)

    def restart(self, attempt: int, now: float, reason: str = "") -> list[Future[JoinReply]]:
        """End the epochs before the launcher's attempt; return their joins that wait, to be cancelled."""
        if attempt <= self.attempt:
            return []
        waiters = self.waiters()
        self.attempt = attempt
        self.before = [info for epoch in self for info in epoch.infos(now)]
        self._last_ended = self._latest_number()
        self._restarted_at = now
        self.epochs, self.forming, self.growth = {}, None, Growth(self.name)
        self._children = ChildProcesses(self.name)
        self._writer.job_restarted(self.name, self._last_ended, attempt, reason)
        return waiters

    def epoch_of(self, member: Member) -> Epoch | None:
        """Return the complete epoch that this very process is in."""
        for epoch in self.epochs.values():
            if epoch.complete and epoch.find(member.rank, member.instance) is not None:
                return epoch
        return None

    def awaited_epoch(self, request: JoinRequest) -> Epoch:
        """Return the epoch that a join waits for; an empty one if no process is waiting any more."""
        request = self._resolved(request)
        if request.awaits_growth or request.growth is not None:
            return self.epoch_of(request.member) or self.growth.epoch_of(request.member)
        return self.epoch_of(request.member) or self.forming or self._next_epoch(request.world_size)

    def heartbeat(self, beat: Heartbeat, now: float) -> HeartbeatOutcome:
        """Record a heartbeat; that of a rank that has left or failed changes nothing."""
        epoch = self.epochs.get(beat.epoch)
        if epoch is None:
            if beat.epoch <= self._last_ended or (self.epochs and beat.epoch < self._latest_number()):
                return HeartbeatOutcome(None)
            epoch = self._restore(beat, now)
        epoch.check_world_size(beat.world_size, beat.member)
        epoch.check_rank_free(beat.member, now)
        record = epoch.find(beat.member.rank, beat.member.instance) or epoch.admit(beat.member, now)
        if not record.is_live():
            record.refuse_heartbeat(now)
            return HeartbeatOutcome(epoch)
        record.heartbeat(beat, self._pace.interval, now)
        epoch.heard(record)
        changes = epoch.groups.report(record, beat, now)
        record.report_groups(changes.reported, changes.ended, now)
        lost = epoch.report_lost(record, beat.lost, more=beat.changes_since > 0)
        self._writer.state_changes(epoch, [record, *lost], now)
        self._writer.group_changes(epoch, changes.reported, changes.ended)
        return HeartbeatOutcome(epoch, lost, changes)

    def leave(self, goodbye: Leave, now: float) -> None:
        """Record that a rank leaves an epoch whose world was complete."""
        for epoch in self.epochs.values():
            record = epoch.find(goodbye.rank, goodbye.instance)
            if record is not None:
                before = list(record.groups.values())
                record.leave(goodbye.reason, now, goodbye.failed_ranks[: epoch.size])
                epoch.note_end(record)
                self._writer.state_changes(epoch, [record], now)
                self._writer.group_changes(epoch, [], before if not record.groups else [])
        if not self.has_ended():  # it goes on in another epoch
            self.epochs = {number: epoch for number, epoch in self.epochs.items() if epoch.live_ranks()}

    def process_exited(self, rank: int, pid: int, host: str, reason: str, now: float) -> None:
        """Record how a process exited, from the launcher that observed it: its cause is more exact than the peers'.

        The rank may be held by a child of the process.
        """
        for epoch in self.epochs.values():
            here = [record for record in epoch.records.values() if record.member.host == host]
            held = [record for record in here if record.member.pid == pid]
            # After a growth the ranks have other numbers than the launcher's.
            for record in held or [each for each in here if each.member.rank == rank and not epoch.grown]:
                if record.process_exited(reason, now):
                    epoch.note_end(record)
                    self._writer.state_changes(epoch, [record], now)

    def poll_timeouts(self, now: float) -> None:
        """Record and log the state changes of ranks that have been silent for too long."""
        for epoch in self.epochs.values():
            if epoch.expire(now):
                self._writer.state_changes(epoch, epoch.records.values(), now)
        for number, epoch in list(self.epochs.items()):
            if epoch.grown and not epoch.live_ranks() and not self.has_ended():  # the world before goes on
                del self.epochs[number]

    def withdraw(self, rank: int, instance: str, *, if_idle: bool = False) -> list[Future[JoinReply]]:
        """Free a joiner's place in the epoch that it waits for, ``if_idle`` unless a join of it waits; return these."""
        for epoch in self._incomplete():
            record = epoch.find(rank if epoch is self.forming else UNASSIGNED, instance)
            if record is not None:
                if not (if_idle and record.waiters):
                    self._remove(epoch, record)
                return list(record.waiters)
        return []

    def waiters(self) -> list[Future[JoinReply]]:
        """Return the joins that wait."""
        return [future for epoch in self._incomplete() for future in epoch.waiters()]

    def _incomplete(self) -> tuple[Epoch, ...]:
        """Return the epochs whose worlds are incomplete."""
        return tuple(filter(None, (self.forming, self.growth.forming, self.growth.wait_list)))

    def latest(self) -> Epoch | None:
        """Return the last epoch whose world was complete."""
        return self.epochs[max(self.epochs)] if self.epochs else None

    def waiting(self, now: float) -> list[Member]:
        """Return the processes that wait for the world to grow."""
        self.drop_silent_joiners(now)
        return self.growth.waiting()

    def has_ended(self) -> bool:
        """Return whether there was a world, and all ranks of it have left or failed."""
        return bool(self.epochs) and not any(epoch.live_ranks() for epoch in self.epochs.values())

    def live_ranks(self) -> int:
        """Return how many ranks are live, joining ones included."""
        return sum(map(Epoch.live_ranks, (*self.epochs.values(), *self._incomplete())))

    def excuse(self, seconds: float) -> None:
        """Take some seconds off the silence of all ranks."""
        for epoch in (*self.epochs.values(), *self._incomplete()):
            for record in epoch.all_records():
                record.last_seen += seconds

    def last_seen(self) -> float:
        """Return the clock at the last heartbeat of any rank, or at the job's last restart."""
        return max((record.last_seen for epoch in self for record in epoch.all_records()), default=self._restarted_at)

    def drop_silent_joiners(self, now: float) -> None:
        """Forget joiners whose processes have died, and the forming epoch if there are no others."""
        for epoch in reversed(self._incomplete()):  # the wait list first: no free place goes to another silent one
            for record in reversed(epoch.silent_joiners(now)):
                self._remove(epoch, record)

    def _remove(self, epoch: Epoch, record: RankRecord) -> None:
        epoch.remove(record)
        self._writer.join_abandoned(epoch, record)
        if epoch is not self.forming:
            self.growth.settle()
        elif not epoch.count:
            self.forming = None

    def _latest_number(self) -> int:
        return max(self.epochs, default=self._last_ended)

    def _check_attempt(self, request: JoinRequest) -> None:
        """Raise RankTakenError if the job was restarted after the joining process had been started."""
        if request.attempt < self.attempt and (request.attempt or not request.awaits_growth):
            raise RankTakenError(
                f"{request.member.described()} was started before restart {self.attempt} of job {self.name!r}, in "
                "which another process has its place. The launcher ends the processes of the attempt before: was this "
                "one started by a rank, in a session of its own?",
                ranks=[request.member.rank],
            )

    def _next_epoch(self, size: int) -> Epoch:
        return Epoch(self.name, self._next_number(), size)

    def _next_number(self) -> int:
        return max(self._latest_number(), self._last_used) + 1

    def _renumber(self) -> None:
        """Number the epochs that form after those that are complete."""
        for epoch in (self.forming, self.growth.forming):
            if epoch is not None:
                epoch.number = self._next_number()

    def _restore(self, beat: Heartbeat, now: float) -> Epoch:
        """Add an epoch whose world was complete before this gateway was started."""
        epoch = self.epochs[beat.epoch] = Epoch(self.name, beat.epoch, beat.world_size)
        self._last_used = max(self._last_used, beat.epoch)
        self._renumber()
        self._drop_old_epochs(now)
        return epoch

    def _drop_old_epochs(self, now: float) -> None:
        latest = self._latest_number()
        self.epochs = {number: epoch for number, epoch in self.epochs.items() if number == latest or epoch.live_ranks()}


HEARTBEATS_A_SECOND = 500
"""Heartbeats of all ranks together in a second, at most, once they know the interval: about a fifth of a core."""


class HeartbeatPace:
    """The interval that replies name; ``interval``: seconds; whole ones, so that it seldom changes."""

    def __init__(self) -> None:
        self.interval = HEARTBEAT_SECONDS

    def set_ranks(self, ranks: int) -> None:
        """Set the interval for a number of live ranks."""
        self.interval = max(HEARTBEAT_SECONDS, float(math.ceil(ranks / HEARTBEATS_A_SECOND)))

    def add_ranks(self, ranks: int) -> float:
        """Return the interval from now on, as these ranks are live."""
        before = self.interval
        self.set_ranks(ranks)
        self.interval = max(before, self.interval)
        return self.interval
