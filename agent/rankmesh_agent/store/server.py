"""The fast path's server: one thread that carries out what its clients ask for, one request of each in turn.

A command that has to wait holds up nobody: whoever completes it, in whatever thread, sends the answer from there. So a
rank that sets a key for which another one waits needs no second thread to run before that one knows.
"""

from __future__ import annotations

import contextlib
import errno
import heapq
import itertools
import logging
import math
import os
import secrets
import select
import socket
import struct
import threading
import time
from collections import OrderedDict, deque
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple

from rankmesh_agent.net.sockets import break_when_peer_vanishes
from rankmesh_agent.net.spin import AdaptiveSpin
from rankmesh_agent.store import codec
from rankmesh_agent.store.command import Waiting
from rankmesh_agent.store.table import Table
from rankmesh_agent.wire import handshake, store_frames
from rankmesh_agent.wire.errors import DistNetworkError, DistStoreError, ProtocolError

HANDSHAKE_SECONDS = 10.0
"""How long a stranger may take to prove that it belongs here."""
MAX_UNAUTHENTICATED = 128
"""How many may be at it at once; more are closed unheard."""
KEPT_SECONDS = 60.0
"""How long the last answer to a connection that broke is kept: longer than its client tries."""
MOST_KEPT, MOST_KEPT_BYTES = 4096, 64 << 20
"""How many of these answers are kept, and how large they may be together."""
_READ, _READ_MORE = 1 << 13, 1 << 20
_STOP_SECONDS = 5.0
_MIN_STALE_TIMERS = 64
_ACCEPT, _HANDSHAKE = 0, 1
"""What a timer may be for, besides a _PendingRequest, by its number."""
_ACCEPT_RETRY_SECONDS = 0.05
MAX_POLL_SECONDS = 3600.0
"""How long the server's thread sleeps at most, in seconds: no system call waits for ever."""

_log = logging.getLogger("rankmesh.store")


class _PendingRequest(NamedTuple):
    """A request that has not been answered yet; no two have the same number."""

    number: int
    seq: int
    command: Waiting[Any]
    future: Future[Any]


class _Connection:
    """One client: it has at most one request under way.

    Attributes:
        sock: its socket, which does not block.
        challenge: the challenge it has to pass, None once it has.
        name: what it is called if it breaks.
        wanted: how many bytes make the next step.
        received: what of them is there.
        unsent: what could not be sent yet.
        waiting: the request that waits; whoever takes it away, with the lock, answers it.
        last: the number of its last request that changed something, and the answer.
        lock: holds off closing while another thread sends.
    """

    __slots__ = ("_poll", "challenge", "last", "lock", "name", "received", "sock", "unsent", "waiting", "wanted")

    def __init__(self, sock: socket.socket, poll: select.epoll, challenge: handshake.Challenge) -> None:
        self.sock = sock
        self.challenge: handshake.Challenge | None = challenge
        self.name = b""
        self.wanted = handshake.HELLO_BYTES
        self.received = bytearray()
        self.unsent: memoryview | None = None
        self.waiting: _PendingRequest | None = None
        self.last: tuple[int, bytes] | None = None
        self.lock = threading.RLock()
        self._poll = poll

    def send(self, frame: bytes) -> None:
        """Send, now or as soon as there is room.

        Raises:
            OSError: the client has gone.
        """
        try:
            sent = self.sock.send(frame, socket.MSG_NOSIGNAL)
        except BlockingIOError:
            sent = 0
        if sent < len(frame):
            self.unsent = memoryview(frame)[sent:]
            self._poll.modify(self.sock, select.EPOLLOUT)

    def flush(self) -> None:
        """Send more of what could not be sent before."""
        assert self.unsent is not None
        self.unsent = self.unsent[self.sock.send(self.unsent, socket.MSG_NOSIGNAL) :]
        if not self.unsent:
            self.unsent = None
            self._poll.modify(self.sock, select.EPOLLIN)

    def is_due(self, step: int) -> bool:
        """Whether it has not done yet what a timer is for: the challenge, or a _PendingRequest by its number."""
        waiting = self.waiting
        return self.challenge is not None if step == _HANDSHAKE else waiting is not None and waiting.number == step

    def take_pending(self, waiting: _PendingRequest | None = None) -> _PendingRequest | None:
        """Return what waits, which is the caller's to answer now; None if it is somebody else's, or not ``waiting``."""
        with self.lock:
            found = self.waiting
            if found is None or (waiting is not None and found is not waiting):
                return None
            self.waiting = None
            return found

    def peer_closed(self) -> bool:
        """Whether the client has hung up."""
        try:
            return not self.sock.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def shut_down(self) -> None:
        """Make the server's thread drop the connection. From any thread."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)


class _Kept:
    """The last answers to connections that broke, by the connections' names."""

    def __init__(self) -> None:
        self._found: OrderedDict[bytes, tuple[float, int, bytes]] = OrderedDict()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._found)

    def add(self, name: bytes, seq: int, frame: bytes) -> None:
        self._found[name] = (time.monotonic() + KEPT_SECONDS, seq, frame)
        self._bytes += len(frame)
        while len(self._found) > MOST_KEPT or self._bytes > MOST_KEPT_BYTES:
            self.pop(next(iter(self._found)))

    def pop(self, name: bytes) -> tuple[int, bytes] | None:
        """Return a request's number and its answer, None if there is none; it is not kept any longer."""
        found = self._found.pop(name, None)
        if found is None:
            return None
        self._bytes -= len(found[2])
        return found[1:]

    def next(self) -> float:
        """Return when the oldest one is to be forgotten."""
        return next(iter(self._found.values()))[0] if self._found else math.inf

    def forget_until(self, now: float) -> None:
        while self._found and next(iter(self._found.values()))[0] <= now:
            self.pop(next(iter(self._found)))


