"""Framed stream: a connection between an attached process and its agent, the same at both ends."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from rankmesh_agent.net.deadline import Deadline
from rankmesh_agent.net.handshake import Handshake
from rankmesh_agent.net.sockets import peer_closed
from rankmesh_agent.net.tls_socket import NO_SIGNAL, TlsError
from rankmesh_agent.wire import attach_frames
from rankmesh_agent.wire.attach_frames import HEADER_BYTES, Header
from rankmesh_agent.wire.errors import ProtocolError

T = TypeVar("T")
Buffer = memoryview | bytes | bytearray
SEND_SECONDS = 30.0
"""Seconds without a sent or received byte of a frame after which the stream fails."""
SLICE_SECONDS = 1
"""Maximum duration of one system call; the deadline is checked between two calls."""
_ONE_SLICE = struct.pack("ll", SLICE_SECONDS, 0)
_MAX_BUFFERS = 512
"""Buffers of one system call; the kernel accepts 1024."""
_MAX_FDS = 4
_FIRST_BYTES, _GROWTH = 1 << 20, 4
"""Memory for announced bytes before any has come, and how much more there is each time that all of it is filled."""


class StreamClosedError(Exception):
    """The peer has closed the connection, or the connection is lost."""


class StreamTimeoutError(Exception):
    """The peer has sent or received nothing for too long."""


class Frame(NamedTuple):
    """A frame without its payload, and the descriptors sent with it."""

    header: Header
    document: bytes | bytearray
    descriptors: list[int]


class FramedStream:
    """One end of a stream, which closes its socket. One thread at a time may use it."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.is_local = sock.family == socket.AF_UNIX
        sock.settimeout(None)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _ONE_SLICE)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _ONE_SLICE)

    def send(self, frame: bytes, payload: Sequence[Buffer] = (), descriptors: Sequence[int] = ()) -> None:
        """Send a frame.

        Raises:
            StreamClosedError: the connection has ended.
            StreamTimeoutError: the peer receives nothing.
        """
        sent = 0
        try:
            if descriptors:
                sent = socket.send_fds(self.sock, [frame], descriptors)
            elif not payload:
                sent = self.sock.send(frame, NO_SIGNAL)
        except BlockingIOError:
            if descriptors:
                raise StreamTimeoutError(f"it has received no byte for {SLICE_SECONDS} s") from None
        except OSError as error:
            raise StreamClosedError(error.strerror or str(error)) from error
        if sent < len(frame) or payload:
            self._send_all([memoryview(frame)[sent:], *payload])

    def _send_all(self, buffers: list[Buffer], deadline: Deadline | None = None) -> None:
        """Send buffers, until a deadline; without one, as long as the peer receives."""
        stall = deadline or Deadline(SEND_SECONDS)
        begin = 0
        while begin < len(buffers):
            try:
                sent = self.sock.sendmsg(buffers[begin : begin + _MAX_BUFFERS], (), NO_SIGNAL)
            except BlockingIOError:
                if stall.expired():
                    raise StreamTimeoutError(f"it has received no byte for {stall.seconds:g} s") from None
                continue
            except OSError as error:
                raise StreamClosedError(error.strerror or str(error)) from error
            if deadline is None:
                stall.restart(SEND_SECONDS)
            while begin < len(buffers) and sent >= len(buffers[begin]):
                sent -= len(buffers[begin])
                begin += 1
            if sent:
                buffers[begin] = memoryview(buffers[begin])[sent:]
                if deadline is not None and deadline.expired():
                    raise StreamTimeoutError(f"it has not received the frame within {deadline.seconds:g} s")

    def receive(self, deadline: Deadline | None, *, descriptors: bool = False) -> Frame:
        """Return the next frame, without its payload.

        Args:
            descriptors: whether to accept descriptors; the caller closes them.

        Raises:
            StreamClosedError: the connection has ended.
            StreamTimeoutError: no frame has arrived.
            ProtocolError: the data is not a frame.
        """
        fds: list[int] = []
        try:
            return self._receive_frame(deadline, fds, descriptors)
        except BaseException:
            for descriptor in fds:
                os.close(descriptor)
            raise

    def _receive_frame(self, deadline: Deadline | None, fds: list[int], descriptors: bool) -> Frame:
        data = self._receive_first(deadline, fds if descriptors else None)
        if len(data) < HEADER_BYTES:
            whole = bytearray(HEADER_BYTES)
            whole[: len(data)] = data
            self.receive_into([memoryview(whole)[len(data) :]])
            data = whole
        header = attach_frames.decode(data)
        document: bytes | bytearray = b""
        if header.document:
            document = self.receive_bytes(header.document)
        return Frame(header, document, fds)

    def _receive_first(self, deadline: Deadline | None, fds: list[int] | None) -> bytes | bytearray:
        while True:
            try:
                if fds is None or not self.is_local:
                    data = self.sock.recv(HEADER_BYTES)
                else:
                    data, found, _, _ = socket.recv_fds(self.sock, HEADER_BYTES, _MAX_FDS)
                    fds += found
                    for descriptor in found:
                        os.set_inheritable(descriptor, False)
            except BlockingIOError:
                if deadline is not None and deadline.expired():
                    raise StreamTimeoutError("no frame has arrived") from None
                continue
            except OSError as error:
                raise StreamClosedError(error.strerror or str(error)) from error
            if not data:
                raise StreamClosedError("the connection has ended")
            return data

    def receive_into(self, views: Sequence[memoryview], deadline: Deadline | None = None) -> None:
        """Receive a payload after its header, until a deadline; without one, as long as the peer sends."""
        stall = deadline or Deadline(SEND_SECONDS)
        shortened = False
        for view in views:
            rest = view
            while len(rest):
                if deadline is not None and not shortened and deadline.remaining() < SLICE_SECONDS:
                    shortened = True
                    last = struct.pack("ll", 0, max(1, int(deadline.remaining() * 1e6)))
                    self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, last)
                try:
                    count = self.sock.recv_into(rest, 0, socket.MSG_WAITALL)
                except BlockingIOError:
                    if stall.expired():
                        raise StreamTimeoutError(f"it has sent no byte for {stall.seconds:g} s") from None
                    continue
                except OSError as error:
                    raise StreamClosedError(error.strerror or str(error)) from error
                if not count:
                    raise StreamClosedError("the connection has ended")
                rest = rest[count:]
                if deadline is None:
                    stall.restart(SEND_SECONDS)
                elif len(rest) and deadline.expired():
                    raise StreamTimeoutError(f"it has not sent the frame within {deadline.seconds:g} s")
        if shortened:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _ONE_SLICE)

    def receive_bytes(self, size: int, deadline: Deadline | None = None, begun: bytes | bytearray = b"") -> bytearray:
        """Receive ``size`` bytes that a header has announced; their memory grows with those that have arrived.

        Args:
            begun: the first of them, which have been received already.
        """
        received = len(begun)
        data = bytearray(min(size, max(_FIRST_BYTES, received)))
        data[:received] = begun
        while True:
            with memoryview(data) as view:
                self.receive_into([view[received:]], deadline)
            received = len(data)
            if received == size:
                return data
            data += bytes(min(size, _GROWTH * received) - received)

    def peer_closed(self) -> bool:
        """Return whether the peer has closed the connection."""
        return peer_closed(self.sock)

    def shutdown(self) -> None:
        """End the connection, which also wakes a thread that waits for it; ``close`` must follow."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket."""
        self.sock.close()

    def greet(self, handshake: Handshake[T], seconds: float) -> T:
        """Run a handshake on the stream's socket, and use the socket with TLS from then on; return its result."""
        try:
            return handshake.run(seconds)
        except TlsError as error:
            raise ProtocolError(str(error)) from error
        except OSError as error:
            if isinstance(error, TimeoutError) and error.errno is None:  # the kernel's is of a host that has vanished
                raise StreamTimeoutError("it has not completed the handshake") from None
            raise StreamClosedError(error.strerror or str(error)) from error
        finally:
            self.sock = handshake.sock


class ReusableBuffer:
    """Memory that is allocated once and reused by later calls, up to ``max_kept`` bytes."""

    def __init__(self, max_kept: int) -> None:
        self._max_kept = max_kept
        self._memory = np.empty(0, np.uint8)

    def take(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Return memory of this size, valid until the next call."""
        if nbytes <= self._memory.size:
            return self._memory[:nbytes]
        return self._keep(np.empty(nbytes, np.uint8))

    def receive(self, stream: FramedStream, nbytes: int) -> npt.NDArray[np.uint8]:
        """Receive bytes that a header has announced; the result is valid until the next call."""
        if nbytes <= max(self._memory.size, _FIRST_BYTES):
            kept = self.take(nbytes)
            stream.receive_into([kept.data])
            return kept
        try:
            return self._keep(np.frombuffer(stream.receive_bytes(nbytes), np.uint8))
        except MemoryError as error:
            raise StreamClosedError(f"there is no memory for {nbytes} bytes, which it sends") from error

    def _keep(self, memory: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        """Keep memory for later calls, unless it is too large; return it."""
        if memory.size <= self._max_kept:
            self._memory = memory
        return memory
