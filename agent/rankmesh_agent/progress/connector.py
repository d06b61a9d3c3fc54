"""Connections of a rank to others: at the join to its neighbours, which is its second half, later to ranks on demand.

Each rank listens before it joins, so all ranks in the peer table are reachable. Of two neighbours, the higher rank
connects at the join. On demand both may, at the same time: then the connection of the higher rank is the one to stay,
and it rejects the other. With its HELLO the client sends an identity of fixed size: its rank, the epoch, and the
instances of both processes. So the listener rejects a client whose target address now belongs to another process.

One thread makes all connections: it sleeps until one of them, outgoing or incoming, can continue. So a world of many
ranks takes few iterations, however slow a single peer is, and whatever the rank's other threads do. A rank that is
connected to all others has no such thread any more.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Protocol

from rankmesh_agent.net.deadline import Deadline
from rankmesh_agent.net.descriptors import log_failure
from rankmesh_agent.progress.engine import ProgressEngine
from rankmesh_agent.progress.outgoing import DIAL_SECONDS, IDENTITY, RETRY_SECONDS, OutgoingConnection
from rankmesh_agent.shared_memory.mapping import NoSharedMemoryError
from rankmesh_agent.transports.base import Connection
from rankmesh_agent.transports.tcp import HANDSHAKE_SECONDS, TcpListener, TcpTransport
from rankmesh_agent.wire.errors import AuthenticationError, DistError, DistNetworkError
from rankmesh_agent.wire.goodbye import Goodbye
from rankmesh_agent.wire.schemas import Member

_SLICE_SECONDS = 0.1
"""Maximum duration of one sleep while connections are being made: their timeouts are checked between two sleeps."""
_SLEEP_SECONDS = 3600.0
"""The same while none is being made."""
_STALLED_SECONDS, _MAX_STALLED_SECONDS = 0.5, 4.0
"""Seconds of a join without a new connection after which it is checked whether a member has left: twice as long after
each check, for where a hundred ranks start on a few cores, they keep the gateway from answering."""
_SILENT_SECONDS = 30.0
"""Seconds without an answer of the gateway after which it counts as gone, with the rank that hosts it."""
_ASK_SECONDS = 1.0
"""Interval at which the gateway is asked which ranks have ended, while one cannot be reached."""
_FIND_SECONDS = 1.0
"""Interval at which the gateway is asked for addresses that it has not given."""
_PAUSE_SECONDS = 0.1
"""Pause after an error of this process, such as the lack of a free descriptor."""
_CLOSE_SECONDS = 0.2
"""Time limit of the handshakes that are under way when this rank leaves."""


class Membership(Protocol):
    """The gateway's knowledge of the ranks."""

    def raise_if_left(self) -> bool:
        """Raise if a rank has left during the join; return whether the gateway has answered."""

    def ended(self, unreached: Collection[int]) -> Mapping[int, Goodbye]:
        """Return the ranks that have ended, and how, given those that cannot be reached."""

    def find_members(self, ranks: Collection[int]) -> Iterable[Member]:
        """Return members with their addresses, as far as those are known; raise DistNetworkError without an answer."""


