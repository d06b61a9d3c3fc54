"""A connection over TCP, after its handshake, with TLS or without."""

from __future__ import annotations

import contextlib
import fcntl
import select
import socket
import sys
import termios
from collections.abc import Sequence
from typing import ClassVar

from rankmesh_agent.net.sockets import probe_idle_peer, silent_seconds
from rankmesh_agent.net.spin import core_contention
from rankmesh_agent.net.tls_socket import buffered, committed
from rankmesh_agent.transports.base import Buffer, Connection, connection_lost
from rankmesh_agent.wire.errors import DistNetworkError

SOCKET_BUFFER = 4 << 20
_CACHED_BUFFER = 1 << 20
"""The same between two ranks of a host that have a core each: the receiver then finds the bytes in a cache."""
_TCP_CLOSE = b"\7"
"""First byte of struct tcp_info: the state of a connection that is over."""
_IOV_MAX = 1024
_SPINS, _SPINS_A_YIELD = 64, 8
"""Receives that may find nothing before a wait sleeps: about the duration of a wakeup and of a peer's call."""


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
        self._own_cores = False

    def configure_for_data(self) -> None:
        """Enlarge the socket buffers and probe an idle peer: this connection carries arrays, not only a handshake."""
        self._set_buffers(SOCKET_BUFFER)
        probe_idle_peer(self.socket)

    def use_aggressive_mode(self) -> None:
        self._own_cores = True
        with contextlib.suppress(OSError):  # the connection has ended, which the next call reports
            if self.socket.getpeername()[0] == self.socket.getsockname()[0]:
                self._set_buffers(_CACHED_BUFFER)

    def send(self, buffers: Sequence[Buffer]) -> int:
        try:
            return self.socket.sendmsg(buffers[:_IOV_MAX])
        except BlockingIOError:
            return 0
        except OSError as error:
            raise connection_lost(self.peer, error.strerror or str(error)) from error

    def committed(self) -> int:
        return committed(self.socket)

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

    def recv_soon(self, buffer: memoryview) -> int:
        receive = self.socket.recv_into
        if self._own_cores and core_contention.should_spin():
            for turn in range(1, _SPINS):
                try:
                    return receive(buffer) or self.recv_into(buffer)  # 0: the connection has ended
                except BlockingIOError:
                    if turn % _SPINS_A_YIELD == 0 and not core_contention.yield_core():
                        break
                except OSError:
                    break
        return self.recv_into(buffer)

    def fileno(self) -> int:
        return self._fileno

    def bare_fileno(self) -> int:
        return self._fileno if type(self.socket) is socket.socket else -1

    def events(self, writing: bool) -> int:
        return select.POLLIN | select.POLLOUT if writing else select.POLLIN

    def has_work(self, writing: bool, reading: bool = True) -> bool:
        return buffered(self.socket)

    def silent_seconds(self) -> float:
        return silent_seconds(self.socket)

    def drain(self) -> bool:
        # A close with unread bytes, or before an acknowledgement, may reset the connection and lose sent bytes.
        scratch = bytearray(1 << 16)
        try:
            with contextlib.suppress(BlockingIOError):
                for _ in range(SOCKET_BUFFER // len(scratch)):
                    if not self.socket.recv_into(scratch):
                        break
            if self.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1) == _TCP_CLOSE:
                return True  # reset, which an earlier call has reported; sent bytes still count as unacknowledged
            return int.from_bytes(fcntl.ioctl(self.socket, termios.TIOCOUTQ, b"\0" * 4), sys.byteorder) == 0
        except (OSError, DistNetworkError):
            return True  # the connection is reset: no acknowledgement will come

    def close(self) -> None:
        if self.socket.fileno() >= 0:
            self.drain()
            with contextlib.suppress(OSError):
                self.socket.shutdown(socket.SHUT_WR)
        self.socket.close()

    def _set_buffers(self, nbytes: int) -> None:
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, nbytes)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, nbytes)
