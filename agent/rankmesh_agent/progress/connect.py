"""Connections to other ranks: at the join to the neighbours, which is its second half, and later to ranks on demand.

Each rank listens before it joins, so all ranks in the peer table are reachable. At the join, the higher rank of a pair
of neighbours connects. On demand both may, at the same time: then the connection of the higher rank is the one to stay,
and it rejects the other. With its HELLO the client sends an identity of fixed size: its rank,
the epoch, and the instances of both processes. So the listener rejects a client whose target address now belongs to
another process.

One thread makes all connections: it sleeps until one of them, outgoing or incoming, can continue. So a world of many
ranks takes few iterations, however slow a single peer is.
"""

from __future__ import annotations

import contextlib
import math
import select
import struct
import time
from collections.abc import Callable, Collection, Iterable, Sequence

from rankmesh_agent.net.deadline import Deadline
from rankmesh_agent.net.descriptors import raise_if_exhausted
from rankmesh_agent.transports.base import Connection
from rankmesh_agent.transports.shared_memory import NoSharedMemoryError
from rankmesh_agent.transports.tcp import HANDSHAKE_SECONDS, PendingTcpConnection, TcpListener, TcpTransport
from rankmesh_agent.wire import frames
from rankmesh_agent.wire.errors import AuthenticationError, DistNetworkError
from rankmesh_agent.wire.frames import Opcode
from rankmesh_agent.wire.goodbye import Goodbye
from rankmesh_agent.wire.schemas import Member

_IDENTITY = struct.Struct("!II32s32s")
_RETRY_SECONDS = 0.1
_MAX_NAMED = 4
"""Ranks named in an error about settings."""
_SLICE_SECONDS = 0.1
"""Maximum duration of one sleep: timeouts are checked between two sleeps."""
_STALLED_SECONDS, _MAX_STALLED_SECONDS = 0.5, 4.0
"""Seconds without a new connection after which it is checked whether a member has left: twice as long after each check,
for where a hundred ranks start on a few cores, they keep the gateway from answering."""
_SILENT_SECONDS = 30.0
"""Seconds without an answer of the gateway after which it counts as gone, with the rank that hosts it."""
_ATTEMPT_SECONDS = 10.0
"""Timeout of one address, if the peer has several."""


def check_settings(members: Sequence[Member]) -> None:
    """Check that the settings that must be the same on all ranks are the same.

    Raises:
        DistNetworkError: they differ; the error names the variable, and the ranks with each value.
    """
    eager: dict[object, list[Member]] = {}
    full: dict[object, list[Member]] = {}
    forced: dict[object, list[Member]] = {}
    for member in members:
        if member.eager_bytes >= 0:
            eager.setdefault(member.eager_bytes, []).append(member)
        if member.full_mesh >= 0:
            full.setdefault(member.full_mesh, []).append(member)
        if member.transport in ("tcp", "shm"):  # auto is compatible with both
            forced.setdefault(member.transport, []).append(member)
    settings = {"RANKMESH_EAGER_BYTES": eager, "RANKMESH_FULL_MESH": full, "RANKMESH_TRANSPORT": forced}
    for variable, found in settings.items():
        if len(found) > 1:
            values = "; ".join(f"{value} on {_described(having)}" for value, having in found.items())
            raise DistNetworkError(
                f"{variable} differs between ranks: {values}. Set it to the same value on every rank, or unset it.",
                ranks=[member.rank for member in min(found.values(), key=len)],
            )


def _described(members: Sequence[Member]) -> str:
    """Return descriptions of the members, at most _MAX_NAMED of them."""
    more = len(members) - _MAX_NAMED
    named = ", ".join(member.described() for member in members[:_MAX_NAMED])
    return f"{named} and {more} more" if more > 0 else named


