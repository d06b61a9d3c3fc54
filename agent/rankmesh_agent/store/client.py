"""The store at another place, for callers without an event loop: over the fast path, or else over HTTP."""

from __future__ import annotations

import socket
import struct
import time
from contextlib import suppress
from typing import NoReturn, TypeVar
from urllib.parse import urlsplit

from rankmesh_agent.net.deadline import Deadline
from rankmesh_agent.net.sockets import break_when_peer_vanishes
from rankmesh_agent.net.spin import AdaptiveSpin
from rankmesh_agent.store import codec
from rankmesh_agent.store.base import CONNECT_SECONDS, RESPONSE_SECONDS
from rankmesh_agent.store.blocking import BlockingStore
from rankmesh_agent.store.command import Command, Waiting
from rankmesh_agent.wire import handshake, store_frames
from rankmesh_agent.wire.errors import AuthenticationError, DistNetworkError, DistStoreError, ProtocolError

RETRY_SECONDS = 0.05
"""How long to pause before an owner that is not there yet is asked again."""
MAX_IDLE = 8
"""How many connections are kept that nobody uses: a thread that calls needs one for itself."""
_SLICE_SECONDS = 1
"""How long one system call waits for an answer: the deadline is looked at in between."""
_SLICE, _SEND_SECONDS = struct.pack("ll", _SLICE_SECONDS, 0), struct.pack("ll", int(RESPONSE_SECONDS), 0)
_READ = 1 << 14

T = TypeVar("T")


class _ConnectionLost(Exception):
    """The connection broke: the request may have got through or not."""


class _ResponseTimeout(Exception):
    """No answer came in time."""


class _NotSupported(Exception):
    """Whoever is there does not know the fast path."""


class _Connection:
    """A connection to the owner, which carries one request at a time.

    Args:
        sock: a connected socket at which the challenge was passed.
        name: what both sides call the connection.
    """

    __slots__ = ("name", "seq", "sock", "spin")

    def __init__(self, sock: socket.socket, name: bytes) -> None:
        self.sock = sock
        self.name = name
        self.seq = 0
        self.spin = AdaptiveSpin(sock.recv, _READ, socket.MSG_DONTWAIT)

    def ask(self, command: Command[T], timeout: float, again: bytes = b"") -> T:
        """Send a command and return its result; after any other error than a store's, the line must be closed.

        Args:
            command: what to ask for.
            timeout: how many seconds the answer may take, besides the time that the command may wait.
            again: what the request was on the connection that broke.

        Raises:
            DistStoreError: the command failed.
            ProtocolError: that is no answer.
        """
        self.seq = seq = (self.seq + 1) & 0xFFFFFFFF
        frame = codec.encode_command(command, seq, again=again)
        data: bytes | bytearray
        try:
            self.sock.sendall(frame, socket.MSG_NOSIGNAL)
            try:
                data = self.spin.poll() or self.sock.recv(_READ) or _raise_closed()
            except BlockingIOError:  # a slice of the time is over
                left = timeout + command.seconds - _SLICE_SECONDS
                data = self._read_into(bytearray(store_frames.HEADER_BYTES), 0, left)
            if len(data) < store_frames.HEADER_BYTES:
                data = self._read_rest(data, store_frames.HEADER_BYTES, timeout)
            kind, answered, count, length, number = store_frames.decode_response(data)
            if len(data) != store_frames.HEADER_BYTES + length:
                data = self._read_rest(data, store_frames.HEADER_BYTES + length, timeout)
        except BlockingIOError:
            raise _ResponseTimeout("it stopped in the middle") from None
        except OSError as error:
            raise _ConnectionLost(error.strerror or str(error)) from error
        if answered != seq:
            raise ProtocolError("the store answered another request than ours")
        return codec.decode_result(command, kind, number, store_frames.decode_parts(data, count) if count else [])

    def _read_rest(self, begun: bytes | bytearray, size: int, timeout: float) -> bytearray:
        """Return so many bytes of an answer that has begun."""
        if len(begun) > size:
            raise ProtocolError("the store sent more than an answer")
        whole = bytearray(size)
        whole[: len(begun)] = begun
        return self._read_into(whole, len(begun), timeout)

    def _read_into(self, whole: bytearray, at: int, timeout: float) -> bytearray:
        """Fill up ``whole``; no part of it may take longer than ``timeout`` seconds, give or take a slice."""
        rest, over = memoryview(whole)[at:], Deadline(timeout)
        while rest:
            if over.expired():
                raise _ResponseTimeout("timed out")
            with suppress(BlockingIOError):  # a slice of the time is over
                rest = rest[self.sock.recv_into(rest) or _raise_closed() :]
                over.restart(timeout)
        return whole


