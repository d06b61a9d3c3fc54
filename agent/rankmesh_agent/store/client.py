"""Client of a remote store for callers without an event loop: binary protocol, else HTTP."""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from typing import TypeVar
from urllib.parse import urlsplit

from rankmesh_agent.net.deadline import Deadline
from rankmesh_agent.net.pool import ConnectionPool
from rankmesh_agent.net.spin import AdaptiveSpin
from rankmesh_agent.net.stream import SLICE_SECONDS, FramedStream, StreamClosedError, StreamTimeoutError
from rankmesh_agent.net.upgrade import request_upgrade
from rankmesh_agent.store import codec
from rankmesh_agent.store.base import CONNECT_SECONDS, RESPONSE_SECONDS, BlockingStore
from rankmesh_agent.store.command import Command, Waiting
from rankmesh_agent.store.moved import StoreMovedError
from rankmesh_agent.wire import store_frames
from rankmesh_agent.wire.errors import AuthenticationError, DistNetworkError, DistStoreError, ProtocolError

RETRY_SECONDS = 0.05
"""Pause between attempts to reach an owner that has not started yet."""
_SEND_SECONDS = struct.pack("ll", int(RESPONSE_SECONDS), 0)
_READ = 1 << 14

T = TypeVar("T")


class _NotSupported(Exception):
    """The peer does not speak the binary protocol."""


class Attempt:
    """What is known about earlier attempts to execute a command at other owners.

    Attributes:
        retried: identity of the first request that may have been executed, if any.
    """

    retried = b""

    def may_follow(self, error: DistNetworkError) -> bool:
        """Return whether the command can be sent to the next owner after an error."""
        return isinstance(error, StoreMovedError) or isinstance(error.__cause__, OSError | StreamClosedError)


