"""Interface of the point-to-point transports: listener, dial, and connection; none of them ever blocks.

A connection is an ordered, reliable stream of bytes. ``send`` and ``recv_into`` do what can be done at once; to
wait, poll ``fileno()`` after ``prepare_wait()`` has returned True. One thread at a time may send and
one may receive. After any error the connection is closed, never used again: its peer cannot know where we stopped.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Sequence
from typing import ClassVar

from rankmesh_agent.wire.errors import DistNetworkError

Buffer = bytes | memoryview
IDENTITY_BYTES = 80
"""What a client may tell a listener about itself: of fixed size, so that no stranger decides how much is read."""


class Connection(ABC):
    """One end of a byte stream."""

    medium: ClassVar[str]
    """What carries the bytes: ``tcp``, ``segment`` or ``inproc``."""

    peer: str
    """The other end in words, for error messages."""

    parallel_reads: bool = False
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
    def has_work(self, writing: bool) -> bool:
        """Return whether there is something to do that poll would not tell; costs no system call."""

    @abstractmethod
    def prepare_wait(self, writing: bool) -> bool:
        """Return True if the caller may sleep in poll now; False if there already is something to do."""

    @abstractmethod
    def on_wakeup(self) -> None:
        """Take note that poll reported this descriptor: called before anything is received."""

    def expose(self, view: memoryview) -> tuple[int, int]:
        """Return where the peer may read ``view`` itself, and the generation of the offer; address 0 where it cannot.

        The offer stands until ``revoke``: no byte of ``view`` may change before.
        """
        return 0, 0

    def revoke(self) -> None:
        """Take back all offers: called before the first of their bytes changes, whoever reads it just now."""
        return

    def read_exposed(self, address: int, into: int, nbytes: int) -> None:
        """Copy bytes that the peer has offered to an address of this process; they are good if the offer ``stands``.

        Raises:
            DistNetworkError: they cannot be read.
        """
        raise DistNetworkError(f"{self.peer} offers no memory", address=self.peer)

    def still_exposed(self, generation: int) -> bool:
        """Return whether the peer has taken back no offer of that generation: what was read before this is good."""
        return False

    def silent_seconds(self) -> float:
        """Return for how many seconds the peer's host has left unanswered what it has to answer, 0.0 if it has not.

        A process that is busy, or stopped, is not silent: its kernel answers.
        """
        return 0.0

    def drain(self) -> bool:
        """Throw away what comes in; return whether the peer has got everything that was sent, so that one may close."""
        return True

    @abstractmethod
    def close(self) -> None:
        """Close this end. Does nothing the second time."""

    @abstractmethod
    def close_in_child(self) -> None:
        """In a forked child: let go of the parent's connection, without the peer noticing anything."""


class PendingConnection(ABC):
    """A connection that is being made, from either side: nothing in it waits."""

    @abstractmethod
    def fileno(self) -> int:
        """Return a descriptor to poll for ``events()``; another one, perhaps, after each ``advance()``."""

    @abstractmethod
    def events(self) -> int:
        """Return the poll events that mean 'go on'."""

    @abstractmethod
    def advance(self) -> Connection | None:
        """Do what can be done now; return the connection as soon as both sides have it. Then this is over.

        Raises:
            AuthenticationError: the other side does not know the token.
            DistNetworkError: nobody listens there, it does not speak the protocol, or does not want this connection.
        """

    @abstractmethod
    def close(self) -> None:
        """Give up."""


Admit = Callable[[bytes], bool]
"""Returns whether the client that said a greeting may come in. It has passed the challenge by then."""


class Listener(ABC):
    """Where peers connect to. Nothing happens but in ``arrivals``: peers that come meanwhile wait in its queue."""

    address: str
    """Where peers connect to, as Transport.dial takes it."""

    @abstractmethod
    def descriptors(self) -> list[int]:
        """Return what to poll for reading; others, perhaps, after each ``arrivals``."""

    @abstractmethod
    def accept(self, ready: Container[int], admits: Admit) -> list[tuple[bytes, Connection]]:
        """Do what can be done now; return the connections that are ready, each with its client's greeting.

        To be called now and then also when there is nothing to read: it ends what takes too long.

        Args:
            ready: the descriptors that can be read.
            admits: says who may come in.

        Raises:
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
    def dial(self, address: str, greeting: bytes = b"") -> PendingConnection:
        """Begin to connect to a listener.

        Args:
            address: where it listens.
            greeting: what it is told as soon as it knows that we belong here, at most GREETING_BYTES; shorter ones
                arrive with zeros behind them.

        Raises:
            DistNetworkError: there can be nobody.
        """


def connection_lost(peer: str, why: str = "closed by the other side") -> DistNetworkError:
    """Return the error of a connection that ended."""
    return DistNetworkError(f"connection to {peer} lost: {why}", address=peer)
