"""Driver of the scripts of ``wire.hello``: waits for one on a socket, or runs any number of them in one thread."""

from __future__ import annotations

import select
import socket
from collections.abc import Callable
from typing import Generic, TypeVar

from rankmesh_agent.net import tls
from rankmesh_agent.net.deadline import Deadline
from rankmesh_agent.net.peer_credentials import warn_refused
from rankmesh_agent.net.readiness import is_ready
from rankmesh_agent.net.tls_socket import NO_SIGNAL, TlsSocket
from rankmesh_agent.wire.hello import ClientRefusedError, NeedsTlsError, Script

T = TypeVar("T")


class Handshake(Generic[T]):
    """One side of a handshake; that of TLS comes first if the socket has it.

    Args:
        sock: the socket that carries it.
        script: this side's script, which begins after the handshake of TLS.
        wrap: for a server: returns the socket to use if the client's first byte is that of TLS.

    Attributes:
        started: whether any byte has been sent or received.
        steps: number of steps of the script that have begun.
    """

    def __init__(self, sock: socket.socket, script: Script[T], wrap: Callable[[], socket.socket] | None = None) -> None:
        self.started = False
        self.steps = 0
        self._script = script
        self._wrap = wrap
        self._unsent = self._unfilled = memoryview(b"")
        self._begin(sock)

    def _begin(self, sock: socket.socket) -> None:
        self._sock = sock
        self._unsecured = sock if isinstance(sock, TlsSocket) and not sock.secured else None
        if self._unsecured is None and self._wrap is None:
            self._begin_step(next(self._script))

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
        return bool(self._unsent) if self._unsecured is None else self._unsecured.wants_to_write()

    def advance(self) -> T | None:
        """Continue as far as possible; return the script's result at its end. The socket must be non-blocking.

        A call that sends does not receive yet: the other side has not answered.

        Raises:
            OSError: the connection is lost.
            DistError: the script has failed.
        """
        try:
            if self._wrap is not None:
                first, wrap, self._wrap = self._sock.recv(1, socket.MSG_PEEK), self._wrap, None
                if not first:
                    raise ConnectionResetError("closed by the other side")
                self._begin(wrap() if first == tls.RECORD else self._sock)
            if self._unsecured is not None:
                secured = self._unsecured.handshake()
                self.started = self.started or not self._unsecured.wants_to_write()
                if not secured:
                    return None
                self._unsecured = None
                self._begin_step(next(self._script))
            while True:
                if self._unsent:
                    self._unsent = self._unsent[self._sock.send(self._unsent, NO_SIGNAL) :]
                    self.started = True
                    if self._unsent or self._unfilled:
                        return None
                if self._unfilled:
                    received = self._sock.recv_into(self._unfilled)
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
            tls.require_at(self._sock.getpeername())
            raise
        except OSError as error:
            self._script.throw(error)
            raise

    def run(self, seconds: float) -> T:
        """Run the script to its end and return its result; leaves the socket blocking.

        Raises:
            TimeoutError: the handshake takes longer than ``seconds``.
            OSError, DistError: see advance.
        """
        deadline = Deadline(seconds)
        self._sock.setblocking(False)
        while (result := self.advance()) is None:
            if not is_ready(self._sock, deadline.remaining(), writing=self._wants_to_write()):
                raise TimeoutError(f"the handshake is not complete after {seconds:g} s")
        self._sock.setblocking(True)
        return result

    def close(self) -> None:
        """Release the resources of the script; the socket stays open."""
        self._script.close()
