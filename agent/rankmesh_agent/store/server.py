"""Server of stores in their binary protocol: one thread executes the requests of all clients in turn, one of each.

A command that waits does not delay others: the thread that completes it, whichever that is, sends the response. So if a
rank sets a key for which another one waits, no other thread has to run before the response is on its way.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, Protocol, TypeVar

from rankmesh_agent.config.tls import tls_settings
from rankmesh_agent.net.admission import Admission
from rankmesh_agent.net.descriptors import log_failure
from rankmesh_agent.net.handshake import Handshake, accept
from rankmesh_agent.net.sockets import peer_closed
from rankmesh_agent.net.spin import AdaptiveSpin
from rankmesh_agent.net.tls_socket import buffered
from rankmesh_agent.store import codec
from rankmesh_agent.store.command import Waiting
from rankmesh_agent.store.connection import Connection, PendingRequest
from rankmesh_agent.store.table import Table
from rankmesh_agent.wire import store_frames
from rankmesh_agent.wire.credentials import Credentials
from rankmesh_agent.wire.errors import DistNetworkError, DistStoreError, ProtocolError, StoreLostError
from rankmesh_agent.wire.hello import Client, Service, welcoming
from rankmesh_agent.wire.store_frames import Frame, RequestId

HANDSHAKE_SECONDS = 10.0
"""Time limit of each step of a client's handshake."""
MAX_POLL_SECONDS = 3600.0
"""Longest sleep of the server's thread: no system call waits for ever."""
_READ, _READ_MORE = 1 << 13, 1 << 20
_STOP_SECONDS = 5.0
_PAUSE_SECONDS = 0.05
_LOST = "this gateway does not have the job's store: it was started after the job, without the file of its state"

_log = logging.getLogger("rankmesh.store")

T = TypeVar("T")


class Tables(Protocol):
    """The stores that a server has, by the ids that clients give."""

    def find(self, store: bytes) -> Table | None:
        """Return the keys and values of a store; None if there is none of that id, any more."""

    def credentials(self, store: bytes) -> str | Credentials:
        """Return the credentials that the clients of a store have, or an unknown one's."""