class StoreServer:
    """Serves a table to the connections that it is given. Its thread starts with the first one.

    Args:
        table: the keys and values.
        token: the job's secret.
        name: its thread's name.
    """

    def __init__(self, table: Table, token: str, name: str = "rankmesh-store-fast") -> None:
        self._table = table
        self._token = token
        self._lock = threading.RLock()  # the garbage collector may close stores, and so this, at any time
        self._upgraded: deque[socket.socket] = deque()
        self._connections: dict[int, _Connection] = {}
        self._named: dict[bytes, _Connection] = {}
        self._kept = _Kept()
        self._unauthenticated = 0
        self._timers: list[tuple[float, int, _Connection | None, int]] = []  # when, order, who, and of what
        self._due = math.inf  # when the first of the timers, or of what is kept, is over; or earlier
        self._sequence = itertools.count(_HANDSHAKE + 1)
        self._closed = False
        self._poll: select.epoll | None = None
        self._wakeup = -1
        self._unix_listener: socket.socket | None = None
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)

    def handle(self, sock: socket.socket) -> None:
        """Serve a connection whose client has asked for the fast path. From any thread."""
        with self._lock:
            if self._closed:
                sock.close()
                return
            self._upgraded.append(sock)
            if self._poll is None:
                self._poll = select.epoll()
                self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
                self._poll.register(self._wakeup, select.EPOLLIN)
                self._unix_listener = _listen_unix()
                self._poll.register(self._unix_listener, select.EPOLLIN)
                self._thread.start()
            os.eventfd_write(self._wakeup, 1)

    def close(self) -> None:
        """Close all connections, and end the thread. Does nothing the second time."""
        self._end()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(_STOP_SECONDS)

    def _end(self) -> None:
        """Have the thread close everything. From any thread."""
        with self._lock:
            self._closed = True
            if self._wakeup >= 0:
                os.eventfd_write(self._wakeup, 1)

    def close_in_child(self) -> None:
        """In a forked child: let go of the parent's descriptors."""
        self._closed = True
        self._lock = threading.RLock()
        for connection in self._connections.values():
            connection.sock.close()
        self._close_descriptors()

    # The thread

    def _serve(self) -> None:
        poll = self._poll
        unix_listener = self._unix_listener
        assert poll is not None
        assert unix_listener is not None
        connections, listener, spin = self._connections, unix_listener.fileno(), AdaptiveSpin(poll.poll, 0)
        try:
            while not self._closed:
                events = spin.poll() or poll.poll(self._poll_timeout())
                for number, _ in events:
                    connection = connections.get(number)
                    if connection is not None:
                        self._on_ready(connection)
                    elif number == listener:
                        self._accept_unix(poll, unix_listener)
                    elif number == self._wakeup:
                        self._accept_upgraded(poll)
                if time.monotonic() >= self._due:
                    self._run_timers()
        finally:
            with self._lock:
                self._closed = True
            for connection in list(self._connections.values()):
                self._close_connection(connection)
            with self._lock:
                self._close_descriptors()

    def _close_descriptors(self) -> None:
        while self._upgraded:
            self._upgraded.popleft().close()
        if self._unix_listener is not None:
            self._unix_listener.close()
        if self._poll is not None:
            self._poll.close()
            os.close(self._wakeup)
            self._poll, self._wakeup = None, -1

    def _accept_upgraded(self, poll: select.epoll) -> None:
        """Take in those who were brought."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wakeup)
        assert self._unix_listener is not None
        answer = store_frames.upgrade_response(self._unix_listener.getsockname()[1:].decode())
        while self._upgraded:
            connection = self._register(poll, self._upgraded.popleft())
            if connection is None:
                continue
            try:
                connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                break_when_peer_vanishes(connection.sock)
                connection.send(answer)
            except OSError:
                self._close_connection(connection)

    def _accept_unix(self, poll: select.epoll, unix_listener: socket.socket) -> None:
        """Take in one who has come to the unix socket."""
        try:
            self._register(poll, unix_listener.accept()[0])
        except BlockingIOError:
            pass
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS):
                poll.modify(unix_listener, 0)  # he stays in the queue: trying again at once would only spin
                self._set_timer(_ACCEPT_RETRY_SECONDS, None, _ACCEPT)

    def _register(self, poll: select.epoll, sock: socket.socket) -> _Connection | None:
        if self._unauthenticated >= MAX_UNAUTHENTICATED:
            sock.close()
            return None
        sock.setblocking(False)
        connection = _Connection(sock, poll, handshake.Challenge(self._token, client=False))
        self._connections[sock.fileno()] = connection
        self._unauthenticated += 1
        poll.register(sock, select.EPOLLIN)
        self._set_timer(HANDSHAKE_SECONDS, connection, _HANDSHAKE)
        return connection

    def _on_ready(self, connection: _Connection) -> None:
        """Do what a connection is ready for."""
        try:
            if connection.unsent is not None:
                connection.flush()
            else:
                self._receive(connection)
        except BlockingIOError:
            pass
        except (OSError, DistNetworkError):
            # A port scan, an old version, a wrong token, a client that died: it learns nothing more.
            self._close_connection(connection)
        except Exception:
            _log.exception("the store cannot carry out a request; its connection is closed")
            self._close_connection(connection)

    def _receive(self, connection: _Connection) -> None:
        """Receive, and take the next step once all of it is there."""
        received = connection.received
        data: bytes | bytearray = connection.sock.recv(_READ_MORE if received else _READ)
        if not data or connection.waiting is not None:  # it has gone, or speaks out of turn
            self._close_connection(connection)
            return
        if received:
            received += data
            data = received
        if len(data) >= connection.wanted:
            if connection.challenge is not None:
                self._advance_handshake(connection, connection.challenge, bytes(data))
                return
            opcode, flags, seq, count, length, seconds = store_frames.decode_request(data)
            wanted = store_frames.HEADER_BYTES + length
            if len(data) == wanted:
                if received:
                    connection.received = bytearray()
                    connection.wanted = store_frames.HEADER_BYTES
                self._handle(connection, opcode, flags, seq, seconds, store_frames.decode_parts(data, count))
                return
            if len(data) > wanted:
                raise ProtocolError("a client of the store's fast path sent a request before it had its answer")
            connection.wanted = wanted
        if not received:
            received += data

    def _advance_handshake(self, connection: _Connection, challenge: handshake.Challenge, data: bytes) -> None:
        """Take a step of the challenge.

        Raises:
            DistNetworkError: the client is not one.
        """
        if len(data) > connection.wanted:
            raise ProtocolError("a client of the store's fast path spoke before it was its turn")
        connection.received = bytearray()
        if not challenge.name:
            challenge.receive_hello(data)
            connection.send(challenge.hello())
            connection.wanted = handshake.PROOF_BYTES
            return
        challenge.receive_proof(data)
        connection.send(challenge.proof())
        connection.wanted = store_frames.HEADER_BYTES
        connection.challenge, connection.name = None, challenge.name
        self._named[connection.name] = connection
        self._unauthenticated -= 1

    def _handle(
        self, connection: _Connection, opcode: int, flags: int, seq: int, seconds: float, parts: list[bytes]
    ) -> None:
        """Carry out a request."""
        if flags & store_frames.RETRY:
            frame = self._cached_response(parts.pop(0) if parts else b"")
            if frame is not None:
                frame = store_frames.with_seq(frame, seq)
                connection.last = (seq, frame)
                connection.send(frame)
                return
        try:
            command = codec.decode_command(opcode, flags, seconds, parts)
            self._table.count_call(command.name)
            found = command.try_execute(self._table)
            if found is None:
                assert isinstance(command, Waiting)
                if seconds <= 0:
                    raise command.late(self._table)
                self._start_wait(
                    connection, _PendingRequest(next(self._sequence), seq, command, command.begin(self._table))
                )
                return
        except DistStoreError as error:
            connection.send(codec.encode_error(seq, error))
            return
        frame = codec.encode_result(seq, found[0])
        if command.writes:
            connection.last = (seq, frame)
        connection.send(frame)

    def _start_wait(self, connection: _Connection, waiting: _PendingRequest) -> None:
        connection.waiting = waiting
        self._set_timer(waiting.command.seconds, connection, waiting.number)
        waiting.future.add_done_callback(partial(self._on_complete, connection, waiting))

    def _on_complete(self, connection: _Connection, waiting: _PendingRequest, future: Future[Any]) -> None:
        """Answer a request that has waited, in the thread that completed it."""
        if connection.waiting is not waiting:  # it was too late already, or its client has gone
            return
        if future.cancelled():  # the table is closed: so is this, all at once, or whoever waited would try again here
            self._end()
            return
        frame = codec.encode_result(waiting.seq, future.result())
        sent = False
        with connection.lock:
            if connection.take_pending(waiting) is None:
                return
            try:
                if not (waiting.command.writes and connection.peer_closed()):
                    connection.send(frame)
                    sent = True
                    if waiting.command.writes:
                        connection.last = (waiting.seq, frame)
            except OSError:
                pass
            finally:
                if not sent:
                    connection.shut_down()
        if not sent:
            waiting.command.undo(self._table, future.result())

    def _cached_response(self, earlier: bytes) -> bytes | None:
        """Return the answer to a request that was carried out already, None if it was not; now it will not be any more.

        Raises:
            ProtocolError: ``earlier`` does not say which one it was.
        """
        try:
            name, seq = store_frames.RETRIED_REQUEST.unpack(earlier)
        except struct.error:
            raise ProtocolError("a request of the store's fast path does not say which one it repeats") from None
        broken = self._named.get(name)
        if broken is not None:
            waiting = broken.take_pending()
            if waiting is not None and not waiting.future.cancel():
                broken.last = (waiting.seq, codec.encode_result(waiting.seq, waiting.future.result()))
            self._close_connection(broken)
        kept = self._kept.pop(name)
        return kept[1] if kept is not None and kept[0] == seq else None

    def _close_connection(self, connection: _Connection) -> None:
        """Close a connection, and take back what its client was about to get."""
        number = connection.sock.fileno()
        if number < 0:
            return
        with connection.lock:
            waiting = connection.take_pending()
            assert self._poll is not None
            self._poll.unregister(number)  # a forked child may have it open, too
            connection.sock.close()
        del self._connections[number]
        if connection.challenge is not None:
            self._unauthenticated -= 1
            connection.challenge = None
        self._named.pop(connection.name, None)
        if connection.last is not None:
            self._kept.add(connection.name, *connection.last)
            self._due = min(self._due, self._kept.next())
            connection.last = None
        if waiting is not None and not waiting.future.cancel():
            waiting.command.undo(self._table, waiting.future.result())

    # Time

    def _set_timer(self, seconds: float, connection: _Connection | None, of: int) -> None:
        """Look again in so many seconds whether a connection, or the listener, still is where it is now."""
        timers = self._timers
        if len(timers) > _MIN_STALE_TIMERS + 2 * len(self._connections):  # most of them are over
            timers[:] = [one for one in timers if one[2] is None or one[2].is_due(one[3])]
            heapq.heapify(timers)
        at = time.monotonic() + seconds
        heapq.heappush(timers, (at, next(self._sequence), connection, of))
        self._due = min(self._due, at)

    def _poll_timeout(self) -> float | None:
        """Return how long nothing happens unless somebody speaks; None for always."""
        if self._due == math.inf:
            return None
        return min(max(0.0, self._due - time.monotonic()), MAX_POLL_SECONDS)

    def _run_timers(self) -> None:
        """Do what is due, and find out what is next."""
        now = time.monotonic()
        self._kept.forget_until(now)
        while self._timers and self._timers[0][0] <= now:
            _, _, connection, of = heapq.heappop(self._timers)
            if connection is None:
                assert self._poll is not None
                assert self._unix_listener is not None
                self._poll.modify(self._unix_listener, select.EPOLLIN)
            elif of == _HANDSHAKE:
                if connection.challenge is not None:
                    self._close_connection(connection)
            else:
                waiting = connection.waiting
                if waiting is not None and waiting.number == of and connection.take_pending(waiting) is not None:
                    self._time_out(connection, waiting)
        self._due = min(self._timers[0][0] if self._timers else math.inf, self._kept.next())

    def _time_out(self, connection: _Connection, waiting: _PendingRequest) -> None:
        """Answer a request that has waited for long enough."""
        if waiting.future.cancel():
            frame = codec.encode_error(waiting.seq, waiting.command.late(self._table))
        else:
            frame = codec.encode_result(waiting.seq, waiting.future.result())
            if waiting.command.writes:
                connection.last = (waiting.seq, frame)
        try:
            connection.send(frame)
        except OSError:
            self._close_connection(connection)


def _listen_unix() -> socket.socket:
    """Return a unix socket that listens under a name of its own, which is in no directory and goes with the socket."""
    found = socket.socket(socket.AF_UNIX)
    found.bind(f"\0rankmesh-store-{secrets.token_hex(16)}")
    found.listen(1024)
    found.setblocking(False)
    return found