def _raise_closed() -> NoReturn:
    raise _ConnectionLost("it hung up")


class StoreClient(BlockingStore):
    """The store at another place, for callers without an event loop.

    Threads that call at the same time have a connection each, so one that waits holds up nobody. A call whose
    connection breaks is repeated over another one, and the owner carries it out once.

    Args:
        url: base URL of whoever owns the keys and values.
        token: the job's token; empty for none.
    """

    def __init__(self, url: str, token: str = "") -> None:
        self._url = url.rstrip("/")
        self._token = token
        self._idle: list[_Connection] = []
        self._connections: set[_Connection] = set()
        self._unix_socket = ""
        self._http: BlockingStore | None = None
        self._closed = False

    def execute(self, command: Command[T]) -> T:
        return self._execute(command, RESPONSE_SECONDS)

    def execute_first(self, command: Command[T], deadline: Deadline) -> T:
        """Carry out a command that does not wait at an owner that may yet have to start.

        Raises:
            DistNetworkError: nobody was there when the deadline passed, or it is not a store.
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
        """Close all connections; calls under way end with an error."""
        self._closed = True
        for line in list(self._connections):
            with suppress(OSError):
                line.sock.shutdown(socket.SHUT_RDWR)  # wakes whoever waits at it, who closes it
        self._close_idle()
        if self._http is not None:
            self._http.close()

    def close_in_child(self) -> None:
        for line in list(self._connections):
            line.sock.close()
        self._connections.clear()
        self._idle.clear()
        if self._http is not None:
            self._http.close_in_child()

    def _execute(self, command: Command[T], timeout: float) -> T:
        if self._http is not None:
            return self._http.execute(command)
        try:
            line = self._idle.pop()
        except IndexError:
            try:
                line = self._open(timeout)
            except _NotSupported:
                return self._execute_over_http(command, timeout)
            except (_ConnectionLost, _ResponseTimeout, ProtocolError) as error:
                raise self._unreachable_error(error) from error
        began = time.monotonic()
        try:
            try:
                return self._call(line, command, timeout)
            except _ConnectionLost:  # idle for too long, perhaps
                again = store_frames.RETRIED_REQUEST.pack(line.name, line.seq) if command.writes else b""
                rest: Command[T] = command
                if isinstance(command, Waiting):
                    rest = command.with_timeout(max(0.0, command.seconds - (time.monotonic() - began)))
                return self._call(self._open(timeout), rest, timeout, again)
        except (_ConnectionLost, _ResponseTimeout, _NotSupported, ProtocolError) as error:
            raise self._unreachable_error(error) from error

    def _call(self, line: _Connection, command: Command[T], timeout: float, again: bytes = b"") -> T:
        try:
            result = line.ask(command, timeout, again)
        except DistStoreError:
            self._release(line)
            raise
        except BaseException:  # Ctrl-C too: the owner learns from it that nobody waits any more
            self._discard(line)
            raise
        self._release(line)
        return result

    def _release(self, line: _Connection) -> None:
        if len(self._idle) < MAX_IDLE:
            self._idle.append(line)
            if self._closed:
                self._close_idle()
        else:
            self._discard(line)

    def _discard(self, line: _Connection) -> None:
        self._connections.discard(line)
        line.sock.close()

    def _close_idle(self) -> None:
        with suppress(IndexError):
            while True:
                self._discard(self._idle.pop())

    def _open(self, timeout: float) -> _Connection:
        """Return a new connection.

        Raises:
            DistNetworkError: caused by an OSError: there is nobody.
            AuthenticationError: the owner has another token.
            _NotSupported: whoever is there does not know the fast path.
            _ConnectionLost, _ResponseTimeout: the owner went, or does not answer.
        """
        if self._closed:
            raise self._closed_error()
        try:
            split = urlsplit(self._url)
            host, port = split.hostname or "", split.port or 80
        except ValueError as error:
            raise DistNetworkError(f"{self._url!r} is not a store's URL: {error}", address=self._url) from None
        if not host:
            raise DistNetworkError(f"{self._url!r} is not a store's URL: it names no host", address=self._url)
        if split.scheme != "http":
            raise _NotSupported(f"{split.scheme} is not http")
        sock = self._connect_unix()
        if sock is None:
            sock = self._connect(host, port, split.netloc, timeout)
        try:
            sock.settimeout(timeout)
            try:
                name = self._authenticate(sock)
            except AuthenticationError:
                # An owner that ends hangs up without a word, too. It does not get as far the second time.
                sock.close()
                sock = self._connect_unix() or self._connect(host, port, split.netloc, timeout)
                sock.settimeout(timeout)
                name = self._authenticate(sock)
            sock.settimeout(None)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _SLICE)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _SEND_SECONDS)
        except BaseException:
            sock.close()
            raise
        line = _Connection(sock, name)
        self._connections.add(line)
        if self._closed:  # meanwhile, and perhaps before close() could see this one
            self._discard(line)
            raise self._closed_error()
        return line

    def _connect(self, host: str, port: int, place: str, timeout: float) -> socket.socket:
        """Return a socket whose other end speaks the fast path from now on."""
        try:
            sock = socket.create_connection((host, port), min(CONNECT_SECONDS, timeout))
        except (OSError, UnicodeError) as error:
            raise self._unreachable_error(error) from error
        try:
            sock.settimeout(timeout)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            break_when_peer_vanishes(sock)
            sock.sendall(store_frames.UPGRADE.request(place))
            head = b""
            while (nearby := store_frames.unix_socket_of(head)) is None:
                head += sock.recv(_READ) or _raise_closed()
        except BaseException as error:
            sock.close()
            if isinstance(error, TimeoutError):
                raise _ResponseTimeout(str(error)) from error
            if isinstance(error, OSError | ProtocolError | _ConnectionLost):
                raise _NotSupported(str(error)) from error
            raise
        self._unix_socket = nearby
        nearer = self._connect_unix()
        if nearer is None:
            return sock
        sock.close()
        return nearer

    def _connect_unix(self) -> socket.socket | None:
        """Return a socket to an owner on this host, None if it is elsewhere, or not known yet."""
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

    def _authenticate(self, sock: socket.socket) -> bytes:
        """Pass the challenge; return the connection's name."""
        challenge = handshake.Challenge(self._token, client=True)
        try:
            sock.sendall(challenge.hello())
            challenge.receive_hello(_receive_exactly(sock, handshake.HELLO_BYTES))
            try:
                sock.sendall(challenge.proof())
                challenge.receive_proof(_receive_exactly(sock, handshake.PROOF_BYTES))
            except (ConnectionError, _ConnectionLost, AuthenticationError):  # it hangs up without a word
                raise AuthenticationError(
                    f"the store at {self._url} refused us: RANKMESH_TOKEN must be the same there and here",
                    address=self._url,
                ) from None
        except TimeoutError as error:
            raise _ResponseTimeout(str(error)) from error
        except OSError as error:
            raise _ConnectionLost(str(error)) from error
        return challenge.name

    def _execute_over_http(self, command: Command[T], timeout: float) -> T:
        """Ask for a command over HTTP, and do so from now on if that works."""
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
            if works and self._http is None and not self._closed:
                self._http = http
            else:
                http.close()

    def _closed_error(self) -> DistNetworkError:
        return DistNetworkError(f"the connection to the store at {self._url} is closed", address=self._url)

    def _unreachable_error(self, error: Exception) -> DistNetworkError:
        what = str(error) or type(error).__name__
        return DistNetworkError(f"the store at {self._url} cannot be reached: {what}", address=self._url)


def _receive_exactly(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        data += sock.recv(size - len(data)) or _raise_closed()
    return data
