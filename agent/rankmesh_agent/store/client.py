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
from rankmesh_agent.net.spin import Spinner
from rankmesh_agent.store import codec
from rankmesh_agent.store.base import ANSWER_SECONDS, CONNECT_SECONDS
from rankmesh_agent.store.blocking import BlockingStore
from rankmesh_agent.store.command import Command, Waiting
from rankmesh_agent.wire import handshake, store_frames
from rankmesh_agent.wire.errors import AuthenticationError, DistNetworkError, DistStoreError, ProtocolError

RETRY_SECONDS = 0.05
"""How long to pause before an owner that is not there yet is asked again."""
MOST_IDLE = 8
"""How many connections are kept that nobody uses: a thread that calls needs one for itself."""
_SLICE_SECONDS = 1
"""How long one system call waits for an answer: the deadline is looked at in between."""
_SLICE, _SEND_SECONDS = struct.pack("ll", _SLICE_SECONDS, 0), struct.pack("ll", int(ANSWER_SECONDS), 0)
_READ = 1 << 14

T = TypeVar("T")


class _Lost(Exception):
    """The connection broke: the request may have got through or not."""


class _Late(Exception):
    """No answer came in time."""


class _Stranger(Exception):
    """Whoever is there does not know the fast path."""


class _Line:
    """A connection to the owner, which carries one request at a time.

    Args:
        sock: a connected socket at which the challenge was passed.
        name: what both sides call the connection.
    """

    __slots__ = ("lookout", "name", "seq", "sock")

    def __init__(self, sock: socket.socket, name: bytes) -> None:
        self.sock = sock
        self.name = name
        self.seq = 0
        self.lookout = Spinner(sock.recv, _READ, socket.MSG_DONTWAIT)

    def ask(self, command: Command[T], patience: float, again: bytes = b"") -> T:
        """Send a command and return its result; after any other error than a store's, the line must be closed.

        Args:
            command: what to ask for.
            patience: how many seconds the answer may take, besides the time that the command may wait.
            again: what the request was on the connection that broke.

        Raises:
            DistStoreError: the command failed.
            ProtocolError: that is no answer.
        """
        self.seq = seq = (self.seq + 1) & 0xFFFFFFFF
        frame = codec.request(command, seq, again=again)
        data: bytes | bytearray
        try:
            self.sock.sendall(frame, socket.MSG_NOSIGNAL)
            try:
                data = self.lookout.spin() or self.sock.recv(_READ) or _hung_up()
            except BlockingIOError:  # a slice of the time is over
                left = patience + command.seconds - _SLICE_SECONDS
                data = self._received(bytearray(store_frames.HEADER_BYTES), 0, left)
            if len(data) < store_frames.HEADER_BYTES:
                data = self._whole(data, store_frames.HEADER_BYTES, patience)
            kind, answered, count, length, number = store_frames.decode_response(data)
            if len(data) != store_frames.HEADER_BYTES + length:
                data = self._whole(data, store_frames.HEADER_BYTES + length, patience)
        except BlockingIOError:
            raise _Late("it stopped in the middle") from None
        except OSError as error:
            raise _Lost(error.strerror or str(error)) from error
        if answered != seq:
            raise ProtocolError("the store answered another request than ours")
        return codec.result(command, kind, number, store_frames.decode_parts(data, count) if count else [])

    def _whole(self, begun: bytes | bytearray, size: int, patience: float) -> bytearray:
        """Return so many bytes of an answer that has begun."""
        if len(begun) > size:
            raise ProtocolError("the store sent more than an answer")
        whole = bytearray(size)
        whole[: len(begun)] = begun
        return self._received(whole, len(begun), patience)

    def _received(self, whole: bytearray, at: int, patience: float) -> bytearray:
        """Fill up ``whole``; no part of it may take longer than ``patience`` seconds, give or take a slice."""
        rest, over = memoryview(whole)[at:], Deadline(patience)
        while rest:
            if over.expired():
                raise _Late("timed out")
            with suppress(BlockingIOError):  # a slice of the time is over
                rest = rest[self.sock.recv_into(rest) or _hung_up() :]
                over.restart(patience)
        return whole


def _hung_up() -> NoReturn:
    raise _Lost("it hung up")


