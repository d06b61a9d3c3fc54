"""TCP transport; each connection starts with the HELLO of wire.hello, between hosts inside TLS.

::

    client → server   HELLO     PROPOSAL   IDENTITY
    server → client   WELCOME   ANSWER

This is one round trip, besides that of TLS, in whose handshake both ranks show certificates.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import struct
import time
from collections.abc import Callable, Container
from typing import Any, NamedTuple

from rankmesh_agent.config.tls import TlsSettings, tls_settings
from rankmesh_agent.net import tls
from rankmesh_agent.net.admission import Admission, ConnectionLimit
from rankmesh_agent.net.deadline import Deadline
from rankmesh_agent.net.descriptors import raise_if_exhausted, reason
from rankmesh_agent.net.fork import close_in_children
from rankmesh_agent.net.handshake import Handshake, accept
from rankmesh_agent.net.sockets import bind, peer_closed
from rankmesh_agent.transports.base import Connection, connection_lost
from rankmesh_agent.transports.tcp_connection import TcpConnection
from rankmesh_agent.wire.errors import AuthenticationError, DistError, DistNetworkError
from rankmesh_agent.wire.hello import Client, Script, Service, client_script, hello, welcome

HANDSHAKE_SECONDS = 10.0
"""Time limit of each step of the handshake of a client that is not yet authenticated."""
_EXHAUSTED_RETRY_SECONDS = 0.05
_ACCEPT_BATCH = 4
"""Connections that a listener accepts before it reads from those that it has."""

PROPOSAL = struct.Struct("!BQ80s32s")
"""The client sends this with its HELLO: 1 and size, name and nonce of a shared memory file, or 0 to stay on TCP."""
ACCEPTED, DECLINED, REJECTED = b"\1", b"\0", b"\2"
"""The server's answer, with its WELCOME: the proposal is accepted, it is declined, or the client is rejected."""

IDENTITY_BYTES = 80
"""Size of the identity that a client sends to a listener: fixed, so that no client decides how much is read."""

Admit = Callable[[bytes], bool]
"""Returns whether a client with this identity may connect. The client is authenticated by then."""
_Admitted = tuple[bytes, Connection]


class Proposal:
    """A client's proposal for the connection after the handshake; this one is to stay on the socket."""

    proposal = PROPOSAL.pack(0, 0, b"", b"")

    def resolve(self, connection: TcpConnection, accepted: bool) -> Connection:
        """Return the connection to use."""
        connection.configure_for_data()
        return connection

    def close(self) -> None:
        """Release the resources of the proposal, accepted or not."""


class PendingTcpConnection:
    """Connects to the first socket address of a host that answers, and runs the handshake there. No method blocks.

    Args:
        address: host and port.
        script: returns this side's script for a connection.
        settings: name the certificates, if they are in files.
    """

    def __init__(
        self, address: str, script: Callable[[TcpConnection], Script[Connection]], token: str, settings: TlsSettings
    ) -> None:
        self._address = address
        self._token, self._tls = token, settings
        self._script = script
        self._socket_addresses = _resolve(address)
        self._connect_next()

    def fileno(self) -> int:
        """Return a descriptor to poll for ``events()``; it may change with each ``advance()``."""
        return self._connection.fileno()

    def events(self) -> int:
        """Return the poll events that the next ``advance`` waits for."""
        return self._handshake.events()

    def connected(self) -> bool:
        """Return whether the host has accepted a connection, whatever the process there does."""
        return self._handshake.started

    def advance(self) -> Connection | None:
        """Continue as far as possible; return the connection once both sides have it. No call may follow that.

        Raises:
            AuthenticationError: the peer does not know the token.
            DistNetworkError: no listener answers, it uses another protocol, or it rejects this connection.
        """
        while True:
            try:
                return self._handshake.advance()
            except OSError as error:
                if self._handshake.started:
                    raise connection_lost(self._address, error.strerror or str(error)) from error
                if not self._socket_addresses:
                    raise _unreachable(self._address, error) from error
            self.close()
            self._connect_next()

    def close(self) -> None:
        """Abandon the connection."""
        self._handshake.close()
        self._connection.close()

    def _connect_next(self) -> None:
        family, socket_address = self._socket_addresses.pop(0)
        try:
            sock = close_in_children(socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK))
        except OSError as error:
            raise _unreachable(self._address, error) from error
        try:
            with contextlib.suppress(BlockingIOError):
                sock.connect(socket_address)
        except (OSError, OverflowError) as error:  # OverflowError: the port is out of range
            sock.close()
            if not self._socket_addresses:
                raise _unreachable(self._address, error) from error
            self._connect_next()
            return
        sock = tls.secured(sock, split_address(self._address)[0], socket_address, self._token, self._tls)
        self._connection = TcpConnection(sock, self._address)
        self._handshake = Handshake(sock, Service.MESH, self._script(self._connection), client=True)


