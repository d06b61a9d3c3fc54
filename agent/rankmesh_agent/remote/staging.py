"""Staging buffer of a stream: memory that an attached process and its agent on the same host share for arrays of calls.

The process creates the memory (memfd_create), sealed against shrinking, so that no access of the agent raises SIGBUS,
and sends its descriptor with the first call whose arrays it has no room for. It copies arrays in and results out.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rankmesh_agent.collectives.link import Array, as_bytes
from rankmesh_agent.net.stream import Frame, FramedStream, ReusableBuffer, StreamClosedError
from rankmesh_agent.shared_memory.mapping import Mapping
from rankmesh_agent.wire import attach_frames
from rankmesh_agent.wire.attach_frames import STAGED, Header, Kind
from rankmesh_agent.wire.errors import ProtocolError

if sys.platform == "linux":
    import fcntl

    _SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    _SEAL_EXEC = 0x20  # the kernel's own addition, with sysctl vm.memfd_noexec=1

MAX_KEPT_BYTES = 64 << 20
_MIN_BYTES = 1 << 20

Memory = npt.NDArray[np.uint8]


def is_kept(mapping: Mapping) -> bool:
    """Return whether a buffer serves later calls, too; both ends drop a larger one after its call."""
    return mapping.bytes.size <= MAX_KEPT_BYTES


def create(nbytes: int) -> Mapping:
    """Return a new buffer of ``nbytes`` at least; ``release`` closes its descriptor."""
    size = max(_MIN_BYTES, 1 << (nbytes - 1).bit_length())
    if size > MAX_KEPT_BYTES:
        size = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    descriptor = os.memfd_create("rankmesh-staging", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, size)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
        return Mapping(descriptor, size)
    except BaseException:
        os.close(descriptor)
        raise


def map_received(descriptors: Sequence[int]) -> Mapping:
    """Return the buffer whose descriptor a process has sent; closes all descriptors.

    Raises:
        ProtocolError: it is not one descriptor of a file that is sealed against shrinking and can be written.
    """
    mapping: Mapping | None = None
    try:
        if len(descriptors) != 1:
            raise ProtocolError(f"an attached process sent {len(descriptors)} descriptors in place of a buffer's")
        (descriptor,) = descriptors
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
        size = os.fstat(descriptor).st_size
        writable = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDWR
        if seals & ~_SEAL_EXEC != _SEALS or not writable or not 0 < size <= attach_frames.MAX_PAYLOAD:
            raise ProtocolError(f"an attached process sent a buffer of {size} bytes with seals {seals:#x}")
        mapping = Mapping(descriptor, size)
        mapping.release()
    except (OSError, ValueError, OverflowError) as error:
        raise ProtocolError(f"an attached process sent a buffer that cannot be mapped: {error}") from error
    finally:
        for descriptor in descriptors if mapping is None else ():
            os.close(descriptor)
    return mapping


class StagedStream(FramedStream):
    """A process's end of a stream to its agent, with a staging buffer where both are on one host."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock)
        self._staging: Mapping | None = None
        self._staged = False

    def send_request(self, document: bytes, up: Sequence[memoryview], room: int) -> None:
        """Send a request and its arrays, behind which the response may have ``room`` bytes of arrays."""
        nbytes = sum(map(len, up))
        descriptors = self._reserve(nbytes + room)
        staging = self._staging if self._staged else None
        if staging is None:
            self.send(attach_frames.encode(Kind.REQUEST, document, nbytes), up)
            return
        begin = 0
        for view in up:
            staging.bytes[begin : begin + len(view)] = np.frombuffer(view, np.uint8)
            begin += len(view)
        try:
            self.send(attach_frames.encode(Kind.REQUEST, document, nbytes, STAGED), (), descriptors)
        finally:
            if descriptors:
                staging.release()

    def receive_arrays(self, response: Header, down: Sequence[memoryview], begin: int) -> None:
        """Receive the arrays of a response, if it has any; ``begin`` is their offset in the staging buffer."""
        if response.flags & STAGED and self._staging is not None:
            for view in down:
                np.frombuffer(view, np.uint8)[:] = self._staging.bytes[begin : begin + len(view)]
                begin += len(view)
        elif response.payload:
            if response.payload != sum(map(len, down)):
                raise ProtocolError(f"the agent sent an unexpected payload of {response.payload} bytes")
            self.receive_into(down)

    def end_request(self, *, failed: bool) -> None:
        """Drop a buffer that is too large to be kept, or that a failed call may still write to."""
        if self._staging is not None and self._staged and (failed or not is_kept(self._staging)):
            self._staging = None

    def close(self) -> None:
        super().close()
        staging, self._staging = self._staging, None
        if staging is not None:
            staging.release()

    def _reserve(self, nbytes: int) -> list[int]:
        """Have a buffer for the arrays; return the descriptor of a new one."""
        self._staged = bool(nbytes) and self.is_local
        if not self._staged or (self._staging is not None and self._staging.bytes.size >= nbytes):
            return []
        self._staging = None
        with contextlib.suppress(OSError, AttributeError):  # no memfd_create: the arrays go through the stream
            self._staging = create(nbytes)
            return [self._staging.descriptor]
        self._staged = False
        return []


