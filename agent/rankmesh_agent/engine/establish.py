"""Connect every pair of ranks: the second half of a join.

Each rank listens before it joins, so everyone in the peer table can be reached. The higher rank of a pair connects.
The transport has challenged both sides by then; an identity of fixed size says which rank, of which process, calls
whom: an address that meanwhile belongs to another process is noticed.
"""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Callable, Sequence

from rankmesh_agent.transports.base import Connection, Listener, Transport, recv_exactly, send_all
from rankmesh_agent.wire.deadline import Deadline
from rankmesh_agent.wire.errors import AuthenticationError, DistError, DistNetworkError
from rankmesh_agent.wire.schemas import Member

_IDENTITY = struct.Struct("!II32s32s")
_WELCOME = b"\1"
_IDENTITY_SECONDS = 2.0
_RETRY_SECONDS = 0.1


def connect_all(
    me: Member,
    members: Sequence[Member],
    epoch: int,
    listener: Listener,
    transport_to: Callable[[Member], Transport],
    deadline: Deadline,
) -> dict[int, Connection]:
    """Return a connection to every other member, by rank.

    Args:
        me: this process.
        members: everyone, this process included.
        epoch: the job's epoch.
        listener: where higher ranks connect to us.
        transport_to: the transport for a member.
        deadline: when to give up.

    Raises:
        DistNetworkError: a pair could not be connected; names it, and the addresses that were tried.
    """
    accepting = _Accepting(me, members, epoch, listener, deadline)
    connections: dict[int, Connection] = {}
    try:
        for peer in members:
            if peer.rank < me.rank:
                connections[peer.rank] = _connect(me, peer, epoch, transport_to(peer), deadline)
        return connections | accepting.result()
    except BaseException:
        accepting.cancel()
        for connection in connections.values():
            connection.close()
        raise


def _connect(me: Member, peer: Member, epoch: int, transport: Transport, deadline: Deadline) -> Connection:
    """Connect to a peer at the first of its addresses that answers."""
    while True:
        failures = []
        for address in peer.addresses:
            try:
                return _call(me, peer, epoch, transport, address, deadline)
            except AuthenticationError:
                raise
            except (DistNetworkError, TimeoutError) as error:
                failures.append(f"{address}: {error}")
        if deadline.remaining() < _RETRY_SECONDS:
            raise DistNetworkError(
                f"rank {me.rank} on {me.host} cannot reach {peer.described()} ({'; '.join(failures)}); if those are "
                f"addresses of the wrong network, set RANKMESH_BIND or GLOO_SOCKET_IFNAME on rank {peer.rank}",
                ranks=[peer.rank],
                address=", ".join(peer.addresses),
            )
        time.sleep(_RETRY_SECONDS)


def _call(me: Member, peer: Member, epoch: int, transport: Transport, address: str, deadline: Deadline) -> Connection:
    connection = transport.connect(address, deadline)
    try:
        identity = _IDENTITY.pack(me.rank, epoch, me.instance.encode(), peer.instance.encode())
        send_all(connection, identity, deadline)
        recv_exactly(connection, len(_WELCOME), deadline)
    except BaseException:
        connection.close()
        raise
    return connection


class _Accepting:
    """Takes the connections of all higher ranks, in a thread, while this rank connects to the lower ones."""

    def __init__(
        self, me: Member, members: Sequence[Member], epoch: int, listener: Listener, deadline: Deadline
    ) -> None:
        self._me = me
        self._expected = {member.rank: member for member in members if member.rank > me.rank}
        self._epoch = epoch
        self._listener = listener
        self._deadline = deadline
        self._connections: dict[int, Connection] = {}
        self._cancelled = False
        self._thread = threading.Thread(target=self._accept, name="rankmesh-establish", daemon=True)
        self._thread.start()

    def result(self) -> dict[int, Connection]:
        """Wait for all of them."""
        while self._thread.is_alive():
            self._thread.join(0.1)  # in slices, so that Ctrl-C gets through
        missing = [member for rank, member in self._expected.items() if rank not in self._connections]
        if missing:
            names = ", ".join(member.described() for member in missing)
            raise DistNetworkError(
                f"rank {self._me.rank} at {', '.join(self._me.addresses)} was not reached by {names} within "
                f"{self._deadline.seconds:.0f} s, although all have joined: did they fail, or is the address one they "
                "cannot reach?",
                ranks=[member.rank for member in missing],
            )
        return self._connections

    def cancel(self) -> None:
        """Give up: close what was accepted."""
        self._cancelled = True
        self._thread.join()
        for connection in self._connections.values():
            connection.close()

    def _accept(self) -> None:
        while len(self._connections) < len(self._expected) and not self._cancelled and not self._deadline.passed():
            try:
                connection = self._listener.accept(Deadline(min(0.2, self._deadline.remaining())))
            except TimeoutError:
                continue
            except DistError:
                return
            rank = self._identify(connection)
            if rank is None:
                connection.close()
                continue
            former = self._connections.pop(rank, None)
            if former is not None:
                former.close()  # the peer gave that one up and called again
            self._connections[rank] = connection

    def _identify(self, connection: Connection) -> int | None:
        """Return the rank at the other end, None if it is not one we wait for."""
        deadline = Deadline(_IDENTITY_SECONDS)
        try:
            rank, epoch, caller, called = _IDENTITY.unpack(recv_exactly(connection, _IDENTITY.size, deadline))
            expected = self._expected.get(rank)
            if expected is None or epoch != self._epoch:
                return None
            if (caller, called) != (expected.instance.encode(), self._me.instance.encode()):
                return None
            send_all(connection, _WELCOME, deadline)
        except (DistError, TimeoutError):
            return None
        return int(rank)