class Connector:
    """The outgoing and incoming connections of this process. For one thread at a time.

    Args:
        me: this process.
        members: all ranks, this process included; those without addresses are connected to after ``add``.
        epoch: the job's epoch.
        listener: the listener to which other ranks connect; ``close`` closes it.
        transport_to: returns the transport to a member.

    Attributes:
        connections: the ready connections, by rank, until ``take`` returns them.
        failures: the errors of ranks that another attempt would not reach either.
    """

    def __init__(
        self,
        me: Member,
        members: Iterable[Member],
        epoch: int,
        listener: TcpListener,
        transport_to: Callable[[Member], TcpTransport],
    ) -> None:
        self.connections: dict[int, Connection] = {}
        self.failures: dict[int, DistNetworkError] = {}
        self._me = me
        self._members = {member.rank: member for member in members if member is not me}
        self._epoch = epoch
        self._listener = listener
        self._transport_to = transport_to
        self._outgoing: dict[int, _OutgoingConnection] = {}
        self._admitted: dict[int, Deadline] = {}
        """Ranks whose handshakes with this one are under way, until when."""
        self._taken: set[int] = set()

    # The join

    def connect(
        self,
        ranks: Collection[int],
        deadline: Deadline,
        raise_if_left: Callable[[], bool] = lambda: True,
        leave: Callable[[BaseException], Goodbye] | None = None,
    ) -> dict[int, Connection]:
        """Connect to the neighbours, each of which connects to this rank; return the connections, by rank.

        Ranks that are early may have connected on demand: their connections are among those returned.

        Args:
            ranks: the neighbours.
            deadline: deadline of all connections.
            raise_if_left: raises if a member has left, and returns whether the gateway answers; called while no
                connection is made, at growing intervals.
            leave: called with the error that ends the attempt, before connections are closed; returns the goodbye for
                the peers that are connected.

        Raises:
            DistNetworkError: a pair cannot be connected (the error names it, and the addresses tried), or settings that
                must be the same on all ranks differ.
            DescriptorLimitError: this process has no free descriptor.
            NoSharedMemoryError: this process has no room for shared memory, and no other transport is allowed.
        """
        check_settings(sorted([self._me, *self._members.values()], key=lambda member: member.rank))
        made, seconds, answered_at = 0, _STALLED_SECONDS, time.monotonic()
        stalled = Deadline(seconds)
        try:
            for rank in ranks:
                if rank < self._me.rank:
                    self.dial(rank, deadline)
            while missing := [self._members[rank] for rank in ranks if rank not in self.connections]:
                if deadline.expired():
                    raise self._timeout_error(missing, deadline)
                self.advance(min(_SLICE_SECONDS, deadline.remaining()))
                for error in self.failures.values():
                    raise error
                if len(self.connections) > made:
                    made, stalled, answered_at = len(self.connections), Deadline(seconds), time.monotonic()
                elif stalled.expired():
                    if raise_if_left():
                        answered_at = time.monotonic()
                    elif time.monotonic() - answered_at > _SILENT_SECONDS:
                        raise self._stalled_error(missing)
                    seconds = min(2 * seconds, _MAX_STALLED_SECONDS)
                    stalled = Deadline(seconds)
        except BaseException as error:
            try:
                if isinstance(error, AuthenticationError):
                    raise_if_left()  # a listener that ends in the middle of a handshake looks like one with other token
                if leave is not None:
                    self._say_goodbye(leave(error))
            finally:
                self._abandon()
            raise
        return self.take()

    def _stalled_error(self, missing: Sequence[Member]) -> DistNetworkError:
        """Return the error of a join whose gateway has gone meanwhile."""
        names = ", ".join(member.described() for member in missing)
        return DistNetworkError(
            f"rank {self._me.rank} is not connected to {names}, and the gateway does not answer any more: a rank has "
            "failed, perhaps the one that hosts the gateway; its error says why",
            ranks=[member.rank for member in missing],
        )

    def _timeout_error(self, missing: Sequence[Member], deadline: Deadline) -> DistNetworkError:
        """Return the error that names the missing ranks."""
        for outgoing in self._outgoing.values():
            return outgoing.error()
        names = ", ".join(member.described() for member in missing)
        return DistNetworkError(
            f"rank {self._me.rank} at {', '.join(self._me.addresses)} was not reached by {names} within "
            f"{deadline.seconds:.0f} s, although all have joined: have they failed, or is this address unreachable "
            "for them?",
            ranks=[member.rank for member in missing],
        )

    def _say_goodbye(self, goodbye: Goodbye) -> None:
        """Send a GOODBYE over the ready connections: their peers read it as soon as they use them."""
        payload = goodbye.encode()
        header = frames.encode(Opcode.GOODBYE, epoch=self._epoch, length=len(payload))
        for connection in self.connections.values():
            with contextlib.suppress(DistNetworkError):
                connection.send([header, payload])

    # At the join and on demand

    def add(self, member: Member) -> None:
        """Add the addresses of a member."""
        self._members[member.rank] = member

    def can_dial(self, rank: int) -> bool:
        """Return whether the addresses of a rank are known, or not needed, as it is connected."""
        return bool(self._members[rank].addresses) or rank in self.connections or rank in self._taken

    def dial(self, rank: int, deadline: Deadline) -> None:
        """Begin to connect to a rank, unless it is connected."""
        if rank not in self.connections and rank not in self._taken and rank not in self._outgoing:
            peer = self._members[rank]
            self._outgoing[rank] = _OutgoingConnection(self._me, peer, self._epoch, self._transport_to(peer), deadline)

    def busy(self) -> bool:
        """Return whether connections are being made, so that ``advance`` has to be called from time to time."""
        return bool(self._outgoing) or self._listener.busy()

    def dialing(self) -> bool:
        """Return whether a connection of this rank to another one is under way."""
        return any(each.pending is not None for each in self._outgoing.values())

    def advance(self, seconds: float, wakeup: int | None = None) -> None:
        """Sleep until a connection can continue, then continue it.

        Args:
            seconds: time limit.
            wakeup: a descriptor that ends the sleep once it is readable.
        """
        now = time.monotonic()
        rest = min(seconds, _SLICE_SECONDS) if self.busy() else seconds
        poll = select.poll()
        for fd in [*self._listener.descriptors(), *([] if wakeup is None else [wakeup])]:
            poll.register(fd, select.POLLIN)
        under_way: dict[int, _OutgoingConnection] = {}
        for each in list(self._outgoing.values()):
            if each.pending is None and each.retry_at <= now:
                if self._is_admitted(each.peer.rank):
                    each.retry_at = now + _RETRY_SECONDS
                else:
                    self._continue(each, each.begin)
            if each.pending is not None:
                fd = each.pending.fileno()
                under_way[fd] = each
                poll.register(fd, each.pending.events())
            else:
                rest = min(rest, max(0.0, each.retry_at - now))
        ready = {fd for fd, _ in poll.poll(math.ceil(1000 * rest))}
        for fd, each in under_way.items():
            if fd in ready:
                self._continue(each, each.advance)
            elif each.abandon_at <= now:
                each.abandon()
        for identity, connection in self._listener.accept(ready, self._admits):
            rank = self._rank_of(identity)
            assert rank is not None
            previous = self.connections.pop(rank, None)
            if previous is not None:
                previous.close()  # the peer has abandoned that connection and made this one
            self._admitted.pop(rank, None)
            self.cancel(rank)
            self.connections[rank] = connection

    def take(self) -> dict[int, Connection]:
        """Return the connections that have become ready, by rank, once."""
        taken, self.connections = self.connections, {}
        self._taken.update(taken)
        return taken

    def unreached(self) -> list[_OutgoingConnection]:
        """Return the outgoing connections of which every address has failed."""
        return [each for each in self._outgoing.values() if each.rounds]

    def cancel(self, rank: int) -> None:
        """End the attempts to connect to a rank."""
        outgoing = self._outgoing.pop(rank, None)
        if outgoing is not None:
            outgoing.close()

    def close(self) -> None:
        """End all attempts, and close the listener and the connections that have not been taken."""
        self._abandon()
        self._listener.close()

    def _abandon(self) -> None:
        for rank in list(self._outgoing):
            self.cancel(rank)
        for connection in self.take().values():
            connection.close()

    def _continue(self, outgoing: _OutgoingConnection, step: Callable[[], Connection | None]) -> None:
        rank = outgoing.peer.rank
        try:
            connection = step()
        except (AuthenticationError, NoSharedMemoryError) as error:
            self.cancel(rank)
            self.failures[rank] = error
            return
        if connection is not None:
            del self._outgoing[rank]
            self.connections[rank] = connection

    def _rank_of(self, identity: bytes) -> int | None:
        """Return the rank of a client, None if it is not a member."""
        rank, epoch, instance, peer_instance = _IDENTITY.unpack_from(identity)
        expected = self._members.get(rank)
        if expected is None or epoch != self._epoch:
            return None
        # A client that knows this process's instance has it from the gateway, for this epoch.
        if peer_instance != self._me.instance.encode() or instance != (expected.instance.encode() or instance):
            return None
        return int(rank)

    def _admits(self, identity: bytes) -> bool:
        """Return whether a client may connect: a lower rank not if this one's connection to it is under way, or ready.

        A higher one that connects again has abandoned its first connection.
        """
        rank = self._rank_of(identity)
        if rank is None or rank in self._taken:
            return False
        outgoing = self._outgoing.get(rank)
        if rank < self._me.rank and (
            rank in self.connections or (outgoing is not None and outgoing.pending is not None)
        ):
            return False
        self._admitted[rank] = Deadline(HANDSHAKE_SECONDS)
        return True

    def _is_admitted(self, rank: int) -> bool:
        """Return whether this rank has admitted another one, whose handshake has time left."""
        return rank in self._admitted and not self._admitted[rank].expired()