class Connector(threading.Thread):
    """Connects an engine to other ranks.

    Args:
        members: all ranks, this process included; those without addresses are asked of the membership.
        listener: the listener to which other ranks connect; ``close`` closes it.
    """

    def __init__(
        self,
        me: Member,
        members: Iterable[Member],
        epoch: int,
        listener: TcpListener,
        transport_to: Callable[[Member], TcpTransport],
        membership: Membership,
    ) -> None:
        super().__init__(name="rankmesh-connect", daemon=True)
        self.failures: dict[int, DistNetworkError] = {}
        self._me = me
        self._members = {member.rank: member for member in members if member is not me}
        self._epoch = epoch
        self._listener = listener
        self._transport_to = transport_to
        self._membership = membership
        self._engine: ProgressEngine
        self._outgoing: dict[int, OutgoingConnection] = {}
        self._admitted: dict[int, Deadline] = {}
        """Ranks whose handshakes with this one are under way, until when."""
        self._made: set[int] = set()
        """Ranks with which there is, or was, a connection."""
        self._wanted: deque[int] = deque()
        self._ask_at = self._find_at = 0.0
        self._joined = False
        self._error: Exception | None = None
        """The error of this process that ends the join."""
        self._closing = self._closed = False
        self._lock = threading.Lock()  # the eventfd is not written to after its number has become another file's
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    # For other threads

    def connect(self, engine: ProgressEngine, ranks: Collection[int], deadline: Deadline) -> None:
        """Connect an engine to the neighbours, each of which connects to this rank; later to other ranks on demand.

        Returns early if a neighbour has ended, which the engine knows.

        Raises:
            DistNetworkError: a pair cannot be connected; the error names it, and the addresses tried.
            DescriptorLimitError: this process has no free descriptor.
            NoSharedMemoryError: this process has no room for shared memory, and no other transport is allowed.
        """
        self._engine = engine
        engine.dial, engine.on_demand = self._dial, len(ranks) < len(self._members)
        with engine.lock:
            engine.connect(rank for rank in ranks if rank < self._me.rank)
        self.start()

        def over() -> bool:
            if self._error or self.failures or not engine.lost_peers.keys().isdisjoint(ranks):
                return True
            return all(map(engine.is_connected, ranks))

        made, seconds, answered_at = 0, _STALLED_SECONDS, time.monotonic()
        while not engine.wait(over, Deadline(min(seconds, deadline.remaining()))):
            missing = [self._members[rank] for rank in ranks if rank not in self._made]
            if deadline.expired():
                for outgoing in list(self._outgoing.values()):
                    raise outgoing.error()
                raise self._not_reached(
                    missing,
                    f" within {deadline.seconds:.0f} s, although all have joined: have they failed, or is this address "
                    "unreachable for them?",
                )
            if len(self._made) > made:
                made, answered_at = len(self._made), time.monotonic()
                continue
            if self._membership.raise_if_left():
                answered_at = time.monotonic()
            elif time.monotonic() - answered_at > _SILENT_SECONDS:
                raise self._not_reached(
                    missing,
                    ", and the gateway does not answer any more: a rank has failed, perhaps the one that hosts the "
                    "gateway; its error says why",
                )
            seconds = min(2 * seconds, _MAX_STALLED_SECONDS)
        for error in [error for error in (self._error, *self.failures.values()) if error]:
            if isinstance(error, AuthenticationError):
                self._membership.raise_if_left()  # a listener that ends in a handshake looks like one with other token
            raise error
        self._joined = True
        if not engine.on_demand:
            self.close()

    def close(self) -> None:
        """End the thread and the attempts, and close the listener. Does nothing the second time.

        Connections under way have a moment to become ready: the engine, which is still open, says goodbye on them.
        """
        self._closing = True
        self._wake()
        if self.is_alive():
            self.join()
        with self._lock:
            if self._closed:
                return
            self._closed = True
        deadline = Deadline(_CLOSE_SECONDS)
        with contextlib.suppress(DistError, OSError):
            while any(each.pending for each in self._outgoing.values()) and not deadline.expired():
                self._advance(deadline.remaining())
        for rank in list(self._outgoing):
            self._cancel(rank)
        self._listener.close()
        os.close(self._wakeup)

    def _dial(self, rank: int) -> None:
        """Connect to a rank soon; does not wait."""
        self._wanted.append(rank)
        self._wake()

    def _wake(self) -> None:
        with self._lock:
            if not self._closed:
                os.eventfd_write(self._wakeup, 1)

    def _not_reached(self, missing: Sequence[Member], why: str) -> DistNetworkError:
        """Return the error of a join without the connections to some neighbours."""
        names = ", ".join(member.described() for member in missing)
        return DistNetworkError(
            f"rank {self._me.rank} at {', '.join(self._me.addresses)} was not reached by {names}{why}",
            ranks=[member.rank for member in missing],
        )

    # In the thread

    def run(self) -> None:
        """Make connections until ``close``."""
        while not self._closing:
            try:
                self._dial_wanted()
                self._advance(_FIND_SECONDS if self._engine.unaddressed else _SLEEP_SECONDS)
                self._give_up_unreached()
            except Exception as error:
                if not self._joined:
                    self._error = error
                    return
                # The ranks that wait for a connection have deadlines of their own.
                log_failure("a connection to another rank could not be made", error)
                time.sleep(_PAUSE_SECONDS)

    def _dial_wanted(self) -> None:
        """Begin to connect to the ranks that the engine wants, once their addresses are known."""
        engine = self._engine
        wanted = {self._wanted.popleft() for _ in range(len(self._wanted))} | engine.unaddressed.keys()
        wanted = {rank for rank in wanted if rank not in self._made and rank not in engine.lost_peers}
        unaddressed = {rank for rank in wanted if not self._members[rank].addresses}
        if unaddressed - engine.unaddressed.keys() or (unaddressed and time.monotonic() >= self._find_at):
            engine.unaddressed = self._find_addresses(unaddressed)
        else:
            engine.unaddressed = {rank: engine.unaddressed[rank] for rank in unaddressed}
        for rank in wanted - engine.unaddressed.keys() - self._outgoing.keys():
            peer = self._members[rank]
            self._outgoing[rank] = OutgoingConnection(self._me, peer, self._epoch, self._transport_to(peer))

    def _find_addresses(self, ranks: Collection[int]) -> dict[int, str]:
        """Get the addresses of ranks from the gateway; return those that it has not given, and why."""
        why = "the gateway does not know its address"
        try:
            self._members |= {member.rank: member for member in self._membership.find_members(ranks)}
        except DistNetworkError as error:
            why = f"its address is not known, and {error.message}"
        self._find_at = time.monotonic() + _FIND_SECONDS
        return {rank: why for rank in ranks if not self._members[rank].addresses}

    def _advance(self, seconds: float) -> None:
        """Sleep until a connection can continue, or there is one to begin, and continue it."""
        now = time.monotonic()
        rest = min(seconds, _SLICE_SECONDS) if self._outgoing or self._listener.busy() else seconds
        poll = select.poll()
        for fd in (*self._listener.descriptors(), self._wakeup):
            poll.register(fd, select.POLLIN)
        under_way: dict[int, OutgoingConnection] = {}
        for each in list(self._outgoing.values()):
            if each.pending is None and each.retry_at <= now:
                if self._is_admitted(each.peer.rank):
                    each.retry_at = now + RETRY_SECONDS
                else:
                    self._continue(each, each.begin)
            if each.pending is not None:
                fd = each.pending.fileno()
                under_way[fd] = each
                poll.register(fd, each.pending.events())
            else:
                rest = min(rest, max(0.0, each.retry_at - now))
        ready = {fd for fd, _ in poll.poll(math.ceil(1000 * rest))}
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wakeup)
        for fd, each in under_way.items():
            if fd in ready:
                self._continue(each, each.advance)
            elif each.abandon_at <= now:
                each.abandon()
        for identity, connection in self._listener.accept(ready, self._admit):
            rank = self._rank_of(identity)
            assert rank is not None
            if rank in self._made:  # the peer has abandoned this attempt
                connection.close()
                continue
            self._admitted.pop(rank, None)
            self._cancel(rank)
            self._add(rank, connection)

    def _continue(self, outgoing: OutgoingConnection, step: Callable[[], Connection | None]) -> None:
        rank = outgoing.peer.rank
        try:
            connection = step()
        except (AuthenticationError, NoSharedMemoryError) as error:
            self._give_up(rank, error, f"rank {self._me.rank} cannot connect to it: {error.message}")
            return
        if connection is not None:
            del self._outgoing[rank]
            self._add(rank, connection)

    def _add(self, rank: int, connection: Connection) -> None:
        self._made.add(rank)
        self._engine.add_connection(rank, connection)

    def _cancel(self, rank: int) -> None:
        """End the attempts to connect to a rank."""
        outgoing = self._outgoing.pop(rank, None)
        if outgoing is not None:
            outgoing.close()

    def _give_up(self, rank: int, error: DistNetworkError, why: str) -> None:
        """Record that a rank cannot be reached; other ranks are informed, too."""
        self._cancel(rank)
        self.failures[rank] = error
        self._engine.lose(rank, Goodbye(why, died=True))

    def _give_up_unreached(self) -> None:
        """Give up the ranks that have ended, and those of which every address has failed until the deadline."""
        engine = self._engine
        unreached = [each for each in self._outgoing.values() if each.rounds]
        # A rank that dials this one at the same time rejects the first attempt.
        asked = [each.peer.rank for each in unreached if each.rounds > 1 and not each.silent]
        if (asked or engine.unaddressed) and time.monotonic() > self._ask_at:
            for rank, end in self._membership.ended(asked).items():
                # Others have failed at the gateway also if they are only stopped.
                if end.clean or rank in asked or rank in engine.unaddressed:
                    engine.lose(rank, end)
            self._ask_at = time.monotonic() + _ASK_SECONDS
        for outgoing in unreached:
            rank = outgoing.peer.rank
            if rank in engine.lost_peers:
                self._cancel(rank)
            elif outgoing.silent:  # a stopped process is waited for, as where all ranks are connected
                outgoing.deadline.restart(DIAL_SECONDS)
            elif outgoing.deadline.expired():
                error = outgoing.error()
                self._give_up(rank, error, error.message)

    # Clients

    def _rank_of(self, identity: bytes) -> int | None:
        """Return the rank of a client, None if it is not a member."""
        rank, epoch, instance, peer_instance = IDENTITY.unpack_from(identity)
        expected = self._members.get(rank)
        if expected is None or epoch != self._epoch:
            return None
        # A client that knows this process's instance has it from the gateway, for this epoch.
        if peer_instance != self._me.instance.encode() or instance != (expected.instance.encode() or instance):
            return None
        return int(rank)

    def _admit(self, identity: bytes) -> bool:
        """Admit a client, unless it is a lower rank to which this one connects; return whether it may connect."""
        rank = self._rank_of(identity)
        if rank is None or rank in self._made:
            return False
        outgoing = self._outgoing.get(rank)
        if rank < self._me.rank and outgoing is not None and outgoing.pending is not None:
            return False
        self._admitted[rank] = Deadline(HANDSHAKE_SECONDS)
        return True

    def _is_admitted(self, rank: int) -> bool:
        """Return whether this rank has admitted another one, whose handshake has time left."""
        return rank in self._admitted and not self._admitted[rank].expired()
