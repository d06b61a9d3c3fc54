"""A job: the worlds of its epochs, and the rules by which ranks get into them."""

from __future__ import annotations

from collections.abc import Iterator

from rankmesh_agent.wire.schemas import Heartbeat, JoinRequest, Leave, Member
from rankmesh_gateway.state.epoch import Epoch
from rankmesh_gateway.state.event_writer import EventWriter
from rankmesh_gateway.state.rank import RankRecord


class Job:
    """The epochs of one job.

    Args:
        name: the job's name.
        chronicle: what is told of what happens.

    Attributes:
        name: the job's name.
        worlds: the worlds that came together, by epoch; old ones are forgotten once nobody is left in them.
        forming: the world that comes together at the moment, if there is one.
    """

    def __init__(self, name: str, chronicle: EventWriter) -> None:
        self.name = name
        self._chronicle = chronicle
        self.epochs: dict[int, Epoch] = {}
        self.forming: Epoch | None = None

    def __iter__(self) -> Iterator[Epoch]:
        """The worlds from the oldest to the one that is forming."""
        yield from (self.epochs[epoch] for epoch in sorted(self.epochs))
        if self.forming is not None:
            yield self.forming

    def join(self, request: JoinRequest, now: float) -> Epoch:
        """Admit a rank to the forming world, which may be complete by that.

        Returns:
            The world the rank is in: the one that is complete when this very process joined it earlier.

        Raises:
            RankTakenError: another process that runs holds the rank, or others hold all ranks.
            WorldSizeMismatchError: the forming world has another size.
        """
        member = request.member
        joined = self.epoch_of(member)
        if joined is not None:
            return joined
        if self.epochs:
            latest = self.epochs[self._latest()]
            latest.check_rank_free(member, now)
            latest.check_not_full(request.world_size, member, now)
        world = self._forming_epoch(request.world_size, now)
        world.check_world_size(request.world_size, member)
        world.check_rank_free(member, now)
        known = world.find(member.rank, member.instance)
        record = world.admit(member, now)
        if known is None:
            self._chronicle.rank_joining(world, record)
        self.forming = world
        if world.complete:
            self._complete(world, now)
        return world

    def epoch_of(self, member: Member) -> Epoch | None:
        """The complete world that this very process is in."""
        for world in self.epochs.values():
            if world.complete and world.find(member.rank, member.instance) is not None:
                return world
        return None

    def awaited_epoch(self, request: JoinRequest) -> Epoch:
        """The world a join waits for; an empty one when nobody waits any more."""
        fresh = self._new_epoch(self._next_epoch(), request.world_size)
        return self.epoch_of(request.member) or self.forming or fresh

    def heartbeat(self, beat: Heartbeat, now: float) -> tuple[Epoch | None, list[RankRecord]]:
        """Take in a sign of life.

        Returns:
            The world it belongs to; None when that is over and forgotten, as a newer one has come together. And the
            ranks that have failed, as this one saw.

        Raises:
            RankTakenError: another process that runs holds this rank of the epoch.
            WorldSizeMismatchError: the epoch's other ranks have another world size.
        """
        world = self.epochs.get(beat.epoch)
        if world is None:
            if self.epochs and beat.epoch < self._latest():
                return None, []
            world = self._restore(beat, now)
        world.check_world_size(beat.world_size, beat.member)
        world.check_rank_free(beat.member, now)
        record = world.find(beat.member.rank, beat.member.instance) or world.admit(beat.member, now)
        before = record.groups
        record.heartbeat(beat.groups, now)
        lost = world.report_lost(record, beat.lost, now)
        self._chronicle.state_changes(world, [record, *lost], now)
        self._chronicle.group_changes(world, record, before, now)
        return world, lost

    def leave(self, goodbye: Leave, now: float) -> None:
        """Take in a goodbye from a world that came together."""
        for world in self.epochs.values():
            record = world.find(goodbye.rank, goodbye.instance)
            if record is not None:
                before = record.groups
                record.leave(goodbye.reason, now)
                self._chronicle.state_changes(world, [record], now)
                self._chronicle.group_changes(world, record, before, now)

    def process_exited(self, rank: int, pid: int, host: str, reason: str, now: float) -> list[RankRecord]:
        """Take in how a process ended, from somebody who watched it: its cause is better than what others saw.

        Args:
            rank: the rank it was started as.
            pid: its id; what holds the rank may be a child of it.
            host: the host it ran on.
            reason: how it ended.
            now: the clock.

        Returns:
            The ranks that have failed by that.
        """
        found = []
        for world in self.epochs.values():
            here = [record for record in world.records.values() if record.member.host == host]
            held = [record for record in here if record.member.pid == pid]
            found += [
                (world, record)
                for record in held or [record for record in here if record.member.rank == rank]
                if record.process_exited(reason, now)
            ]
        for world, record in found:
            self._chronicle.state_changes(world, [record], now)
        return [record for _, record in found]

    def poll_timeouts(self, now: float) -> None:
        """Tell the event log who has been silent for too long."""
        for world in self.epochs.values():
            self._chronicle.state_changes(world, world.records.values(), now)

    def withdraw(self, rank: int, instance: str) -> Epoch | None:
        """Free a joiner's place in the forming world.

        Returns:
            The world it waited for, if it did.
        """
        world = self.forming
        if world is None:
            return None
        record = world.find(rank, instance)
        if record is None:
            return None
        world.remove(record)
        if not world.all_records():
            self.forming = None
        return world

    def latest(self) -> Epoch | None:
        """The world that came together last."""
        return self.epochs.get(self._latest())

    def live_ranks(self, now: float) -> int:
        """How many ranks are there, joiners included."""
        return sum(world.live_ranks(now) for world in self)

    def last_seen(self) -> float:
        """The clock at the last sign of life of any rank."""
        return max((record.last_seen for world in self for record in world.all_records()), default=float("-inf"))

    def drop_silent_joiners(self, now: float) -> None:
        """Forget joiners whose processes died, and the forming world if there are no others."""
        if self.forming is None:
            return
        self.forming.drop_silent_joiners(now)
        if not self.forming.all_records():
            self.forming = None

    def _latest(self) -> int:
        return max(self.epochs, default=0)

    def _next_epoch(self) -> int:
        return self._latest() + 1

    def _forming_epoch(self, world_size: int, now: float) -> Epoch:
        self.drop_silent_joiners(now)
        return self.forming or self._new_epoch(self._next_epoch(), world_size)

    def _new_epoch(self, epoch: int, size: int) -> Epoch:
        return Epoch(self.name, epoch, size, self._chronicle)

    def _complete(self, world: Epoch, now: float) -> None:
        world.start(now)
        self.epochs[world.number] = world
        self.forming = None
        self._drop_old_epochs(now)

    def _restore(self, beat: Heartbeat, now: float) -> Epoch:
        """Take up a world that came together before this gateway was started."""
        world = self.epochs[beat.epoch] = self._new_epoch(beat.epoch, beat.world_size)
        if self.forming is not None:
            self.forming.number = self._next_epoch()
        self._drop_old_epochs(now)
        return world

    def _drop_old_epochs(self, now: float) -> None:
        latest = self._latest()
        self.epochs = {epoch: world for epoch, world in self.epochs.items() if epoch == latest or world.live_ranks(now)}
