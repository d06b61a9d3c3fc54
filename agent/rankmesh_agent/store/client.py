"""Client of a remote store for callers without an event loop."""

from __future__ import annotations

import contextlib
import random
import socket
import time
from typing import Any, TypeVar
from urllib.parse import SplitResult, urlsplit

from rankmesh_agent.net.deadline import Deadline
from rankmesh_agent.net.descriptors import is_exhausted, limit_named, raise_if_exhausted
from rankmesh_agent.net.dial import connect
from rankmesh_agent.net.fork import close_in_children
from rankmesh_agent.net.handshake import Handshake
from rankmesh_agent.net.peer_credentials import PeerRefusedError, check_peer
from rankmesh_agent.net.pool import ConnectionPool
from rankmesh_agent.net.retry import until_accepted
from rankmesh_agent.net.sockets import break_when_peer_vanishes
from rankmesh_agent.net.spin import AdaptiveSpin
from rankmesh_agent.net.stream import SLICE_SECONDS, FramedStream, StreamClosedError, StreamTimeoutError
from rankmesh_agent.net.tls_socket import RecordChangedError
from rankmesh_agent.store import codec
from rankmesh_agent.store.base import (
    CONNECT_SECONDS,
    MARGIN_SECONDS,
    BlockingStore,
    KeyWaitInfo,
    unresponsive_error,
    wait_info,
)
from rankmesh_agent.store.command import Command, Waiting
from rankmesh_agent.store.key_waits import failed_wait_error
from rankmesh_agent.wire import store_frames
from rankmesh_agent.wire.credentials import remedy
from rankmesh_agent.wire.errors import (
    AuthenticationError,
    DistError,
    DistNetworkError,
    DistStoreError,
    KeyNotFoundError,
    ProtocolError,
    QueueEmptyError,
    StoreTimeoutError,
    StoreUnresponsiveError,
)
from rankmesh_agent.wire.hello import Service, client_script, hello, new_name

_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.05, 1.0
"""Seconds between attempts to reach an server that has not started yet, about an eighth of the time so far."""
_MIN_SECONDS = 0.001
_READ = 1 << 14

T = TypeVar("T")


class Call:
    """One call of a store, over one connection after the other if they break.

    Args:
        failures: the failures before the call, see BlockingStore.
        retried: identity of the first request that may have been executed, if any.
        keyed: whether the identity is an Idempotency-Key's.

    Attributes:
        failures, retried, keyed: see above.
        cancelled: whether the caller does not wait for the result any more.
    """

    def __init__(self, failures: tuple[DistError, ...], retried: bytes = b"", *, keyed: bool = False) -> None:
        self.failures = failures
        self.retried = retried
        self.keyed = keyed
        self.cancelled = False
        self._connection: ClientConnection | None = None

    def use(self, connection: ClientConnection) -> None:
        """Note the connection that carries the call now."""
        self._connection = connection
        if self.cancelled:
            connection.shutdown()

    def cancel(self) -> None:
        """End the call: the server learns it by the end of the connection. From any thread."""
        self.cancelled = True
        if self._connection is not None:
            self._connection.shutdown()

    def may_be_repeated(self, error: DistNetworkError) -> bool:
        """Return whether the call may go on over another connection after an error."""
        broken = error.__cause__ is not None and not isinstance(error, StoreUnresponsiveError)
        return broken and not self.cancelled