class _IncomingConnection(NamedTuple):
    """A client's connection during its handshake, with the time limit of the current step."""

    connection: TcpConnection
    handshake: Handshake[_Admitted]
    step: Deadline
    admission: Admission


class TcpListener:
    """A listening endpoint. All its work happens in ``accept``; between two calls, peers wait in its backlog.

    It authenticates all clients concurrently: a client that sends nothing delays no other.

    Args:
        script: returns what the server says to a client with an attachment.

    Attributes:
        address: the address that peers pass to TcpTransport.dial.
    """

    def __init__(
        self,
        listening: socket.socket,
        script: Callable[[TcpConnection, Admit, bytes], Script[_Admitted]],
        token: str,
        settings: TlsSettings,
    ) -> None:
        self._token, self._tls = token, settings
        host, port = listening.getsockname()[:2]
        self.address = f"{host}:{port}"
        listening.setblocking(False)
        self._socket = listening
        self._script = script
        self._fileno = listening.fileno()
        self._handshakes: dict[int, _IncomingConnection] = {}
        self._has_room = True
        self._limit = ConnectionLimit("connections to this rank whose clients have sent no credential")
        self._arrived: list[_Admitted] = []
        """Ready connections that ``accept`` has yet to return."""

    def descriptors(self) -> list[int]:
        """Return the descriptors to poll for reading; they may change with each ``accept``."""
        return [self._fileno, *self._handshakes] if self._has_room else [*self._handshakes]

    def busy(self) -> bool:
        """Return whether handshakes are under way, so that ``accept`` has to be called from time to time."""
        return bool(self._handshakes) or not self._has_room

    def accept(self, ready: Container[int], admits: Admit) -> list[_Admitted]:
        """Continue all handshakes as far as possible; return the ready connections, each with its client's identity.

        The caller calls this from time to time even if no descriptor is readable: it ends handshakes that time out.

        Args:
            ready: the descriptors that are readable.
            admits: decides by identity which clients may connect.

        Raises:
            DistNetworkError: the listener is closed.
            DescriptorLimitError: there is no free descriptor for a client. The next call returns what is ready.
        """
        if self._socket.fileno() < 0:
            raise DistNetworkError(f"the listener at {self.address} is closed", address=self.address)
        for fd, incoming in list(self._handshakes.items()):
            if fd in ready:
                steps = incoming.handshake.steps
                self._advance(fd, incoming.handshake)
                if incoming.handshake.steps > steps:
                    incoming.step.restart(HANDSHAKE_SECONDS)
                    incoming.admission.renew()
            if fd in self._handshakes and incoming.step.expired():
                self._close_handshake(fd)
        if self._fileno in ready or not self._has_room:
            self._accept_clients(admits)
        arrived, self._arrived = self._arrived, []
        return arrived

    def close(self) -> None:
        """Stop listening. A second call does nothing."""
        for fd in list(self._handshakes):
            self._close_handshake(fd)
        for _, connection in self._arrived:
            connection.close()
        self._arrived.clear()
        self._socket.close()

    def _accept_clients(self, admits: Admit) -> None:
        self._has_room = True
        for _ in range(_ACCEPT_BATCH):
            if not self._limit.make_room():
                self._has_room = False
                return
            try:
                sock, socket_address = self._socket.accept()
            except BlockingIOError:
                return
            except OSError as error:
                raise_if_exhausted(error, f"cannot accept a connection at {self.address}")
                if error.errno in (errno.ENOMEM, errno.ENOBUFS):
                    time.sleep(_EXHAUSTED_RETRY_SECONDS)  # the client stays in the backlog; an immediate retry spins
                    return
                continue  # this client has closed its connection in the backlog
            self._start_handshake(close_in_children(sock), socket_address[0], socket_address[1], admits)

    def _start_handshake(self, sock: socket.socket, host: str, port: int, admits: Admit) -> None:
        peer = f"{host}:{port}"
        try:
            connection = TcpConnection(sock, peer)
        except OSError as error:  # the client has closed the connection already
            sock.close()
            raise_if_exhausted(error, f"cannot accept a connection at {self.address}")
            return
        admission = self._limit.admit(sock)

        def respond(client: Client) -> Script[_Admitted]:
            connection.socket = started.sock
            return self._script(connection, admits, client.attachment)

        token, size = self._token, PROPOSAL.size + IDENTITY_BYTES
        started = accept(sock, Service.MESH, lambda _: token, size, token, self._tls, respond)
        incoming = _IncomingConnection(connection, started, Deadline(HANDSHAKE_SECONDS), admission)
        self._handshakes[connection.fileno()] = incoming
        self._advance(connection.fileno(), started)  # its first message has usually arrived

    def _advance(self, fd: int, incoming: Handshake[_Admitted]) -> None:
        try:
            admitted = incoming.advance()
            if admitted is not None and peer_closed(incoming.sock):
                raise ConnectionResetError("the client has abandoned the connection meanwhile")
        except (DistError, OSError) as error:
            raise_if_exhausted(error, f"cannot accept a connection at {self.address}")
            # A port scan, an old version, a wrong token, a closed connection: the client gets no answer.
            self._close_handshake(fd)
        else:
            if admitted is not None:
                self._handshakes.pop(fd).admission.end()
                self._arrived.append(admitted)

    def _close_handshake(self, fd: int) -> None:
        incoming = self._handshakes.pop(fd)
        incoming.admission.end()
        incoming.handshake.close()
        incoming.connection.socket = incoming.handshake.sock
        incoming.connection.close()


