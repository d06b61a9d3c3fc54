"""MPI backend of a group: its collectives, its point-to-point messages, and the watchdog over both."""

from __future__ import annotations

from rankmesh_agent.backends.cpu import CpuBackend
from rankmesh_agent.group.local import LocalCommunicator
from rankmesh_agent.mpi.backend import MpiBackend
from rankmesh_agent.mpi.communicator import MpiCommunicator, create_communicator
from rankmesh_agent.mpi.messages import MpiMessages
from rankmesh_agent.mpi.watchdog import WATCHDOG, WatchedGroup


class MpiGroup(MpiBackend):
    """Executes the calls of a group over MPI, carries its messages, and has the watchdog check both.

    Args:
        group: the group.
        communicator: its MPI communicator.
    """

    messages: MpiMessages

    def __init__(self, group: LocalCommunicator, communicator: MpiCommunicator) -> None:
        engine, comm = group.engine, communicator.comm
        super().__init__(comm, group.link, engine.lost_peers, group.ranks, communicator.compare_calls)
        self.messages = MpiMessages(comm, group.ranks, engine, group.matcher, group.state.global_rank)
        self._engine = engine
        self._watched = WatchedGroup(group.state, group.active_call, group.link, self, self.messages.progress)
        if group.size > 1:
            WATCHDOG.add(self._watched)

    def on_peer_lost(self) -> None:
        """See Backend."""
        WATCHDOG.wake()

    def leave(self) -> None:
        """See Backend."""
        WATCHDOG.remove(self._watched)
        self._watched.report_progress()  # a member that waits for this rank in a later call learns that it does in vain
        with self._engine.lock:
            self.messages.close()


def use_mpi(group: LocalCommunicator, compares: bool) -> None:
    """Execute a group's collectives, and carry its messages, over MPI from now on; a synchronous collective call.

    Args:
        group: the group.
        compares: whether this member wants the ranks to compare their calls; all do if one member wants it.

    Raises:
        DistBackendError: a member has no MPI, or they are not processes of one MPI job; at all of them.
    """
    found: list[MpiCommunicator] = []
    # Over messages, and as a call with a number of its own: those of the first set-up may still be on their way.
    group.use_backend(CpuBackend(group.link))
    group.set_up(
        lambda link: found.append(create_communicator(link, group.id, compares)), group.timeout, " over MPI", None
    )
    group.use_backend(MpiGroup(group, found[0]))
