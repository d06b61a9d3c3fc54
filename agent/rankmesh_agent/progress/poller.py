"""The epoll instance of an engine, with an eventfd that ends a sleep early."""

from __future__ import annotations

import os
import select
import threading

from rankmesh_agent.progress.framing import FramedConnection


class Poller:
    """Polls the connections of an engine. All methods but ``close`` are called with the engine's lock held.

    Args:
        lock: the engine's lock, released while ``poll`` waits.

    Attributes:
        peers: the registered connections, by file descriptor.
        wakeup_fd: the eventfd.
    """

    def __init__(self, lock: threading.RLock) -> None:
        self.peers: dict[int, FramedConnection] = {}
        self.wakeup_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = lock
        self._masks: dict[int, int] = {}
        self._asleep = False
        self._epoll = select.epoll()
        self._epoll.register(self.wakeup_fd, select.EPOLLIN)

    @property
    def asleep(self) -> bool:
        """True if a thread sleeps in ``poll``."""
        return self._asleep

    def add(self, peer: FramedConnection) -> None:
        """Report received bytes of a connection."""
        fd = peer.connection.fileno()
        self.peers[fd] = peer
        self._masks[fd] = peer.connection.events(False)
        self._epoll.register(fd, self._masks[fd])

    def remove(self, peer: FramedConnection) -> None:
        """Stop reporting events of a connection."""
        fd = peer.connection.fileno()
        if self.peers.pop(fd, None) is not None:
            del self._masks[fd]
            self._epoll.unregister(fd)

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

    def poll(self, timeout: float) -> list[tuple[int, int]]:
        """Return file descriptors and their events, after at most ``timeout`` seconds; releases the lock meanwhile."""
        interrupted: KeyboardInterrupt | None = None
        try:
            self._asleep = timeout > 0
            self._lock.release()
            events = self._epoll.poll(timeout)
        finally:
            while not self._lock._is_owned():  # type: ignore[attr-defined]  # Ctrl-C may interrupt acquire, too
                try:
                    self._lock.acquire()
                except KeyboardInterrupt as error:
                    interrupted = error
            self._asleep = False
        if interrupted is not None:
            raise interrupted
        return events

    def wake(self) -> None:
        """End the sleep of the thread in ``poll``, or the next one."""
        os.eventfd_write(self.wakeup_fd, 1)

    def wake_sleeper(self) -> None:
        """End the sleep of the thread in ``poll``, if one sleeps."""
        if self._asleep:
            os.eventfd_write(self.wakeup_fd, 1)

    def close(self) -> None:
        """Close the descriptors."""
        self._epoll.close()
        os.close(self.wakeup_fd)
