"""Driver of the scripts of ``wire.hello``: waits for one on a socket, or runs any number of them in one thread."""

from __future__ import annotations

import contextlib
import select
import socket
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from rankmesh_agent.config.tls import TlsSettings
from rankmesh_agent.net import tls
from rankmesh_agent.net.addresses import peer_name
from rankmesh_agent.net.deadline import Deadline
from rankmesh_agent.net.peer_credentials import admit_peer, warn_refused
from rankmesh_agent.net.readiness import is_ready
from rankmesh_agent.net.tls_socket import NO_SIGNAL, TlsSocket
from rankmesh_agent.wire.credentials import Credentials
from rankmesh_agent.wire.errors import ProtocolError
from rankmesh_agent.wire.hello import (
    MAGIC,
    MOST_BYTES,
    PREFACE_BYTES,
    Client,
    ClientRefusedError,
    NeedsTlsError,
    Script,
    Service,
    Verdict,
    accepting_script,
    check_preface,
    preface,
    welcome,
)

T = TypeVar("T")


class Handshake(Generic[T]):
    """One side of a handshake: the PREFACE, the handshake of TLS where there is one, and a script.

    Args:
        sock: the socket that carries it: a client's has TLS already, whose handshake has not begun.
        service: the service.
        script: this side's script, which begins after the handshake of TLS.
        client: whether this side has opened the connection.
        wrap: for a server: returns the socket with TLS, for a client that uses it. None if none can.

    Attributes:
        sock: the socket, with TLS where there is TLS.
        started: whether any byte has been sent or received.
        steps: number of steps that have begun.
    """

    def __init__(
        self,
        sock: socket.socket,
        service: Service,
        script: Script[T],
        *,
        client: bool,
        wrap: Callable[[], socket.socket] | None = None,
    ) -> None:
        self.sock = sock
        self.started = False
        self.steps = 0
        self._script = script
        self._service = service
        self._wrap = wrap
        self._begun = False
        self._server: tuple[Any, ...] | None = None
        self._unsecured = sock if isinstance(sock, TlsSocket) else None
        self._first = memoryview(preface(service) if client else b"")
        self._expected = 0 if client else PREFACE_BYTES
        self._received = bytearray(PREFACE_BYTES)
        self._unsent = self._unfilled = memoryview(b"")

    def _begin_step(self, step: tuple[bytes, int]) -> None:
        outgoing, expected = step
        self.steps += 1
        self._unsent = memoryview(outgoing)
        self._received = bytearray(expected)
        self._unfilled = memoryview(self._received)

    def events(self) -> int:
        """Return the poll events that the next ``advance`` waits for."""
        return select.POLLOUT if self._wants_to_write() else select.POLLIN

    def _wants_to_write(self) -> bool:
        if self._first:
            return True
        return bool(self._unsent) if self._unsecured is None else self._unsecured.wants_to_write()

    def advance(self) -> T | None:
        """Continue as far as possible; return the script's result at its end. The socket must be non-blocking.

        A call that sends does not receive yet: the other side has not answered.

        Raises:
            OSError: the connection is lost.
            DistError: the script has failed.
        """
        try:
            if self._first and self._unsecured is None:
                outgoing, expected = next(self._script)
                self._begin_step((bytes(self._first) + outgoing, expected))
                self._begun, self._first = True, self._unfilled[:0]
            if not self._begun:
                self._exchange_preface()
                if self._unsecured is not None:
                    secured = self._unsecured.handshake()
                    self.started = self.started or not self._unsecured.wants_to_write()
                    if not secured:
                        return None
                    self._unsecured = None
                self._begun = True
                self._begin_step(next(self._script))
            while True:
                if self._unsent:
                    self._unsent = self._unsent[self.sock.send(self._unsent, NO_SIGNAL) :]
                    self.started = True
                    if self._server is None:  # it is not known any more once the server has closed the connection
                        self._server = self.sock.getpeername()
                    if self._unsent or self._unfilled:
                        return None
                if self._unfilled:
                    received = self.sock.recv_into(self._unfilled)
                    if not received:
                        raise ConnectionResetError("closed by the other side")
                    self._unfilled = self._unfilled[received:]
                    self.started = True
                    if self._unfilled:
                        return None
                self._begin_step(self._script.send(bytes(self._received)))
        except BlockingIOError:
            return None
        except StopIteration as end:
            result: T = end.value
            return result
        except ClientRefusedError as error:
            warn_refused(error)
            raise
        except NeedsTlsError:
            if self._server is not None:
                tls.require_at(self._server)
            raise
        except OSError as error:
            self._script.throw(error)
            raise

    def _exchange_preface(self) -> None:
        """Send or receive the PREFACE; see what a client sends next."""
        while self._first:
            self._first = self._first[socket.socket.send(self.sock, self._first, NO_SIGNAL) :]
            self.started = True
        while self._expected:
            count = self.sock.recv_into(memoryview(self._received)[-self._expected :])
            if not count:
                raise ConnectionResetError("closed by the other side")
            self._expected -= count
            self.started = True
            if not self._expected:
                self.steps += 1
                self._check_preface(bytes(self._received))
        if self._wrap is not None:
            first, wrap, self._wrap = self.sock.recv(1, socket.MSG_PEEK), self._wrap, None
            if not first:
                raise ConnectionResetError("closed by the other side")
            if first == tls.RECORD:
                self.sock = wrap()
                self._unsecured = self.sock if isinstance(self.sock, TlsSocket) else None

    def _check_preface(self, start: bytes) -> None:
        try:
            check_preface(start, self._service)
        except ProtocolError:
            if start.startswith(MAGIC):
                with contextlib.suppress(OSError):
                    self.sock.recv(MOST_BYTES)
                with contextlib.suppress(OSError):  # has this side's version
                    self.sock.send(welcome(Verdict.OTHER_SERVICE), NO_SIGNAL)
            raise

    def run(self, seconds: float) -> T:
        """Run the script to its end and return its result; leaves the socket blocking.

        Raises:
            TimeoutError: the handshake takes longer than ``seconds``.
            OSError, DistError: see advance.
        """
        deadline = Deadline(seconds)
        self.sock.setblocking(False)
        while (result := self.advance()) is None:
            if not is_ready(self.sock, deadline.remaining(), writing=self._wants_to_write()):
                raise TimeoutError(f"the handshake is not complete after {seconds:g} s")
        self.sock.setblocking(True)
        return result

    def close(self) -> None:
        """Release the resources of the script; the socket stays open."""
        self._script.close()


