"""Monitor of the waits for keys of a job's store: the failure of a rank ends them, as it ends collectives."""

from __future__ import annotations

from functools import partial

from rankmesh_agent.group.local import LocalCommunicator
from rankmesh_agent.progress.engine import ProgressEngine
from rankmesh_agent.store.job_store import JobStore
from rankmesh_agent.wire.errors import DistError, StoreTimeoutError

_NAMED = 4
"""Maximum number of ranks in a message."""


class StoreWaitMonitor:
    """Ends the waits of this rank that are under way when it learns of a failure.

    Each rank ends its own waits, by what it knows itself: a wait that a survivor begins after the failure goes on,
    wherever the keys are.

    Args:
        engine: the progress engine.
        job_store: the job's store.
        world: the group of all ranks.
    """

    def __init__(self, engine: ProgressEngine, job_store: JobStore, world: LocalCommunicator) -> None:
        self._engine = engine
        self._job_store = job_store
        self._peers = len(world.ranks) - 1
        self._known: set[int] = set()
        self.follow(world)
        with engine.lock:
            engine.on_peer_lost = self._on_peer_lost
            if engine.lost_peers:
                self._end_all_if_alone()

    def follow(self, world: LocalCommunicator) -> None:
        """End the waits when this group fails from now on: the world has shrunk to it."""
        with self._engine.lock:
            self._world = world
            world.state.on_failure.append(partial(self._on_failure, world))

    def progress(self) -> None:
        """Receive the failures that other ranks report, if a wait is under way. Called from time to time."""
        if self._job_store.waits_under_way():
            self._engine.progress()

    # With the engine's lock held

    def _on_failure(self, world: LocalCommunicator, failure: DistError) -> None:
        if world is self._world:
            self._known.update(self._engine.lost_peers)
            self._job_store.fail_waits(failure)

    def _on_peer_lost(self, rank: int) -> None:
        world, lost = self._world, self._engine.lost_peers[rank]
        if not lost.clean and rank in world.ranks and rank not in self._known:  # the world has failed before
            self._job_store.fail_waits(world.state.loss_error(rank))
        self._known.add(rank)
        self._end_all_if_alone()

    def _end_all_if_alone(self) -> None:
        lost, state = self._engine.lost_peers, self._world.state
        if len(lost) < self._peers:
            return
        ranks = [rank for rank in state.ranks if rank in lost]
        losses = "; ".join(state.loss_error(rank).message for rank in ranks[:_NAMED])
        self._job_store.fail_waits(
            StoreTimeoutError(
                f"no other rank is left that could set a key{f': {losses}' if losses else ''}",
                ranks=[state.global_rank(rank) for rank in ranks],
                group=state.name,
            ),
            for_good=True,
        )