class AgentStream(FramedStream):
    """An agent's end of a stream for calls: the arrays of the request that it has brought last."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock)
        self._in, self._out = ReusableBuffer(MAX_KEPT_BYTES), ReusableBuffer(MAX_KEPT_BYTES)
        self._staging: Mapping | None = None
        self._request: Header
        self._returned: Sequence[memoryview] = ()

    def receive_request(self) -> Frame:
        """Return the next request; see FramedStream.receive and ``map_received``."""
        frame = self.receive(None, descriptors=True)
        if frame.descriptors:
            self._staging = map_received(frame.descriptors)
        self._request, self._returned = frame.header, ()
        return frame

    def respond(self, kind: Kind, document: bytes) -> None:
        """Respond to the request, with the arrays that it returns if the response is OK."""
        returned = self._returned if kind is Kind.OK else ()
        staged = self._request.flags & STAGED
        if staged and self._staging is not None and not is_kept(self._staging):
            self._staging = None
        if staged and returned:
            self.send(attach_frames.encode(kind, document, 0, STAGED))
        else:
            self.send(attach_frames.encode(kind, document, sum(map(len, returned))), returned)

    def raise_if_closed(self) -> None:
        """Raise StreamClosedError if the process has closed the connection."""
        if self.peer_closed():
            raise StreamClosedError("the client does not wait for the response any more")

    def take_arrays(
        self, dtype: np.dtype[Any], inputs: Sequence[int], outputs: Sequence[int]
    ) -> tuple[list[Array], list[Array]]:
        """Return the arrays that the request brings, and those that it has the agent fill, given their lengths."""
        sent, filled = sum(inputs) * dtype.itemsize, sum(outputs) * dtype.itemsize
        self._check_sizes(sent, filled)
        if self._request.flags & STAGED:
            memory = self._staged(sent + filled)
            source, target = memory[:sent], memory[sent:]
        else:
            source, target = self._in.receive(self, sent), self._out.take(filled)
        return _split(source, dtype, inputs), _split(target, dtype, outputs)

    def take_message(self, dtype: np.dtype[Any], count: int, *, sent: bool) -> Array:
        """Return the array of a message, sent or to be received, in memory of its own: the message may outlast the
        request.
        """
        nbytes = count * dtype.itemsize
        self._check_sizes(nbytes if sent else 0, 0 if sent else nbytes)
        staged = self._staged(nbytes) if self._request.flags & STAGED else None
        if not sent:
            return np.empty(nbytes, np.uint8).view(dtype)
        return (ReusableBuffer(0).receive(self, nbytes) if staged is None else staged.copy()).view(dtype)

    def return_arrays(self, arrays: Sequence[Array]) -> None:
        """Have the response return arrays of ``take_arrays``."""
        self._returned = [as_bytes(array) for array in arrays]

    def return_message(self, array: Array) -> None:
        """Have the response return the array of ``take_message``."""
        self._returned = [as_bytes(array)]
        if self._request.flags & STAGED:
            self._staged(array.nbytes)[:] = array.view(np.uint8)

    def _check_sizes(self, sent: int, filled: int) -> None:
        if sent != self._request.payload or filled > attach_frames.MAX_PAYLOAD:
            raise ProtocolError(
                f"an attached process sent {self._request.payload} bytes for a call that reads arrays of {sent} bytes "
                f"and fills arrays of {filled} bytes"
            )

    def _staged(self, nbytes: int) -> Memory:
        if self._staging is None or nbytes > self._staging.bytes.size:
            raise ProtocolError(f"an attached process has no buffer for the {nbytes} bytes of its call's arrays")
        return self._staging.bytes[:nbytes]


def _split(memory: Array, dtype: np.dtype[Any], lengths: Sequence[int]) -> list[Array]:
    arrays, begin = [], 0
    for length in lengths:
        end = begin + length * dtype.itemsize
        arrays.append(memory[begin:end].view(dtype))
        begin = end
    return arrays
