"""Sockets, with the mutual challenge of wire.handshake at the start of each.

::

    client → server   HELLO
    server → client   HELLO
    client → server   PROOF   PROPOSAL   GREETING
    server → client   PROOF   ANSWER

Two round trips: what the client proposes and who it is go along with its proof, hold no secrets, and are looked at only
if that is right. The client in turn believes the answer only if the server's proof is right.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import select
import socket
import struct
import sys
import termios
import time
from collections.abc import Callable, Container, Sequence
from typing import Any, ClassVar

from rankmesh_agent.net.deadline import Deadline
from rankmesh_agent.net.sockets import bind, probe_idle_peer, silent_seconds
from rankmesh_agent.transports.base import (
    IDENTITY_BYTES,
    Admit,
    Buffer,
    Connection,
    Listener,
    PendingConnection,
    Transport,
    connection_lost,
)
from rankmesh_agent.transports.handshaking import Handshake, Script
from rankmesh_agent.wire import handshake
from rankmesh_agent.wire.errors import AuthenticationError, DistError, DistNetworkError

HANDSHAKE_SECONDS = 10.0
"""How long a stranger may take to prove that it belongs here."""
MAX_HANDSHAKES = 128
"""How many may be at it at once; more are closed unheard."""
SOCKET_BUFFER = 4 << 20
_SHORT_OF_SOMETHING_SECONDS = 0.05
_MOST_BUFFERS = 1024
"""What one system call takes (IOV_MAX)."""

PROPOSAL = struct.Struct("!BQ160s32s")
"""What the client says with its proof: 1 and size, name and nonce of a shared memory file, or 0 to stay on TCP."""
ACCEPTED, DECLINED, REJECTED = b"\1", b"\0", b"\2"
"""What the server answers with its own: it takes the proposal, it stays on TCP, or it does not admit the client."""

AcceptProposal = Callable[["TcpConnection", bytes], tuple[Connection, bool]]


class TcpConnection(Connection):
    """A connected socket."""

    medium: ClassVar[str] = "tcp"

    def __init__(self, sock: socket.socket, peer: str) -> None:
        if sock.gettimeout() != 0:
            sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = sock
        self.peer = peer
        self._fileno = sock.fileno()

    def configure_for_data(self) -> None:
        """Make room for arrays: this is not only a doorbell, or somebody at the door."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BUFFER)
        probe_idle_peer(self.socket)

    def send(self, buffers: Sequence[Buffer]) -> int:
        try:
            return self.socket.sendmsg(buffers[:_MOST_BUFFERS])
        except BlockingIOError:
            return 0
        except OSError as error:
            raise connection_lost(self.peer, error.strerror or str(error)) from error

    def recv_into(self, buffer: memoryview) -> int:
        try:
            received = self.socket.recv_into(buffer)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise connection_lost(self.peer, error.strerror or str(error)) from error
        if not received and len(buffer):
            raise connection_lost(self.peer)
        return received

    def fileno(self) -> int:
        return self._fileno

    def events(self, writing: bool) -> int:
        return select.POLLIN | select.POLLOUT if writing else select.POLLIN

    def has_work(self, writing: bool) -> bool:
        return False

    def prepare_wait(self, writing: bool) -> bool:
        return True

    def on_wakeup(self) -> None:
        pass

    def silent_seconds(self) -> float:
        return silent_seconds(self.socket)

    def drain(self) -> bool:
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
            self.drain()
            with contextlib.suppress(OSError):
                self.socket.shutdown(socket.SHUT_WR)
        self.socket.close()

    def close_in_child(self) -> None:
        self.socket.close()


class Proposal:
    """What a client proposes once it has passed the challenge: this one, to stay on the socket."""

    proposal = PROPOSAL.pack(0, 0, b"", b"")

    def resolve(self, connection: TcpConnection, taken: bool) -> Connection:
        """Return the connection to use.

        Args:
            connection: the socket.
            taken: whether the listener has taken the proposal.
        """
        connection.configure_for_data()
        return connection

    def close(self) -> None:
        """Undo what the proposal needed, whether anything came of it or not."""


