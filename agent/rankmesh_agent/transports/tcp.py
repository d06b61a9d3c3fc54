"""Sockets, with the mutual challenge of wire.handshake at the start of each."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import queue
import select
import socket
import struct
import sys
import termios
import threading
import time
from collections.abc import Callable, Sequence
from typing import ClassVar

from rankmesh_agent.transports.base import (
    Buffer,
    Connection,
    Listener,
    Transport,
    lost,
    recv_exactly,
    send_all,
)
from rankmesh_agent.wire import handshake
from rankmesh_agent.wire.deadline import Deadline
from rankmesh_agent.wire.errors import AuthenticationError, DistError, DistNetworkError
from rankmesh_agent.wire.sockets import bind

CHALLENGE_SECONDS = 10.0
"""How long a stranger may take to prove that it belongs here."""
MAX_STRANGERS = 128
"""How many may be at it at once; more are closed unheard."""
SOCKET_BUFFER = 4 << 20
_SHORT_OF_SOMETHING_SECONDS = 0.05
_MOST_BUFFERS = 1024
"""What one system call takes (IOV_MAX)."""

PROPOSAL = struct.Struct("!BQ160s32s")
"""What the client says after the challenge: 1 and size, name and nonce of a shared memory file, or 0 to stay on TCP."""
ANSWER = struct.Struct("!B")
"""1 if the server takes the proposal, 0 to stay on TCP."""

Upgrade = Callable[["TcpConnection", bytes, Deadline], Connection]


class TcpConnection(Connection):
    """A connected socket."""

    medium: ClassVar[str] = "tcp"

    def __init__(self, sock: socket.socket, peer: str) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BUFFER)
        self.socket = sock
        self.peer = peer
        self._fileno = sock.fileno()

    def send(self, buffers: Sequence[Buffer]) -> int:
        try:
            return self.socket.sendmsg(buffers[:_MOST_BUFFERS])
        except BlockingIOError:
            return 0
        except OSError as error:
            raise lost(self.peer, error.strerror or str(error)) from error

    def recv_into(self, buffer: memoryview) -> int:
        try:
            received = self.socket.recv_into(buffer)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise lost(self.peer, error.strerror or str(error)) from error
        if not received and len(buffer):
            raise lost(self.peer)
        return received

    def fileno(self) -> int:
        return self._fileno

    def events(self, writing: bool) -> int:
        return select.POLLIN | select.POLLOUT if writing else select.POLLIN

    def pending(self, writing: bool) -> bool:
        return False

    def prepare_wait(self, writing: bool) -> bool:
        return True

    def woken(self) -> None:
        pass

    def finish(self) -> bool:
        # Closing over unread bytes, or before ours are acknowledged, may reset the connection and lose what we sent.
        scratch = bytearray(1 << 16)
        try:
            with contextlib.suppress(BlockingIOError):
                for _ in range(SOCKET_BUFFER // len(scratch)):
                    if not self.socket.recv_into(scratch):
                        break
            return int.from_bytes(fcntl.ioctl(self.socket, termios.TIOCOUTQ, b"\0" * 4), sys.byteorder) == 0
        except OSError:
            return True  # reset: there is nobody to wait for

    def close(self) -> None:
        if self.socket.fileno() >= 0:
            self.finish()
            with contextlib.suppress(OSError):
                self.socket.shutdown(socket.SHUT_WR)
        self.socket.close()

    def forget(self) -> None:
        self.socket.close()


class TcpListener(Listener):
    """Accepts in a thread, and challenges each peer in a thread of its own: a silent stranger holds up nobody."""

    def __init__(self, listening: socket.socket, token: str, upgrade: Upgrade) -> None:
        host, port = listening.getsockname()[:2]
        self.address = f"{host}:{port}"
        self._socket = listening
        self._token = token
        self._upgrade = upgrade
        self._ready: queue.SimpleQueue[Connection | None] = queue.SimpleQueue()
        self._strangers = threading.Semaphore(MAX_STRANGERS)
        self._closed = False
        self._thread = threading.Thread(target=self._accept_all, name="rankmesh-accept", daemon=True)
        self._thread.start()

    def accept(self, deadline: Deadline) -> Connection:
        try:
            connection = self._ready.get(timeout=deadline.remaining())
        except queue.Empty:
            raise TimeoutError(f"nobody connected to {self.address} within {deadline.seconds:.1f} s") from None
        if connection is None:
            self._ready.put(None)  # for the next caller
            raise DistNetworkError(f"the listener at {self.address} is closed", address=self.address)
        return connection

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the accept below
        self._socket.close()
        self._thread.join()
        self._close_unclaimed()

    def _close_unclaimed(self) -> None:
        """Close what nobody will accept any more, and leave an end mark: a late one may have come behind the last."""
        with contextlib.suppress(queue.Empty):
            while True:
                unclaimed = self._ready.get_nowait()
                if unclaimed is not None:
                    unclaimed.close()
        self._ready.put(None)

    def _accept_all(self) -> None:
        while True:
            try:
                sock, address = self._socket.accept()
            except OSError as error:
                if self._closed or self._socket.fileno() < 0:
                    return
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS):
                    time.sleep(_SHORT_OF_SOMETHING_SECONDS)  # it stays in the queue: trying at once would only spin
                continue  # otherwise that one peer gave up while it waited
            if not self._strangers.acquire(blocking=False):
                sock.close()
                continue
            threading.Thread(target=self._welcome, args=(sock, address), name="rankmesh-welcome", daemon=True).start()

    def _welcome(self, sock: socket.socket, address: tuple[str, int]) -> None:
        connection = None
        try:
            connection = TcpConnection(sock, f"{address[0]}:{address[1]}")
            deadline = Deadline(CHALLENGE_SECONDS)
            _prove(connection, self._token, deadline, client=False)
            proposal = recv_exactly(connection, PROPOSAL.size, deadline)
            ready = self._upgrade(connection, proposal, deadline)
        except (DistError, OSError):
            # A port scan, an old version, a wrong token, silence: it learns nothing more.
            (connection or sock).close()
        else:
            self._ready.put(ready)
            if self._closed:
                self._close_unclaimed()
        finally:
            self._strangers.release()


class TcpTransport(Transport):
    """Reaches peers on any host.

    Args:
        token: the job's secret.
    """

    def __init__(self, token: str = "") -> None:
        self._token = token

    def listen(self, address: str) -> Listener:
        host, port = split_address(address)
        return TcpListener(bind(host, port, what="the agent listens for peers"), self._token, self._accept_proposal)

    def connect(self, address: str, deadline: Deadline) -> Connection:
        connection = self._open(address, deadline)
        try:
            return self._propose(connection, deadline)
        except BaseException:
            connection.close()
            raise

    def _propose(self, connection: TcpConnection, deadline: Deadline) -> Connection:
        send_all(connection, PROPOSAL.pack(0, 0, b"", b""), deadline)
        recv_exactly(connection, ANSWER.size, deadline)
        return connection

    def _accept_proposal(self, connection: TcpConnection, proposal: bytes, deadline: Deadline) -> Connection:
        send_all(connection, ANSWER.pack(0), deadline)
        return connection

    def _open(self, address: str, deadline: Deadline) -> TcpConnection:
        try:
            sock = socket.create_connection(split_address(address), timeout=max(0.001, deadline.remaining()))
        except TimeoutError:
            raise TimeoutError(f"{address} did not answer within {deadline.seconds:.1f} s") from None
        except (OSError, OverflowError, UnicodeError) as error:  # the latter two: no such port, no such name
            why = getattr(error, "strerror", None) or str(error)
            raise DistNetworkError(f"cannot connect to {address}: {why}", address=address) from error
        connection = TcpConnection(sock, address)
        try:
            _prove(connection, self._token, deadline, client=True)
        except BaseException:
            connection.close()
            raise
        return connection


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of ``host:port``; an IPv6 host may stand in brackets.

    Raises:
        ValueError: there is no port.
    """
    host, separator, port = address.rpartition(":")
    if not separator or not port.isdigit():
        raise ValueError(f"{address!r} is not an address of the form host:port")
    return host.strip("[]"), int(port)


def _prove(connection: Connection, token: str, deadline: Deadline, *, client: bool) -> None:
    """Run the challenge; the client speaks first in each round."""
    challenge = handshake.Challenge(token, client=client)
    if client:
        send_all(connection, challenge.hello(), deadline)
        challenge.receive_hello(recv_exactly(connection, handshake.HELLO_BYTES, deadline))
        send_all(connection, challenge.proof(), deadline)
        try:
            proof = recv_exactly(connection, handshake.PROOF_BYTES, deadline)
        except DistNetworkError as error:
            # The server closes without a word when our proof was wrong.
            raise AuthenticationError(
                f"{connection.peer} refused us: RANKMESH_TOKEN must be the same on every rank", address=connection.peer
            ) from error
        challenge.receive_proof(proof)
    else:
        challenge.receive_hello(recv_exactly(connection, handshake.HELLO_BYTES, deadline))
        send_all(connection, challenge.hello(), deadline)
        challenge.receive_proof(recv_exactly(connection, handshake.PROOF_BYTES, deadline))
        send_all(connection, challenge.proof(), deadline)
