"""Limits of the connections that wait for their clients: of those that have not been accepted yet, and of idle ones.

All servers of this process share a limit. It is a part of the limit of open descriptors: the rest stays for the rank
itself. At the limit, a new connection takes the place of the one that has waited longest. So clients that send nothing
keep no other one out, which is accepted within milliseconds. A connection with bytes that its server has not read yet
does not wait for its client.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import resource
import socket
import sys
import termios
import threading
import time

from rankmesh_agent.net.addresses import peer_name
from rankmesh_agent.net.descriptors import limit_text
from rankmesh_agent.net.rate_limit import WarningInterval

_MIN_CONNECTIONS = 8
_MIN_SECONDS = 0.05
"""Seconds that a connection may wait in any case: on a busy machine, a client takes a moment between two calls."""
_log = logging.getLogger("rankmesh")


class Admission:
    """A connection's place under a limit.

    Args:
        limit: the limit.
        sock: the connection; ``end`` must precede its close.

    Attributes:
        peeked: number of bytes that the server has read and left in the socket.
        since: when the connection began to wait, by time.monotonic.
    """

    def __init__(self, limit: ConnectionLimit, sock: socket.socket) -> None:
        self._limit = limit
        self.sock = sock
        self.peeked = 0
        self.since = time.monotonic()

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
        self._limit.defer(self)

    def end(self) -> None:
        """Free the place: the client is accepted, or the connection is about to be closed."""
        self._limit.remove(self)


class ConnectionLimit:
    """Limits the connections that wait for their clients. For several threads.

    Args:
        what: the connections, for the log.
        share: the limit is one connection for each ``share`` descriptors that this process may open.
        most: maximum of the limit.
    """

    def __init__(self, what: str, share: int, most: int) -> None:
        self._what = what
        self._share = share
        self._most = most
        self._warning = WarningInterval()
        self._evictions = 0
        self.reset()

    def reset(self) -> None:
        """Forget all connections, in a forked child."""
        self._lock = threading.RLock()  # reentrant: the garbage collector may close a server at any time
        self._waiting: dict[Admission, None] = {}  # the one that has waited longest first
        self._evicted: set[Admission] = set()

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def size(self) -> int:
        """The maximum number of connections."""
        descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if descriptors == resource.RLIM_INFINITY:
            return self._most
        return max(_MIN_CONNECTIONS, min(self._most, descriptors // self._share))

    @property
    def batch(self) -> int:
        """Number of connections that a server accepts before it reads from those that it has: a part of the size."""
        return max(1, self.size // 8)

    def has_room(self) -> bool:
        """Return whether a server may accept one more connection now, else soon.

        At the limit, the connection that has waited longest is shut down. Its server closes it, as it does if the
        client has ended the connection. There is no room while too many of those are not closed yet, or the others have
        come a moment ago, or have sent bytes that their servers have yet to read: then new ones wait to be accepted.
        """
        with self._lock:
            return self._make_room(self.size)

    def admit(self, sock: socket.socket) -> Admission:
        """Give a connection a place, for which the one that has waited longest is shut down if there is none."""
        admission = Admission(self, sock)
        with self._lock:
            self._make_room(self.size)
            self._waiting[admission] = None
        return admission

    def defer(self, admission: Admission) -> None:
        """Put a connection behind all others."""
        with self._lock:
            if admission in self._waiting:
                del self._waiting[admission]
                self._waiting[admission] = None

    def remove(self, admission: Admission) -> None:
        """See Admission."""
        with self._lock:
            self._waiting.pop(admission, None)
            self._evicted.discard(admission)

    def _make_room(self, size: int) -> bool:
        while len(self._waiting) >= size:
            if len(self._evicted) >= size:
                return False
            for _ in range(len(self._waiting)):
                oldest = next(iter(self._waiting))
                if not oldest.has_unread():
                    break
                self.defer(oldest)
            else:
                return False
            if time.monotonic() - oldest.since < _MIN_SECONDS:
                return False
            self._evict(oldest)
        return True

    def _evict(self, admission: Admission) -> None:
        self._waiting.pop(admission, None)  # the garbage collector may have removed it
        self._evicted.add(admission)
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


UNAUTHENTICATED = ConnectionLimit("connections whose clients have sent no request and no credential", 8, 1024)
"""Connections that have neither sent the head of a request nor a credential that is accepted."""
IDLE = ConnectionLimit("HTTP connections that wait for the next request, or for its body", 4, 1 << 16)
"""HTTP connections after their first head, while the server waits for the client."""


def _reset_after_fork() -> None:
    for limit in (UNAUTHENTICATED, IDLE):
        limit.reset()


os.register_at_fork(after_in_child=_reset_after_fork)