class TcpTransport:
    """Transport to peers on any host."""

    def __init__(self, token: str = "") -> None:
        self._token, self._tls = token, tls_settings()

    def listen(self, address: str) -> TcpListener:
        """Listen at ``address``.

        Raises:
            AddressInUseError: another socket listens there.
            DistNetworkError: the address cannot be used.
            ValueError: this process's TLS settings are invalid.
        """
        if self._tls.enabled:
            tls.server_context(self._tls)
        host, port = split_address(address)
        return TcpListener(
            bind(host, port, purpose="the agent listens for peers"), self._server_script, self._token, self._tls
        )

    def dial(self, address: str, identity: bytes = b"") -> PendingTcpConnection:
        """Begin to connect to a listener.

        Args:
            identity: identity of this client, at most IDENTITY_BYTES; padded with zeros. The listener looks at it only
                after it has authenticated this client.

        Raises:
            DistNetworkError: no listener can have this address.
        """
        identity = identity.ljust(IDENTITY_BYTES, b"\0")
        return PendingTcpConnection(
            address, lambda connection: self._client_script(connection, identity), self._token, self._tls
        )

    def _server_script(self, connection: TcpConnection, admits: Admit, attachment: bytes) -> Script[_Admitted]:
        proposal, identity = attachment[: PROPOSAL.size], attachment[PROPOSAL.size :]
        if not admits(identity):
            yield welcome() + REJECTED, 0
            raise DistNetworkError(f"{connection.peer} is not an expected rank", address=connection.peer)
        return identity, (yield from self._answer(connection, proposal))

    def _client_script(self, connection: TcpConnection, identity: bytes) -> Script[Connection]:
        with contextlib.closing(self._offer()) as offer:
            refusal = AuthenticationError(
                f"{connection.peer} has another token than this rank: RANKMESH_TOKEN must be the same on every rank",
                address=connection.peer,
            )
            greeting = hello(self._token, offer.proposal + identity)
            answer = yield from client_script(greeting, refusal, len(ACCEPTED))
            if answer == REJECTED:
                raise DistNetworkError(
                    f"the process at {connection.peer} does not wait for this rank: another process has that address",
                    address=connection.peer,
                )
            return offer.resolve(connection, answer == ACCEPTED)

    def _offer(self) -> Proposal:
        """Return the proposal of this transport."""
        return Proposal()

    def _answer(self, connection: TcpConnection, proposal: bytes) -> Script[Connection]:
        """Answer a client's proposal; return the connection to use."""
        connection.configure_for_data()
        yield welcome() + DECLINED, 0
        return connection


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of ``host:port``; an IPv6 host may be in brackets."""
    host, separator, port = address.rpartition(":")
    if not separator or not port.isdigit():
        raise ValueError(f"{address!r} is not an address of the form host:port")
    return host.strip("[]"), int(port)


def _resolve(address: str) -> list[tuple[int, Any]]:
    """Return families and socket addresses of ``host:port``, in the order of the connection attempts."""
    host, port = split_address(address)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, OverflowError, UnicodeError) as error:  # OverflowError: no such port; UnicodeError: no such name
        raise _unreachable(address, error) from error
    # getaddrinfo takes a port modulo 2**16; connect refuses one that is out of range.
    return [(family, (resolved[0], port, *resolved[2:])) for family, _, _, _, resolved in found]


def _unreachable(address: str, error: BaseException) -> DistNetworkError:
    raise_if_exhausted(error, f"cannot connect to {address}")
    return DistNetworkError(f"cannot connect to {address}: {reason(error)}", address=address)
