"""Client of a remote store for callers without an event loop: binary protocol, else HTTP."""

from __future__ import annotations

import socket
import struct
import time
from contextlib import suppress
from typing import NoReturn, TypeVar
from urllib.parse import urlsplit

from rankmesh_agent.net.deadline import Deadline
from rankmesh_agent.net.handshake import Handshake
from rankmesh_agent.net.pool import ConnectionPool
from rankmesh_agent.net.spin import AdaptiveSpin
from rankmesh_agent.net.upgrade import request_upgrade
from rankmesh_agent.store import codec
from rankmesh_agent.store.base import CONNECT_SECONDS, RESPONSE_SECONDS
from rankmesh_agent.store.blocking import BlockingStore
from rankmesh_agent.store.command import Command, Waiting
from rankmesh_agent.wire import handshake, store_frames
from rankmesh_agent.wire.errors import AuthenticationError, DistNetworkError, DistStoreError, ProtocolError

RETRY_SECONDS = 0.05
"""Pause between attempts to reach an owner that has not started yet."""
_SLICE_SECONDS = 1
"""Time limit of one receive call: the deadline is checked in between."""
_SLICE, _SEND_SECONDS = struct.pack("ll", _SLICE_SECONDS, 0), struct.pack("ll", int(RESPONSE_SECONDS), 0)
_READ = 1 << 14

T = TypeVar("T")


class _ConnectionLost(Exception):
    """The connection broke: the owner may have executed the request or not."""


class _ResponseTimeout(Exception):
    """No response came in time."""


class _NotSupported(Exception):
    """The peer does not speak the binary protocol."""


class _Connection:
    """A connection to the owner, which carries one request at a time.

    Args:
        sock: a connected socket that has passed the handshake.
        name: the connection's name at both ends.
    """

    __slots__ = ("name", "seq", "sock", "spin")

    def __init__(self, sock: socket.socket, name: bytes) -> None:
        self.sock = sock
        self.name = name
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
        """
        self.seq = seq = (self.seq + 1) & 0xFFFFFFFF
        frame = codec.encode_command(command, seq, retried=retried)
        data: bytes | bytearray
        try:
            self.sock.sendall(frame, socket.MSG_NOSIGNAL)
            try:
                data = self.spin.poll() or self.sock.recv(_READ) or _raise_closed()
            except BlockingIOError:  # one slice of the time is over
                left = timeout + command.seconds - _SLICE_SECONDS
                data = self._read_into(bytearray(store_frames.HEADER_BYTES), 0, left)
            if len(data) < store_frames.HEADER_BYTES:
                data = self._read_rest(data, store_frames.HEADER_BYTES, timeout)
            kind, answered, count, length, number = store_frames.decode_response(data)
            if len(data) != store_frames.HEADER_BYTES + length:
                data = self._read_rest(data, store_frames.HEADER_BYTES + length, timeout)
        except BlockingIOError:
            raise _ResponseTimeout("the response stopped in the middle") from None
        except OSError as error:
            raise _ConnectionLost(error.strerror or str(error)) from error
        if answered != seq:
            raise ProtocolError("the store's response belongs to another request")
        return codec.decode_result(command, kind, number, store_frames.decode_parts(data, count) if count else [])

    def shutdown(self) -> None:
        """End the connection, also for a thread that receives."""
        with suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket."""
        self.sock.close()

    def _read_rest(self, begun: bytes | bytearray, size: int, timeout: float) -> bytearray:
        """Return ``size`` bytes of a response that begins with ``begun``."""
        if len(begun) > size:
            raise ProtocolError("the store sent more than a response")
        whole = bytearray(size)
        whole[: len(begun)] = begun
        return self._read_into(whole, len(begun), timeout)

    def _read_into(self, whole: bytearray, at: int, timeout: float) -> bytearray:
        """Fill ``whole`` from ``at`` on; no part may take longer than ``timeout`` seconds, give or take a slice."""
        rest, deadline = memoryview(whole)[at:], Deadline(timeout)
        while rest:
            if deadline.expired():
                raise _ResponseTimeout("timed out")
            with suppress(BlockingIOError):  # one slice of the time is over
                rest = rest[self.sock.recv_into(rest) or _raise_closed() :]
                deadline.restart(timeout)
        return whole


def _raise_closed() -> NoReturn:
    raise _ConnectionLost("the owner closed the connection")


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

    def execute(self, command: Command[T]) -> T:
        return self._execute(command, RESPONSE_SECONDS)

    def execute_first(self, command: Command[T], deadline: Deadline) -> T:
        """Execute a command that does not wait, at an owner that may not have started yet.

        Raises:
            DistNetworkError: no owner listens there before the deadline, or it is not a store.
        """
        while True:
            try:
                return self._execute(command, max(deadline.remaining(), RETRY_SECONDS))
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
        if self._http is not None:
            self._http.close_in_child()

    def _execute(self, command: Command[T], timeout: float) -> T:
        if self._http is not None:
            return self._http.execute(command)
        try:
            connection = self._pool.acquire(lambda: self._open(timeout))
        except _NotSupported:
            return self._execute_over_http(command, timeout)
        except (_ConnectionLost, _ResponseTimeout, ProtocolError) as error:
            raise self._unreachable_error(error) from error
        began = time.monotonic()
        try:
            try:
                return self._call(connection, command, timeout)
            except _ConnectionLost:  # the owner closed it while it was idle, perhaps
                retried = store_frames.RETRIED_REQUEST.pack(connection.name, connection.seq) if command.writes else b""
                rest: Command[T] = command
                if isinstance(command, Waiting):
                    rest = command.with_timeout(max(0.0, command.seconds - (time.monotonic() - began)))
                return self._call(self._pool.connect(lambda: self._open(timeout)), rest, timeout, retried)
        except (_ConnectionLost, _ResponseTimeout, _NotSupported, ProtocolError) as error:
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
            _ConnectionLost, _ResponseTimeout: the owner ended, or does not respond.
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
        sock = self._connect_unix() or self._connect(host, port, split.netloc, timeout)
        try:
            try:
                name = self._authenticate(sock, timeout)
            except AuthenticationError:
                # An owner that ends closes the connection without a message, too: the second attempt tells which.
                sock.close()
                sock = self._connect_unix() or self._connect(host, port, split.netloc, timeout)
                name = self._authenticate(sock, timeout)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _SLICE)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _SEND_SECONDS)
        except BaseException:
            sock.close()
            raise
        return _Connection(sock, name)

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
                raise _ResponseTimeout(str(error)) from error
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

    def _authenticate(self, sock: socket.socket, timeout: float) -> bytes:
        """Pass the handshake; return the connection's name."""
        refusal = AuthenticationError(
            f"the store at {self._url} refused us: RANKMESH_TOKEN must be the same there and here", address=self._url
        )
        try:
            return Handshake(sock, handshake.client_script(self._token, refusal)).run(timeout)
        except TimeoutError as error:
            raise _ResponseTimeout(str(error)) from error
        except OSError as error:
            raise _ConnectionLost(str(error)) from error

    def _execute_over_http(self, command: Command[T], timeout: float) -> T:
        """Execute a command over HTTP; if the owner is a store, so do all later calls."""
        from rankmesh_agent.store.http_client import BlockingHttpStore

        http = BlockingHttpStore(self._url, self._token)
        works = False
        try:
            found = http.execute_within(command, timeout)
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
        reason = str(error) or type(error).__name__
        return DistNetworkError(f"the store at {self._url} cannot be reached: {reason}", address=self._url)