class PendingTcpConnection(PendingConnection):
    """Connects to the first of an address's sockets that answers, and has a conversation there.

    Args:
        address: host and port.
        script: this side's part of the conversation, on a socket.
    """

    def __init__(self, address: str, script: Callable[[TcpConnection], Script]) -> None:
        self._address = address
        self._script = script
        self._places = _resolve(address)
        self._conversation = self._call()

    def fileno(self) -> int:
        return self._conversation.fileno()

    def events(self) -> int:
        return self._conversation.events()

    def advance(self) -> Connection | None:
        while True:
            try:
                return self._conversation.advance()
            except DistNetworkError as error:
                if self._conversation.started:
                    raise
                if not self._places:
                    raise _unreachable(self._address, error.__cause__ or error) from error
            self._conversation.close()
            self._conversation = self._call()

    def close(self) -> None:
        self._conversation.close()

    def _call(self) -> Handshake:
        family, place = self._places.pop(0)
        try:
            sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        except OSError as error:
            raise _unreachable(self._address, error) from error
        try:
            with contextlib.suppress(BlockingIOError):
                sock.connect(place)
        except (OSError, OverflowError) as error:  # the latter: no such port
            if not self._places:
                sock.close()
                raise _unreachable(self._address, error) from error
            sock.close()
            return self._call()
        connection = TcpConnection(sock, self._address)
        return Handshake(connection, self._script(connection))


class _Stranger(Handshake):
    """Somebody who has to prove that they belong here.

    Args:
        connection: to them.
        script: returns this side's part of the conversation, which notes what they greet with.
    """

    def __init__(self, connection: TcpConnection, script: Callable[[_Stranger], Script]) -> None:
        super().__init__(connection, script(self))
        self.greeting = b""
        self.deadline = Deadline(HANDSHAKE_SECONDS)


class TcpListener(Listener):
    """Challenges everyone who comes, all at once: a silent stranger holds up nobody."""

    def __init__(self, listening: socket.socket, token: str, upgrade: AcceptProposal) -> None:
        host, port = listening.getsockname()[:2]
        self.address = f"{host}:{port}"
        listening.setblocking(False)
        self._socket = listening
        self._token = token
        self._upgrade = upgrade
        self._fileno = listening.fileno()
        self._strangers: dict[int, _Stranger] = {}

    def descriptors(self) -> list[int]:
        return [self._fileno, *self._strangers]

    def accept(self, ready: Container[int], admits: Admit) -> list[tuple[bytes, Connection]]:
        if self._socket.fileno() < 0:
            raise DistNetworkError(f"the listener at {self.address} is closed", address=self.address)
        arrived: list[tuple[bytes, Connection]] = []
        for fd, stranger in list(self._strangers.items()):
            if fd in ready:
                self._hear(fd, stranger, arrived)
            if fd in self._strangers and stranger.deadline.expired():
                self._hang_up(fd)
        if self._fileno in ready:
            self._let_in(admits)
        return arrived

    def close(self) -> None:
        for fd in list(self._strangers):
            self._hang_up(fd)
        self._socket.close()

    def _let_in(self, admits: Admit) -> None:
        while True:
            try:
                sock, place = self._socket.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS):
                    time.sleep(_SHORT_OF_SOMETHING_SECONDS)  # it stays in the queue: trying at once would only spin
                    return
                continue  # that one peer gave up while it waited
            if len(self._strangers) < MAX_HANDSHAKES:
                self._challenge(sock, f"{place[0]}:{place[1]}", admits)
            else:
                sock.close()

    def _challenge(self, sock: socket.socket, peer: str, admits: Admit) -> None:
        try:
            connection = TcpConnection(sock, peer)
        except OSError:  # it has gone again
            sock.close()
            return
        stranger = _Stranger(connection, lambda them: self._welcome(them, connection, admits))
        self._strangers[connection.fileno()] = stranger
        self._hear(connection.fileno(), stranger, [])  # what it says first is here already, as a rule

    def _hear(self, fd: int, stranger: _Stranger, arrived: list[tuple[bytes, Connection]]) -> None:
        try:
            connection = stranger.advance()
        except (DistError, OSError):
            # A port scan, an old version, a wrong token, silence: it learns nothing more.
            self._hang_up(fd)
        else:
            if connection is not None:
                del self._strangers[fd]
                arrived.append((stranger.greeting, connection))

    def _hang_up(self, fd: int) -> None:
        self._strangers.pop(fd).close()

    def _welcome(self, them: _Stranger, connection: TcpConnection, admits: Admit) -> Script:
        challenge = handshake.Challenge(self._token, client=False)
        challenge.receive_hello((yield b"", handshake.HELLO_BYTES))
        said = yield challenge.hello(), handshake.PROOF_BYTES + PROPOSAL.size + IDENTITY_BYTES
        proof, proposal, greeting = _split(said, handshake.PROOF_BYTES, PROPOSAL.size)
        challenge.receive_proof(proof)
        if not admits(greeting):
            yield challenge.proof() + REJECTED, 0
            raise DistNetworkError(f"{connection.peer} is not who is waited for", address=connection.peer)
        them.greeting = greeting
        upgraded, taken = self._upgrade(connection, proposal)
        yield challenge.proof() + (ACCEPTED if taken else DECLINED), 0
        return upgraded


