"""Connect every pair of ranks: the second half of a join.

Each rank listens before it joins, so everyone in the peer table can be reached. The higher rank of a pair connects.
The transport has challenged both sides by then; an identity of fixed size says which rank, of which process, calls
whom: an address that meanwhile belongs to another process is noticed.

One thread does it all, the caller's: it sleeps until one of the connections under way, to us or from us, can go on.
So a world of many ranks takes few turns, however slow a single peer is.
"""

from __future__ import annotations

import select
import struct
import time
from collections.abc import Callable, Sequence

from rankmesh_agent.net.deadline import Deadline
from rankmesh_agent.transports.base import Connection, Listener, PendingConnection, Transport
from rankmesh_agent.wire.errors import AuthenticationError, DistNetworkError
from rankmesh_agent.wire.schemas import Member

_IDENTITY = struct.Struct("!II32s32s")
_RETRY_SECONDS = 0.1
_MAX_NAMED = 4
"""Ranks named in an error about settings."""
_SLICE_SECONDS = 0.1
"""How long a sleep lasts at most: what takes too long is noticed between two of them."""
_TRY_SECONDS = 10.0
"""How long a peer may take to answer at one address, where it has others."""


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
        DistNetworkError: a pair could not be connected (names it, and the addresses that were tried), or settings that
            have to be the same on all ranks differ.
    """
    check_settings(members)
    lower = [member for member in members if member.rank < me.rank]
    calls = [_Call(me, peer, epoch, transport_to(peer), deadline) for peer in lower]
    establishing = _Establishing(me, members, epoch, listener, calls)
    try:
        while not establishing.complete:
            if deadline.expired():
                raise establishing.late(deadline)
            establishing.advance(deadline)
    except BaseException:
        establishing.close()
        raise
    return establishing.connections


def check_settings(members: Sequence[Member]) -> None:
    """Check that all ranks have the settings that have to be the same.

    Raises:
        DistNetworkError: they differ; names the variable, and the ranks that have each value.
    """
    eager: dict[object, list[Member]] = {}
    forced: dict[object, list[Member]] = {}
    for member in members:
        if member.eager_bytes >= 0:
            eager.setdefault(member.eager_bytes, []).append(member)
        if member.transport in ("tcp", "shm"):  # auto goes along with either
            forced.setdefault(member.transport, []).append(member)
    for variable, found in (("RANKMESH_EAGER_BYTES", eager), ("RANKMESH_TRANSPORT", forced)):
        if len(found) > 1:
            values = "; ".join(f"{value} on {_ranks_in_words(having)}" for value, having in found.items())
            raise DistNetworkError(
                f"{variable} differs between ranks: {values}. Set it to the same value on every rank, or leave it out.",
                ranks=[member.rank for member in min(found.values(), key=len)],
            )


def _ranks_in_words(members: Sequence[Member]) -> str:
    """Return the members in words, all of them if they are few."""
    more = len(members) - _MAX_NAMED
    named = ", ".join(member.described() for member in members[:_MAX_NAMED])
    return f"{named} and {more} more" if more > 0 else named


class _Establishing:
    """All the connections that are being made, and those there are.

    Attributes:
        connections: those that are ready, by rank.
    """

    def __init__(
        self, me: Member, members: Sequence[Member], epoch: int, listener: Listener, calls: Sequence[_Call]
    ) -> None:
        self.connections: dict[int, Connection] = {}
        self._me = me
        self._higher = {member.rank: member for member in members if member.rank > me.rank}
        self._size = len(self._higher) + len(calls)
        self._epoch = epoch
        self._listener = listener
        self._calls = list(calls)

    @property
    def complete(self) -> bool:
        return len(self.connections) == self._size

    def advance(self, deadline: Deadline) -> None:
        """Sleep until something can go on, and do so."""
        now = time.monotonic()
        rest = _SLICE_SECONDS
        poll = select.poll()
        for fd in self._listener.descriptors():
            poll.register(fd, select.POLLIN)
        under_way: dict[int, _Call] = {}
        for call in list(self._calls):
            if call.attempt is None and call.again <= now:
                self._keep(call, call.begin())
            if call.attempt is not None:
                fd = call.attempt.fileno()
                under_way[fd] = call
                poll.register(fd, call.attempt.events())
            else:
                rest = min(rest, max(0.0, call.again - now))
        ready = {fd for fd, _ in poll.poll(1000 * min(rest, deadline.remaining()))}
        for fd, call in under_way.items():
            if fd in ready:
                self._keep(call, call.advance())
            elif call.until <= now:
                call.give_up()
        for identity, connection in self._listener.accept(ready, lambda identity: self._caller(identity) is not None):
            rank = self._caller(identity)
            assert rank is not None
            former = self.connections.pop(rank, None)
            if former is not None:
                former.close()  # the peer gave that one up and called again
            self.connections[rank] = connection

    def _keep(self, call: _Call, connection: Connection | None) -> None:
        if connection is not None:
            self.connections[call.peer.rank] = connection
            self._calls.remove(call)

    def _caller(self, identity: bytes) -> int | None:
        """Return the rank at the other end, None if it is not one we wait for."""
        rank, epoch, caller, called = _IDENTITY.unpack_from(identity)
        expected = self._higher.get(rank)
        if expected is None or epoch != self._epoch:
            return None
        if (caller, called) != (expected.instance.encode(), self._me.instance.encode()):
            return None
        return int(rank)

    def late(self, deadline: Deadline) -> DistNetworkError:
        """Return the error that says who is missing."""
        if self._calls:
            return self._calls[0].error()
        missing = [member for rank, member in self._higher.items() if rank not in self.connections]
        names = ", ".join(member.described() for member in missing)
        return DistNetworkError(
            f"rank {self._me.rank} at {', '.join(self._me.addresses)} was not reached by {names} within "
            f"{deadline.seconds:.0f} s, although all have joined: did they fail, or is the address one they "
            "cannot reach?",
            ranks=[member.rank for member in missing],
        )

    def close(self) -> None:
        """Give up: close what there is."""
        for call in self._calls:
            call.close()
        for connection in self.connections.values():
            connection.close()


class _Call:
    """The way to a lower rank: its addresses, one after the other, again and again.

    Attributes:
        peer: the rank.
        attempt: what is under way, None before the first and while resting between two.
        again: when to begin, again.
        until: when to give up the attempt.
    """

    def __init__(self, me: Member, peer: Member, epoch: int, transport: Transport, deadline: Deadline) -> None:
        self.peer = peer
        self.attempt: PendingConnection | None = None
        self.again = 0.0
        self.until = 0.0
        self._me = me
        self._transport = transport
        self._deadline = deadline
        self._identity = _IDENTITY.pack(me.rank, epoch, me.instance.encode(), peer.instance.encode())
        self._turn = 0
        self._failures: dict[str, str] = {}

    def begin(self) -> Connection | None:
        """Try the next address."""
        address = self.peer.addresses[self._turn]
        seconds = self._deadline.remaining() if len(self.peer.addresses) == 1 else _TRY_SECONDS
        self.until = time.monotonic() + seconds
        self._failures[address] = f"no answer within {min(seconds, self._deadline.remaining()):.1f} s"
        try:
            self.attempt = self._transport.dial(address, self._identity)
        except DistNetworkError as error:
            self._failed(str(error))
            return None
        return self.advance()

    def advance(self) -> Connection | None:
        """Go on with the attempt; return the connection if it is ready."""
        assert self.attempt is not None
        try:
            connection = self.attempt.advance()
        except AuthenticationError:
            raise
        except DistNetworkError as error:
            self._failed(str(error))
            return None
        if connection is not None:
            self.attempt = None
        return connection

    def give_up(self) -> None:
        """End an attempt that takes too long."""
        self._failed(self._failures[self.peer.addresses[self._turn]])

    def error(self) -> DistNetworkError:
        """Return what to say when the rank could not be reached."""
        failures = "; ".join(f"{address}: {why}" for address, why in self._failures.items())
        return DistNetworkError(
            f"rank {self._me.rank} on {self._me.host} cannot reach {self.peer.described()} ({failures}); if those are "
            f"addresses of the wrong network, set RANKMESH_BIND or GLOO_SOCKET_IFNAME on rank {self.peer.rank}",
            ranks=[self.peer.rank],
            address=", ".join(self.peer.addresses),
        )

    def close(self) -> None:
        """End the attempt that is under way, if one is."""
        attempt, self.attempt = self.attempt, None
        if attempt is not None:
            attempt.close()

    def _failed(self, why: str) -> None:
        """Turn to the next address: at once, unless it is the first one's turn again."""
        self.close()
        self._failures[self.peer.addresses[self._turn]] = why
        self._turn = (self._turn + 1) % len(self.peer.addresses)
        self.again = time.monotonic() + (0.0 if self._turn else _RETRY_SECONDS)
