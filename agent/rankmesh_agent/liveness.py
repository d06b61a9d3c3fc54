"""Liveness of a world's ranks: how each has ended, and whom that concerns, also between calls.

A rank that computes for a minute does not drive the progress engine, which reads the ends of connections. So the kernel
wakes the heartbeat thread, which has the engine read an end, and informs the store's waits, the user, the gateway, and
the ranks not connected to the lost one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from types import MappingProxyType

from rankmesh_agent.group.local import LocalCommunicator
from rankmesh_agent.group.state import GroupState
from rankmesh_agent.progress.engine import ProgressEngine
from rankmesh_agent.progress.progress_thread import SLICE_SECONDS
from rankmesh_agent.store.job_store import JobStore
from rankmesh_agent.wire import frames
from rankmesh_agent.wire.errors import DistBackendError, DistError, StoreTimeoutError
from rankmesh_agent.wire.frames import Opcode
from rankmesh_agent.wire.goodbye import Goodbye
from rankmesh_agent.wire.schemas import LostRank

_UNREAD_SECONDS = 0.3
"""Seconds that a GOODBYE of a peer whose connection has ended may stay unread, behind messages without a receiver yet.
A peer that left in order has reported it to the gateway by then."""
_READ_SECONDS = 0.02
"""Interval of the attempts to read the end of a connection: a thread that drives the engine may stop just before it."""
_NEVER = float("inf")
SILENT_SECONDS = 8.0
"""Seconds that a peer's host may leave packets unanswered; with the time before, about FAILED_SECONDS."""
_MAX_PASSED_ON = 64
"""Maximum number of lost ranks that a rank reports to its peers. The first reports already end all calls."""
_NAMED = 4


