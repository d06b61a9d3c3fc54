"""Backend interface: a backend executes the calls of one group, one at a time and in order."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol

from rankmesh_agent.collectives.select import Algorithm
from rankmesh_agent.net.deadline import Deadline
from rankmesh_agent.progress.framing import Transfer
from rankmesh_agent.progress.message_link import MessageLink
from rankmesh_agent.shared_memory.segment import Segment
from rankmesh_agent.wire.ops import Call

MONITORED = "monitored"
"""Subject of a barrier that must name the missing ranks and leave the process alive, whatever the backend."""


class CallContext(Protocol):
    """The call under way, as its backend sees it. Ranks are group ranks."""

    seq: int
    call: Call

    @property
    def global_ranks(self) -> Sequence[int]:
        """Global ranks of the members, by group rank."""

    def describe(self) -> str:
        """Return the details that this rank adds to the description of its call after a mismatch."""

    def check(self, missing: Callable[[], list[int]]) -> None:
        """Raise if the ranks of ``missing()`` cannot arrive, or the deadline passed; called now and then in a wait."""

    def wait(
        self, ready: Callable[[], bool], missing: Callable[[], list[int]], idle: Callable[[], object] | None = None
    ) -> None:
        """Move messages until ``ready()``; raise as ``check`` does. All three are called with the engine's lock held.

        Args:
            ready: whether the messages have come.
            missing: returns the group ranks from which they have not.
            idle: called before each sleep.
        """


class MessageTransport(Protocol):
    """Carries a group's point-to-point messages. Ranks are the transport's."""

    def send(self, rank: int, view: memoryview, dtype: int, tag: int) -> Transfer:
        """Begin to send ``view`` to a rank."""

    def receive(self, source: int, view: memoryview, dtype: int, tag: int) -> Transfer:
        """Begin to receive into ``view`` from a rank, or from any."""

    def progress_in_background(self, transfer: Transfer) -> None:
        """Keep a message moving while no thread waits for it."""

    def cancel(self, transfer: Transfer) -> bool:
        """Undo a transfer that has not begun; return False if data may be on its way."""

    def wait(self, ready: Callable[[], bool], deadline: Deadline) -> bool:
        """Wait until ``ready()``, which is called with the engine's lock held; the caller does not hold it."""

    def progress(self) -> None:
        """Move what can be moved now; the caller may hold the engine's lock or not."""


class Backend(ABC):
    """Executes the calls of one group on the arrays of one kind of device."""

    name: ClassVar[str]
    """The name that ``get_backend()`` returns."""

    medium: str
    """Medium of the data: ``shm``, ``tcp``, ``shm+tcp`` (inside and between hosts), ``mpi`` or ``self``."""

    device: ClassVar[str] = ""
    """Memory of the arrays: ``""`` for the host's, ``cuda`` for GPUs'. See ``Call.place``."""

    allocates: ClassVar[bool] = False
    """True if the backend makes registered arrays (``OpType.EMPTY``)."""

    monitored_subject: ClassVar[str] = ""
    """Subject of the barrier for monitored_barrier, where an ordinary one cannot name the missing ranks."""

    segment: Segment | None = None
    """Memory that all members share, None if there is none."""

    direct: MessageLink | None = None
    """Messages over which short calls are one exchange of all members with all; None for other backends."""

    messages: MessageTransport | None = None
    """Transport of the point-to-point messages; None leaves them to the progress engine."""

    @abstractmethod
    def algorithm(self, call: Call) -> Algorithm:
        """Return the algorithm for such a call."""

    @abstractmethod
    def run(self, algorithm: Algorithm, arguments: Sequence[Any], context: CallContext) -> None:
        """Execute a call.

        Raises:
            CollectiveMismatchError: the ranks did not make the same call; no array was touched.
            DistBackendError: the call failed half-way, the group cannot go on.
        """

    def on_peer_lost(self) -> None:  # noqa: B027  # most backends do nothing
        """React to the loss of a member, from any thread and with the engine's lock held."""

    def leave(self) -> None:  # noqa: B027  # most backends do nothing
        """Stop watching the group's calls: this rank is about to leave the group."""

    def close(self) -> None:  # noqa: B027  # some have none
        """Release the backend's resources. Does nothing the second time."""
