"""Notification of the failures of a world's ranks, also between calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from rankmesh_agent.group.local import LocalCommunicator
from rankmesh_agent.progress.engine import ProgressEngine
from rankmesh_agent.wire.errors import DistBackendError
from rankmesh_agent.wire.goodbye import Goodbye
from rankmesh_agent.wire.schemas import LostRank


class FailureNotifier:
    """Calls a function with the error of each rank of the world that fails, once for each.

    Args:
        engine: the progress engine.

    Attributes:
        callback: the function, which must not wait; None without one.
    """

    def __init__(self, engine: ProgressEngine) -> None:
        self.callback: Callable[[DistBackendError], None] | None = None
        self._engine = engine
        self._notified: set[int] = set()

    def notify(self, world: LocalCommunicator, lost: Iterable[LostRank]) -> None:
        """Call the function for the failures that are new. Called from time to time, by one thread.

        Args:
            world: the group of all ranks.
            lost: the ranks that the disconnect monitor has found to be gone; the engine may have to read more first.
        """
        callback = self.callback
        if callback is None:
            return
        ends = {each.rank: Goodbye(each.cause, died=True) for each in lost} | dict(self._engine.lost_peers)
        for rank in sorted(ends.keys() - self._notified):
            if rank in world.ranks and not ends[rank].clean:
                self._notified.add(rank)
                with self._engine.lock:
                    error = world.state.loss_error(rank, ends[rank])
                callback(error)