class BlockingRemote(BlockingStore):
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
        self._idle: list[_Line] = []
        self._lines: set[_Line] = set()
        self._nearby = ""
        self._http: BlockingStore | None = None
        self._closed = False

    def do(self, command: Command[T]) -> T:
        return self._do(command, ANSWER_SECONDS)

    def do_first(self, command: Command[T], deadline: Deadline) -> T:
        """Carry out a command that does not wait at an owner that may yet have to start.

        Raises:
            DistNetworkError: nobody was there when the deadline passed, or it is not a store.
        """
        while True:
            try:
                return self._do(command, max(deadline.remaining(), RETRY_SECONDS))
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
        for line in list(self._lines):
            with suppress(OSError):
                line.sock.shutdown(socket.SHUT_RDWR)  # wakes whoever waits at it, who closes it
        self._close_idle()
        if self._http is not None:
            self._http.close()

    def forget(self) -> None:
        for line in list(self._lines):
            line.sock.close()
        self._lines.clear()
        self._idle.clear()
        if self._http is not None:
            self._http.forget()

    def _do(self, command: Command[T], patience: float) -> T:
        if self._http is not None:
            return self._http.do(command)
        try:
            line = self._idle.pop()
        except IndexError:
            try:
                line = self._open(patience)
            except _Stranger:
                return self._do_over_http(command, patience)
            except (_Lost, _Late, ProtocolError) as error:
                raise self._unreachable(error) from error
        began = time.monotonic()
        try:
            try:
                return self._ask(line, command, patience)
            except _Lost:  # idle for too long, perhaps
                again = store_frames.RETRY_OF.pack(line.name, line.seq) if command.writes else b""
                rest: Command[T] = command
                if isinstance(command, Waiting):
                    rest = command.lasting(max(0.0, command.seconds - (time.monotonic() - began)))
                return self._ask(self._open(patience), rest, patience, again)
        except (_Lost, _Late, _Stranger, ProtocolError) as error:
            raise self._unreachable(error) from error

    def _ask(self, line: _Line, command: Command[T], patience: float, again: bytes = b"") -> T:
        try:
            result = line.ask(command, patience, again)
        except DistStoreError:
            self._keep(line)
            raise
        except BaseException:  # Ctrl-C too: the owner learns from it that nobody waits any more
            self._end(line)
            raise
        self._keep(line)
        return result

    def _keep(self, line: _Line) -> None:
        if len(self._idle) < MOST_IDLE:
            self._idle.append(line)
            if self._closed:
                self._close_idle()
        else:
            self._end(line)

    def _end(self, line: _Line) -> None:
        self._lines.discard(line)
        line.sock.close()

    def _close_idle(self) -> None:
        with suppress(IndexError):
            while True:
                self._end(self._idle.pop())

    def _open(self, patience: float) -> _Line:
        """Return a new connection.

        Raises:
            DistNetworkError: caused by an OSError: there is nobody.
            AuthenticationError: the owner has another token.
            _Stranger: whoever is there does not know the fast path.
            _Lost, _Late: the owner went, or does not answer.
        """
        if self._closed:
            raise self._is_closed()
        try:
            split = urlsplit(self._url)
            host, port = split.hostname or "", split.port or 80
        except ValueError as error:
            raise DistNetworkError(f"{self._url!r} is not a store's URL: {error}", address=self._url) from None
        if not host:
            raise DistNetworkError(f"{self._url!r} is not a store's URL: it names no host", address=self._url)
        if split.scheme != "http":
            raise _Stranger(f"{split.scheme} is not http")
        sock = self._connect_nearby()
        if sock is None:
            sock = self._connect(host, port, split.netloc, patience)
        try:
            sock.settimeout(patience)
            try:
                name = self._introduce(sock)
            except AuthenticationError:
                # An owner that ends hangs up without a word, too. It does not get as far the second time.
                sock.close()
                sock = self._connect_nearby() or self._connect(host, port, split.netloc, patience)
                sock.settimeout(patience)
                name = self._introduce(sock)
            sock.settimeout(None)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _SLICE)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _SEND_SECONDS)
        except BaseException:
            sock.close()
            raise
        line = _Line(sock, name)
        self._lines.add(line)
        if self._closed:  # meanwhile, and perhaps before close() could see this one
            self._end(line)
            raise self._is_closed()
        return line

    def _connect(self, host: str, port: int, place: str, patience: float) -> socket.socket:
        """Return a socket whose other end speaks the fast path from now on."""
        try:
            sock = socket.create_connection((host, port), min(CONNECT_SECONDS, patience))
        except (OSError, UnicodeError) as error:
            raise self._unreachable(error) from error
        try:
            sock.settimeout(patience)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            break_when_peer_vanishes(sock)
            sock.sendall(store_frames.UPGRADE.request(place))
            head = b""
            while (nearby := store_frames.local_socket_in(head)) is None:
                head += sock.recv(_READ) or _hung_up()
        except BaseException as error:
            sock.close()
            if isinstance(error, TimeoutError):
                raise _Late(str(error)) from error
            if isinstance(error, OSError | ProtocolError | _Lost):
                raise _Stranger(str(error)) from error
            raise
        self._nearby = nearby
        nearer = self._connect_nearby()
        if nearer is None:
            return sock
        sock.close()
        return nearer

    def _connect_nearby(self) -> socket.socket | None:
        """Return a socket to an owner on this host, None if it is elsewhere, or not known yet."""
        if not self._nearby:
            return None
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.connect(f"\0{self._nearby}")
        except OSError:
            sock.close()
            self._nearby = ""
            return None
        except BaseException:
            sock.close()
            raise
        return sock

    def _introduce(self, sock: socket.socket) -> bytes:
        """Pass the challenge; return the connection's name."""
        challenge = handshake.Challenge(self._token, client=True)
        try:
            sock.sendall(challenge.hello())
            challenge.receive_hello(_exactly(sock, handshake.HELLO_BYTES))
            try:
                sock.sendall(challenge.proof())
                challenge.receive_proof(_exactly(sock, handshake.PROOF_BYTES))
            except (ConnectionError, _Lost, AuthenticationError):  # it hangs up without a word
                raise AuthenticationError(
                    f"the store at {self._url} refused us: RANKMESH_TOKEN must be the same there and here",
                    address=self._url,
                ) from None
        except TimeoutError as error:
            raise _Late(str(error)) from error
        except OSError as error:
            raise _Lost(str(error)) from error
        return challenge.name

    def _do_over_http(self, command: Command[T], patience: float) -> T:
        """Ask for a command over HTTP, and do so from now on if that works."""
        from rankmesh_agent.store.http_client import BlockingHttp

        http = BlockingHttp(self._url, self._token)
        works = False
        try:
            found = http.do_within(command, patience)
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

    def _is_closed(self) -> DistNetworkError:
        return DistNetworkError(f"the connection to the store at {self._url} is closed", address=self._url)

    def _unreachable(self, error: Exception) -> DistNetworkError:
        what = str(error) or type(error).__name__
        return DistNetworkError(f"the store at {self._url} cannot be reached: {what}", address=self._url)


def _exactly(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        data += sock.recv(size - len(data)) or _hung_up()
    return data
