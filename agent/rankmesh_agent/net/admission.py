"""Limits of the connections that wait for their clients: those that have sent no credential yet, and idle ones."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import resource
import socket
import sys
import termios
import time
from collections import OrderedDict

from rankmesh_agent.net.descriptors import limit_text
from rankmesh_agent.net.rate_limit import WarningInterval
from rankmesh_agent.net.sockets import peer_name

MOST = 1024
"""Maximum of connections of one listener that have sent no credential."""
_MIN_CONNECTIONS = 8
_MIN_SECONDS = 0.05
"""Seconds that a connection may wait in any case: on a busy machine, a client takes a moment between two calls."""
_log = logging.getLogger("rankmesh")


class Admission:
    """A connection's place under a limit.

    Args:
        sock: the connection; ``end`` must precede its close.

    Attributes:
        peeked: number of bytes that the server has read and left in the socket.
    """

    def __init__(self, limit: ConnectionLimit, sock: socket.socket) -> None:
        self._limit = limit
        self.sock = sock
        self.since = time.monotonic()
        self.peeked = 0
        self.has_ended = False

    def has_unread(self) -> bool:
        """Return whether the client has sent bytes that the server has yet to read."""
        try:
            unread = fcntl.ioctl(self.sock.fileno(), termios.FIONREAD, bytes(4))
        except (OSError, ValueError):
            return False
        return int.from_bytes(unread, sys.byteorder) > self.peeked

    def renew(self) -> None:
        """Put the connection behind all others: its client has completed a step."""
        self.since = time.monotonic()
        with contextlib.suppress(KeyError):
            self._limit.waiting.move_to_end(self)

    def end(self) -> None:
        """Free the place: the client is accepted, or the connection is about to be closed."""
        self.has_ended = True
        self._limit.waiting.pop(self, None)
        self._limit.evicted.discard(self)


class ConnectionLimit:
    """Limits the connections of a listener that wait for their clients, so that descriptors stay for the rank itself.

    At the limit, a new connection takes the place of the one that has waited longest. So clients that send nothing keep
    no other one out. A connection with bytes that its server has yet to read does not wait for its client: when many
    ranks join at once, their requests wait for a busy server. For several threads: each step is atomic, without a lock.

    Args:
        what: the connections, for the log.
        share: the limit is one connection for each ``share`` descriptors that this process may open.

    Attributes:
        waiting: the connections, the one that has waited longest first.
        evicted: those that have lost their places, and that their server has yet to close.
    """

    def __init__(self, what: str, share: int = 8, most: int = MOST) -> None:
        self._what = what
        self._share = share
        self._most = most
        self._warning = WarningInterval()
        self._evictions = 0
        self.waiting: OrderedDict[Admission, None] = OrderedDict()
        self.evicted: set[Admission] = set()

    @property
    def size(self) -> int:
        """The maximum number of connections."""
        descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if descriptors == resource.RLIM_INFINITY:
            return self._most
        return max(_MIN_CONNECTIONS, min(self._most, descriptors // self._share))

    def make_room(self) -> bool:
        """Shut down the connection that has waited longest, at the limit; return whether one more may be accepted now.

        Not if that one has come a moment ago, or its server has yet to close as many, or to read from all: then clients
        wait in the backlog.
        """
        size = self.size
        if len(self.waiting) < size:
            return True
        return len(self.evicted) < size and self._evict(_MIN_SECONDS)

    def admit(self, sock: socket.socket) -> Admission:
        """Give an accepted connection a place, if need be that of the one that has waited longest."""
        while len(self.waiting) >= self.size and self._evict():
            pass
        admission = Admission(self, sock)
        self.waiting[admission] = None
        return admission

    def _evict(self, min_seconds: float = 0.0) -> bool:
        """Shut down the connection that has waited longest, if it has for some time: its server closes it."""
        for admission in list(self.waiting):
            if time.monotonic() - admission.since < min_seconds:
                return False
            if not admission.has_unread() and self.waiting.pop(admission, 0) is None:
                break  # no other thread has removed it
        else:
            return False
        self.evicted.add(admission)
        if admission.has_ended:  # meanwhile, in another thread
            self.evicted.discard(admission)
        self._evictions += 1
        if self._warning.is_due():
            _log.warning(
                "closed %d %s, the last one from %s: there may be %d of them, a part of this process's file "
                "descriptors; %s",
                self._evictions,
                self._what,
                peer_name(admission.sock),
                self.size,
                limit_text(),
            )
        with contextlib.suppress(OSError):
            admission.sock.shutdown(socket.SHUT_RDWR)
        return True
