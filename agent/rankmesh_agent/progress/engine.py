"""All connections of this process, and the progress engine: the thread that waits moves the bytes.

No thread is dedicated to receiving. Whoever waits for something *leads*: it polls all connections, moves bytes both
ways and delivers frames, whoever they are for; others who wait meanwhile follow, and one of them takes the lead when
the leader has what it wanted. So a synchronous call needs no hand-off between threads. Only while asynchronous
point-to-point messages are under way and nobody has called for a while does a background thread lead. It gives way to
whoever calls, and stays away from one who calls again and again: two threads that take turns with the lock and the
interpreter at every message are slower than one.

Frames go to *ports*, one a group. A frame whose buffer is not there yet stays in the connection: its sender is held up
by the transport's own flow control.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from rankmesh_agent.net.deadline import Deadline
from rankmesh_agent.progress.framing import REMOTE_READ_BYTES, FramedConnection, FrameSink, RemoteRead, Transfer
from rankmesh_agent.transports.base import Buffer, Connection
from rankmesh_agent.wire import frames
from rankmesh_agent.wire.errors import DistNetworkError, ProtocolError
from rankmesh_agent.wire.frames import Header, Opcode

_FINISH_SECONDS = 0.001
_GRACE_SECONDS = 0.001
"""How long nobody has called when the background thread begins to lead."""
SLICE_SECONDS = 0.1
"""How long a wait lasts at most before the deadline is looked at again."""
SILENT_SECONDS = 8.0
"""How long a peer's host may leave unanswered what it has to answer; with what goes before, about FAILED_SECONDS."""
_LOOKS = 10
"""How often a wait looks around before it sleeps, where each look is a system call."""
_SPINS = 200
"""How often where most are none, and the core is this rank's own: about as long as falling asleep and being woken."""
_POLLED = 8
"""Poll is asked, and the lock is free, in one of so many turns where there is nothing that only poll would tell."""
_FIRST = frozenset({Opcode.ENTER, Opcode.ABORT})
"""Frames that may come before this process has made their group."""
_EARLY_FRAMES = 4096
"""Frames kept for groups that this process has not made yet."""


class Disconnect:
    """How a peer went.

    Attributes:
        cause: what ended the connection, or what the peer said as it left.
        clean: whether it said goodbye.
    """

    def __init__(self, cause: str, clean: bool) -> None:
        self.cause = cause
        self.clean = clean