class TcpTransport(Transport):
    """Reaches peers on any host.

    Args:
        token: the job's secret.
    """

    def __init__(self, token: str = "") -> None:
        self._token = token

    def listen(self, address: str) -> Listener:
        host, port = split_address(address)
        return TcpListener(bind(host, port, purpose="the agent listens for peers"), self._token, self._accept_proposal)

    def dial(self, address: str, greeting: bytes = b"") -> PendingConnection:
        greeting = greeting.ljust(IDENTITY_BYTES, b"\0")
        return PendingTcpConnection(address, lambda connection: self._introduce(connection, greeting))

    def _introduce(self, connection: TcpConnection, greeting: bytes) -> Script:
        challenge = handshake.Challenge(self._token, client=True)
        challenge.receive_hello((yield challenge.hello(), handshake.HELLO_BYTES))
        with contextlib.closing(self._offer()) as offer:
            try:
                said = yield challenge.proof() + offer.proposal + greeting, handshake.PROOF_BYTES + len(ACCEPTED)
            except DistNetworkError as error:
                # The server closes without a word when our proof was wrong.
                raise AuthenticationError(
                    f"{connection.peer} refused us: RANKMESH_TOKEN must be the same on every rank",
                    address=connection.peer,
                ) from error
            proof, answer = _split(said, handshake.PROOF_BYTES)
            challenge.receive_proof(proof)
            if answer == REJECTED:
                raise DistNetworkError(
                    f"who answers at {connection.peer} does not wait for this rank: another process has that address",
                    address=connection.peer,
                )
            return offer.resolve(connection, answer == ACCEPTED)

    def _offer(self) -> Proposal:
        """Return what to propose."""
        return Proposal()

    def _accept_proposal(self, connection: TcpConnection, proposal: bytes) -> tuple[Connection, bool]:
        """Return the connection to use, and whether it is the proposed one."""
        connection.configure_for_data()
        return connection, False


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of ``host:port``; an IPv6 host may stand in brackets.

    Raises:
        ValueError: there is no port.
    """
    host, separator, port = address.rpartition(":")
    if not separator or not port.isdigit():
        raise ValueError(f"{address!r} is not an address of the form host:port")
    return host.strip("[]"), int(port)


def _split(data: bytes, *lengths: int) -> list[bytes]:
    """Return pieces of these lengths, and the rest."""
    pieces, begin = [], 0
    for length in lengths:
        pieces.append(data[begin : begin + length])
        begin += length
    return [*pieces, data[begin:]]


def _resolve(address: str) -> list[tuple[int, Any]]:
    """Return families and socket addresses of ``host:port``, the first to be tried first."""
    host, port = split_address(address)
    for family, numeric in ((socket.AF_INET, host), (socket.AF_INET6, host)):
        with contextlib.suppress(OSError, UnicodeError):  # it is a name: not for inet_pton
            socket.inet_pton(family, numeric)
            return [(family, (host, port))]
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, OverflowError, UnicodeError) as error:  # the latter two: no such port, no such name
        raise _unreachable(address, error) from error
    return [(family, place) for family, _, _, _, place in found]


def _unreachable(address: str, error: BaseException) -> DistNetworkError:
    why = getattr(error, "strerror", None) or str(error)
    return DistNetworkError(f"cannot connect to {address}: {why}", address=address)
