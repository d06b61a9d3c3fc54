"""Replication of a job's store to a rank of another host: the owner's side, and the replica's.

The owner sends each change to the replica before it makes it, and waits for the response: so the replica has all that
any client has seen. The replica is the first rank of another host that is left. It takes over if all ranks before it
are dead or have left. A host that only falls silent is not dead: its ranks may go on, without the replica.

An owner that goes on without a replica that only does not respond says so on their connection before it closes it. So a
replica whose connection ends in order, without that message before, has all that the owner ever acknowledged.
"""

from __future__ import annotations

import contextlib
import logging
import math
import select
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from rankmesh_agent.net.descriptors import log_failure
from rankmesh_agent.net.sockets import silent_seconds
from rankmesh_agent.net.stream import StreamClosedError, StreamTimeoutError
from rankmesh_agent.store import codec
from rankmesh_agent.store.client import ClientConnection, StoreClient
from rankmesh_agent.store.moved import StoreMovedError
from rankmesh_agent.store.records import StoreState
from rankmesh_agent.store.replicate import ABANDON, BEGIN, COMPLETE, Replicate
from rankmesh_agent.wire.errors import DistError
from rankmesh_agent.wire.schemas import Member

PATIENCE_SECONDS = 1.5
"""Seconds without a response after which the owner goes on without the replica: fewer than most calls may take."""
SILENT_SECONDS = 8.0
"""The same for large records, for the first connection, and where the replica has no connection for the message."""
_LARGE_BYTES = 1 << 16
_ALIVE_SECONDS = 6.0
"""Seconds in which the owner must have received a response before its connection ended, for the replica to take over:
fewer than SILENT_SECONDS, so the owner cannot have gone on without it."""
_RESET_SECONDS = 1.2
"""The same if the connection did not end in order, by which the owner's last words may be lost: fewer than
PATIENCE_SECONDS."""
_PING_SECONDS = 0.5

_log = logging.getLogger("rankmesh.store")


