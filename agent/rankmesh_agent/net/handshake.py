"""Driver of the scripts of ``wire.hello``: waits for one on a socket, or runs any number of them in one thread."""

from __future__ import annotations

import contextlib
import select
import socket
from collections.abc import Callable, Generator
from functools import partial
from typing import Generic, TypeVar

from rankmesh_agent.config.tls import TlsSettings
from rankmesh_agent.net import tls
from rankmesh_agent.net.deadline import Deadline
from rankmesh_agent.net.descriptors import warn_exhausted
from rankmesh_agent.net.peer_credentials import PeerRefusedError, check_peer, warn_refused
from rankmesh_agent.net.sockets import AF_UNIX, is_ready, peer_name
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
    check_preface,
    preface,
    server_script,
    welcome,
)

T = TypeVar("T")
R = TypeVar("R")
_Steps = Generator[bool, None, R]
"""A part of a handshake: yields when it waits, whether to send."""


class Handshake(Generic[T]):
    """One side of a handshake: the PREFACE, the handshake of TLS where there is one, and a script.

    Args:
        sock: the socket that carries it: a client's has TLS already, whose handshake has not begun.
        script: this side's script, which begins after the handshake of TLS.
        client: whether this side has opened the connection.
        wrap: for a server: returns the socket with TLS, for a client that uses it. None if none can.

    Attributes:
        started: whether any byte has been sent or received.
        steps: number of steps that the other side has completed.
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
        self._steps = self._connect(preface(service)) if client else self._serve(service, wrap)
        self._sends = client

    def events(self) -> int:
        """Return the poll events that the next ``advance`` waits for."""
        return select.POLLOUT if self._sends else select.POLLIN

    def advance(self) -> T | None:
        """Continue as far as possible; return the script's result at its end. The socket must be non-blocking.

        A call that sends does not receive yet: the other side has not answered.
        """
        try:
            self._sends = next(self._steps)
        except StopIteration as end:
            result: T = end.value
            return result
        except BaseException as error:
            self._script.close()
            if isinstance(error, ClientRefusedError):
                warn_refused(error)
            raise
        return None

    def run(self, seconds: float) -> T:
        """Run the script to its end and return its result; leaves the socket blocking.

        Raises:
            TimeoutError: the handshake takes longer than ``seconds``.
            OSError: the connection is lost.
            DistError: the script has failed.
        """
        deadline = Deadline(seconds)
        self.sock.setblocking(False)
        while (result := self.advance()) is None:
            if not is_ready(self.sock, deadline.remaining(), writing=self._sends):
                raise TimeoutError(f"the handshake is not complete after {seconds:g} s")
        self.sock.setblocking(True)
        return result

    def close(self) -> None:
        """Release the resources of the script; the socket stays open."""
        self._steps.close()
        self._script.close()

    def _connect(self, start: bytes) -> _Steps[T]:
        if isinstance(self.sock, TlsSocket):
            yield from self._send(start, partial(socket.socket.send, self.sock))
            yield from self._secure(self.sock)
            start = b""
        return (yield from self._follow_script(start))

    def _serve(self, service: Service, wrap: Callable[[], socket.socket] | None) -> _Steps[T]:
        start = yield from self._receive(PREFACE_BYTES)
        try:
            check_preface(start, service)
        except ProtocolError:
            if start.startswith(MAGIC):
                with contextlib.suppress(OSError):
                    self.sock.recv(MOST_BYTES)
                with contextlib.suppress(OSError):  # has this side's version
                    self.sock.send(welcome(Verdict.OTHER_SERVICE), NO_SIGNAL)
            raise
        if wrap is not None and (yield from self._receive(1, socket.MSG_PEEK)) == tls.RECORD:
            self.sock = wrap()
            if isinstance(self.sock, TlsSocket):
                yield from self._secure(self.sock)
        return (yield from self._follow_script())

    def _secure(self, sock: TlsSocket) -> _Steps[None]:
        while not sock.handshake():
            self.started = self.started or not sock.wants_to_write()
            yield sock.wants_to_write()
        self.steps += 1

    def _follow_script(self, start: bytes = b"") -> _Steps[T]:
        """Exchange the messages of the script, the first one after ``start``; return its result."""
        outgoing, expected = next(self._script)
        outgoing, server = start + outgoing, ()
        while True:
            yield from self._send(outgoing, self.sock.send)
            if outgoing:
                server = server or self.sock.getpeername()  # not known once the server has closed the connection
                if expected:
                    yield False
            received = yield from self._receive(expected)
            try:
                outgoing, expected = self._script.send(received)
            except StopIteration as end:
                result: T = end.value
                return result
            except NeedsTlsError:
                tls.require_at(server)
                raise

    def _send(self, data: bytes, send: Callable[[memoryview, int], int]) -> _Steps[None]:
        rest = memoryview(data)
        while rest:
            try:
                rest = rest[send(rest, NO_SIGNAL) :]
                self.started = True
            except BlockingIOError:
                yield True

    def _receive(self, size: int, flags: int = 0) -> _Steps[bytes]:
        received = b""
        while len(received) < size:
            try:
                data = self.sock.recv(size - len(received), flags)
            except BlockingIOError:
                yield False
                continue
            if not data:
                raise ConnectionResetError("closed by the other side")
            received += data
            self.started = True
        self.steps += 1
        return received


def accept(
    sock: socket.socket,
    service: Service,
    accepted: Callable[[bytes], str | Credentials],
    attachment_bytes: int,
    token: str | Credentials,
    settings: TlsSettings,
    respond: Callable[[Client], Script[T]],
) -> Handshake[T]:
    """Return the server's side of a handshake on a connection from a port or a unix socket.

    Args:
        token: the secret, or all credentials: the authorities of TLS. Without one, the client's user counts.
        settings: name the certificates, if they are in files.
    """

    def wrap() -> socket.socket:
        return tls.server_side(shake.sock, peer_name(shake.sock), token, settings)

    def judge() -> Verdict:
        return verdict_on(shake.sock, token, settings)

    script = server_script(accepted, service, attachment_bytes, judge, respond)
    shake = Handshake(sock, service, script, client=False, wrap=None if sock.family == AF_UNIX else wrap)
    return shake


def verdict_on(sock: socket.socket, token: str | Credentials, settings: TlsSettings) -> Verdict:
    """Return whether a connection may have a client, whatever its credential."""
    if tls.is_exposed(sock, token, settings):
        return Verdict.NEEDS_TLS
    try:
        if not token:
            check_peer(sock)
    except PeerRefusedError as error:
        warn_refused(error)
        return Verdict.OTHER_USER
    except OSError as error:
        warn_exhausted("a client is not served", error)
        raise
    return Verdict.WELCOME
