"""What carries a group's calls and messages over MPI, put together."""

from __future__ import annotations

from rankmesh_agent.group.pending import ActiveCall
from rankmesh_agent.group.state import LocalGroupState
from rankmesh_agent.mpi.backend import MpiBackend
from rankmesh_agent.mpi.communicator import MpiCommunicator
from rankmesh_agent.mpi.messages import MpiMessages
from rankmesh_agent.mpi.watchdog import WATCHDOG, WatchedGroup
from rankmesh_agent.progress.matching import MessageMatcher
from rankmesh_agent.progress.message_link import MessageLink


class MpiGroup:
    """One rank's side of it.

    Args:
        joined: the group's communicator.
        standing: whether the group can go on.
        running: its collective calls.
        link: messages among the members over the mesh.
        matching: the mesh's side of the group's messages between two ranks.

    Attributes:
        backend: carries the collectives.
        messages: carries the messages.
    """

    def __init__(
        self,
        joined: MpiCommunicator,
        standing: LocalGroupState,
        running: ActiveCall,
        link: MessageLink,
        matching: MessageMatcher,
    ) -> None:
        self._mesh = mesh = standing.mesh
        self.backend = MpiBackend(joined.comm, link, mesh.lost_peers, standing.ranks, joined.compare_calls)
        self.messages = MpiMessages(joined.comm, standing.ranks, mesh, matching, standing.global_rank)
        self._guarded = WatchedGroup(standing, running, link, self.backend, self.messages.progress)
        if link.size > 1:
            WATCHDOG.add(self._guarded)

    def lost(self) -> None:
        """Take note that a member is gone; for any thread."""
        WATCHDOG.wake()

    def close(self) -> None:
        """Have nothing look at the calls any more. The backend is closed by whoever has it."""
        WATCHDOG.remove(self._guarded)
        self._guarded.report_progress()  # who waits for this rank in a later call is to know that it does so in vain
        with self._mesh.lock:
            self.messages.close()