class Replicator:
    """The owner's side. Its methods need the table's lock, but for ``probe`` and ``exclude``.

    Args:
        rank: the owner.
        ranks: ranks of other hosts, in the order in which they become the replica.
        members: all ranks, by rank.
        token: the job's token.
        lost: returns the ranks that have failed or left.
        step_down: called if the replica has become the owner.
        snapshot: returns the records, in parts, of the present state.
    """

    def __init__(
        self,
        rank: int,
        ranks: Sequence[int],
        members: Mapping[int, Member],
        token: str,
        lost: Callable[[], Collection[int]],
        step_down: Callable[[], None],
        snapshot: Callable[[], Iterator[list[bytes]]],
    ) -> None:
        self._owner = rank
        self._ranks = ranks
        self._members = members
        self._token = token
        self._lost = lost
        self._step_down = step_down
        self._snapshot = snapshot
        self._unusable: set[int] = set()
        self._silent: set[int] = set()
        self._known: set[int] = set()
        self._probes = 0
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
            rank = self._next()
            if rank is None:
                return
            self._rank = rank
            self._client = StoreClient(self._members[rank].http, self._token)
            try:
                # A rank that has never been the replica may not have started to serve.
                self._connection = self._client.connect(PATIENCE_SECONDS if rank in self._known else SILENT_SECONDS)
            except (DistError, StreamClosedError, StreamTimeoutError) as error:
                self._drop(error)
                continue
            self._known.add(rank)
            flags = BEGIN
            for parts in self._snapshot():
                if not self._call(Replicate(flags, (b"".join(parts),), self._owner)):
                    break
                flags = 0
            if self._connection is not None:
                self._call(Replicate(flags | COMPLETE, owner=self._owner))

    def ping(self) -> None:
        """Show the replica that the owner lives, or find another one."""
        with contextlib.suppress(StoreMovedError):
            if self._connection is not None:
                self._call(Replicate())
            self.attach()

    def probe(self) -> None:
        """Without a replica: look whether one of the ranks that did not respond does so again. Needs no lock."""
        if self._connection is not None or not self._silent or self._next() is not None:
            return
        gone = {*self._lost(), *self._unusable}
        ranks = [rank for rank in self._ranks if rank in self._silent and rank not in gone]
        if not ranks:
            return
        self._probes += 1
        rank = ranks[self._probes % len(ranks)]
        client = StoreClient(self._members[rank].http, self._token)
        try:
            client.connect(PATIENCE_SECONDS).close()
        except (DistError, StreamClosedError, StreamTimeoutError):
            return
        finally:
            client.close()
        self._silent.discard(rank)

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

    def _next(self) -> int | None:
        """Return the rank to become the replica, None if there is none."""
        gone = {*self._lost(), *self._unusable, *self._silent}
        return next((rank for rank in self._ranks if rank not in gone), None)

    def _call(self, command: Replicate) -> bool:
        connection = self._connection
        assert connection is not None
        large = sum(map(len, command.records)) > _LARGE_BYTES
        began = time.monotonic()
        try:
            connection.call(command, SILENT_SECONDS if large else PATIENCE_SECONDS)
        except StoreMovedError:
            self.close()
            self._step_down()
            raise
        except (DistError, StreamClosedError, StreamTimeoutError) as error:
            if isinstance(error, StreamTimeoutError) and not _abandon(connection):
                _wait_for_end(connection, began + SILENT_SECONDS - time.monotonic())
            self._drop(error)
            return False
        return True

    def _drop(self, error: Exception) -> None:
        """Go on without a replica that has ended, or does not respond."""
        cause = error.__cause__
        refused = not isinstance(cause, OSError) or isinstance(cause, ConnectionError)
        if refused and not isinstance(error, StreamTimeoutError):
            self._unusable.add(self._rank)
        else:
            host = self._members[self._rank].host_id if self._host_is_silent(cause) else None
            self._silent |= {rank for rank in self._ranks if rank == self._rank or self._members[rank].host_id == host}
            _log.warning("rank %d is no replica of the job's store until it responds again: %s", self._rank, error)
        self._disconnect()

    def _host_is_silent(self, cause: BaseException | None) -> bool:
        """Return whether not even the host of the replica, which does not respond, has acknowledged anything."""
        connection = self._connection
        if connection is None:  # it could not be made
            return isinstance(cause, OSError)
        return not connection.is_local and silent_seconds(connection.sock) > 0.0

    def _disconnect(self) -> None:
        if self._client is not None:
            self._client.close()
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _abandon(connection: ClientConnection) -> bool:
    """Tell the replica, before the end of the connection, that the owner goes on; return whether it will learn it."""
    if connection.sent_in_part:
        return False
    frame = codec.encode_command(Replicate(ABANDON), 0)
    try:
        return connection.sock.send(frame, socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT) == len(frame)
    except BlockingIOError:
        return False
    except OSError:
        return True  # it has ended already, and not in order


def _wait_for_end(connection: ClientConnection, seconds: float) -> None:
    """Wait until the connection ends, at most so long."""
    poll = select.poll()
    poll.register(connection.sock, 0)  # for its end alone
    poll.poll(max(0.0, seconds) * 1000)


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
        """Ping at regular intervals."""
        while not self._stopping.is_set():
            try:
                self._ping()
            except Exception as error:
                log_failure("the store's owner could not show its replica that it lives", error)
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
        owner: the owner's rank, -1 if there was none.
    """

    def __init__(self) -> None:
        self.state = StoreState()
        self.owner = -1
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
            self.state, self.owner, self._source = StoreState(), command.owner, connection
            self._complete = self._ended = False
        if connection != self._source or self._ended:
            return False
        if command.flags & ABANDON:
            self._complete, self._ended = False, True
            return False
        for record in command.records:
            self.state.apply(record)
        self._complete = self._complete or bool(command.flags & COMPLETE)
        self._confirmed, self._responded = self._responded, time.monotonic()  # it has had the response before this one
        return True

    def on_closed(self, connection: bytes, *, by_peer: bool, reset: bool = False) -> None:
        """The owner's process has closed its connection, or has ended; or this process closes it.

        Args:
            connection: its name.
            by_peer: whether the owner's process did.
            reset: whether something that the owner has sent may be lost.
        """
        if connection == self._source and not self._ended:
            self._ended = True
            recently = time.monotonic() - self._confirmed < (_RESET_SECONDS if reset else _ALIVE_SECONDS)
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
