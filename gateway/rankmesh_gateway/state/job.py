"""A job: the worlds of its epochs, and the rules by which ranks get into them."""

from __future__ import annotations

from collections.abc import Iterator

from rankmesh_agent.wire.schemas import Heartbeat, JoinRequest, Leave, Member
from rankmesh_gateway.state.epoch import World
from rankmesh_gateway.state.event_writer import Chronicle
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

    def __init__(self, name: str, chronicle: Chronicle) -> None:
        self.name = name
        self._chronicle = chronicle
        self.worlds: dict[int, World] = {}
        self.forming: World | None = None

    def __iter__(self) -> Iterator[World]:
        """The worlds from the oldest to the one that is forming."""
        yield from (self.worlds[epoch] for epoch in sorted(self.worlds))
        if self.forming is not None:
            yield self.forming

    def join(self, request: JoinRequest, now: float) -> World:
        """Admit a rank to the forming world, which may be complete by that.

        Returns:
            The world the rank is in: the one that is complete when this very process joined it earlier.

        Raises:
            RankTakenError: another process that runs holds the rank, or others hold all ranks.
            WorldSizeMismatchError: the forming world has another size.
        """
        member = request.member
        joined = self.joined(member)
        if joined is not None:
            return joined
        if self.worlds:
            latest = self.worlds[self._latest()]
            latest.refuse_taken_rank(member, now)
            latest.refuse_one_too_many(request.world_size, member, now)
        world = self._forming(request.world_size, now)
        world.refuse_other_size(request.world_size, member)
        world.refuse_taken_rank(member, now)
        known = world.holder(member.rank, member.instance)
        record = world.admit(member, now)
        if known is None:
            self._chronicle.joining(world, record)
        self.forming = world
        if world.complete:
            self._complete(world, now)
        return world

    def joined(self, member: Member) -> World | None:
        """The complete world that this very process is in."""
        for world in self.worlds.values():
            if world.complete and world.holder(member.rank, member.instance) is not None:
                return world
        return None

    def standing(self, request: JoinRequest) -> World:
        """The world a join waits for; an empty one when nobody waits any more."""
        fresh = self._world(self._next_epoch(), request.world_size)
        return self.joined(request.member) or self.forming or fresh

    def heartbeat(self, beat: Heartbeat, now: float) -> tuple[World | None, list[RankRecord]]:
        """Take in a sign of life.

        Returns:
            The world it belongs to; None when that is over and forgotten, as a newer one has come together. And the
            ranks that have failed, as this one saw.

        Raises:
            RankTakenError: another process that runs holds this rank of the epoch.
            WorldSizeMismatchError: the epoch's other ranks have another world size.
        """
        world = self.worlds.get(beat.epoch)
        if world is None:
            if self.worlds and beat.epoch < self._latest():
                return None, []
            world = self._learn(beat, now)
        world.refuse_other_size(beat.world_size, beat.member)
        world.refuse_taken_rank(beat.member, now)
        record = world.holder(beat.member.rank, beat.member.instance) or world.admit(beat.member, now)
        before = record.groups
        record.beat(beat.groups, now)
        lost = world.lose(record, beat.lost, now)
        self._chronicle.look(world, [record, *lost], now)
        self._chronicle.groups(world, record, before, now)
        return world, lost

    def leave(self, goodbye: Leave, now: float) -> None:
        """Take in a goodbye from a world that came together."""
        for world in self.worlds.values():
            record = world.holder(goodbye.rank, goodbye.instance)
            if record is not None:
                before = record.groups
                record.end(goodbye.reason, now)
                self._chronicle.look(world, [record], now)
                self._chronicle.groups(world, record, before, now)

    def end(self, rank: int, pid: int, host: str, reason: str, now: float) -> list[RankRecord]:
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
        for world in self.worlds.values():
            here = [record for record in world.records.values() if record.member.host == host]
            held = [record for record in here if record.member.pid == pid]
            found += [
                (world, record)
                for record in held or [record for record in here if record.member.rank == rank]
                if record.fail(reason, now)
            ]
        for world, record in found:
            self._chronicle.look(world, [record], now)
        return [record for _, record in found]

    def look(self, now: float) -> None:
        """Tell the event log who has been silent for too long."""
        for world in self.worlds.values():
            self._chronicle.look(world, world.records.values(), now)

    def withdraw(self, rank: int, instance: str) -> World | None:
        """Free a joiner's place in the forming world.

        Returns:
            The world it waited for, if it did.
        """
        world = self.forming
        if world is None:
            return None
        record = world.holder(rank, instance)
        if record is None:
            return None
        world.remove(record)
        if not world.everyone():
            self.forming = None
        return world

    def latest(self) -> World | None:
        """The world that came together last."""
        return self.worlds.get(self._latest())

    def present(self, now: float) -> int:
        """How many ranks are there, joiners included."""
        return sum(world.present(now) for world in self)

    def last_seen(self) -> float:
        """The clock at the last sign of life of any rank."""
        return max((record.seen for world in self for record in world.everyone()), default=float("-inf"))

    def drop_silent_joiners(self, now: float) -> None:
        """Forget joiners whose processes died, and the forming world if there are no others."""
        if self.forming is None:
            return
        self.forming.drop_silent_joiners(now)
        if not self.forming.everyone():
            self.forming = None

    def _latest(self) -> int:
        return max(self.worlds, default=0)

    def _next_epoch(self) -> int:
        return self._latest() + 1

    def _forming(self, world_size: int, now: float) -> World:
        self.drop_silent_joiners(now)
        return self.forming or self._world(self._next_epoch(), world_size)

    def _world(self, epoch: int, size: int) -> World:
        return World(self.name, epoch, size, self._chronicle)

    def _complete(self, world: World, now: float) -> None:
        world.begin(now)
        self.worlds[world.epoch] = world
        self.forming = None
        self._drop_old_worlds(now)

    def _learn(self, beat: Heartbeat, now: float) -> World:
        """Take up a world that came together before this gateway was started."""
        world = self.worlds[beat.epoch] = self._world(beat.epoch, beat.world_size)
        if self.forming is not None:
            self.forming.epoch = self._next_epoch()
        self._drop_old_worlds(now)
        return world

    def _drop_old_worlds(self, now: float) -> None:
        latest = self._latest()
        self.worlds = {epoch: world for epoch, world in self.worlds.items() if epoch == latest or world.present(now)}