class _Connection(FramedStream):
    """A connection to the owner, which carries one request at a time.

    Args:
        sock: a connected socket that has switched to the binary protocol.
    """

    name = b""
    """The connection's name at both ends, after the handshake."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _SEND_SECONDS)
        self.seq = 0
        self.spin = AdaptiveSpin(sock.recv, _READ, socket.MSG_DONTWAIT)

    def call(self, command: Command[T], timeout: float, retried: bytes = b"") -> T:
        """Send a command and return its result; after any error but DistStoreError the connection must be closed.

        Args:
            command: the command.
            timeout: time limit of the response in seconds, besides the time that the command may wait.
            retried: the identity of the request that it repeats, if any.

        Raises:
            DistStoreError: the command failed.
            ProtocolError: the response is malformed.
            StreamClosedError: the connection broke; the owner may have executed the command or not.
            StreamTimeoutError: no response came in time.
        """
        self.seq = seq = (self.seq + 1) & 0xFFFFFFFF
        frame = codec.encode_command(command, seq, retried=retried)
        data: bytes | bytearray
        try:
            self.sock.sendall(frame, socket.MSG_NOSIGNAL)
            try:
                data = self.spin.poll() or self.sock.recv(_READ)
            except BlockingIOError:  # one slice of the time is over
                left = timeout + command.seconds - SLICE_SECONDS
                data = self._read_rest(b"", store_frames.HEADER_BYTES, left)
        except BlockingIOError:
            raise StreamTimeoutError("it does not receive the request") from None
        except OSError as error:
            raise StreamClosedError(error.strerror or str(error)) from error
        if not data:
            raise StreamClosedError("the owner closed the connection")
        if len(data) < store_frames.HEADER_BYTES:
            data = self._read_rest(data, store_frames.HEADER_BYTES, timeout)
        header = store_frames.decode_response(data)
        if len(data) != (size := store_frames.HEADER_BYTES + header[3]):
            data = self._read_rest(data, size, timeout)
        if header[1] != seq:
            raise ProtocolError("the store's response belongs to another request")
        return codec.decode_result(command, header, data)

    def _read_rest(self, begun: bytes | bytearray, size: int, timeout: float) -> bytearray:
        """Return ``size`` bytes of a response that begins with ``begun``; a pause may take ``timeout`` seconds."""
        if len(begun) > size:
            raise ProtocolError("the store sent more than a response")
        whole = bytearray(size)
        whole[: len(begun)] = begun
        self.receive_into([memoryview(whole)[len(begun) :]], timeout)
        return whole


class StoreClient(BlockingStore):
    """A remote store for callers without an event loop.

    Concurrent threads use a connection each, so a waiting call does not delay others. If a connection breaks, its call
    is repeated over another one, and the owner executes it once.

    Args:
        url: base URL of the owner of the keys and values.
        token: the job's token; empty for none.
    """

    def __init__(self, url: str, token: str = "") -> None:
        self._url = url.rstrip("/")
        self._token = token
        self._pool: ConnectionPool[_Connection] = ConnectionPool(self._closed_error)
        self._unix_socket = ""
        self._http: BlockingStore | None = None

    def execute_first(self, command: Command[T], deadline: Deadline) -> T:
        """Execute a command that does not wait, at an owner that may not have started yet.

        Raises:
            DistNetworkError: no owner listens there before the deadline, or it is not a store.
        """
        while True:
            try:
                return self.execute(command, max(deadline.remaining(), RETRY_SECONDS))
            except DistNetworkError as error:
                if not isinstance(error.__cause__, OSError):
                    raise
                if deadline.expired():
                    raise DistNetworkError(
                        f"waited {deadline.seconds:g} s for a store at {self._url}: {error.__cause__}. Does the "
                        "process that hosts it (is_master=True) run, and are host and port the same there?",
                        address=self._url,
                    ) from error
            time.sleep(min(RETRY_SECONDS, deadline.remaining()))

    def close(self) -> None:
        """Close all connections; calls in progress end with an error."""
        self._pool.close()
        if self._http is not None:
            self._http.close()

    def close_in_child(self) -> None:
        self._pool.close_in_child()

    def execute(self, command: Command[T], timeout: float = RESPONSE_SECONDS, attempt: Attempt | None = None) -> T:
        """Execute a command; the owner may take ``timeout`` seconds besides the time that the command waits."""
        attempt = attempt or Attempt()
        if self._http is not None:
            return self._http.execute(command)
        try:
            connection = self._pool.acquire(lambda: self._open(timeout))
        except _NotSupported:
            return self._execute_over_http(command, timeout)
        except (StreamClosedError, StreamTimeoutError, ProtocolError) as error:
            raise self._unreachable_error(error) from error
        began = time.monotonic()
        try:
            try:
                return self._call(connection, command, timeout, attempt.retried)
            except StreamClosedError:  # the owner closed it while it was idle, perhaps
                if command.writes and not attempt.retried:
                    attempt.retried = store_frames.RETRIED_REQUEST.pack(connection.name, connection.seq)
                rest: Command[T] = command
                if isinstance(command, Waiting):
                    rest = command.with_timeout(max(0.0, command.seconds - (time.monotonic() - began)))
                return self._call(self._pool.connect(lambda: self._open(timeout)), rest, timeout, attempt.retried)
        except (StreamClosedError, StreamTimeoutError, _NotSupported, ProtocolError) as error:
            raise self._unreachable_error(error) from error

    def _call(self, connection: _Connection, command: Command[T], timeout: float, retried: bytes = b"") -> T:
        try:
            result = connection.call(command, timeout, retried)
        except DistStoreError:
            self._pool.release(connection)
            raise
        except BaseException:  # Ctrl-C too: by the closed connection the owner learns that the wait is over
            self._pool.discard(connection)
            raise
        self._pool.release(connection)
        return result

    def _open(self, timeout: float) -> _Connection:
        """Return a new connection.

        Raises:
            DistNetworkError: caused by an OSError: the owner does not listen.
            AuthenticationError: the owner has another token.
            _NotSupported: the peer does not speak the binary protocol.
            StreamClosedError, StreamTimeoutError: the owner ended, or does not respond.
        """
        try:
            split = urlsplit(self._url)
            host, port = split.hostname or "", split.port or 80
        except ValueError as error:
            raise DistNetworkError(f"{self._url!r} is not a store's URL: {error}", address=self._url) from None
        if not host:
            raise DistNetworkError(f"{self._url!r} is not a store's URL: it names no host", address=self._url)
        if split.scheme != "http":
            raise _NotSupported(f"{split.scheme} is not http")
        with contextlib.suppress(AuthenticationError):
            return self._open_connection(host, port, split.netloc, timeout)
        # The connection breaks without a message if the owner ends, too; then the second attempt finds no owner.
        return self._open_connection(host, port, split.netloc, timeout)

    def _open_connection(self, host: str, port: int, netloc: str, timeout: float) -> _Connection:
        refusal = AuthenticationError(
            f"the store at {self._url} refused us: RANKMESH_TOKEN must be the same there and here", address=self._url
        )
        connection = _Connection(self._connect_unix() or self._connect(host, port, netloc, timeout))
        try:
            connection.name = connection.authenticate(self._token, timeout, refusal)
        except BaseException:
            connection.close()
            raise
        return connection

    def _connect(self, host: str, port: int, netloc: str, timeout: float) -> socket.socket:
        """Return a socket whose peer speaks the binary protocol from now on."""
        try:
            sock = socket.create_connection((host, port), min(CONNECT_SECONDS, timeout))
        except (OSError, UnicodeError) as error:
            raise self._unreachable_error(error) from error
        try:
            head = request_upgrade(sock, store_frames.UPGRADE, netloc, timeout)
        except BaseException as error:
            sock.close()
            if isinstance(error, TimeoutError):
                raise StreamTimeoutError(str(error)) from error
            if isinstance(error, OSError | ProtocolError):
                raise _NotSupported(str(error)) from error
            raise
        self._unix_socket = store_frames.unix_socket_of(head)
        unix = self._connect_unix()
        if unix is None:
            return sock
        sock.close()
        return unix

    def _connect_unix(self) -> socket.socket | None:
        """Return a socket to an owner on this host, None if it is on another one, or its unix socket not known yet."""
        if not self._unix_socket:
            return None
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.connect(f"\0{self._unix_socket}")
        except OSError:
            sock.close()
            self._unix_socket = ""
            return None
        except BaseException:
            sock.close()
            raise
        return sock

    def _execute_over_http(self, command: Command[T], timeout: float) -> T:
        """Execute a command over HTTP; if the owner is a store, so do all later calls."""
        from rankmesh_agent.store.http_client import BlockingHttpStore

        http = BlockingHttpStore(self._url, self._token)
        works = False
        try:
            found = http.execute(command, timeout)
            works = True
            return found
        except DistStoreError:
            works = True
            raise
        finally:
            if works and self._http is None and not self._pool.closed:
                self._http = http
            else:
                http.close()

    def _closed_error(self) -> DistNetworkError:
        return DistNetworkError(f"the connection to the store at {self._url} is closed", address=self._url)

    def _unreachable_error(self, error: Exception) -> DistNetworkError:
        reason = "timed out" if isinstance(error, StreamTimeoutError) else str(error) or type(error).__name__
        return DistNetworkError(f"the store at {self._url} cannot be reached: {reason}", address=self._url)
