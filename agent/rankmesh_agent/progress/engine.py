"""The progress engine: all connections of this process, driven by the threads that wait for messages.

A thread that waits *drives* the engine: it polls all connections, moves bytes both ways and delivers every frame,
whatever group it belongs to. Other threads that wait at the same time block until the driver has moved something; one
of them drives when the driver has finished. So a synchronous call needs no hand-off between threads. Only while
asynchronous messages are outstanding and no thread waits does a thread of the engine's own drive: ``progress_thread``.

A frame whose buffer has not been posted stays in the connection: the transport's flow control holds up its sender.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from rankmesh_agent.net.deadline import Deadline
from rankmesh_agent.net.fork import reset_lock
from rankmesh_agent.progress import wait_graph
from rankmesh_agent.progress.framing import (
    REMOTE_READ_BYTES,
    UNCONNECTED,
    FramedConnection,
    FrameSink,
    Peers,
    RemoteRead,
    Transfer,
)
from rankmesh_agent.progress.poller import POLL_INTERVAL, TAKE_INTERVAL, Poller
from rankmesh_agent.progress.progress_thread import SLICE_SECONDS, ProgressThread
from rankmesh_agent.progress.sinks import SinkTable
from rankmesh_agent.progress.status import Status
from rankmesh_agent.progress.wait_graph import WaitGraph
from rankmesh_agent.transports.base import Buffer, Connection
from rankmesh_agent.wire import frames
from rankmesh_agent.wire.errors import DistNetworkError, ProtocolError
from rankmesh_agent.wire.frames import Header, Opcode
from rankmesh_agent.wire.goodbye import Goodbye

Test = Callable[[], bool]
Action = Callable[[], object]
_DRAIN_SECONDS, _MAX_DEPARTURES = 0.001, 256
_OUTGOING = operator.attrgetter("outgoing")


class ProgressEngine:
    """This process's connections to the peers of an epoch.

    Args:
        epoch: the job's epoch; frames of another epoch are dropped.
        oversubscribed: whether the host has more ranks than cores: a rank that waits then yields its core.

    Attributes:
        lock: guards the engine and the groups' messages.
        call_count: number of calls of the foreground so far, each counted before it takes the lock: the background
            thread then releases it.
        lost_peers: how the peers have ended that have: by their GOODBYE, or as the end of the connection shows.
        lost_at: when, by the monotonic clock.
        dial: asks for a connection to a rank, which ``add_connection`` or ``lose`` answers; called with the lock held.
        on_demand: whether ranks connect on demand, so that some may not be connected after the join.
        unaddressed: the ranks to connect to whose addresses the gateway has not given, and why.
        ends: an epoll descriptor that reports the end of connections, see ended_connections.
        on_peer_failure: called, with the lock held, when a peer has ended that has not left in order; must not wait.
        departures: the groups that this process has left lately, each with its ranks and the frame that informs them:
            ranks that connect later get it, too.
        status_sources: return the calls and messages of this process that wait.
    """

    dial: Callable[[int], None]

    def __init__(
        self, rank: int, epoch: int, world_size: int, *, eager_limit: int, oversubscribed: bool = True
    ) -> None:
        self.rank = rank
        self.epoch = epoch
        self.world_size = world_size
        self.eager_limit = eager_limit
        self.lost_peers: dict[int, Goodbye] = {}
        self.lost_at: dict[int, float] = {}
        self.on_peer_failure: Callable[[], None] = lambda: None
        self.on_demand = False
        self.unaddressed: dict[int, str] = {}
        self.oversubscribed = oversubscribed
        self._peers = Peers(lambda rank: self.dial(rank), eager_limit)
        # Reentrant because an RLock knows its owner, which a wait interrupted by Ctrl-C needs.
        self.lock = threading.RLock()
        self.call_count = 0
        self.poll_count = self._taken = 0
        self.driven = False
        self.closed = False
        self._changed = threading.Condition(self.lock)
        self._followers = 0
        self._poller = Poller(self.lock, oversubscribed)
        self.rings, self.sockets, self.ends = self._poller.rings, self._poller.sockets, self._poller.ends
        self._sinks = SinkTable(epoch, self._on_goodbye)
        self.background = ProgressThread(self, self._sinks.sinks)
        self.status_sources: list[Callable[[], list[Status]]] = []
        self.wait_graph = WaitGraph(self)
        self._sinks.add(wait_graph.GROUP, self.wait_graph)
        self.departures: deque[tuple[tuple[int, ...], list[bytes]]] = deque(maxlen=_MAX_DEPARTURES)
        self._goodbye: list[bytes] = []

    def transports(self) -> dict[int, str]:
        """Return the medium of the connection to each peer that is, or was, connected."""
        peers = self._peers.copy()
        return {rank: peer.connection.medium for rank, peer in peers.items() if peer.connection is not UNCONNECTED}

    def waits(self) -> list[Status]:
        """Return the calls and messages of this process that wait."""
        with self.lock:
            return [wait for waits in self.status_sources for wait in waits()]

    def ended_connections(self) -> set[int]:
        """Return the ranks whose connections have ended since the last call; their last bytes may not have been read.

        The kernel reports them also while no thread drives the engine.
        """
        with self.lock:  # a descriptor that is closed may become that of another rank
            return self._poller.ended()

    def add_connection(self, rank: int, connection: Connection) -> None:
        """Use a connection that has been made."""
        with self.lock:
            if self.closed or rank in self.lost_peers:
                connection.close()
                return
            if not self.oversubscribed:
                connection.use_aggressive_mode()
            peer = self._peers.setdefault(rank, FramedConnection(rank, connection, self.eager_limit))
            peer.connection = connection
            self._poller.add(peer)
            self._flush(peer)
            for members, departure in self.departures:
                if rank in members:
                    self.send(rank, departure)
            if self._goodbye:
                self.send(rank, self._goodbye)
            self._poller.wake_sleeper()

    def lose(self, rank: int, end: Goodbye, *, connected: bool = False) -> None:
        """Record the end of a rank, unless it is lost already; if it is connected, only with ``connected``."""
        with self.lock:
            if connected or not self.is_connected(rank):
                peer = self._peers.get(rank)
                self._drop_peer(FramedConnection(rank, UNCONNECTED, 0) if peer is None else peer, end)
                self._poller.wake_sleeper()

    def register_sink(self, group: int, sink: FrameSink) -> None:
        """Deliver a group's frames from now on, including those that arrived early."""
        with self.lock:
            self._sinks.add(group, sink)
            for rank in self.lost_peers:
                sink.on_peer_lost(rank)

    def unregister_sink(self, group: int) -> None:
        """Drop a group's frames from now on, including those that have begun to arrive."""
        with self.lock:
            sink = self._sinks.drop(group)
            for rank in () if sink is None else sink.exposed_to():
                self.revoke(rank)
            for rank, peer in self._peers.items():
                if rank not in self.lost_peers:
                    was_paused = peer.paused
                    peer.discard_group(group)
                    if was_paused and not peer.paused and not self.closed:
                        self._poller.update(peer)
                        self._poller.due.add(peer)

    # With the lock held

    def is_connected(self, rank: int) -> bool:
        """Return whether a rank is connected."""
        return rank in self._peers and rank not in self.lost_peers and self._peers[rank].connection is not UNCONNECTED

    def silent_seconds(self, rank: int) -> float:
        """Return how long a rank's host has not acknowledged what was sent to it."""
        if self.closed or not self.is_connected(rank):
            return 0.0
        return self._peers[rank].connection.silent_seconds()

    def connected(self) -> list[int]:
        """Return the ranks that are connected."""
        return [rank for rank in self._peers if self.is_connected(rank)]

    def connect(self, ranks: Iterable[int]) -> None:
        """Connect to ranks that are waited for: their end is then noticed at once."""
        if not self.closed:
            for rank in ranks:
                if rank not in self.lost_peers and rank != self.rank:
                    self._peers[rank]

    def send(self, rank: int, buffers: Sequence[Buffer], transfer: Transfer | None = None) -> None:
        """Send a frame to a peer, or queue it. Frames to a lost peer are dropped: its failure ends the waits for it."""
        if rank in self.lost_peers or self.closed:
            return
        peer = self._peers[rank]
        queued = bool(peer.outgoing)
        try:
            peer.send(buffers, transfer)
        except DistNetworkError:
            peer.stop_sending()  # its earlier frames can still be received, perhaps a GOODBYE
        except BaseException as error:
            self._abort_connection(peer, error)
            raise
        if peer.outgoing and not queued and not peer.corked:
            self._poller.update(peer)
            # A sleeping driver of shared memory waits for data only, not yet for room to send.
            if rank in self.rings:
                self._poller.wake_sleeper()

    def take(self, rank: int, header: bytes, into: memoryview) -> bool:
        """Receive a frame from a peer if it comes next and soon, at the next poll what else has come."""
        peer = self.rings.get(rank) or self.sockets.get(rank)
        if peer is None or self.driven:
            return False
        try:
            taken = peer.take(header, into)
        except DistNetworkError as error:
            self._drop_peer(peer, Goodbye(error.message, died=True))
            return False
        except BaseException as error:
            self._abort_connection(peer, error)
            raise
        if peer.unread:
            self._poller.due.add(peer)
        if not taken:
            return False
        self._taken += 1
        if self._taken % TAKE_INTERVAL == 0:
            self.poll_once(0)  # a rank that never waits learns what the other peers send, and who has failed
        return True

    def resume_send(self, rank: int) -> None:
        """Send the rest of a frame that the compiled core has queued."""
        peer = self.sockets.get(rank)
        if peer is not None:
            self._flush(peer)

    def cancel_send(self, transfer: Transfer) -> tuple[int, Header] | None:
        """Remove a frame that has not begun to leave; return its peer and its header."""
        for rank, peer in self._peers.items():
            header = peer.cancel_send(transfer)
            if header is not None:
                self._poller.update(peer)
                return rank, header
        return None

    def resume(self, rank: int) -> None:
        """Resume receiving from a peer that was paused because a buffer was missing."""
        peer = self._peers.get(rank)
        if peer is not None and peer.paused and rank not in self.lost_peers:
            self._receive(peer)

    def expose(self, rank: int, view: memoryview) -> tuple[int, int]:
        """Expose ``view`` to a peer's reads, if the peer can read it; see Connection.expose."""
        return (0, 0) if rank in self.lost_peers else self._peers[rank].connection.expose(view)

    def revoke(self, rank: int) -> None:
        """End a peer's access to exposed memory; see Connection.revoke."""
        if rank in self._peers:
            self._peers[rank].connection.revoke()

    def start_remote_read(self, rank: int, read: RemoteRead) -> None:
        """Begin to read memory that a peer has exposed; a read from a lost peer never completes."""
        if rank not in self.lost_peers:
            peer = self._peers[rank]
            peer.remote_reads.append(read)
            self._poller.due.add(peer)
            self._poller.wake_sleeper()

    def cancel_remote_read(self, rank: int, group: int, seq: int) -> None:
        """End the read of a message that its sender has withdrawn."""
        if rank in self._peers:
            peer = self._peers[rank]
            peer.remote_reads = deque(read for read in peer.remote_reads if (read.group, read.seq) != (group, seq))

    # Without the lock

    def flush(self, timeout: float) -> None:
        """Send the queued frames, such as an ABORT, within at most ``timeout`` seconds."""
        self.call_count += 1
        with self.lock:
            if not self._all_flushed():
                self.drive(self._all_flushed, Deadline(timeout))

    # Progress

    def wait(self, ready: Test, deadline: Deadline, hopeless: Test | None = None, idle: Action | None = None) -> bool:
        """Wait, without the lock, until ``ready()``; see ``drive``."""
        self.call_count += 1
        with self.lock:
            return self.drive(ready, deadline, hopeless, idle)

    def drive(self, ready: Test, deadline: Deadline, hopeless: Test | None = None, idle: Action | None = None) -> bool:
        """Move bytes until ``ready()``, or leave that to the thread that does. With the lock held, as all arguments.

        Args:
            ready: whether what is waited for has come.
            hopeless: whether it cannot come any more, which ends the wait.
            idle: called before each sleep.

        Returns:
            Whether it has come; False also if the engine is closed.
        """
        driving, end = False, deadline.at
        try:
            while not ready():
                remaining = end - time.monotonic()
                if remaining <= 0 or self.closed or (hopeless is not None and hopeless()):
                    return False
                if idle is not None:
                    idle()
                remaining = remaining if remaining < SLICE_SECONDS else SLICE_SECONDS
                if not self.driven or driving:
                    self.driven = driving = True
                    self.poll_once(remaining)
                    continue
                self._followers += 1
                try:
                    if self.background.driving:
                        self._poller.wake()
                    self._changed.wait(remaining)
                finally:
                    self._followers -= 1
            return True
        finally:
            if driving:
                self.driven = False
                if not self.background.driving:
                    self.call_count += 1  # a thread that has waited often calls again at once
                if self._followers or self.closed:
                    self._changed.notify_all()
                if self.background.resting:
                    self.background.on_driver_left()

    def progress(self) -> None:
        """Move the bytes that can be moved now, without waiting."""
        self.call_count += 1
        with self.lock:
            if not self.driven and not self.closed:
                self.poll_once(0)

    def poll_once(self, timeout: float) -> None:
        """Sleep until a connection is ready, at most ``timeout`` seconds, and move its bytes. With the lock held."""
        self.poll_count += 1
        poller = self._poller
        ready = poller.ready_peers() if poller.due or poller.rings else []
        events: list[tuple[int, int]] = []
        if not ready and timeout:
            ready, events = poller.sleep(timeout)
        elif not ready or self.poll_count % POLL_INTERVAL == 0:
            events = poller.poll(0)
        for fd, event in events:
            peer = poller.peers.get(fd)
            if peer is None:
                # A thread in progress(), which polls beside the driver, may have read the eventfd.
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(poller.wakeup_fd)
                continue
            ended = bool(peer.paused and event & (select.EPOLLHUP | select.EPOLLERR))
            if (poller.rings and not peer.connection.on_wakeup()) or ended:
                poller.stop_polling(peer)
            if peer not in ready and not ended:
                ready.append(peer)
        for peer in ready:
            if peer.rank not in self.lost_peers:
                self._receive(peer)
            if peer.outgoing:
                self._flush(peer)
        if self._followers and ready:
            self._changed.notify_all()

    # One connection

    def _receive(self, peer: FramedConnection) -> None:
        self._poller.due.discard(peer)
        peer.corked = True
        try:
            more = peer.receive(self._sinks.sinks, self._sinks.sink_for)
        except DistNetworkError as error:
            self._drop_peer(peer, Goodbye(error.message, died=True))
            return
        except BaseException as error:
            self._abort_connection(peer, error)
            raise
        finally:
            peer.corked = False
            if peer.outgoing:
                self._flush(peer)
        if peer.rank in self.lost_peers:
            return
        if peer.paused or peer.outgoing or peer.custom_events:
            self._poller.update(peer)
        if more or (peer.at_eof and not peer.paused):
            self._poller.due.add(peer)
        if peer.remote_reads:
            self._read_remote(peer)

    def _read_remote(self, peer: FramedConnection) -> None:
        budget = REMOTE_READ_BYTES
        try:
            while peer.remote_reads and budget > 0:
                peer.corked = True
                try:
                    budget -= peer.run_remote_reads()
                finally:
                    peer.corked = False
                    self._flush(peer)
        finally:  # after Ctrl-C the chunk is read again
            if peer.remote_reads and peer.rank not in self.lost_peers:
                self._poller.due.add(peer)

    def _flush(self, peer: FramedConnection) -> None:
        if peer.rank in self.lost_peers:
            return
        try:
            peer.flush()
        except DistNetworkError:
            peer.stop_sending()
        except BaseException as error:
            self._abort_connection(peer, error)
            raise
        self._poller.update(peer)

    def _abort_connection(self, peer: FramedConnection, error: BaseException) -> None:
        """End a connection that an exception, Ctrl-C included, has left within a frame: its position is unknown."""
        self._drop_peer(peer, Goodbye(f"interrupted in a frame by {type(error).__name__}", died=True))

    def _on_goodbye(self, rank: int, about: int, end: Goodbye) -> None:
        """Record that a peer leaves, or that another rank is lost, as a peer reports it."""
        if about == rank:
            self._drop_peer(self._peers[rank], end)
        elif not 0 <= about < self.world_size:
            raise ProtocolError(f"rank {rank} reports the end of rank {about}, which is not in the world")
        elif about != self.rank:
            self.lose(about, end)

    def _drop_peer(self, peer: FramedConnection, end: Goodbye) -> None:
        if peer.rank in self.lost_peers or self.closed:
            return
        self.lost_peers[peer.rank], self.lost_at[peer.rank] = end, time.monotonic()
        self._poller.forget(peer)
        peer.remote_reads.clear()
        peer.outgoing.clear()
        peer.connection.close()
        for sink in list(self._sinks.sinks.values()):
            sink.on_peer_lost(peer.rank)
        if self._followers:
            self._changed.notify_all()
        if not end.clean:
            self.on_peer_failure()
        if self.on_demand and not self._goodbye and not self.connected():  # who else has ended is not known
            others = (rank for rank in range(self.world_size) if rank not in self.lost_peers and rank != self.rank)
            self.connect(itertools.islice(others, 1))

    # The end

    def say_goodbye(self, goodbye: Goodbye, timeout: float = 2.0) -> None:
        """Send a GOODBYE to every peer, and flush the queues within ``timeout``. A second call does nothing."""
        with self.lock:
            if self.closed or self._goodbye:
                return
            payload = goodbye.encode()
            self._goodbye = [frames.encode(Opcode.GOODBYE, epoch=self.epoch, length=len(payload)), payload]
            for rank in self.connected():
                self.send(rank, self._goodbye)
        self.flush(timeout)

    def close(self, reason: str = "", timeout: float = 2.0) -> None:
        """Say goodbye, with a reason, unless that is done, and close. A second call does nothing."""
        deadline = Deadline(timeout)
        self.say_goodbye(Goodbye(reason), timeout)
        with self._changed:
            if self.closed:
                return
            self.closed = True
            self._poller.wake()
            self._changed.notify_all()
            background = self.background.on_closed()
        if background is not None and background is not threading.current_thread():
            background.join()
        with self._changed:
            self._changed.wait_for(lambda: not self.driven, SLICE_SECONDS * 10)
            connections = undrained = [self._peers[rank].connection for rank in self.connected()]
            while (undrained := [each for each in undrained if not each.drain()]) and not deadline.expired():
                time.sleep(_DRAIN_SECONDS)
            for connection in connections:
                connection.close()
            self._poller.close()

    def end_in_child(self) -> None:
        """Send nothing in a forked child."""
        reset_lock(self.lock)
        self.closed = True

    def _all_flushed(self) -> bool:
        return not any(map(_OUTGOING, self._peers.values()))