class Liveness:
    """Detects ends of ranks, and informs of them. For the heartbeat thread, without the engine's lock.

    Each rank ends its own waits for keys, by what it knows itself, as a failure ends collectives. A wait that a
    survivor begins after the failure goes on.

    Attributes:
        world: the group of all ranks; set anew when the world shrinks.
        callback: called with the error of each rank of the world that fails, once; it must not wait. None without one.
    """

    def __init__(self, engine: ProgressEngine, store: JobStore, world: LocalCommunicator) -> None:
        self.world = world
        self.callback: Callable[[DistBackendError], None] | None = None
        self._engine = engine
        self._store = store
        self._peers = len(world.ranks) - 1
        self._ended: dict[int, float] = {}
        self._unanswered_since: dict[int, float] = {}
        """The time of the first check with packets unanswered by a peer's host, by rank."""
        self._reported: set[int] = set()
        self._passed_on: set[int] = set()
        self._called_back: set[int] = set()
        self._known: set[int] = set()
        """The lost ranks for which waits for keys have ended, or need not."""
        self._failed: GroupState | None = None
        """The latest world for whose failure they have."""

    def fileno(self) -> int:
        """Return a descriptor that is readable when a connection has ended."""
        return self._engine.ends.fileno()

    def poll(self) -> bool:
        """Inform of new ends, but the gateway; return whether there is one that ``failed_peers`` has not reported."""
        engine = self._engine
        self._ended |= dict.fromkeys(engine.ended_connections() - self._ended.keys(), time.monotonic())
        if self._ended.keys() - engine.lost_peers.keys() or self._store.waits_under_way():
            engine.progress()  # a GOODBYE may have arrived, or other ranks report a failure
        self._end_store_waits()
        self._call_back()
        return any(lost.rank not in self._reported for lost in self._find())

    def next_check(self) -> float:
        """Return the seconds until ``poll`` has to be called even if the descriptor is not readable."""
        known = self._reported | self._engine.lost_peers.keys()
        waiting = [since for rank, since in self._ended.items() if rank not in known]
        if waiting:
            return min(max(0.0, min(waiting) + _UNREAD_SECONDS - time.monotonic()), _READ_SECONDS)
        return SLICE_SECONDS if self._store.waits_under_way() else _NEVER

    def fail_silent_hosts(self) -> None:
        """Declare peers failed whose hosts have answered nothing for SILENT_SECONDS; called every second.

        TCP itself gives up only after a quarter of an hour.
        """
        engine, now = self._engine, time.monotonic()
        with engine.lock:
            unanswered = {rank: silent for rank in engine.connected() if (silent := engine.silent_seconds(rank))}
            # A window probe may be the first packet in minutes: its answer may still be under way.
            self._unanswered_since = {rank: self._unanswered_since.get(rank, now) for rank in unanswered}
            for rank, since in self._unanswered_since.items():
                silent = min(unanswered[rank], now - since)
                if silent >= SILENT_SECONDS:
                    why = f"its host has answered nothing for {silent:.0f} s: it, or the network to it, is down"
                    engine.lose(rank, Goodbye(why, died=True, silent=True), connected=True)

    def failed_peers(self) -> list[LostRank]:
        """Return the peers that are gone without a GOODBYE, by rank."""
        found = self._find()
        self._reported |= {lost.rank for lost in found}
        return found

    def pass_on(self, unread: Mapping[int, Goodbye] = MappingProxyType({})) -> None:
        """Tell the connected ranks how other ranks were lost, once for each, ``unread`` ends included."""
        engine = self._engine
        if not engine.on_demand:
            return
        with engine.lock:
            ends = {**unread, **engine.lost_peers}
            for rank in [rank for rank, end in ends.items() if not end.clean and rank not in self._passed_on]:
                self._passed_on.add(rank)
                if len(self._passed_on) <= _MAX_PASSED_ON:
                    payload = ends[rank].encode()
                    header = frames.encode(Opcode.GOODBYE, epoch=engine.epoch, tag=rank + 1, length=len(payload))
                    for peer in engine.connected():
                        engine.send(peer, [header, payload])

    def _find(self) -> list[LostRank]:
        lost_peers = self._engine.lost_peers.copy()
        found = {rank: lost.reason for rank, lost in lost_peers.items() if lost.died}
        before = time.monotonic() - _UNREAD_SECONDS
        for rank, since in self._ended.items():
            if rank not in lost_peers and since <= before:
                found[rank] = "its connection has ended, and its last bytes have not been read yet"
        return [LostRank(rank, cause) for rank, cause in sorted(found.items())]

    def _call_back(self) -> None:
        """Call the user's function for the failures that are new."""
        callback, world = self.callback, self.world
        if callback is None:
            return
        ends = {lost.rank: Goodbye(lost.cause, died=True) for lost in self._find()} | self._engine.lost_peers.copy()
        for rank in sorted(ends.keys() - self._called_back):
            if rank in world.ranks and not ends[rank].clean:
                self._called_back.add(rank)
                with self._engine.lock:
                    error = world.state.loss_error(rank, ends[rank])
                callback(error)

    def _end_store_waits(self) -> None:
        """End the waits for keys that began before a failure of the world, or of one of its ranks."""
        engine, store, state = self._engine, self._store, self.world.state
        errors: list[tuple[DistError, float]] = []
        with engine.lock:
            new = {rank: at for rank, at in engine.lost_at.items() if rank not in self._known}
            self._known |= new.keys()
            if state.failure is not None and state.failed_at is not None and self._failed is not state:
                self._failed = state
                errors.append((state.failure, state.failed_at))
            for rank, at in new.items():
                because = state.failed_at is not None and at <= state.failed_at  # the world has failed because of it
                if rank in state.ranks and not engine.lost_peers[rank].clean and not because:
                    errors.append((state.loss_error(rank), at))
            alone = new and len(engine.lost_peers) >= self._peers
            lost = [rank for rank in state.ranks if rank in engine.lost_peers] if alone else []
            losses = "; ".join(state.loss_error(rank).message for rank in lost[:_NAMED])
        for error, at in errors:
            store.fail_waits(error, at)
        if alone:
            store.fail_waits(
                StoreTimeoutError(
                    f"no other rank is left that could set a key{f': {losses}' if losses else ''}",
                    ranks=[state.global_rank(rank) for rank in lost],
                    group=state.name,
                ),
                for_good=True,
            )
