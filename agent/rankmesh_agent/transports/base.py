"""What every point-to-point transport offers: listen, connect, and a connection that never blocks.

A connection is an ordered, reliable stream of bytes. ``send`` and ``recv_into`` do what can be done at once; who wants
to wait polls ``fileno()`` after ``prepare_wait()`` said that there is nothing to do. One thread at a time may send and
one may receive. After any error the connection is closed, never used again: its peer cannot know where we stopped.
"""

from __future__ import annotations

import select
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from rankmesh_agent.wire.deadline import Deadline
from rankmesh_agent.wire.errors import DistNetworkError

Buffer = bytes | memoryview


class Connection(ABC):
    """One end of a byte stream."""

    medium: ClassVar[str]
    """What carries the bytes: ``tcp``, ``segment`` or ``inproc``."""

    peer: str
    """The other end in words, for error messages."""

    two_cores: bool = False
    """Whether the host has a core for each rank, so that the one of a peer that waits can be used meanwhile."""

    @abstractmethod
    def send(self, buffers: Sequence[Buffer]) -> int:
        """Take as many bytes of ``buffers``, in order, as fit now; return how many, 0 when full.

        Raises:
            DistNetworkError: the connection is lost.
        """

    @abstractmethod
    def recv_into(self, buffer: memoryview) -> int:
        """Fill ``buffer`` with what is here, at most its length; return how many bytes, 0 when there is nothing yet.

        Raises:
            DistNetworkError: the connection is lost, and everything that came before has been received.
        """

    @abstractmethod
    def fileno(self) -> int:
        """Return a descriptor to poll for ``events()``."""

    @abstractmethod
    def events(self, writing: bool) -> int:
        """Return the poll events that mean 'try again', to receive and, if ``writing``, to send."""

    @abstractmethod
    def pending(self, writing: bool) -> bool:
        """Return whether there is something to do that poll would not tell; costs no system call."""

    @abstractmethod
    def prepare_wait(self, writing: bool) -> bool:
        """Return True if the caller may sleep in poll now; False if there already is something to do."""

    @abstractmethod
    def woken(self) -> None:
        """Take note that poll reported this descriptor: called before anything is received."""

    def offer(self, view: memoryview) -> tuple[int, int]:
        """Return where the peer may read ``view`` itself, and the generation of the offer; address 0 where it cannot.

        The offer stands until ``revoke``: no byte of ``view`` may change before.
        """
        return 0, 0

    def revoke(self) -> None:
        """Take back all offers: called before the first of their bytes changes, whoever reads it just now."""
        return

    def read_offered(self, address: int, into: int, nbytes: int) -> None:
        """Copy bytes that the peer has offered to an address of this process; they are good if the offer ``stands``.

        Raises:
            DistNetworkError: they cannot be read.
        """
        raise DistNetworkError(f"{self.peer} offers no memory", address=self.peer)

    def stands(self, generation: int) -> bool:
        """Return whether the peer has taken back no offer of that generation: what was read before this is good."""
        return False

    def finish(self) -> bool:
        """Throw away what comes in; return whether the peer has got everything that was sent, so that one may close."""
        return True

    @abstractmethod
    def close(self) -> None:
        """Close this end. Does nothing the second time."""

    @abstractmethod
    def forget(self) -> None:
        """In a forked child: let go of the parent's connection, without the peer noticing anything."""


class Listener(ABC):
    """Waits for peers to connect."""

    address: str
    """Where peers connect to, as Transport.connect takes it."""

    @abstractmethod
    def accept(self, deadline: Deadline) -> Connection:
        """Return the next connection of a peer that passed the challenge.

        Raises:
            TimeoutError: none came before the deadline.
            DistNetworkError: the listener is closed.
        """

    @abstractmethod
    def close(self) -> None:
        """Stop listening. Does nothing the second time."""


class Transport(ABC):
    """A way to reach peers."""

    @abstractmethod
    def listen(self, address: str) -> Listener:
        """Listen at ``address``.

        Raises:
            AddressInUseError: somebody else listens there.
            DistNetworkError: the address cannot be used.
        """

    @abstractmethod
    def connect(self, address: str, deadline: Deadline) -> Connection:
        """Connect to a listener.

        Raises:
            AuthenticationError: the other side does not know the token.
            DistNetworkError: nobody listens there, or it does not speak the protocol.
            TimeoutError: it did not answer before the deadline.
        """


def wait_ready(connection: Connection, deadline: Deadline, *, writing: bool) -> None:
    """Sleep until ``connection`` may have something to do, or for no reason: the caller tries again.

    Raises:
        TimeoutError: the deadline passed.
    """
    if deadline.passed():
        raise TimeoutError(f"no answer from {connection.peer} within {deadline.seconds:.1f} s")
    if not connection.prepare_wait(writing):
        return
    poller = select.poll()
    poller.register(connection.fileno(), connection.events(writing))
    if poller.poll(deadline.remaining() * 1000):
        connection.woken()


def send_all(connection: Connection, data: Buffer, deadline: Deadline) -> None:
    """Send all of ``data``, waiting for room.

    Raises:
        TimeoutError: the deadline passed.
        DistNetworkError: the connection is lost.
    """
    view = memoryview(data)
    while view:
        sent = connection.send([view])
        view = view[sent:]
        if view and not sent:
            wait_ready(connection, deadline, writing=True)


def recv_exactly(connection: Connection, length: int, deadline: Deadline) -> bytes:
    """Return the next ``length`` bytes, waiting for them.

    Raises:
        TimeoutError: the deadline passed.
        DistNetworkError: the connection is lost.
    """
    data = bytearray(length)
    view = memoryview(data)
    while view:
        received = connection.recv_into(view)
        view = view[received:]
        if view and not received:
            wait_ready(connection, deadline, writing=False)
    return bytes(data)


def lost(peer: str, why: str = "closed by the other side") -> DistNetworkError:
    """Return the error of a connection that ended."""
    return DistNetworkError(f"connection to {peer} lost: {why}", address=peer)
