"""MPI backend of a group: its collectives, its point-to-point messages, and the watchdog of both."""

from __future__ import annotations

from rankmesh_agent.backends.cpu import CpuBackend
from rankmesh_agent.group.local import LocalCommunicator
from rankmesh_agent.mpi.backend import MpiBackend
from rankmesh_agent.mpi.communicator import MpiCommunicator, create_communicator
from rankmesh_agent.mpi.messages import MpiMessages
from rankmesh_agent.mpi.watchdog import WATCHDOG, CallWatchdog


class MpiGroup(MpiBackend):
    """Runs the collectives of a group in MPI, transports its messages, and watches both.

    Args:
        group: the group.
        made: its MPI communicator.
    """

    messages: MpiMessages

    def __init__(self, group: LocalCommunicator, made: MpiCommunicator) -> None:
        self._engine = engine = group.engine
        super().__init__(made.comm, group.link, engine.lost_peers, group.ranks, made.compare_calls)
        self.messages = MpiMessages(made.comm, group.ranks, engine, group.matcher, group.state.global_rank)
        self._watchdog = CallWatchdog(group.state, group.link, self, self.messages.progress)
        self._check = self._watchdog.check
        if group.size > 1:
            WATCHDOG.add(self._check)

    def on_peer_lost(self) -> None:
        """See Backend."""
        WATCHDOG.wake()

    def leave(self) -> None:
        """See Backend."""
        WATCHDOG.remove(self._check)
        self._watchdog.report_progress()  # ranks in a later call learn that this rank does not make it
        with self._engine.lock:
            self.messages.close()


def use_mpi(group: LocalCommunicator, compare_calls: bool) -> None:
    """Run a group's collectives and messages in MPI from now on; a synchronous collective call.

    Args:
        group: the group.
        compare_calls: whether this member requests that calls are compared.

    Raises:
        DistBackendError: a member has no MPI, or the members are not all in one MPI job; raised at all of them.
    """
    made: list[MpiCommunicator] = []
    # A call over messages with a number of its own: those of the group's first set-up may still be on their way.
    group.use_backend(CpuBackend(group.link))
    group.set_up(
        lambda link: made.append(create_communicator(link, group.id, compare_calls)), group.timeout, " over MPI", None
    )
    group.use_backend(MpiGroup(group, made[0]))
