"""The registry against a model of it: any sequence of joins, heartbeats, losses, leaves and pauses."""

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

from rankmesh_agent.wire.errors import RankTakenError, WorldSizeMismatchError
from rankmesh_agent.wire.schemas import FAILED_SECONDS, SUSPECT_SECONDS, UNASSIGNED, Leave, LostRank, Member
from rankmesh_gateway.state.epoch import JOIN_SILENCE_SECONDS
from rankmesh_gateway.state.registry import Registry

ASK = Requests()
PROCESSES = [(rank, life) for rank in (0, 1, 2, 7, 8) for life in (1, 2)]
"""Those of number 7 and 8 join without a rank."""
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


class RegistryMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.registry = Registry(self.clock)
        self.epochs: dict[int, World] = {}
        self.forming: World | None = None
        self.last_used = 0
        self.waiting: list[tuple[Future[Any], str]] = []
        self.ended: set[tuple[int, str]] = set()

    @property
    def now(self) -> float:
        return self.clock.now

    def expect(self, error: type[Exception] | None, call: Any) -> Any:
        try:
            found = call()
        except (RankTakenError, WorldSizeMismatchError) as raised:
            assert type(raised) is error  # noqa: PT017  # which of the two it is, is up to the model
            return None
        assert error is None, f"{error} was expected"
        return found

    def drop_old(self) -> None:
        self.epochs = {n: w for n, w in self.epochs.items() if n == max(self.epochs) or w.live(self.now)}

    def next_number(self) -> int:
        return max(self.last_used, *self.epochs, 0) + 1

    def expire(self) -> None:
        for world in self.epochs.values():
            world.expire(self.now)

    def remove(self, instance: str) -> None:
        if self.forming is not None:
            ranks = {key: rank for key, rank in self.forming.ranks.items() if rank.member.instance != instance}
            self.forming = World(self.forming.size, ranks) if ranks else None

    def awaits(self, instance: str) -> bool:
        return any(waiter == instance for _, waiter in self.waiting)

    @rule(seconds=st.sampled_from([0.1, 1.0, SUSPECT_SECONDS, FAILED_SECONDS, JOIN_SILENCE_SECONDS + 1]))
    def advance(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @rule(process=st.sampled_from(PROCESSES), size=st.sampled_from([1, 2, 2, 2, 3]))
    def join(self, process: tuple[int, int], size: int) -> None:
        number, life = process
        if number < 7 and number >= size:
            return
        request = ASK.join(number, size, life=life) if number < 7 else ASK.join_unassigned(number, size, life=life)
        member = request.member
        before = [
            n
            for n, world in self.epochs.items()
            if len(world.ranks) == world.size
            and any(r.member.instance == member.instance for r in world.ranks.values())
        ]
        if before:
            assert self.registry.join(request).result(timeout=0).epoch == before[0]
            return
        latest = self.epochs.get(max(self.epochs, default=0))
        if latest is not None:
            full = member.rank == UNASSIGNED and size == latest.size and latest.live(self.now) >= size
            if full or latest.taken(member, self.now):
                self.expect(RankTakenError, lambda: self.registry.join(request))
                return
        for rank in list(self.forming.ranks.values()) if self.forming is not None else ():
            if self.now - rank.seen > JOIN_SILENCE_SECONDS and not self.awaits(rank.member.instance):
                self.remove(rank.member.instance)
        error = None
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
        unassigned = iter([rank for key, rank in world.ranks.items() if isinstance(key, str)])
        ranks = {n: world.ranks.get(n) or next(unassigned) for n in range(world.size)}
        for n, rank in ranks.items():
            ranks[n] = Rank(replace(rank.member, rank=n), self.now, joining=False)
        number = self.last_used = self.next_number()
        self.epochs[number] = World(world.size, ranks)
        self.drop_old()
        assert (reply.complete, reply.epoch, reply.missing) == (True, number, [])
        assert reply.members == [rank.member for rank in ranks.values()]
        assert all(future.result(timeout=0) is reply for future, _ in self.waiting)
        self.waiting = []

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def stop_waiting(self, data: st.DataObject) -> None:
        future, _ = self.waiting.pop(data.draw(st.integers(0, len(self.waiting) - 1)))
        assert future.cancel()

    @rule(process=st.sampled_from(PROCESSES))
    def withdraw(self, process: tuple[int, int]) -> None:
        number, life = process
        request = ASK.join(number, 8, life=life) if number < 7 else ASK.join_unassigned(number, life=life)
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
        number = max(1, number + later)
        beat = replace(ASK.heartbeat(0, size, epoch=number), member=member, watches_peers=watches)
        beat.lost = [LostRank(rank, "closed") for rank in sorted(lost) if rank < size]
        latest = max(self.epochs, default=0)
        if number not in self.epochs and number < latest:
            assert self.registry.heartbeat(beat).failed == []
            return
        world = self.epochs.get(number)
        error = None
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

    @rule(
        process=st.sampled_from(PROCESSES),
        place=st.sampled_from([0, 1, 2, UNASSIGNED]),
        reason=st.sampled_from(["", "x"]),
    )
    def leave(self, process: tuple[int, int], place: int, reason: str) -> None:
        instance = ASK.member(*process).instance
        self.registry.leave(Leave("job", 1, place, instance, reason))
        for world in self.epochs.values():
            for n, rank in world.ranks.items():
                if rank.member.instance == instance and place in (n, UNASSIGNED):
                    rank.end("failed" if reason else "left", self.now)
        if any(world.live(self.now) for world in self.epochs.values()):
            self.epochs = {n: world for n, world in self.epochs.items() if world.live(self.now)}
        forming = self.forming.ranks if self.forming is not None else {}
        if any(r.member.instance == instance and place in (r.member.rank, UNASSIGNED) for r in forming.values()):
            assert all(future.cancelled() for future, waiter in self.waiting if waiter == instance)
            self.waiting = [each for each in self.waiting if each[1] != instance]
            self.remove(instance)

    @rule(process=st.sampled_from(PROCESSES), parent=st.booleans())
    def process_exited(self, process: tuple[int, int], parent: bool) -> None:
        member = ASK.member(*process)
        pid = 4711 if parent else member.pid
        self.registry.process_exited("job", process[0], pid, member.host, "exit code 1")
        for world in self.epochs.values():
            here = {n: rank for n, rank in world.ranks.items() if rank.member.host == member.host}
            held = [rank for rank in here.values() if rank.member.pid == pid]
            for rank in held or [rank for n, rank in here.items() if n == process[0]]:
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
        live = sum(world.live(self.now) for _, world in worlds)
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
        for event in log.since(log.resume_position(0)):
            data = json.loads(event.data)
            for rank in data["ranks"]:
                state = "alive" if event.kind == "world-complete" else EVENTS.get(event.kind, "left")
                assert logged.get((data["epoch"], rank)) != state or state == "joining"
                logged[data["epoch"], rank] = state
        for n, world in self.epochs.items():
            for rank, record in world.ranks.items():
                assert logged[n, rank] == record.state(self.now)


TestRegistry = pytest.mark.slow(RegistryMachine.TestCase)
TestRegistry.settings = settings(
    max_examples=60, stateful_step_count=40, derandomize=True, deadline=None, database=None
)