class StoreServer:
    """Serves stores, or only one, to the connections of a port. Its thread starts with the first one.

    Args:
        unix_socket: name of the unix socket that brings connections, too; '' for none. Clients at the port learn it.
    """

    def __init__(
        self, tables: Table | Tables, token: str | Credentials, name: str = "rankmesh-store", unix_socket: str = ""
    ) -> None:
        self._tables = tables
        self._unix_name = store_frames.encode_unix_name(unix_socket)
        self._token, self._tls = token, tls_settings()
        self._lock = threading.RLock()  # reentrant: the garbage collector may close stores at any time
        self._arrived: deque[tuple[socket.socket, Admission]] = deque()
        self._connections: dict[int, Connection] = {}
        self._due = math.inf  # when the first connection is due, or earlier
        self._closed = False
        self._poll: select.epoll | None = None
        self._wakeup = -1
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)

    def handle(self, sock: socket.socket, admission: Admission) -> None:
        """Serve a connection that begins with the PREFACE of the service. From any thread."""
        with self._lock:
            if self._closed:
                admission.end()
                sock.close()
                return
            if self._poll is None:
                self._start()
            self._arrived.append((sock, admission))
            os.eventfd_write(self._wakeup, 1)

    def _start(self) -> None:
        """Open the descriptors and start the thread; an error leaves all as it was, for the next client."""
        with contextlib.ExitStack() as undo:
            poll = undo.enter_context(select.epoll())
            wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            undo.callback(os.close, wakeup)
            poll.register(wakeup, select.EPOLLIN)
            undo.pop_all()
        self._poll, self._wakeup = poll, wakeup
        self._thread.start()

    def close(self) -> None:
        """Close all connections, and end the thread. Does nothing the second time."""
        with self._lock:
            self._closed = True
            if self._wakeup >= 0:
                os.eventfd_write(self._wakeup, 1)
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(_STOP_SECONDS)

    # The thread

    def _serve(self) -> None:
        poll = self._poll
        assert poll is not None
        connections, spin = self._connections, AdaptiveSpin(poll.poll, 0)
        try:
            while not self._closed:
                try:
                    events = spin.poll() or poll.poll(min(max(0.0, self._due - time.monotonic()), MAX_POLL_SECONDS))
                    for descriptor, _ in events:
                        connection = connections.get(descriptor)
                        if connection is not None:
                            self._on_ready(connection)
                        elif descriptor == self._wakeup:
                            self._accept_arrived(poll)
                    if time.monotonic() >= self._due:
                        self._call_due()
                except Exception as error:  # the other clients' store goes on
                    log_failure("the store cannot serve a client", error)
                    time.sleep(_PAUSE_SECONDS)
        finally:
            with self._lock:
                self._closed = True
            for connection in list(self._connections.values()):
                self._close_connection(connection)
            with self._lock:
                self._close_descriptors()

    def _close_descriptors(self) -> None:
        while self._arrived:
            sock, admission = self._arrived.popleft()
            admission.end()
            sock.close()
        if self._poll is not None:
            self._poll.close()
            os.close(self._wakeup)
            self._poll, self._wakeup = None, -1

    # Connections

    def _accept_arrived(self, poll: select.epoll) -> None:
        """Register the connections that handle() has queued."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wakeup)
        while self._arrived:
            self._register(poll, *self._arrived.popleft())

    def _register(self, poll: select.epoll, sock: socket.socket, admission: Admission) -> Connection:
        reply = b"" if sock.family == socket.AF_UNIX else self._unix_name
        try:
            sock.setblocking(False)
            tables, size = self._tables, store_frames.STORE_ID_BYTES
            accepted = (lambda _: self._token) if isinstance(tables, Table) else tables.credentials
            handshake = accept(sock, Service.STORE, accepted, size, self._token, self._tls, welcoming(reply))
            connection = Connection(sock, poll, handshake, admission)
            poll.register(sock, select.EPOLLIN)
        except BaseException:
            admission.end()
            sock.close()
            raise
        self._connections[sock.fileno()] = connection
        self._call_after(HANDSHAKE_SECONDS, connection, partial(self._end_handshake, connection))
        return connection

    def _close_connection(self, connection: Connection) -> None:
        """Close a connection, and undo the request that its client waits for."""
        descriptor = connection.sock.fileno()
        if descriptor < 0:
            return
        with connection.lock:
            request = connection.take_pending()
            assert self._poll is not None
            self._poll.unregister(descriptor)  # a forked child may hold the descriptor, too
            connection.admission.end()
            connection.sock.close()
        del self._connections[descriptor]
        connection.handshake = connection.on_due = None
        if connection.last is not None and connection.table is not None:
            connection.table.replies.add(RequestId(connection.name, connection.last[0]), connection.last[1])
            connection.last = None
        if request is not None and not request.future.cancel():
            self._undo(request)

    def _undo(self, request: PendingRequest) -> None:
        """Undo a request whose client has not got the response, and will not."""
        if request.future.exception() is None:
            undo = partial(request.command.undo, request.table, request.future.result())
            self._execute_as(request.table, request.request_id, undo)

    def _execute_as(self, table: Table, request_id: RequestId, execute: Callable[[], T]) -> T:
        """Return what ``execute`` returns; the changes that it makes are recorded as those of a request."""
        log = table.log
        if log is None:
            return execute()
        log.request_id = request_id
        try:
            return execute()
        finally:
            log.request_id = None

    def _on_ready(self, connection: Connection) -> None:
        """Send or receive on a connection that is ready for it."""
        try:
            if connection.unsent is not None:
                connection.flush()
            elif connection.handshake is not None:
                self._advance_handshake(connection, connection.handshake)
            else:
                self._receive(connection)
                while connection.sock.fileno() >= 0 and buffered(connection.sock):
                    self._receive(connection)
        except BlockingIOError:
            pass
        except (OSError, DistNetworkError):
            # A port scan, an old version, a wrong token, a client that died: the peer gets no reason.
            self._close_connection(connection)
        except Exception:
            _log.exception("the store cannot execute a request; its connection is closed")
            self._close_connection(connection)

    def _receive(self, connection: Connection) -> None:
        """Receive, and execute a request once all of its bytes have come."""
        received = connection.received
        # The exact size, as malloc maps a larger buffer anew each time; and a byte more, for a request that follows.
        size = min(connection.wanted - len(received) + 1, _READ_MORE) if received else _READ
        data = connection.sock.recv(size)
        if not data or connection.pending is not None:  # closed, or a request before the response to the last one
            self._close_connection(connection)
            return
        received += data
        if len(received) < connection.wanted:
            return
        length, seq = store_frames.decode_header(received)
        connection.wanted = store_frames.HEADER_BYTES + length
        if len(received) > connection.wanted:
            raise ProtocolError("a client of the store's binary protocol sent a request before the last response")
        if len(received) == connection.wanted:
            connection.received, connection.wanted = bytearray(), store_frames.HEADER_BYTES
            self._execute(connection, seq, received)

    def _advance_handshake(self, connection: Connection, client_handshake: Handshake[Client]) -> None:
        """Continue the handshake; OSError or DistNetworkError if the client fails it."""
        steps = client_handshake.steps
        try:
            client = client_handshake.advance()
        finally:
            connection.sock = client_handshake.sock
        if client is not None:
            connection.handshake = connection.on_due = None
            tables, connection.name = self._tables, client.name
            connection.table = tables if isinstance(tables, Table) else tables.find(client.attachment)
            connection.admission.end()
        elif client_handshake.steps > steps:
            connection.admission.renew()

    def _end_handshake(self, connection: Connection) -> None:
        """Close a connection whose client takes too long for a step of the handshake."""
        self._on_ready(connection)  # this thread may not have run since the client sent its part
        left = connection.admission.since + HANDSHAKE_SECONDS - time.monotonic()
        if connection.handshake is not None and left > 0:
            self._call_after(left, connection, partial(self._end_handshake, connection))
        elif connection.handshake is not None:
            self._close_connection(connection)

    # Requests

    def _execute(self, connection: Connection, seq: int, frame: Frame) -> None:
        """Execute a request."""
        table = connection.table
        if table is None:
            connection.send(codec.encode_error(seq, StoreLostError(_LOST)))
            return
        try:
            request = codec.decode_request(frame)
            command = request.command
            request_id = request.request_id or RequestId(connection.name, seq)
            if request.request_id is not None:
                earlier = self._earlier_response(table, request_id)
                if earlier is not None:
                    connection.last = (seq, store_frames.with_seq(earlier, seq))
                    connection.send(connection.last[1])
                    return
            table.count_call(command.name)
            if table.log is None or not command.writes:
                found = command.try_execute(table)
            else:
                found = self._execute_as(table, request_id, partial(command.try_execute, table))
            if found is None:
                assert isinstance(command, Waiting)
                if command.seconds <= 0:
                    raise command.timeout_error(table)
                future = self._execute_as(table, request_id, partial(command.start, table))
                pending = connection.pending = PendingRequest(seq, command, table, future, request_id)
                self._call_after(command.seconds, connection, partial(self._end_wait, connection, pending))
                future.add_done_callback(partial(self._on_complete, connection, pending))
                return
        except DistStoreError as error:
            connection.send(codec.encode_error(seq, error))
            return
        response = codec.encode_result(seq, found[0])
        if command.writes:
            self._record(connection, table, request_id, seq, response)
        connection.send(response)

    def _record(self, connection: Connection, table: Table, request_id: RequestId, seq: int, frame: Frame) -> None:
        """Record the response to a request, for a client that does not get it. From any thread."""
        connection.last = (seq, frame)
        if request_id.name != connection.name:
            table.replies.add(request_id, frame)

    def _record_wait(self, connection: Connection, request: PendingRequest, frame: Frame) -> None:
        """Record the response to a request that has waited, unless it failed: then it may be executed again."""
        if request.command.writes and request.future.exception() is None:
            self._record(connection, request.table, request.request_id, request.seq, frame)

    def _on_complete(self, connection: Connection, request: PendingRequest, future: Future[Any]) -> None:
        """Respond to a request that has waited, in the thread that completed it."""
        if connection.pending is not request:  # it timed out already, or its client has closed the connection
            return
        if future.cancelled():  # the table is closed
            connection.shut_down()
            return
        frame = _response(request)
        with connection.lock:
            if connection.take_pending(request) is None:
                return
            try:
                if not (request.command.writes and peer_closed(connection.sock)):
                    connection.send(frame)
                    self._record_wait(connection, request, frame)
                    return
            except OSError:
                pass
            connection.shut_down()
        self._undo(request)

    def _earlier_response(self, table: Table, request_id: RequestId) -> Frame | None:
        """Return the response to a request that was executed already; None if it was not, and never will be."""
        for each in list(self._connections.values()):
            if each.table is not table:
                continue
            if each.name == request_id.name:
                request = each.take_pending()
                if request is not None and not request.future.cancel():
                    self._record_wait(each, request, _response(request))
                self._close_connection(each)
            elif (request := each.pending) is not None and request.request_id == request_id:
                self._end_wait(each, request)  # of an earlier repetition
        return table.replies.find(request_id)

    # Time limits

    def _call_after(self, seconds: float, connection: Connection, action: Callable[[], object]) -> None:
        """Have ``action`` called in so many seconds, by the server's thread, unless the connection forgets it."""
        connection.due, connection.on_due = time.monotonic() + seconds, action
        self._due = min(self._due, connection.due)

    def _call_due(self) -> None:
        """End what is due, and find what is next."""
        now = time.monotonic()
        for connection in list(self._connections.values()):
            if (action := connection.on_due) is not None and connection.due <= now:
                connection.on_due = None
                action()
        self._due = min((each.due for each in self._connections.values() if each.on_due is not None), default=math.inf)

    def _end_wait(self, connection: Connection, request: PendingRequest) -> None:
        """Respond to a request that has waited for its whole time, or whose client repeats it."""
        if connection.take_pending(request) is None:
            return
        if request.future.cancel():
            frame: Frame = codec.encode_error(request.seq, request.command.timeout_error(request.table))
        else:
            frame = _response(request)
            self._record_wait(connection, request, frame)
        try:
            connection.send(frame)
        except OSError:
            self._close_connection(connection)


def _response(request: PendingRequest) -> Frame:
    """Return the response to a request whose wait is over."""
    error = request.future.exception()
    if error is None:
        return codec.encode_result(request.seq, request.future.result())
    return codec.encode_error(request.seq, error if isinstance(error, DistStoreError) else DistStoreError(str(error)))
