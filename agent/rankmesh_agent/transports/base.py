"""Interface of the connections of all transports. No method blocks.

A connection is an ordered, reliable stream of bytes. ``send`` and ``recv_into`` transfer the bytes that can
be transferred at once. To wait, the caller polls ``fileno()`` after ``prepare_wait()`` has returned True. One thread at
a time may send, and one may receive. After an error the connection is closed and never used again: its peer cannot know
at which byte the stream stopped.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from rankmesh_agent.wire.errors import DistNetworkError

Buffer = bytes | memoryview


class Connection(ABC):
    """One end of a byte stream."""

    medium: ClassVar[str]
    """Medium of the bytes: ``tcp`` or ``segment``."""

    peer: str

    @abstractmethod
    def send(self, buffers: Sequence[Buffer]) -> int:
        """Send as many bytes of ``buffers``, in order, as fit now; return their number, 0 if none fits.

        Raises:
            DistNetworkError: the connection is lost.
        """

    def committed(self) -> int:
        """Return how many bytes ``send`` has taken without reporting them: the next call must begin with them."""
        return 0

    @abstractmethod
    def recv_into(self, buffer: memoryview) -> int:
        """Receive the bytes that have arrived, at most ``len(buffer)``; return their number, 0 if none has arrived.

        Raises:
            DistNetworkError: the connection is lost, and all bytes that arrived before have been received.
        """

    def take(self, head: bytes, into: memoryview) -> bool:
        """Receive ``head``, and ``into`` after it, if memory brings them next and soon; else return False."""
        return False

    def streams(self, nbytes: int) -> bool:
        """Return whether so many bytes go through memory while both sides are at work, each on a core of its own."""
        return False

    def recv_payload(self, buffer: memoryview) -> int:
        """Receive as ``recv_into`` does, but follow a sender at work in the same memory until the buffer is full."""
        return self.recv_into(buffer)

    def recv_soon(self, buffer: memoryview) -> int:
        """Receive as ``recv_into`` does, but poll a moment for the first bytes, where the cores are free for it."""
        return self.recv_into(buffer)

    @abstractmethod
    def fileno(self) -> int:
        """Return a descriptor to poll for ``events()``."""

    def bare_fileno(self) -> int:
        """Return the descriptor of a socket that carries no other bytes than this connection's, -1 if there is none."""
        return -1

    @abstractmethod
    def events(self, writing: bool) -> int:
        """Return the poll events to wait for, to receive and, if ``writing``, to send."""

    def has_work(self, writing: bool, reading: bool = True) -> bool:
        """Return whether bytes can be moved that poll does not report; makes no system call."""
        return False

    def prepare_wait(self, writing: bool, reading: bool = True) -> bool:
        """Return True if the caller may sleep in poll now, False if bytes can be moved already."""
        return True

    def on_wakeup(self) -> bool:
        """Handle an event of this descriptor; called after poll has reported it, before the next receive.

        Returns:
            Whether poll may report others: False once the peer has closed a descriptor that carries no frames.
        """
        return True

    def use_aggressive_mode(self) -> None:
        """Adapt to a host that has a core for each rank; called once, before the first frame."""
        return

    def expose(self, view: memoryview) -> tuple[int, int]:
        """Return the address at which the peer may read ``view``, and its generation; address 0 if the peer cannot.

        The memory stays exposed until ``revoke``: no byte of ``view`` may change before.
        """
        return 0, 0

    def revoke(self) -> None:
        """End the exposure of all memory; called before the first exposed byte changes, even during a read."""
        return

    def read_exposed(self, address: int, into: int, nbytes: int) -> None:
        """Copy exposed bytes of the peer to an address of this process; valid if ``still_exposed`` afterwards."""
        raise DistNetworkError(f"{self.peer} exposes no memory", address=self.peer)

    def still_exposed(self, generation: int) -> bool:
        """Return whether the peer has not revoked this generation: the bytes read before this call are valid."""
        return False

    def silent_seconds(self) -> float:
        """Return the seconds for which the peer's host has left packets unanswered, 0.0 if no packet is unanswered.

        A busy or stopped process is not silent: its kernel answers.
        """
        return 0.0

    def drain(self) -> bool:
        """Discard received bytes; return whether the peer has received all sent bytes, so that this end may close."""
        return True

    @abstractmethod
    def close(self) -> None:
        """Close this end. A second call does nothing."""


class Unconnected(Connection):
    """In place of a connection that has not been made yet: it takes no byte."""

    medium: ClassVar[str] = ""
    peer = "a rank that is not connected yet"

    def send(self, buffers: Sequence[Buffer]) -> int:
        return 0

    def recv_into(self, buffer: memoryview) -> int:
        return 0

    def fileno(self) -> int:
        return -1

    def events(self, writing: bool) -> int:
        return 0

    def close(self) -> None:
        pass


def connection_lost(peer: str, why: str = "closed by the other side") -> DistNetworkError:
    """Return the error of a connection that has ended."""
    return DistNetworkError(f"connection to {peer} lost: {why}", address=peer)
