"""MPI side of a group: the backend for its collectives, its messages, and the watchdog of both."""

from __future__ import annotations

from rankmesh_agent.group.pending import LocalActiveCall
from rankmesh_agent.group.state import LocalGroupState
from rankmesh_agent.mpi.backend import MpiBackend
from rankmesh_agent.mpi.communicator import MpiCommunicator
from rankmesh_agent.mpi.messages import MpiMessages
from rankmesh_agent.mpi.watchdog import WATCHDOG, CallWatchdog
from rankmesh_agent.progress.matching import MessageMatcher
from rankmesh_agent.progress.message_link import MessageLink


class MpiGroup:
    """One rank's MPI side of a group.

    Args:
        made: the group's MPI communicator.
        state: of the group.
        active: the active collective call.
        link: messages among the members, outside of MPI.
        matching: the group's point-to-point messages outside of MPI.

    Attributes:
        backend: runs the collectives.
        messages: transports the point-to-point messages.
    """

    def __init__(
        self,
        made: MpiCommunicator,
        state: LocalGroupState,
        active: LocalActiveCall,
        link: MessageLink,
        matching: MessageMatcher,
    ) -> None:
        self._mesh = mesh = state.mesh
        self.backend = MpiBackend(made.comm, link, mesh.lost_peers, state.ranks, made.compare_calls)
        self.messages = MpiMessages(made.comm, state.ranks, mesh, matching, state.global_rank)
        self._watchdog = CallWatchdog(state, active, link, self.backend, self.messages.progress)
        self._check = self._watchdog.check
        if link.size > 1:
            WATCHDOG.add(self._check)

    def lost(self) -> None:
        """Check the calls at once, as a member is lost. Thread-safe."""
        WATCHDOG.wake()

    def close(self) -> None:
        """End the watch and the messages. The owner of the backend closes that."""
        WATCHDOG.remove(self._check)
        self._watchdog.report_progress()  # ranks in a later call learn that this rank does not make it
        with self._mesh.lock:
            self.messages.close()