def accept(
    sock: socket.socket,
    service: Service,
    accepted: Callable[[bytes], str | Credentials],
    attachment_bytes: int,
    token: str | Credentials,
    settings: TlsSettings,
    reply: bytes = b"",
) -> Handshake[Client]:
    """Return the server's side of a handshake on a connection from a port or a unix socket.

    Args:
        sock: the connection.
        service: the service.
        accepted: returns the credentials that may have a client with an attachment.
        attachment_bytes: size of an attachment.
        token: the secret, or all credentials: the authorities of TLS. Without one, the client's user counts.
        settings: name the certificates, if they are in files.
        reply: what follows the WELCOME.
    """

    def wrap() -> socket.socket:
        return tls.server_side(shake.sock, peer_name(shake.sock), token, settings)

    def judge() -> Verdict:
        return verdict_on(shake.sock, token, settings)

    script = accepting_script(accepted, service, attachment_bytes, judge, reply)
    is_unix = sock.family == getattr(socket, "AF_UNIX", None)
    shake = Handshake(sock, service, script, client=False, wrap=None if is_unix else wrap)
    return shake


def verdict_on(sock: socket.socket, token: str | Credentials, settings: TlsSettings) -> Verdict:
    """Return whether a connection may have a client, whatever its credential."""
    if tls.is_exposed(sock, token, settings):
        return Verdict.NEEDS_TLS
    return Verdict.WELCOME if admit_peer(sock, token) else Verdict.OTHER_USER
