"""Replication of a job's store to a rank of another host: the owner's side, and the replica's.

The owner sends each change to the replica before it makes it, and waits for the response: so the replica has all that
any client has seen. The replica is the first rank of another host that is left. It takes over if all ranks before it
are dead or have left. A host that only falls silent is not dead: its ranks may go on, without the replica.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from rankmesh_agent.net.stream import StreamClosedError, StreamTimeoutError
from rankmesh_agent.store.client import ClientConnection, StoreClient
from rankmesh_agent.store.moved import StoreMovedError
from rankmesh_agent.store.records import StoreState
from rankmesh_agent.store.replicate import BEGIN, COMPLETE, Replicate
from rankmesh_agent.wire.errors import DistError
from rankmesh_agent.wire.schemas import Member

SILENT_SECONDS = 8.0
"""Seconds without a response after which the owner goes on without the replica."""
_ALIVE_SECONDS = 6.0
"""Seconds in which the owner must have received a response before its connection ended, for the replica to take over:
fewer than SILENT_SECONDS, so the owner cannot have gone on without it."""
_PING_SECONDS = 1.0

_log = logging.getLogger("rankmesh.store")


class Replicator:
    """The owner's side. Its methods need the table's lock, but for ``exclude``.

    Args:
        ranks: ranks of other hosts, in the order in which they become the replica.
        members: all ranks, by rank.
        token: the job's token.
        lost: returns the ranks that have failed or left.
        step_down: called if the replica has become the owner.
        snapshot: returns the records, in parts, of the present state.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        members: Mapping[int, Member],
        token: str,
        lost: Callable[[], Collection[int]],
        step_down: Callable[[], None],
        snapshot: Callable[[], Iterator[list[bytes]]],
    ) -> None:
        self._ranks = ranks
        self._members = members
        self._token = token
        self._lost = lost
        self._step_down = step_down
        self._snapshot = snapshot
        self._unusable: set[int] = set()
        self._rank = -1
        self._closed = False
        self._client: StoreClient | None = None
        self._connection: ClientConnection | None = None

    def send(self, parts: list[bytes]) -> None:
        """Send a record of a change that is about to be made; return when the replica has it, if there is one.

        Raises:
            StoreMovedError: the replica is the owner, so the change must not be made.
        """
        self.attach()
        while self._connection is not None and not self._call(Replicate(0, (b"".join(parts),))):
            self.attach()

    def attach(self) -> None:
        """Send the state to a replica, if there is none, but could be one."""
        while self._connection is None and not self._closed:
            gone = {*self._lost(), *self._unusable}
            rank = next((rank for rank in self._ranks if rank not in gone), None)
            if rank is None:
                return
            self._rank = rank
            self._client = StoreClient(self._members[rank].http, self._token)
            try:
                self._connection = self._client.connect(SILENT_SECONDS)
            except (DistError, StreamClosedError, StreamTimeoutError) as error:
                self._drop(error)
                continue
            flags = BEGIN
            for parts in self._snapshot():
                if not self._call(Replicate(flags, (b"".join(parts),))):
                    break
                flags = 0
            if self._connection is not None:
                self._call(Replicate(flags | COMPLETE))

    def ping(self) -> None:
        """Show the replica that the owner lives, or find another one."""
        with contextlib.suppress(StoreMovedError):
            if self._connection is not None:
                self._call(Replicate())
            self.attach()

    def exclude(self, ranks: Collection[int]) -> None:
        """Find another replica at the next change, if these ranks have it. Needs no lock: it ends a call under way."""
        connection = self._connection
        if connection is not None and self._rank in ranks:
            connection.shutdown()

    def close(self) -> None:
        """Close the connection for good."""
        self._closed = True
        self._disconnect()

    def close_in_child(self) -> None:
        """Close the parent's descriptors in a forked child."""
        if self._client is not None:
            self._client.close_in_child()

    def _call(self, command: Replicate) -> bool:
        assert self._connection is not None
        try:
            self._connection.call(command, SILENT_SECONDS)
        except StoreMovedError:
            self.close()
            self._step_down()
            raise
        except (DistError, StreamClosedError, StreamTimeoutError) as error:
            self._drop(error)
            return False
        return True

    def _drop(self, error: Exception) -> None:
        """Go on without a replica that has ended, or does not respond."""
        self._unusable.add(self._rank)
        if isinstance(error, StreamTimeoutError):
            _log.warning("rank %d is no replica of the job's store any more: %s", self._rank, error)
        self._disconnect()

    def _disconnect(self) -> None:
        if self._client is not None:
            self._client.close()
        if self._connection is not None:
            self._connection.close()
            self._connection = None


class KeepaliveThread(threading.Thread):
    """Thread of an owner that shows its replica that it lives.

    Args:
        ping: does so.
    """

    def __init__(self, ping: Callable[[], None]) -> None:
        super().__init__(name="rankmesh-store-replica", daemon=True)
        self._ping = ping
        self._stopping = threading.Event()

    def run(self) -> None:
        """Ping once a second."""
        while not self._stopping.is_set():
            self._ping()
            self._stopping.wait(_PING_SECONDS)

    def stop(self) -> None:
        """End the thread."""
        self._stopping.set()
        if self.is_alive() and self is not threading.current_thread():
            self.join(2 * SILENT_SECONDS)


class Replica:
    """The replica's side: what an owner on another host has sent. For the server's thread.

    Attributes:
        state: the owner's state.
    """

    def __init__(self) -> None:
        self.state = StoreState()
        self._source = b""
        self._complete = self._ended = False
        self._responded = self._confirmed = -math.inf

    def receive(self, connection: bytes, command: Replicate) -> bool:
        """Apply records; return False if they do not continue those that came before.

        Args:
            connection: name of the owner's connection.
            command: has the records.
        """
        if command.flags & BEGIN:
            self.state, self._source = StoreState(), connection
            self._complete = self._ended = False
        if connection != self._source or self._ended:
            return False
        for record in command.records:
            self.state.apply(record)
        self._complete = self._complete or bool(command.flags & COMPLETE)
        self._confirmed, self._responded = self._responded, time.monotonic()  # it has had the response before this one
        return True

    def on_closed(self, connection: bytes, *, by_peer: bool) -> None:
        """The owner's process has closed its connection, or has ended; or this process closes it."""
        if connection == self._source and not self._ended:
            self._ended = True
            recently = time.monotonic() - self._confirmed < _ALIVE_SECONDS
            self._complete = self._complete and by_peer and recently

    def finish(self) -> None:
        """Apply no more records: this rank takes over."""
        self._ended = True

    @property
    def current(self) -> bool:
        """True if the replica has, as far as it knows, all that the owner has acknowledged."""
        return self._complete

    @property
    def usable(self) -> bool:
        """True if the owner is gone, and the replica has all that it acknowledged."""
        return self._complete and self._ended