class _OutgoingConnection:
    """The outgoing connection to a lower rank: tries its addresses in turn, repeatedly.

    Attributes:
        peer: the rank.
        pending: the current attempt, None between two attempts.
        retry_at: time of the next attempt.
        abandon_at: time at which the current attempt ends.
        rounds: how often all addresses have failed.
        deadline: of all attempts.
    """

    def __init__(self, me: Member, peer: Member, epoch: int, transport: TcpTransport, deadline: Deadline) -> None:
        self.peer = peer
        self.pending: PendingTcpConnection | None = None
        self.retry_at = 0.0
        self.abandon_at = 0.0
        self.rounds = 0
        self.deadline = deadline
        self._me = me
        self._transport = transport
        self._identity = _IDENTITY.pack(me.rank, epoch, me.instance.encode(), peer.instance.encode())
        self._address_index = 0
        self._failures: dict[str, str] = {}
        self._silent: set[str] = set()
        """Addresses whose latest attempt has connected, but got no answer."""

    def begin(self) -> Connection | None:
        """Try the next address."""
        address = self.peer.addresses[self._address_index]
        seconds = self.deadline.remaining() if len(self.peer.addresses) == 1 else _ATTEMPT_SECONDS
        self.abandon_at = time.monotonic() + seconds
        self._failures[address] = f"no answer within {min(seconds, self.deadline.remaining()):.1f} s"
        try:
            self.pending = self._transport.dial(address, self._identity)
        except DistNetworkError as error:
            raise_if_exhausted(error, f"rank {self._me.rank} cannot connect to {self.peer.described()}")
            if isinstance(error, NoSharedMemoryError):
                raise
            self._failed(str(error))
            return None
        return self.advance()

    def advance(self) -> Connection | None:
        """Continue the attempt; return the connection once it is ready."""
        assert self.pending is not None
        try:
            connection = self.pending.advance()
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

    def abandon(self) -> None:
        """End an attempt that has timed out."""
        address = self.peer.addresses[self._address_index]
        connected = self.pending is not None and self.pending.connected()
        self._failed(self._failures[address])
        if connected:
            self._silent.add(address)

    def silent(self) -> bool:
        """Return whether the peer's host accepts connections, but no process answers there: it may be stopped."""
        return bool(self._silent)

    def error(self) -> DistNetworkError:
        """Return the error of a rank that cannot be reached."""
        failures = "; ".join(f"{address}: {why}" for address, why in self._failures.items())
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

    def _failed(self, why: str) -> None:
        """Select the next address: at once, or after a delay once all have failed."""
        self.close()
        address = self.peer.addresses[self._address_index]
        self._failures[address] = why
        self._silent.discard(address)
        self._address_index = (self._address_index + 1) % len(self.peer.addresses)
        self.rounds += not self._address_index
        self.retry_at = time.monotonic() + (0.0 if self._address_index else _RETRY_SECONDS)
