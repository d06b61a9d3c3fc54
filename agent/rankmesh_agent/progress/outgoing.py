"""The outgoing connection to one rank: tries its addresses in turn, repeatedly. No method blocks."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable

from rankmesh_agent.net.deadline import Deadline
from rankmesh_agent.net.descriptors import raise_if_exhausted
from rankmesh_agent.shared_memory.mapping import NoSharedMemoryError
from rankmesh_agent.transports.base import Connection
from rankmesh_agent.transports.tcp import PendingTcpConnection, TcpTransport
from rankmesh_agent.wire.errors import AuthenticationError, DistNetworkError
from rankmesh_agent.wire.schemas import Member

IDENTITY = struct.Struct("!II32s32s")
"""A client's part of its HELLO: its rank, the epoch, and the instances of both processes."""
DIAL_SECONDS = 60.0
_ATTEMPT_SECONDS = 10.0
"""Timeout of one address, if the peer has several."""
RETRY_SECONDS = 0.1


class OutgoingConnection:
    """The outgoing connection to a rank: tries its addresses in turn, repeatedly.

    Attributes:
        pending: the current attempt, None between two attempts.
        rounds: how often all addresses have failed.
    """

    def __init__(self, me: Member, peer: Member, epoch: int, transport: TcpTransport) -> None:
        self.peer = peer
        self.pending: PendingTcpConnection | None = None
        self.retry_at = 0.0
        self.abandon_at = 0.0
        self.rounds = 0
        self.deadline = Deadline(DIAL_SECONDS)
        self._me = me
        self._transport = transport
        self._identity = IDENTITY.pack(me.rank, epoch, me.instance.encode(), peer.instance.encode())
        self._address_index = 0
        self._begun = 0.0
        self._failures: dict[str, str] = {}
        self.silent: set[str] = set()
        """Addresses whose latest attempt has connected, but got no answer: the process there may be stopped."""

    def begin(self) -> Connection | None:
        """Try the next address."""
        self._begun = time.monotonic()
        only = len(self.peer.addresses) == 1
        self.abandon_at = self._begun + (self.deadline.remaining() if only else _ATTEMPT_SECONDS)
        return self._try(self._dial)

    def advance(self) -> Connection | None:
        """Continue the attempt; return the connection once it is ready."""
        assert self.pending is not None
        return self._try(self.pending.advance)

    def abandon(self) -> None:
        """End an attempt that has timed out."""
        address, connected = self._address, self.pending is not None and self.pending.connected()
        self._failed(self._no_answer())
        if connected:
            self.silent.add(address)

    def error(self) -> DistNetworkError:
        """Return the error of a rank that cannot be reached."""
        why = self._failures if self.pending is None else self._failures | {self._address: self._no_answer()}
        failures = "; ".join(f"{address}: {failure}" for address, failure in why.items())
        return DistNetworkError(
            f"rank {self._me.rank} on {self._me.host} cannot reach {self.peer.described()} ({failures}); if those are "
            f"addresses of the wrong network, set RANKMESH_BIND or GLOO_SOCKET_IFNAME on rank {self.peer.rank}",
            ranks=[self.peer.rank],
            address=", ".join(self.peer.addresses),
        )

    def close(self) -> None:
        """End the current attempt, if any."""
        pending, self.pending = self.pending, None
        if pending is not None:
            pending.close()

    @property
    def _address(self) -> str:
        return self.peer.addresses[self._address_index]

    def _dial(self) -> Connection | None:
        self.pending = self._transport.dial(self._address, self._identity)
        return self.pending.advance()

    def _try(self, step: Callable[[], Connection | None]) -> Connection | None:
        """Make a step of the attempt; return the connection once it is ready. Raises if other addresses cannot help."""
        try:
            connection = step()
        except DistNetworkError as error:
            self.close()
            raise_if_exhausted(error, f"rank {self._me.rank} cannot connect to {self.peer.described()}")
            if isinstance(error, AuthenticationError | NoSharedMemoryError):
                raise
            self._failed(str(error))
            return None
        if connection is not None:
            self.pending = None
        return connection

    def _no_answer(self) -> str:
        return f"no answer within {time.monotonic() - self._begun:.1f} s"

    def _failed(self, why: str) -> None:
        """Select the next address: at once, or after a delay once all have failed."""
        self.close()
        self._failures[self._address] = why
        self.silent.discard(self._address)
        self._address_index = (self._address_index + 1) % len(self.peer.addresses)
        self.rounds += not self._address_index
        self.retry_at = time.monotonic() + (0.0 if self._address_index else RETRY_SECONDS)
