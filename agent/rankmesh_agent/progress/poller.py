"""Readiness of an engine's connections: epoll, shared memory (which epoll does not report), and a spin before a sleep.

An eventfd ends a sleep early.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading

from rankmesh_agent.net.spin import core_contention
from rankmesh_agent.progress.framing import FramedConnection
from rankmesh_agent.shared_memory.process_vm import address_of

POLL_INTERVAL = 8
"""Interval, in polls, at which a busy engine polls epoll and releases the lock."""
TAKE_INTERVAL = 64
"""Interval, in frames taken from memory without a poll, at which all connections are polled."""
_SPINS_WITH_POLL = 10
"""Spins of a wait before it sleeps, where each spin is a system call."""
_SPINS = 200
"""Spins where most make no system call and the rank has its own core: about the duration of a sleep and a wakeup."""


class Poller:
    """Polls the connections of an engine. All methods but ``close`` are called with the engine's lock held.

    Args:
        lock: the engine's lock, released while ``poll`` waits.

    Attributes:
        peers: the connections that epoll reports, by file descriptor.
        rings: the connections in shared memory, by rank; epoll reports none of their bytes: each sleep checks first.
        sockets: the other connections, by rank.
        due: the connections to turn to at the next poll, whatever epoll reports.
        ends: reports the ends of connections alone, once each.
    """

    def __init__(self, lock: threading.RLock, oversubscribed: bool) -> None:
        self.peers: dict[int, FramedConnection] = {}
        self.rings: dict[int, FramedConnection] = {}
        self.sockets: dict[int, FramedConnection] = {}
        self.due: set[FramedConnection] = set()
        with contextlib.ExitStack() as undo:
            self._epoll = undo.enter_context(select.epoll())
            self.ends = undo.enter_context(select.epoll())
            self.wakeup_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            undo.pop_all()
        self.asleep = False
        self._lock = lock
        self._oversubscribed = oversubscribed
        self._spins = _SPINS_WITH_POLL if oversubscribed else _SPINS
        self._masks: dict[int, int] = {}
        self._ranks: dict[int, int] = {}
        """The rank of the latest connection of each file descriptor."""
        self._epoll.register(self.wakeup_fd, select.EPOLLIN)

    def add(self, peer: FramedConnection) -> None:
        """Poll a connection from now on."""
        connection = peer.connection
        if connection.medium == "tcp":
            self.sockets[peer.rank], self._spins = peer, _SPINS_WITH_POLL
            peer.bare_fd = connection.bare_fileno()
            peer.address = address_of(peer.staging)
            if connection.has_work(False):  # TLS: decrypted at the end of the handshake
                self.due.add(peer)
        else:
            self.rings[peer.rank] = peer
        fd = connection.fileno()
        self.peers[fd] = peer
        self._masks[fd] = connection.events(False)
        self._epoll.register(fd, self._masks[fd])
        self._ranks[fd] = peer.rank
        self.ends.register(fd, select.EPOLLRDHUP | select.EPOLLONESHOT)

    def ended(self) -> set[int]:
        """Return the ranks whose connections have ended since the last call."""
        return {self._ranks[fd] for fd, _ in self.ends.poll(0)}

    def stop_polling(self, peer: FramedConnection) -> None:
        """Stop polling a connection that has ended; its last bytes may still wait for their buffer."""
        peer.at_eof = True
        fd = peer.connection.fileno()
        if self.peers.pop(fd, None) is not None:
            del self._masks[fd]
            self._epoll.unregister(fd)

    def forget(self, peer: FramedConnection) -> None:
        """Report nothing of a connection any more."""
        self.stop_polling(peer)
        self.due.discard(peer)
        self.rings.pop(peer.rank, None)
        self.sockets.pop(peer.rank, None)

    def update(self, peer: FramedConnection) -> None:
        """Report room to send while frames are queued, and no received bytes while the connection is paused."""
        peer.custom_events = peer.paused or bool(peer.outgoing)
        connection = peer.connection
        fd = connection.fileno()
        mask = connection.events(bool(peer.outgoing))
        if peer.paused and connection.medium == "tcp":
            mask &= ~select.EPOLLIN
        if self._masks.get(fd, mask) != mask:
            self._masks[fd] = mask
            self._epoll.modify(fd, mask)

    def ready_peers(self) -> list[FramedConnection]:
        """Return the connections with work that epoll does not report."""
        due = self.due
        ready = [*due] if due else []
        ready += [
            peer
            for peer in self.rings.values()
            if peer.connection.has_work(bool(peer.outgoing), not peer.paused)
            and peer not in due
            and (peer.outgoing or not peer.paused)
        ]
        return ready

    def sleep(self, timeout: float) -> tuple[list[FramedConnection], list[tuple[int, int]]]:
        """Spin, then sleep; return the ready connections and the events of epoll as soon as there are any."""
        # A sleep and a wakeup take longer than most messages: spin first.
        polling = bool(self.sockets)
        for turn in range(self._spins if core_contention.should_spin() else 0):
            ready = self.ready_peers() if self.due or self.rings else []
            events = self.poll(0) if polling or turn % POLL_INTERVAL == 0 else []
            if ready or events:
                return ready, events
            if (self._oversubscribed or turn % POLL_INTERVAL == 0) and not core_contention.yield_core():
                break
        # Only now: once a reader has declared that it sleeps, its peer must ring the doorbell at each write.
        ready = []
        for peer in self.rings.values():
            may_sleep = peer.connection.prepare_wait(bool(peer.outgoing), not peer.paused)
            if not may_sleep and (peer.outgoing or not peer.paused):
                ready.append(peer)
        return ready, self.poll(0 if ready or self.due else timeout)

    def poll(self, timeout: float) -> list[tuple[int, int]]:
        """Return file descriptors and their events, after at most ``timeout`` seconds; releases the lock meanwhile."""
        interrupted: KeyboardInterrupt | None = None
        try:
            self.asleep |= timeout > 0  # another thread may sleep while this one only looks
            self._lock.release()
            events = self._epoll.poll(timeout)
        finally:
            while not self._lock._is_owned():  # type: ignore[attr-defined]  # Ctrl-C may interrupt acquire, too
                try:
                    self._lock.acquire()
                except KeyboardInterrupt as error:
                    interrupted = error
            self.asleep &= timeout <= 0
        if interrupted is not None:
            raise interrupted
        return events

    def wake(self) -> None:
        """End the sleep of the thread in ``poll``, or the next one."""
        os.eventfd_write(self.wakeup_fd, 1)

    def wake_sleeper(self) -> None:
        """End the sleep of the thread in ``poll``, if one sleeps."""
        if self.asleep:
            os.eventfd_write(self.wakeup_fd, 1)

    def close(self) -> None:
        """Close the descriptors."""
        self._epoll.close()
        self.ends.close()
        os.close(self.wakeup_fd)
