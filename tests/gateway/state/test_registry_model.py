"""The registry against a model of it: joins, heartbeats, losses, leaves, pauses, growths and restarts in any order."""

from __future__ import annotations

import json
from collections import Counter
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from support.gateway_requests import Clock, Requests

from rankmesh_agent.wire.errors import JobEndedError, RankTakenError, WorldSizeMismatchError
from rankmesh_agent.wire.schemas import FAILED_SECONDS, SUSPECT_SECONDS, UNASSIGNED, Leave, LostRank, Member
from rankmesh_gateway.state.epoch import JOIN_SILENCE_SECONDS
from rankmesh_gateway.state.registry import Registry

ASK = Requests()
PROCESSES = [(rank, life) for rank in (0, 1, 2, 7, 8) for life in (1, 2)]
"""Those of number 7 and 8 join without a rank."""
JOINING = st.sampled_from(PROCESSES).map(lambda process: [process])
WAITING = [(number, life) for number in (4, 5, 6) for life in (1, 2)]
EVENTS = {"rank-joining": "joining", "rank-alive": "alive", "rank-suspect": "suspect", "rank-failed": "failed"}


@dataclass
class Rank:
    """A rank of the model."""

    member: Member
    seen: float
    joining: bool = True
    ended: str = ""
    exited: bool = False
    reported: frozenset[int] = frozenset()
    watches: bool = False

    def state(self, now: float) -> str:
        if self.ended or self.joining:
            return self.ended or "joining"
        return "suspect" if now - self.seen >= SUSPECT_SECONDS else "alive"

    def end(self, state: str, now: float) -> None:
        if not self.exited:
            self.ended, self.exited, self.seen = state, True, now


@dataclass
class World:
    """An epoch of the model; a rank without a number is kept under its instance."""

    size: int
    ranks: dict[Any, Rank] = field(default_factory=dict)
    grown: bool = False

    def expire(self, now: float) -> None:
        """The silent fail, but those to which a peer that is heard is connected."""
        for number, rank in self.ranks.items():
            if rank.ended or rank.joining or now - rank.seen < FAILED_SECONDS:
                continue
            peers = [other for other in self.ranks.values() if other is not rank and other.watches and not other.ended]
            if not any(number not in other.reported and now - other.seen < FAILED_SECONDS for other in peers):
                rank.ended = "failed"

    def live(self, now: float) -> int:
        return sum(rank.state(now) not in ("left", "failed") for rank in self.ranks.values())

    def taken(self, member: Member, now: float) -> bool:
        held = self.ranks.get(member.rank)
        return (
            held is not None and held.member.instance != member.instance and held.state(now) not in ("left", "failed")
        )


@dataclass
class Growth:
    """A growth of the model: its size, the epoch and size before, its ranks, and who waits with a place in it."""

    size: int
    base: tuple[int, int]
    ranks: dict[int, Rank] = field(default_factory=dict)
    placed: list[Rank] = field(default_factory=list)


class RegistryMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.registry = Registry(self.clock)
        self.epochs: dict[int, World] = {}
        self.forming: World | None = None
        self.growth: Growth | None = None
        self.queue: list[Rank] = []
        self.last_used = self.last_ended = self.attempt = 0
        self.waiting: list[tuple[Future[Any], str]] = []
        self.ended: set[tuple[int, str]] = set()

    @property
    def now(self) -> float:
        return self.clock.now

    def expect(self, error: type[Exception] | None, call: Any) -> Any:
        try:
            found = call()
        except (JobEndedError, RankTakenError, WorldSizeMismatchError) as raised:
            assert type(raised) is error  # noqa: PT017  # which of them it is, is up to the model
            return None
        assert error is None, f"{error} was expected"
        return found

    def drop_old(self) -> None:
        self.epochs = {n: w for n, w in self.epochs.items() if n == max(self.epochs) or w.live(self.now)}

    def next_number(self) -> int:
        return max(self.last_used, self.last_ended, *self.epochs, 0) + 1

    def expire(self) -> None:
        for world in self.epochs.values():
            world.expire(self.now)
        for n, world in list(self.epochs.items()):  # the one before goes on
            if world.grown and not world.live(self.now) and not self.has_ended():
                del self.epochs[n]

    def has_ended(self) -> bool:
        return bool(self.epochs) and not any(world.live(self.now) for world in self.epochs.values())

    def known(self, member: Member) -> int:
        """The epoch of a complete world that a process is in, or 0."""
        return next(
            (
                n
                for n, world in self.epochs.items()
                if len(world.ranks) == world.size
                and any(rank.member.instance == member.instance for rank in world.ranks.values())
            ),
            0,
        )

    def remove(self, instance: str) -> None:
        if self.forming is not None:
            ranks = {key: rank for key, rank in self.forming.ranks.items() if rank.member.instance != instance}
            self.forming = World(self.forming.size, ranks) if ranks else None
        if self.growth is not None:
            self.growth.placed = [rank for rank in self.growth.placed if rank.member.instance != instance]
            self.growth.ranks = {n: r for n, r in self.growth.ranks.items() if r.member.instance != instance}
        self.queue = [rank for rank in self.queue if rank.member.instance != instance]
        self.settle()

    def settle(self) -> None:
        """Who waits gets the free places, or is on the list again when the ranks have given up."""
        if self.growth is not None and not self.growth.ranks:
            self.queue += self.growth.placed
            self.growth = None
        if self.growth is not None:
            free = max(0, self.growth.size - self.growth.base[1] - len(self.growth.placed))
            self.growth.placed += self.queue[:free]
            self.queue = self.queue[free:]

    def joiners(self) -> list[Rank]:
        """Who waits in the forming epoch, in the growth, and for it."""
        found = list(self.forming.ranks.values()) if self.forming is not None else []
        return (
            found + ([*self.growth.ranks.values(), *self.growth.placed] if self.growth is not None else []) + self.queue
        )

    def drop_silent(self) -> None:
        for rank in reversed(self.joiners()):
            if self.now - rank.seen > JOIN_SILENCE_SECONDS and not self.awaits(rank.member.instance):
                self.remove(rank.member.instance)

    def awaits(self, instance: str) -> bool:
        return any(waiter == instance for _, waiter in self.waiting)

    @rule(seconds=st.sampled_from([0.1, 1.0, SUSPECT_SECONDS, FAILED_SECONDS, JOIN_SILENCE_SECONDS + 1]))
    def advance(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @rule(
        processes=st.one_of(st.sampled_from([[(0, 1), (1, 1)], [(0, 2), (1, 2)]]), JOINING, JOINING),
        size=st.sampled_from([1, 2, 2, 2, 3]),
        later=st.sampled_from([*[0] * 9, -1, 1]),
    )
    def join(self, processes: list[tuple[int, int]], size: int, later: int) -> None:
        for number, life in processes:
            self.join_as(number, life, size, later)

    def join_as(self, number: int, life: int, size: int, later: int) -> None:
        if number < 7 and number >= size:
            return
        request = ASK.join(number, size, life=life) if number < 7 else ASK.join_unassigned(number, size, life=life)
        request.attempt, member = max(0, self.attempt + later), request.member
        if request.attempt < self.attempt:
            self.expect(RankTakenError, lambda: self.registry.join(request))
            return
        if request.attempt > self.attempt:
            self.begin_attempt()
        before = self.known(member)
        if before:
            assert self.registry.join(request).result(timeout=0).epoch == before
            return
        latest = self.epochs.get(max(self.epochs, default=0))
        if latest is not None:
            full = member.rank == UNASSIGNED and size == latest.size and latest.live(self.now) >= size
            if full or latest.taken(member, self.now):
                self.expect(RankTakenError, lambda: self.registry.join(request))
                return
        if self.forming is not None:
            self.drop_silent()
        error: type[Exception] | None = None
        if self.forming is not None and self.forming.size != size:
            error = WorldSizeMismatchError
        elif self.forming is not None and self.forming.taken(member, self.now):
            error = RankTakenError
        future = self.expect(error, lambda: self.registry.join(request))
        if error is not None:
            return
        self.forming = self.forming or World(size)
        self.forming.ranks[member.instance if number >= 7 else number] = Rank(member, self.now)
        self.waiting.append((future, member.instance))
        if len(self.forming.ranks) == size:
            self.complete(future.result(timeout=0))

    def complete(self, reply: Any) -> None:
        assert self.forming is not None
        world, self.forming = self.forming, None
        unassigned = [rank for key, rank in world.ranks.items() if isinstance(key, str)]
        self.begin_epoch(
            World(world.size, {n: world.ranks[n] for n in range(world.size) if n in world.ranks}), unassigned, reply
        )

    def begin_epoch(self, world: World, unassigned: list[Rank], reply: Any) -> None:
        """Complete a world, in which the unassigned get the free ranks in their order."""
        rest = iter(unassigned)
        ranks = {n: world.ranks.get(n) or next(rest) for n in range(world.size)}
        world.ranks = {n: Rank(replace(rank.member, rank=n), self.now, joining=False) for n, rank in ranks.items()}
        number = self.last_used = self.next_number()
        self.epochs[number] = world
        self.drop_old()
        assert (reply.complete, reply.epoch, reply.missing) == (True, number, [])
        assert reply.members == [rank.member for rank in world.ranks.values()]
        instances = {member.instance for member in reply.members}
        assert all(future.result(timeout=0) is reply for future, waiter in self.waiting if waiter in instances)
        self.waiting = [each for each in self.waiting if each[1] not in instances]

    @rule(processes=st.lists(st.sampled_from(WAITING), min_size=1, max_size=2))
    def await_growth(self, processes: list[tuple[int, int]]) -> None:
        for number, life in processes:
            self.join_growth(ASK.waiting(number, life=life))

    @rule(
        ranks=st.sampled_from([[0], [1], [0, 1], [0, 1], [1, 0], [0, 1, 2], [2, 1, 0]]),
        more=st.sampled_from([0, 1, 1, 1, 2]),
        life=st.sampled_from([10, 10, 10, 10, 20]),
        anew=st.sampled_from([0, 5]),
    )
    def grow(self, ranks: list[int], more: int, life: int, anew: int) -> None:
        """As ranks of the latest world; a gateway that is new may not know that."""
        for rank in ranks:
            self.grow_as(rank, more, life, anew)

    def grow_as(self, rank: int, more: int, life: int, anew: int) -> None:
        epoch = max(self.epochs, default=anew)
        size = self.epochs[epoch].size if epoch in self.epochs else 2
        if epoch and rank < size and (epoch in self.epochs or self.forming is None):
            request = ASK.growth(rank, size + more, size=size, epoch=epoch, life=life + epoch)
            request.attempt = self.attempt
            self.join_growth(request)

    def join_growth(self, request: Any) -> None:
        member, growth = request.member, self.growth
        before = self.known(member)
        if before:
            assert self.registry.join(request).result(timeout=0).epoch == before
            return
        self.drop_silent()
        error: type[Exception] | None = None
        if request.growth is None:
            error = JobEndedError if self.has_ended() else None
        else:
            growth, base = self.growth, (request.growth.epoch, request.growth.size)
            self.last_used = max(self.last_used, base[0])
            if growth is not None and (growth.base != base or growth.size != request.world_size):
                error = WorldSizeMismatchError
            elif growth is not None and World(growth.size, growth.ranks).taken(member, self.now):
                error = RankTakenError
        future = self.expect(error, lambda: self.registry.join(request))
        if error is not None:
            return
        known = [rank for rank in self.joiners() if rank.member.instance == member.instance]
        if known:
            known[0].seen = self.now
        elif request.growth is None:
            self.queue.append(Rank(member, self.now))
        else:
            self.growth = self.growth or Growth(request.world_size, base)
            self.growth.ranks[member.rank] = Rank(member, self.now)
        self.settle()
        self.waiting.append((future, member.instance))
        if self.growth is not None and len(self.growth.ranks) + len(self.growth.placed) == self.growth.size:
            growth, self.growth = self.growth, None
            self.begin_epoch(World(growth.size, growth.ranks, grown=True), growth.placed, future.result(timeout=0))

    @rule()
    def list_those_who_wait(self) -> None:
        self.drop_silent()
        placed = self.growth.placed if self.growth is not None else []
        listed = [each.member.instance for each in self.registry.waiting()]
        assert listed == [rank.member.instance for rank in placed + self.queue]
        if self.growth is not None:
            (epoch, size), ranks = self.growth.base, self.growth.ranks
            request = ASK.growth(0, self.growth.size, size=size, epoch=epoch)
            status = self.registry.join_status(replace(request, member=next(iter(ranks.values())).member))
            assert [each.instance for each in status.members] == [
                rank.member.instance for rank in [*(ranks[n] for n in sorted(ranks)), *placed]
            ]
            assert status.missing == [n for n in range(self.growth.size) if n not in ranks]

    @rule(later=st.sampled_from([0, 1]))
    def restart(self, later: int) -> None:
        before, old = self.registry.ranks(), self.attempt
        waited = [future for future, _ in self.waiting]
        self.registry.restart("job", self.attempt + later)
        if later:
            self.begin_attempt()
            assert all(future.cancelled() for future in waited)
            assert self.registry.attempt_ranks("job", old) == before

    def begin_attempt(self) -> None:
        self.last_ended = max(self.epochs, default=self.last_ended)
        self.attempt += 1
        self.epochs, self.forming, self.growth, self.queue, self.waiting = {}, None, None, [], []

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def stop_waiting(self, data: st.DataObject) -> None:
        future, _ = self.waiting.pop(data.draw(st.integers(0, len(self.waiting) - 1)))
        assert future.cancel()

    def process(self, data: st.DataObject) -> tuple[int, int]:
        """A process, the ranks of growths among them."""
        growers = [(rank, life + n) for n in self.epochs for rank in range(2) for life in (10, 20)]
        return data.draw(st.sampled_from(PROCESSES + WAITING + growers))

    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        number, life = self.process(data)
        request = ASK.join(number, 9, life=life) if number < 7 else ASK.join_unassigned(number, life=life)
        self.registry.withdraw_join(request)
        if not self.awaits(request.member.instance):
            self.remove(request.member.instance)

    @rule(
        data=st.data(),
        lost=st.sets(st.integers(0, 2), max_size=2),
        later=st.sampled_from([0, 0, 0, 1, -1]),
        watches=st.booleans(),
    )
    def heartbeat(self, data: st.DataObject, lost: set[int], later: int, watches: bool) -> None:
        held = [(n, w.size, r.member) for n, w in self.epochs.items() for r in w.ranks.values()]
        strangers = [(1, 2, ASK.member(rank, 2)) for rank in range(2)]
        number, size, member = data.draw(st.sampled_from(held * 3 + strangers))
        self.beat(max(1, number + later), size, member, lost, watches=watches)

    @precondition(lambda self: len(self.epochs) > 1)
    @rule()
    def the_first_world_alone_is_heard(self) -> None:
        for _ in range(2):
            self.clock.advance(FAILED_SECONDS / 2)
            number = min(self.epochs)
            for rank in list(self.epochs[number].ranks.values()):
                if not rank.ended:
                    self.beat(number, self.epochs[number].size, rank.member, set())

    def beat(self, number: int, size: int, member: Member, lost: set[int], *, watches: bool = False) -> None:
        beat = replace(ASK.heartbeat(0, size, epoch=number), member=member, watches_peers=watches)
        beat.lost = [LostRank(rank, "closed") for rank in sorted(lost) if rank < size]
        latest = max(self.epochs, default=0)
        if number not in self.epochs and (number <= self.last_ended or number < latest):
            assert self.registry.heartbeat(beat).failed == []
            return
        world = self.epochs.get(number)
        error: type[Exception] | None = None
        if world is None:
            world = self.epochs[number] = World(size)
            self.last_used = max(self.last_used, number)
            self.drop_old()
        elif world.size != size:
            error = WorldSizeMismatchError
        elif world.taken(member, self.now):
            error = RankTakenError
        self.registry._polled = float("-inf")
        reply = self.expect(error, lambda: self.registry.heartbeat(beat))
        if error is not None:
            return
        rank = world.ranks.get(member.rank)
        if rank is None or rank.member.instance != member.instance:
            rank = world.ranks[member.rank] = Rank(member, self.now)
        if not rank.ended:
            rank.seen, rank.joining, rank.watches = self.now, False, watches
            reported, rank.reported = rank.reported, frozenset(each.rank for each in beat.lost)
            for n in rank.reported - reported:
                other = world.ranks.get(n)
                if other is not None and other is not rank and not other.ended:
                    other.ended = "failed"
        self.expire()
        assert reply.failed == sorted(n for n, r in world.ranks.items() if r.ended == "failed")

    @rule(data=st.data(), place=st.sampled_from([0, 1, 2, UNASSIGNED]), reason=st.sampled_from(["", "x"]))
    def leave(self, data: st.DataObject, place: int, reason: str) -> None:
        instance = ASK.member(*self.process(data)).instance
        self.registry.leave(Leave("job", 1, place, instance, reason))
        for world in self.epochs.values():
            for n, rank in world.ranks.items():
                if rank.member.instance == instance and place in (n, UNASSIGNED):
                    rank.end("failed" if reason else "left", self.now)
        if any(world.live(self.now) for world in self.epochs.values()):
            self.epochs = {n: world for n, world in self.epochs.items() if world.live(self.now)}
        forming = list(self.forming.ranks.values()) if self.forming is not None else []
        joins = [rank for rank in self.joiners() if rank.member.instance == instance]
        if any(rank not in forming or place in (rank.member.rank, UNASSIGNED) for rank in joins):
            assert all(future.cancelled() for future, waiter in self.waiting if waiter == instance)
            self.waiting = [each for each in self.waiting if each[1] != instance]
            self.remove(instance)
        if self.has_ended():
            queued = {rank.member.instance for rank in self.queue}
            assert all(future.cancelled() for future, waiter in self.waiting if waiter in queued)
            self.waiting = [each for each in self.waiting if each[1] not in queued]

    @rule(data=st.data(), parent=st.booleans())
    def process_exited(self, data: st.DataObject, parent: bool) -> None:
        process = self.process(data)
        member = ASK.member(*process)
        pid = 4711 if parent else member.pid
        self.registry.process_exited("job", process[0], pid, member.host, "exit code 1")
        for world in self.epochs.values():
            here = {n: rank for n, rank in world.ranks.items() if rank.member.host == member.host}
            held = [rank for rank in here.values() if rank.member.pid == pid]
            for rank in held or [rank for n, rank in here.items() if n == process[0] and not world.grown]:
                rank.end("failed", self.now)

    @invariant()
    def the_ranks_are_those_of_the_model(self) -> None:
        self.expire()
        number = self.next_number()
        worlds = [*sorted(self.epochs.items()), *([(number, self.forming)] if self.forming is not None else [])]
        expected = [
            (n, r.member.instance, r.member.rank, r.state(self.now)) for n, w in worlds for r in w.ranks.values()
        ]
        infos = self.registry.ranks()
        found = [(info.epoch, info.member.instance, info.member.rank, info.state) for info in infos]
        assert Counter(found) == Counter(expected)
        ended = {(info.epoch, info.member.instance) for info in infos if info.state in ("left", "failed")}
        assert self.ended & {(info.epoch, info.member.instance) for info in infos} <= ended, "the end is final"
        self.ended |= ended
        live = sum(world.live(self.now) for world in self.epochs.values()) + len(self.joiners())
        assert self.registry.counts() == (int(live > 0), live)
        assert {job.epoch: Counter(job.ranks) for job in self.registry.jobs()} == {
            n: Counter(rank.state(self.now) for rank in world.ranks.values()) for n, world in worlds
        }
        assert not any(future.done() for future, _ in self.waiting)
        if self.forming is not None:
            status = self.registry.join_status(ASK.join(0, life=9))
            assert (status.complete, status.epoch, status.world_size) == (False, number, self.forming.size)
            assert status.missing == [n for n in range(self.forming.size) if n not in self.forming.ranks]

    @invariant()
    def the_log_has_each_change_once(self) -> None:
        self.registry.poll_timeouts()
        self.expire()
        logged: dict[tuple[int, int], str] = {}
        log = self.registry.events
        assert log.counts()["job-restarted"] == self.attempt
        for event in log.since(log.resume_position(0)):
            data = json.loads(event.data)
            for rank in data["ranks"]:
                state = "alive" if event.kind == "world-complete" else EVENTS.get(event.kind, "left")
                unnumbered = event.kind in ("rank-joining", "rank-left") and data["epoch"] not in self.epochs
                assert logged.get((data["epoch"], rank)) != state or state == "joining" or unnumbered
                logged[data["epoch"], rank] = state
        for n, world in self.epochs.items():
            for rank, record in world.ranks.items():
                assert logged[n, rank] == record.state(self.now)


TestRegistry = pytest.mark.slow(RegistryMachine.TestCase)
TestRegistry.settings = settings(
    max_examples=60, stateful_step_count=40, derandomize=True, deadline=None, database=None
)