class ClientConnection(FramedStream):
    """A connection to the server, which carries one request at a time.

    Args:
        sock: a connected socket that has switched to the binary protocol.
    """

    name = b""
    """The connection's name at both ends, after the handshake."""
    waits: tuple[Command[Any], float] | None = None
    """The latest command, if it may wait for keys, and when it began, by the monotonic clock."""
    sent_in_part = False
    """True if the latest command did not fit the socket's buffer, and its rest has not been sent."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock)
        self.seq = 0
        self.spin = AdaptiveSpin(sock.recv, _READ, socket.MSG_DONTWAIT)

    def call(self, command: Command[T], timeout: float, retried: bytes = b"", *, keyed: bool = False) -> T:
        """Send a command and return its result; after any error but DistStoreError the connection must be closed.

        Args:
            command: the command.
            timeout: time limit of the call in seconds, besides the time that the command may wait.
            retried: the identity of the request that it may repeat, if any.
            keyed: whether that is an Idempotency-Key's.

        Raises:
            DistStoreError: the command failed.
            ProtocolError: the response is malformed.
            StreamClosedError: the connection broke; the server may have executed the command or not.
            StreamTimeoutError: no response came in time.
        """
        self.seq = seq = (self.seq + 1) & 0xFFFFFFFF
        frame = codec.encode_command(command, seq, retried=retried, keyed=keyed)
        data: bytes | bytearray
        deadline = None  # only a call that does not end at once needs one
        try:
            try:
                sent = self.sock.send(frame, socket.MSG_NOSIGNAL)
            except BlockingIOError:  # one slice of the time is over
                sent = 0
            if sent != len(frame):
                deadline = Deadline(timeout + command.seconds)
                self.sent_in_part = True
                self._send_all([memoryview(frame)[sent:]], deadline)
                self.sent_in_part = False
            try:
                data = self.spin.poll() or self.sock.recv(_READ)
            except BlockingIOError:
                deadline = deadline or Deadline(timeout + command.seconds - SLICE_SECONDS)
                data = self._read_rest(b"", store_frames.HEADER_BYTES, deadline)
        except OSError as error:
            raise StreamClosedError(error.strerror or str(error)) from error
        if not data:
            raise StreamClosedError("the server closed the connection")
        if len(data) < store_frames.HEADER_BYTES:
            deadline = deadline or Deadline(timeout)
            data = self._read_rest(data, store_frames.HEADER_BYTES, deadline)
        header = store_frames.decode_response(data)
        if len(data) != (size := store_frames.HEADER_BYTES + header[3]):
            data = self._read_rest(data, size, deadline or Deadline(timeout))
        if header[1] != seq:
            raise ProtocolError("the store's response belongs to another request")
        return codec.decode_result(command, header, data)

    def _read_rest(self, begun: bytes | bytearray, size: int, deadline: Deadline) -> bytearray:
        """Return ``size`` bytes of a response that begins with ``begun``."""
        if len(begun) > size:
            raise ProtocolError("the store sent more than a response")
        return self.receive_bytes(size, deadline, begun)


class StoreClient(BlockingStore):
    """A remote store for callers without an event loop.

    Concurrent threads use a connection each, so a waiting call does not delay others. If a connection breaks, its call
    is repeated over another one, and the server executes it once.

    Args:
        url: base URL of the server of the keys and values.
        token: the job's token; empty for none.
        store: id of the store.
        unix_socket: name of the server's unix socket, where that is known.
    """

    def __init__(
        self, url: str, token: str = "", store: bytes = store_frames.NO_STORE_ID, unix_socket: str = ""
    ) -> None:
        self._url = url.rstrip("/")
        self._token = token
        self._store = store
        self._pool: ConnectionPool[ClientConnection] = ConnectionPool(self._closed_error)
        self._unix_socket = unix_socket

    def execute_first(self, command: Command[T], deadline: Deadline) -> T:
        """Execute a command that does not wait, at an server that may not have started yet, or has too many clients.

        Raises:
            DistNetworkError: no server serves this client before the deadline, or it is not a store.
        """
        while True:
            try:
                return self.execute(command, max(deadline.remaining(), _SHORTEST_PAUSE))
            except DistNetworkError as error:
                if not isinstance(error.__cause__, OSError | StreamClosedError) or is_exhausted(error.__cause__):
                    raise
                if deadline.expired():
                    raise DistNetworkError(
                        f"waited {deadline.seconds:g} s for a store at {self._url}: {error.__cause__}. Does the "
                        "process that hosts it (is_master=True) run, and are host and port the same there?",
                        address=self._url,
                    ) from error
            # Many clients may wait: with jitter, they do not come back at the same time.
            pause = min(max(_SHORTEST_PAUSE, deadline.elapsed() / 8), _LONGEST_PAUSE) * random.uniform(0.5, 1.5)
            time.sleep(min(pause, deadline.remaining()))

    def connect(self, timeout: float) -> ClientConnection:
        """Return a connection for the caller's own use, which closes it.

        Raises:
            DistNetworkError: the server cannot be reached.
            StreamClosedError, StreamTimeoutError: the server ended, or does not respond.
        """
        try:
            return self._pool.connect(lambda: self._open(time.monotonic() + timeout))
        except ProtocolError as error:
            raise self._unreachable_error(error) from error

    def close(self) -> None:
        """Close all connections; calls in progress end with an error."""
        self._pool.close()

    def execute(self, command: Command[T], timeout: float | None = None, call: Call | None = None) -> T:
        """Execute a command: see the base class.

        Args:
            command: the command.
            timeout: see the base class.
            call: what is known about earlier attempts.
        """
        if timeout is None:  # as in limit(): a call less
            timeout = MARGIN_SECONDS if command.seconds else self.timeout
        call = call or Call(self.failures_before())
        failures = call.failures
        began = time.monotonic()
        ends = began + timeout + command.seconds
        try:
            connection = self._pool.acquire(lambda: self._open(ends))
            connection.waits = (command, began) if command.seconds > 0.0 else None
            try:
                if connection.waits and len(failures) < len(self.failures):
                    return self._try_once(connection, command, timeout, call)
                if connection.seq:
                    return self._call(connection, command, timeout, call)
                # To connect took some of the time: the margin has room for a little of it.
                return self._call(connection, *_remaining(command, timeout, began, timeout / 2), call)
            except StreamClosedError as error:  # the server closed it while it was idle, perhaps
                self._raise_if_changed(error, command)
                if call.cancelled:
                    raise
                connection = self._pool.connect(lambda: self._open(ends))
                connection.waits = (command, began) if command.seconds > 0.0 else None
                if connection.waits and len(failures) < len(self.failures):
                    return self._try_once(connection, command, timeout, call)
                return self._call(connection, *_remaining(command, timeout, began), call)
        except StreamTimeoutError as error:
            raise self.unresponsive_error(command, timeout) from error
        except (StreamClosedError, ProtocolError) as error:
            self._raise_if_changed(error, command)
            raise self._unreachable_error(error) from error

    def _raise_if_changed(self, error: Exception, command: Command[Any]) -> None:
        """Raise an error, which is not the cause of another attempt, if a frame was changed on its way."""
        if isinstance(error.__cause__, RecordChangedError):
            unknown = f"; whether {command.name} was executed is not known" if command.writes else ""
            raise DistNetworkError(
                f"the connection to {self._name()} is closed: {error.__cause__}{unknown}", address=self._url
            ) from None

    def _try_once(self, connection: ClientConnection, command: Command[T], timeout: float, call: Call) -> T:
        """Execute a command, whose wait a failure has ended, without waiting.

        Raises:
            RankFailedError: it would have to wait.
        """
        assert isinstance(command, Waiting)
        failure = self.failure_since(call.failures)
        assert failure is not None
        connection.waits = None
        try:
            attempt: Command[T] = command.with_timeout(0.0)
            return self._call(connection, attempt, timeout, call)
        except (KeyNotFoundError, StoreTimeoutError, QueueEmptyError) as error:
            raise failed_wait_error(failure, error) from None

    def waits_under_way(self) -> bool:
        return any(connection.waits is not None for connection in self._pool.in_use())

    def pending_waits(self) -> list[KeyWaitInfo]:
        return [wait_info(*waits) for connection in self._pool.in_use() if (waits := connection.waits) is not None]

    def fail_waits(self, failure: DistError, *, for_good: bool = False) -> None:
        """See BlockingStore. The connections of the waits end, by which the server learns that they are over."""
        super().fail_waits(failure, for_good=for_good)
        for connection in self._pool.in_use():
            if connection.waits:
                connection.shutdown()

    def _call(self, connection: ClientConnection, command: Command[T], timeout: float, call: Call) -> T:
        call.use(connection)
        try:
            result = connection.call(command, timeout, call.retried, keyed=call.keyed)
        except DistStoreError:
            self._pool.release(connection)
            raise
        except BaseException as error:  # Ctrl-C too: by the closed connection the server learns that the wait is over
            if isinstance(error, StreamClosedError) and command.writes and not call.retried:
                call.retried = store_frames.REQUEST_ID.pack(connection.name, connection.seq)
            self._pool.discard(connection)
            raise
        self._pool.release(connection)
        return result

    def _open(self, ends: float) -> ClientConnection:
        """Return a new connection, made before ``ends``, by time.monotonic.

        Raises:
            DistNetworkError: caused by an OSError: the server does not listen.
            AuthenticationError: the server has another token.
            ProtocolError: the peer does not speak the binary protocol.
            StreamClosedError, StreamTimeoutError: the server ended, or does not respond.
        """
        try:
            split = urlsplit(self._url)
            named = bool(split.hostname) and split.port != 0  # an invalid port raises
        except ValueError as error:
            raise DistNetworkError(f"{self._url!r} is not a store's URL: {error}", address=self._url) from None
        if not named:
            raise DistNetworkError(f"{self._url!r} is not a store's URL: it names no host", address=self._url)
        with contextlib.suppress(AuthenticationError):
            return until_accepted(lambda: self._open_connection(split, _until(ends)), _until(ends))
        # The connection breaks without a message if the server ends, too; then the second attempt finds no server.
        return self._open_connection(split, _until(ends))

    def _open_connection(self, split: SplitResult, deadline: Deadline) -> ClientConnection:
        refusal = AuthenticationError(
            f"the store at {self._url} has another token than this process: {remedy(self._token)}", address=self._url
        )
        unix = self._connect_unix()
        if unix is not None:
            return self._greeted(unix, refusal, deadline)[0]
        size = store_frames.UNIX_NAME_BYTES
        connection, name = self._greeted(self._connect(split, deadline), refusal, deadline, size)
        self._unix_socket = store_frames.decode_unix_name(name)
        unix = self._connect_unix()
        if unix is None:
            return connection
        connection.close()
        return self._greeted(unix, refusal, deadline)[0]

    def _greeted(
        self, sock: socket.socket, refusal: AuthenticationError, deadline: Deadline, reply_bytes: int = 0
    ) -> tuple[ClientConnection, bytes]:
        """Return the connection over a socket, after the handshake, and what the server says besides."""
        connection = ClientConnection(sock)
        try:
            connection.name = new_name()
            script = client_script(hello(self._token, self._store, connection.name), refusal, reply_bytes)
            handshake = Handshake(sock, Service.STORE, script, client=True)
            return connection, connection.greet(handshake, _positive(deadline))
        except BaseException:
            connection.close()
            raise

    def _connect(self, split: SplitResult, deadline: Deadline) -> socket.socket:
        """Return a socket that is connected to the server's port."""
        seconds = min(CONNECT_SECONDS, _positive(deadline))
        try:
            sock = connect(split.scheme, str(split.hostname), split.port, seconds, self._token)
            break_when_peer_vanishes(sock)
            return sock
        except (OSError, UnicodeError) as error:
            raise_if_exhausted(error, f"cannot connect to the store at {self._url}")
            raise self._unreachable_error(error) from error
        except ValueError as error:
            raise DistNetworkError(f"the store at {self._url}: {error}", address=self._url) from None

    def _connect_unix(self) -> socket.socket | None:
        """Return a socket to an server on this host, and of this user; None if its unix socket is not known yet."""
        if not self._unix_socket:
            return None
        with limit_named(f"cannot connect to the store at {self._url}"):
            sock = close_in_children(socket.socket(socket.AF_UNIX))
        try:
            sock.setblocking(False)  # a full backlog is an error, and no wait without a limit
            sock.connect(f"\0{self._unix_socket}")
            check_peer(sock)  # before the HELLO shows it the token
        except (OSError, PeerRefusedError):
            sock.close()
            self._unix_socket = ""
            return None
        except BaseException:
            sock.close()
            raise
        return sock

    def unresponsive_error(self, command: Command[T], timeout: float) -> StoreUnresponsiveError:
        """Return the error of a call to which the server has not responded; the arguments are those of ``execute``."""
        return unresponsive_error(self._name(), self._url, command, timeout)

    def _closed_error(self) -> DistNetworkError:
        return DistNetworkError(f"the connection to the store at {self._url} is closed", address=self._url)

    def _unreachable_error(self, error: Exception) -> DistNetworkError:
        if isinstance(error, DistNetworkError) and not isinstance(error, ProtocolError):
            return error
        reason = str(error) or type(error).__name__
        failure = f"; {self.failures[0].message}" if self.failures else ""
        return DistNetworkError(f"{self._name()} cannot be reached: {reason}{failure}", address=self._url)

    def _name(self) -> str:
        """Return the store for error messages."""
        return f"the store at {self._url}"


def remaining(command: Command[T], ends: float) -> Command[T]:
    """Return a command that waits no longer than until ``ends``, by time.monotonic."""
    if not isinstance(command, Waiting) or not command.seconds:
        return command
    found: Command[T] = command.with_timeout(max(0.0, ends - time.monotonic()))
    return found


def _until(ends: float) -> Deadline:
    """Return the deadline of the time ``ends``, by time.monotonic."""
    return Deadline(ends - time.monotonic())


def _positive(deadline: Deadline) -> float:
    """Return the remaining seconds as a socket's timeout, for which 0 has another meaning."""
    return max(_MIN_SECONDS, deadline.remaining())


def _remaining(command: Command[T], timeout: float, began: float, slack: float = 0.0) -> tuple[Command[T], float]:
    """Return a command and the time limit besides its wait, less the time that has passed since the call began.

    A time up to ``slack`` does not shorten the wait.
    """
    spent = time.monotonic() - began
    if spent > slack and isinstance(command, Waiting) and command.seconds:
        late = max(0.0, spent - command.seconds)
        return command.with_timeout(max(0.0, command.seconds - spent)), max(0.0, timeout - late)
    return command, max(0.0, timeout - spent)
