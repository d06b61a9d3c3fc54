"""Connections of a store's client: how they are made, and the one call that each carries at a time."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import TypeVar

from rankmesh_agent.net.deadline import Deadline
from rankmesh_agent.net.descriptors import raise_if_exhausted
from rankmesh_agent.net.dial import connect, connect_unix
from rankmesh_agent.net.handshake import Handshake
from rankmesh_agent.net.peer_credentials import PeerRefusedError
from rankmesh_agent.net.pool import until_accepted
from rankmesh_agent.net.spin import AdaptiveSpin
from rankmesh_agent.net.stream import FramedStream, StreamClosedError
from rankmesh_agent.store import codec
from rankmesh_agent.store.command import Command
from rankmesh_agent.wire import store_frames
from rankmesh_agent.wire.credentials import remedy
from rankmesh_agent.wire.errors import AuthenticationError, DistNetworkError, ProtocolError
from rankmesh_agent.wire.hello import Service, client_script, hello, new_name
from rankmesh_agent.wire.store_frames import RequestId

_CONNECT_SECONDS = 25.0
"""Time limit of a connection attempt: a host whose kernel has not acknowledged it by then has vanished."""
_MIN_SECONDS = 0.001
_READ = 1 << 14

T = TypeVar("T")


class ClientConnection(FramedStream):
    """A connection to the server, which carries one request at a time."""

    name = b""
    """The connection's name at both ends, after the handshake."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock)
        self.seq = 0
        self.spin = AdaptiveSpin(sock.recv, _READ, socket.MSG_DONTWAIT)

    def call(self, command: Command[T], timeout: float, request_id: RequestId | None = None) -> T:
        """Send a command and return its result; after any error but DistStoreError the connection must be closed.

        Args:
            timeout: time limit of the call in seconds, besides the time that the command may wait.
            request_id: the identity of the request that it may repeat, if any.

        Raises:
            DistStoreError: the command failed.
            ProtocolError: the response is malformed.
            StreamClosedError: the connection broke; the server may have executed the command or not.
            StreamTimeoutError: no response came in time.
        """
        self.seq = seq = (self.seq + 1) & 0xFFFFFFFF
        frame = codec.encode_command(command, seq, request_id)
        data: bytes | bytearray
        ends = time.monotonic() + timeout + command.seconds
        try:
            try:
                sent = self.sock.send(frame, socket.MSG_NOSIGNAL)
            except BlockingIOError:  # one slice of the time is over
                sent = 0
            if sent != len(frame):
                self._send_all([memoryview(frame)[sent:]], _until(ends))
            try:
                data = self.spin.poll() or self.sock.recv(_READ)
            except BlockingIOError:
                data = self._read_rest(b"", store_frames.HEADER_BYTES, ends)
        except OSError as error:
            raise StreamClosedError(error.strerror or str(error)) from error
        if not data:
            raise StreamClosedError("the server closed the connection")
        if len(data) < store_frames.HEADER_BYTES:
            data = self._read_rest(data, store_frames.HEADER_BYTES, ends)
        length, answered = store_frames.decode_header(data)
        if len(data) != (size := store_frames.HEADER_BYTES + length):
            data = self._read_rest(data, size, ends)
        if answered != seq:
            raise ProtocolError("the store's response belongs to another request")
        return codec.decode_result(command, data)

    def _read_rest(self, begun: bytes | bytearray, size: int, ends: float) -> bytearray:
        """Return ``size`` bytes of a response that begins with ``begun``."""
        if len(begun) > size:
            raise ProtocolError("the store sent more than a response")
        return self.receive_bytes(size, _until(ends), begun)


class Connector:
    """Makes connections to the server of a store: over its unix socket, where this process can connect to it.

    Args:
        unix_socket: name of the server's unix socket, where that is known.
        unreachable_error: returns the error of a server that cannot be reached, given its cause.
    """

    def __init__(
        self,
        url: str,
        token: str,
        store: bytes,
        unix_socket: str,
        unreachable_error: Callable[[Exception], DistNetworkError],
    ) -> None:
        self._url, self._token, self._store = url, token, store
        self._unix_socket = unix_socket
        self._unreachable_error = unreachable_error

    def open(self, ends: float) -> ClientConnection:
        """Return a new connection, made before ``ends``, by time.monotonic.

        Raises:
            DistNetworkError: caused by an OSError: the server does not listen.
            AuthenticationError: the server has another token.
            ProtocolError: the peer does not speak the binary protocol.
            StreamClosedError, StreamTimeoutError: the server ended, or does not respond.
        """
        return until_accepted(lambda: self._open_connection(_until(ends)), _until(ends))

    def _open_connection(self, deadline: Deadline) -> ClientConnection:
        refusal = AuthenticationError(
            f"the store at {self._url} has another token than this process: {remedy(self._token)}", address=self._url
        )
        unix = self._connect_unix()
        if unix is not None:
            return self._greeted(unix, refusal, deadline)[0]
        size = store_frames.UNIX_NAME_BYTES
        connection, name = self._greeted(self._connect(deadline), refusal, deadline, size)
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

    def _connect(self, deadline: Deadline) -> socket.socket:
        """Return a socket that is connected to the server's port."""
        seconds = min(_CONNECT_SECONDS, _positive(deadline))
        try:
            return connect(self._url, seconds, self._token)
        except (OSError, UnicodeError) as error:
            raise_if_exhausted(error, f"cannot connect to the store at {self._url}")
            raise self._unreachable_error(error) from error
        except ValueError as error:
            raise DistNetworkError(f"the store at {self._url}: {error}", address=self._url) from None

    def _connect_unix(self) -> socket.socket | None:
        """Return a socket to the server on this host, and of this user; None if its unix socket is not known yet."""
        if not self._unix_socket:
            return None
        try:
            return connect_unix(f"\0{self._unix_socket}")
        except (OSError, PeerRefusedError) as error:
            raise_if_exhausted(error, f"cannot connect to the store at {self._url}")
            self._unix_socket = ""
            return None


def _until(ends: float) -> Deadline:
    """Return the deadline of the time ``ends``, by time.monotonic."""
    return Deadline(ends - time.monotonic())


def _positive(deadline: Deadline) -> float:
    """Return the remaining seconds as a socket's timeout, for which 0 has another meaning."""
    return max(_MIN_SECONDS, deadline.remaining())