class ProgressEngine:
    """This process's connections to all peers of an epoch.

    Args:
        rank: this process's global rank.
        epoch: the job's epoch; frames of another one are not for us.
        connections: one to every other rank.
        eager_limit: largest EAGER payload in bytes.
        crowded: whether the host has more ranks than cores: then a rank that waits gives its core away.

    Attributes:
        lost: how the peers went that are gone.
        on_peer_failure: called, with the lock held, when one went without a goodbye.
    """

    def __init__(
        self,
        rank: int,
        epoch: int,
        connections: dict[int, Connection],
        *,
        eager_limit: int,
        oversubscribed: bool = True,
    ) -> None:
        self.rank = rank
        self.epoch = epoch
        self.eager_limit = eager_limit
        self.lost_peers: dict[int, Disconnect] = {}
        # Reentrant only because it knows its owner, which a wait cut off by Ctrl-C has to ask.
        self.lock = threading.RLock()
        self._changed = threading.Condition(self.lock)
        self._needed = threading.Condition(self.lock)
        for connection in connections.values():
            connection.parallel_reads = not oversubscribed
        self._peers = {
            peer: FramedConnection(peer, connection, eager_limit) for peer, connection in connections.items()
        }
        self._by_fd = {peer.connection.fileno(): peer for peer in self._peers.values()}
        self._masks: dict[int, int] = {}
        self._poll = select.epoll()
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll.register(self._wakeup, select.EPOLLIN)
        for fd, peer in self._by_fd.items():
            self._masks[fd] = peer.connection.events(False)
            self._poll.register(fd, self._masks[fd])
        # Connections that know of bytes which poll does not see have to be asked before each sleep.
        self._asked = [peer for peer in self._peers.values() if peer.connection.medium != "tcp"]
        self._oversubscribed = oversubscribed
        self._ready: set[FramedConnection] = set()
        self._ports: dict[int, FrameSink] = {}
        self._dropped: set[int] = set()
        self._early: list[tuple[int, Header, memoryview | bytes]] = []
        self._leading = False
        self._asleep = False
        self._sweeps = 0
        self._background_leads = False
        self._background_rests = False
        self._visits = 0
        self._followers = 0
        self._outstanding: list[tuple[int, Transfer]] = []
        self._background: threading.Thread | None = None
        self._closed = False
        self.on_peer_failure: Callable[[], None] | None = None

    # Ports

    def register_sink(self, group: int, port: FrameSink) -> None:
        """Begin to deliver a group's frames, those that came before included."""
        with self.lock:
            self._ports[group] = port
            self._dropped.discard(group)
            early, self._early = self._early, []
            for rank, header, payload in early:
                if header.group == group:
                    port.on_frame(rank, header, payload)
                else:
                    self._early.append((rank, header, payload))
            for rank in self.lost_peers:
                port.on_peer_lost(rank)

    def unregister_sink(self, group: int) -> None:
        """Drop a group's frames from now on, also those that have begun to arrive."""
        with self.lock:
            self.drop_sink(group)

    def transports(self) -> dict[int, str]:
        """Return what carries the bytes to each peer."""
        return {rank: peer.connection.medium for rank, peer in self._peers.items()}

    def descriptors(self) -> dict[int, int]:
        """Return the connections' descriptors, each with the rank it leads to."""
        with self.lock:
            return {fd: peer.rank for fd, peer in self._by_fd.items()}

    # With the lock held

    def drop_sink(self, group: int) -> None:
        """Do what close_port does."""
        self._ports.pop(group, None)
        self._dropped.add(group)
        self._outstanding = [held for held in self._outstanding if held[0] != group]
        for rank, peer in self._peers.items():
            held_up = peer.paused
            peer.discard_group(group)
            peer.connection.revoke()
            if rank not in self.lost_peers and not self._closed:
                self._watch(peer)
                if held_up and not peer.paused:
                    self._ready.add(peer)

    def send(self, rank: int, buffers: Sequence[Buffer], transfer: Transfer | None = None) -> None:
        """Send a frame to a peer, or begin to. A lost peer's frames vanish: who waits for it finds out."""
        peer = self._peers[rank]
        if rank in self.lost_peers or self._closed:
            return
        waiting = peer.writing
        try:
            peer.send(buffers, transfer)
        except DistNetworkError:
            peer.stop_sending()  # what it sent before is still to be received; that tells whether it said goodbye
        except BaseException as error:
            self._cut_off(peer, error)
            raise
        if peer.writing and not waiting and not peer.corked:
            self._watch(peer)
            # A leader that sleeps has asked to be woken by what comes, but not yet by room for what goes.
            if self._asleep and peer in self._asked:
                self._wake()

    def cancel_send(self, transfer: Transfer) -> tuple[int, Header] | None:
        """Remove a frame that has not begun to leave; return for which peer it was, and its header."""
        for rank, peer in self._peers.items():
            header = peer.cancel_send(transfer)
            if header is not None:
                if rank not in self.lost_peers:
                    self._watch(peer)
                return rank, header
        return None

    def resume(self, rank: int) -> None:
        """Go on with a peer that was held up because a buffer was missing."""
        peer = self._peers.get(rank)
        if peer is not None and peer.paused and rank not in self.lost_peers:
            self._receive(peer)

    def expose(self, rank: int, view: memoryview) -> tuple[int, int]:
        """Let a peer read ``view`` itself, if it can; see Connection.offer."""
        return (0, 0) if rank in self.lost_peers else self._peers[rank].connection.expose(view)

    def revoke(self, rank: int) -> None:
        """Take back what a peer may read; see Connection.revoke."""
        self._peers[rank].connection.revoke()

    def start_remote_read(self, rank: int, fetch: RemoteRead) -> None:
        """Begin to read what a peer has offered; a lost one's is never told to be there."""
        if rank not in self.lost_peers:
            peer = self._peers[rank]
            peer.remote_reads.append(fetch)
            self._mark_ready(peer)

    def cancel_remote_read(self, rank: int, group: int, seq: int) -> None:
        """Read no further in a message that its sender has taken back."""
        peer = self._peers[rank]
        peer.remote_reads = deque(fetch for fetch in peer.remote_reads if (fetch.group, fetch.seq) != (group, seq))

    # Waiting; without the lock

    def foreground(self) -> threading.RLock:
        """Return the lock, for one who begins messages: the background thread stays away for a while."""
        self._visits += 1  # before the lock is there: who leads in the background lets go of it then
        return self.lock

    def wait(self, ready: Callable[[], bool], deadline: Deadline) -> bool:
        """Wait until ``ready()``, which is called with the lock held, moving bytes meanwhile.

        Returns:
            Whether it became so before the deadline.
        """
        with self.foreground():
            while not ready():
                if deadline.expired() or self._closed:
                    return False
                if self._leading:
                    self._wait_for_driver(deadline)
                else:
                    self._drive(ready, deadline)
            return True

    def progress(self) -> None:
        """Move what can be moved now, without waiting."""
        with self.foreground():
            if not self._leading and not self._closed:
                self._poll_once(0)

    def fail_silent_hosts(self) -> None:
        """Hold peers for failed whose hosts have answered nothing for SILENT_SECONDS; to be called every second.

        A connection does not tell: TCP goes on for a quarter of an hour.
        """
        now = time.monotonic()
        with self.lock:
            for rank, peer in self._peers.items():
                if self._closed or rank in self.lost_peers:
                    continue
                unanswered = peer.connection.silent_seconds()
                if not unanswered:
                    peer.unanswered_since = None
                    continue
                if peer.unanswered_since is None:
                    # A question for room may be the first in minutes: who was asked just now has yet to answer.
                    peer.unanswered_since = now
                silent = min(unanswered, now - peer.unanswered_since)
                if silent >= SILENT_SECONDS:
                    why = f"its host has answered nothing for {silent:.0f} s: it, or the network to it, is down"
                    self._lose(peer, Disconnect(why, clean=False))
                    if self._asleep:
                        self._wake()

    def _drive(self, enough: Callable[[], bool], deadline: Deadline) -> None:
        """Move bytes until it is enough, or the deadline passes."""
        self._leading = True
        try:
            while not enough() and not deadline.expired() and not self._closed:
                self._poll_once(min(SLICE_SECONDS, deadline.remaining()))
        finally:
            self._leading = False
            if not self._background_leads:
                self._visits += 1  # who has waited may well call again
            if self._followers or self._closed:
                self._changed.notify_all()
            if self._background_rests and self._outstanding:
                self._needed.notify()

    def _wait_for_driver(self, deadline: Deadline) -> None:
        """Wait until the leader has moved something, or leaves."""
        self._followers += 1
        try:
            if self._background_leads:
                self._wake()
            self._changed.wait(min(SLICE_SECONDS, deadline.remaining()))
        finally:
            self._followers -= 1

    def _poll_once(self, timeout: float) -> None:
        """Sleep until a connection is ready, at most ``timeout`` seconds, and move its bytes."""
        self._sweeps += 1
        ready = self._due()
        events: list[tuple[int, int]] = []
        if not ready or self._sweeps % _POLLED == 0:
            events = self._polled(0)
        if not ready and not events and timeout:
            ready, events = self._sleep(timeout)
        for fd, event in events:
            peer = self._by_fd.get(fd)
            if peer is None:
                if fd == self._wakeup:
                    os.eventfd_read(self._wakeup)
                continue
            peer.connection.on_wakeup()
            if peer.paused and event & (select.EPOLLHUP | select.EPOLLERR):
                self._hang_up(peer)
            elif peer not in ready:
                ready.append(peer)
        for peer in ready:
            if peer.rank not in self.lost_peers:
                self._receive(peer)
            if peer.writing and peer.rank not in self.lost_peers:
                self._flush(peer)
        if self._followers and ready:
            self._changed.notify_all()

    def _due(self) -> list[FramedConnection]:
        """Return the peers with something to do that poll would not tell."""
        lost, restless = self.lost_peers, self._ready
        ready = [peer for peer in restless if peer.rank not in lost] if restless else []
        ready += [
            peer
            for peer in self._asked
            if peer.connection.has_work(peer.writing)
            and peer.rank not in lost
            and peer not in restless
            and not self._held(peer)
        ]
        return ready

    def _sleep(self, timeout: float) -> tuple[list[FramedConnection], list[tuple[int, int]]]:
        """Return who has something to do, as soon as somebody has; see _due and _polled."""
        # Falling asleep and being woken takes longer than most messages: look around a little before.
        polling = len(self._asked) < len(self._peers)
        for turn in range(_LOOKS if polling or self._oversubscribed else _SPINS):
            if self._oversubscribed or turn % _POLLED == 0:
                os.sched_yield()
            ready = self._due()
            events = self._polled(0) if polling or turn % _POLLED == 0 else []
            if ready or events:
                return ready, events
        # Only now: whoever writes to a ring whose reader says that it sleeps has to ring its bell.
        lost = self.lost_peers
        ready = [
            peer
            for peer in self._asked
            if peer.rank not in lost and not peer.connection.prepare_wait(peer.writing) and not self._held(peer)
        ]
        return ready, self._polled(0 if ready or self._ready else timeout)

    def _polled(self, timeout: float) -> list[tuple[int, int]]:
        """Return what poll tells after ``timeout``; the lock is free meanwhile."""
        interrupted: KeyboardInterrupt | None = None
        try:
            self._asleep = timeout > 0
            self.lock.release()
            events = self._poll.poll(timeout)
        finally:
            while not self.lock._is_owned():  # type: ignore[attr-defined]  # Ctrl-C may cut acquire off, too
                try:
                    self.lock.acquire()
                except KeyboardInterrupt as error:
                    interrupted = error
            self._asleep = False
        if interrupted is not None:
            raise interrupted
        return events

    def _held(self, peer: FramedConnection) -> bool:
        """Whether a peer's incoming bytes have nowhere to go and nothing is to be sent to it."""
        return peer.paused and not peer.writing

    def _receive(self, peer: FramedConnection) -> None:
        self._ready.discard(peer)
        peer.cork()
        try:
            more = peer.receive(self._port_of)
        except DistNetworkError as error:
            self._lose(peer, Disconnect(error.message, clean=False))
            return
        except BaseException as error:
            self._cut_off(peer, error)
            raise
        finally:
            self._uncork(peer)
        if peer.rank in self.lost_peers:
            return
        self._watch(peer)
        if peer.remote_reads:
            self._fetch(peer)
        if more or (peer.at_eof and not peer.paused):
            self._ready.add(peer)

    def _fetch(self, peer: FramedConnection) -> None:
        budget = REMOTE_READ_BYTES
        try:
            while peer.remote_reads and budget > 0:
                peer.cork()
                try:
                    budget -= peer.run_remote_reads()
                finally:
                    self._uncork(peer)
        finally:  # Ctrl-C finds it in order: the piece is read again
            if peer.remote_reads and peer.rank not in self.lost_peers:
                self._ready.add(peer)

    def _uncork(self, peer: FramedConnection) -> None:
        """Send what has been queued while more might have followed."""
        peer.corked = False
        if peer.writing and peer.rank not in self.lost_peers:
            self._flush(peer)

    def _mark_ready(self, peer: FramedConnection) -> None:
        """Have the leader turn to a peer that poll will not tell about, even if it is asleep."""
        self._ready.add(peer)
        if self._asleep:
            self._wake()

    def _flush(self, peer: FramedConnection) -> None:
        try:
            peer.flush()
        except DistNetworkError:
            peer.stop_sending()
        except BaseException as error:
            self._cut_off(peer, error)
            raise
        self._watch(peer)

    def _cut_off(self, peer: FramedConnection, error: BaseException) -> None:
        """End a connection in which a frame is half done: whatever it was, Ctrl-C included, nobody knows where."""
        self._lose(peer, Disconnect(f"interrupted in a frame by {type(error).__name__}", clean=False))

    def _hang_up(self, peer: FramedConnection) -> None:
        """Have poll report a connection no longer that has ended, but whose last bytes have nowhere to go yet."""
        peer.at_eof = True
        fd = peer.connection.fileno()
        if self._by_fd.pop(fd, None) is not None:
            self._masks.pop(fd, None)
            self._poll.unregister(fd)

    def _watch(self, peer: FramedConnection) -> None:
        """Have poll report what matters now: nothing to receive while held up, room to send when something waits."""
        special = peer.paused or peer.writing
        if not special and not peer.custom_events:
            return
        peer.custom_events = special
        connection = peer.connection
        fd = connection.fileno()
        mask = connection.events(peer.writing)
        if peer.paused and connection.medium == "tcp":
            mask &= ~select.EPOLLIN
        if fd in self._by_fd and self._masks.get(fd) != mask:
            self._masks[fd] = mask
            self._poll.modify(fd, mask)

    def _port_of(self, rank: int, header: Header) -> FrameSink | None:
        if header.opcode is Opcode.GOODBYE:
            return _Farewell(self)
        if header.epoch != self.epoch:
            return None
        port = self._ports.get(header.group)
        if port is None and header.opcode in _FIRST and header.group not in self._dropped:
            return _Early(self._early)
        return port

    def _lose(self, peer: FramedConnection, lost: Disconnect) -> None:
        if peer.rank in self.lost_peers or self._closed:
            return
        self.lost_peers[peer.rank] = lost
        self._hang_up(peer)
        self._ready.discard(peer)
        peer.remote_reads.clear()
        peer.connection.close()
        for port in list(self._ports.values()):
            port.on_peer_lost(peer.rank)
        self._changed.notify_all()
        if self.on_peer_failure is not None and not lost.clean:
            self.on_peer_failure()

    def _wake(self) -> None:
        os.eventfd_write(self._wakeup, 1)

    # Asynchronous messages

    def progress_in_background(self, group: int, transfer: Transfer) -> None:
        """Have the background thread see to an asynchronous message. With the lock held."""
        self._outstanding.append((group, transfer))
        if self._background is None:
            self._background = threading.Thread(target=self._lead_in_background, name="rankmesh-progress", daemon=True)
            self._background.start()
        elif self._background_rests:
            self._background_rests = False
            self._needed.notify()

    def _idle(self) -> bool:
        """Whether no asynchronous message is under way."""
        if self._outstanding:
            self._outstanding = [held for held in self._outstanding if not held[1].done]
        return not self._outstanding

    def _lead_in_background(self) -> None:
        visits = -1

        def enough() -> bool:
            return self._visits != visits or self._idle()

        with self.lock:
            while not self._closed:
                if self._idle():
                    self._rest(None)
                elif self._visits != visits:
                    visits, sweeps = self._visits, self._sweeps
                    self._needed.wait(_GRACE_SECONDS)
                    if self._sweeps == sweeps and self._visits != visits and not self._leading and not self._closed:
                        self._poll_once(0)  # who calls only begins messages, and moves nothing
                elif self._leading:
                    self._rest(SLICE_SECONDS)  # in one long wait, whose end we are told
                else:
                    self._background_leads = True
                    try:
                        self._drive(enough, Deadline(SLICE_SECONDS))
                    finally:
                        self._background_leads = False

    def _rest(self, seconds: float | None) -> None:
        self._background_rests = True
        try:
            self._needed.wait(seconds)
        finally:
            self._background_rests = False

    # The end

    def close(self, reason: str = "", patience: float = 2.0, *, failed: bool = False) -> None:
        """Say goodbye to everyone, send what is queued, and close. Does nothing the second time.

        Args:
            reason: why, for the errors of those who still wait for us.
            patience: seconds to wait for peers that do not take what is queued for them.
            failed: have them hold this rank for failed, not for one that has left.
        """
        with self.lock:
            if self._closed:
                return
            payload = reason.encode()[: frames.SMALL]
            header = frames.encode(Opcode.GOODBYE, epoch=self.epoch, part=int(failed), length=len(payload))
            for rank in self._peers:
                self.send(rank, [header, payload])
        deadline = Deadline(patience)
        self.wait(self._all_flushed, deadline)
        with self._changed:
            self._closed = True
            self._wake()
            self._changed.notify_all()
            self._needed.notify()
            background = self._background
        if background is not None and background is not threading.current_thread():
            background.join()
        with self._changed:
            self._changed.wait_for(lambda: not self._leading, SLICE_SECONDS * 10)
            ours = there = [peer.connection for rank, peer in self._peers.items() if rank not in self.lost_peers]
            while (there := [peer for peer in there if not peer.drain()]) and not deadline.expired():
                time.sleep(_FINISH_SECONDS)
            for connection in ours:
                connection.close()
            self._poll.close()
            os.close(self._wakeup)

    def flush(self, patience: float) -> None:
        """Give what is queued, an ABORT say, some time to leave."""
        self.wait(self._all_flushed, Deadline(patience))

    @property
    def closed(self) -> bool:
        """Whether the mesh has been closed."""
        return self._closed

    def close_in_child(self) -> None:
        """In a forked child: let go of the parent's descriptors. Takes no lock: a thread that is gone may hold it."""
        self._closed = True
        for rank, peer in self._peers.items():
            if rank not in self.lost_peers:
                peer.connection.close_in_child()
        self._poll.close()
        os.close(self._wakeup)

    def _all_flushed(self) -> bool:
        return not any(peer.writing for rank, peer in self._peers.items() if rank not in self.lost_peers)


class _Farewell(FrameSink):
    """Takes a GOODBYE: the peer is gone, but not failed unless it says so."""

    def __init__(self, mesh: ProgressEngine) -> None:
        self._mesh = mesh

    def buffer_for(self, rank: int, header: Header) -> memoryview | None:
        return None

    def on_frame(self, rank: int, header: Header, payload: memoryview | bytes) -> None:
        cause = bytes(payload).decode(errors="replace")
        self._mesh._lose(self._mesh._peers[rank], Disconnect(cause, clean=not header.part))

    def on_peer_lost(self, rank: int) -> None:
        pass


class _Early(FrameSink):
    """Keeps arrivals at groups that this process is about to make."""

    def __init__(self, kept: list[tuple[int, Header, memoryview | bytes]]) -> None:
        self._kept = kept

    def buffer_for(self, rank: int, header: Header) -> memoryview | None:
        return None

    def on_frame(self, rank: int, header: Header, payload: memoryview | bytes) -> None:
        if len(self._kept) >= _EARLY_FRAMES:
            raise ProtocolError(f"rank {rank} sent too many frames for groups that are not in use here")
        self._kept.append((rank, header, payload))

    def on_peer_lost(self, rank: int) -> None:
        pass
