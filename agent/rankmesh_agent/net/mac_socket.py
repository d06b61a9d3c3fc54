"""Connection without TLS between hosts: a MAC of each record shows what was changed on its way.

::

    length   4 bytes   of the data
    bulk     8 bytes   number of bytes that follow the MAC without one
    data
    MAC      16 bytes: keyed BLAKE2b of the record's number, the lengths and the data
    bulk data

Each direction has a key of its own, from the challenge, and numbers its records. So bytes that were changed, repeated,
left out, inserted or moved end the connection. Bulk data, which only TLS protects, are those that the layout of the
frames declares to be: in the mesh, data of more than 4 KiB. BLAKE2b takes 1 ns a byte, as long as TCP itself, and with
all else 5 us a record. HMAC-SHA256 takes four times as long for a short one.
"""

from __future__ import annotations

import hmac
import logging
import socket
import struct
from collections import deque
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Any

from rankmesh_agent.net.addresses import is_beyond_host, peer_name
from rankmesh_agent.net.record_socket import NO_SIGNAL, RecordChangedError, RecordSocket
from rankmesh_agent.net.tls import TlsSocket
from rankmesh_agent.wire.credentials import Credentials
from rankmesh_agent.wire.handshake import Challenge

Layout = Callable[[memoryview], tuple[int, int]]
"""Returns, by the header that a buffer begins with, the bytes of its frame that have a MAC, and those without."""

_send, _recv_into = socket.socket.send, socket.socket.recv_into
MAC_BYTES = 16
_HEAD = struct.Struct("!IQ")
_HEAD_BYTES = _HEAD.size
OVERHEAD_BYTES = _HEAD_BYTES + MAC_BYTES
_MAX_DATA = 1 << 16
"""Maximum data of a record: the receiver uses none of it before all has come."""
_AHEAD_BYTES = OVERHEAD_BYTES + (1 << 12)
"""Bytes received where a record begins; the rest of bulk data then needs no copy."""
_MAX_BUFFERS = 512
"""Buffers of one system call; the kernel accepts 1024."""

_FILL_FLAGS = ~int(socket.MSG_PEEK | socket.MSG_WAITALL)

_log = logging.getLogger("rankmesh")


class RecordMac:
    """MACs of the records of one direction, in order.

    Args:
        key: of 32 bytes.
    """

    def __init__(self, key: bytes) -> None:
        self._keyed = blake2b(key=key, digest_size=MAC_BYTES)
        self._number = 0

    def next(self, record: bytes | memoryview) -> bytes:
        """Return the MAC of the next record."""
        mac = self._keyed.copy()
        mac.update(self._number.to_bytes(8, "big"))
        mac.update(record)
        self._number += 1
        return mac.digest()


class MacSocket(RecordSocket):
    """A connected socket with MACs, see RecordSocket.

    Args:
        sock: the socket, which this object takes over; no byte has been sent or received after the handshake.
        sending: key of the records that this side sends.
        receiving: key of those that it receives.
        layout: of the frames, if some have bulk data; a header must not be divided among the buffers of a call.
    """

    def __init__(self, sock: socket.socket, sending: bytes, receiving: bytes, layout: Layout | None = None) -> None:
        super().__init__(sock)
        self._layout = layout
        self._sending = RecordMac(sending)
        self._receiving = RecordMac(receiving)
        self._unsent: memoryview | bytes = b""
        """Rest of the record that is being sent."""
        self._sealed = 0
        """Bytes of data in that record."""
        self._frame_left = self._frame_bulk = 0
        """Bytes of the current frame that are to be sealed, and its bulk data."""
        self._bulk_to_send = 0
        self._staging = memoryview(bytearray(_AHEAD_BYTES))
        self._begin = self._end = 0
        self._needed = OVERHEAD_BYTES
        """Bytes from ``_begin`` that make the next record, or an empty one if its length is not known yet."""
        self._verified = memoryview(b"")
        self._bulk_to_receive = 0
        self._error: OSError | None = None

    def committed(self) -> int:
        return self._sealed

    def buffered(self) -> bool:
        come = self._end - self._begin
        if self._verified or self._error is not None or (self._bulk_to_receive and come):
            return True
        return come >= OVERHEAD_BYTES + min(self._length_of_next(), _MAX_DATA) if come >= OVERHEAD_BYTES else False

    # Sending

    def sendmsg(  # type: ignore[override]
        self, buffers: Any, ancdata: Sequence[Any] = (), flags: int = 0, address: Any = None
    ) -> int:
        if not (self._sealed or self._bulk_to_send or self._frame_left):  # mostly short frames, sent whole
            size = sum(map(len, buffers))
            if 0 < size <= _MAX_DATA and buffers[0] and (not self._layout or self._layout(buffers[0]) == (size, 0)):
                self._unsent = record = self._seal(size, 0, buffers)
                if (count := _send(self, record, flags | NO_SIGNAL)) == len(record):
                    self._unsent, self._sealed = b"", 0
                    return size
                self._unsent = memoryview(record)[count:]
        pending = deque(view for buffer in buffers if (view := memoryview(buffer)))
        sent = 0
        if self._sealed:
            _take(pending, self._sealed)
        while True:
            if not self._unsent and not self._bulk_to_send:
                if not pending:
                    return sent
                self._seal_next(pending)
            out = [self._unsent] if self._unsent else []
            if self._bulk_to_send:
                out += _first(pending, self._bulk_to_send)
            if not out:  # the bulk data comes with the next call
                return sent
            try:
                count = (
                    super().sendmsg(out, (), flags | NO_SIGNAL)
                    if len(out) > 1
                    else _send(self, out[0], flags | NO_SIGNAL)
                )
            except BlockingIOError:
                if not sent:
                    raise
                return sent
            of_record = min(count, len(self._unsent))
            self._unsent = memoryview(self._unsent)[of_record:]
            if self._unsent:
                continue  # the kernel has no room, which the next system call reports
            sent += self._sealed
            self._sealed = 0
            if self._bulk_to_send:
                bulk = count - of_record
                self._bulk_to_send -= bulk
                _take(pending, bulk)
                if bulk:
                    return sent + bulk

    def _seal_next(self, pending: deque[memoryview]) -> None:
        """Make the next record, of as much of ``pending`` as it may have, and remove that."""
        if self._layout is None:
            data = _take(pending, _MAX_DATA)
            size = sum(map(len, data))
        else:
            data, size = [], 0
            while pending and size < _MAX_DATA and not self._bulk_to_send:
                if not self._frame_left:
                    self._frame_left, self._frame_bulk = self._layout(pending[0])
                part = _take(pending, min(self._frame_left, _MAX_DATA - size))
                count = sum(map(len, part))
                data += part
                size += count
                self._frame_left -= count
                if not self._frame_left:
                    self._bulk_to_send = self._frame_bulk
        self._unsent = self._seal(size, self._bulk_to_send, data)

    def _seal(self, size: int, bulk: int, data: Sequence[Any]) -> bytes:
        """Return the record of data of ``size`` bytes, the next one to be sent."""
        record = b"".join((_HEAD.pack(size, bulk), *data))
        record += self._sending.next(record)
        self._sealed = size
        return record

    # Receiving

    def recv(self, bufsize: int, flags: int = 0) -> bytes:
        """Receive as a socket does; only where no layout declares bulk data."""
        while not self._verified:
            if not self._verify_next() and not self._fill(flags):
                return b""
        data = bytes(self._verified[:bufsize])
        if not flags & socket.MSG_PEEK:
            self._verified = self._verified[len(data) :]
        return data

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0) -> int:
        view = memoryview(buffer).cast("B")
        if nbytes:
            view = view[:nbytes]
        filled, size = 0, len(view)
        try:
            while filled < size:
                if self._verified:
                    count = min(size - filled, len(self._verified))
                    view[filled : filled + count] = self._verified[:count]
                    self._verified = self._verified[count:]
                elif self._bulk_to_receive:
                    room = min(size - filled, self._bulk_to_receive)
                    count = self._receive_bulk(view[filled : filled + room], flags)
                    if not count:
                        break
                elif self._verify_next():
                    continue
                elif (filled and not flags & socket.MSG_WAITALL) or not self._fill(flags):
                    break
                else:
                    continue
                filled += count
        except (BlockingIOError, TimeoutError):
            if not filled:
                raise
        except OSError as error:
            self._error = error
            if not filled:
                raise
        return filled

    def _receive_bulk(self, room: memoryview, flags: int) -> int:
        count = min(len(room), self._end - self._begin)
        if count:
            room[:count] = self._staging[self._begin : self._begin + count]
            self._begin += count
        else:
            count = _recv_into(self, room, 0, flags)
        self._bulk_to_receive -= count
        return count

    def _fill(self, flags: int) -> int:
        """Receive more of the next record; return the number of bytes, 0 at the end of the connection."""
        begin, left = self._begin, self._end - self._begin
        if begin:
            if left:
                self._staging[:left] = bytes(self._staging[begin : self._end])
            self._begin, self._end = 0, left
        if self._needed > len(self._staging):
            larger = memoryview(bytearray(self._needed))
            larger[:left] = self._staging[:left]
            self._staging = larger
        room = self._staging[left : max(self._needed, _AHEAD_BYTES)]
        count = _recv_into(self, room, 0, flags & _FILL_FLAGS)
        self._end += count
        return count

    def _verify_next(self) -> bool:
        """Verify the next record, if all of it has come."""
        if self._error is not None:
            raise self._error
        begin, come = self._begin, self._end - self._begin
        if come < self._needed:
            return False
        length, bulk = _HEAD.unpack_from(self._staging, begin)
        if length > _MAX_DATA:
            raise self._changed()
        size = OVERHEAD_BYTES + length
        if come < size:
            self._needed = size
            return False
        end = begin + size
        mac = end - MAC_BYTES
        if not hmac.compare_digest(self._staging[mac:end], self._receiving.next(self._staging[begin:mac])):
            raise self._changed()
        self._verified = self._staging[begin + _HEAD_BYTES : mac]
        self._bulk_to_receive = bulk
        self._begin, self._needed = end, OVERHEAD_BYTES
        return True

    def _length_of_next(self) -> int:
        length: int = _HEAD.unpack_from(self._staging, self._begin)[0]
        return length

    def _changed(self) -> RecordChangedError:
        reason = "a frame was changed, repeated, left out, inserted or moved on its way: its MAC is wrong"
        _log.warning("the connection to %s is closed: %s", peer_name(self), reason)
        self._error = RecordChangedError(reason)
        return self._error


def wants_macs(sock: socket.socket, token: str | Credentials) -> bool:
    """Return whether this end of a connection wants MACs: it leaves the host without TLS, and there is a token.

    The other end may see another network, as behind a port forwarder: if one end wants MACs, both have them.
    """
    if not token or isinstance(sock, TlsSocket) or sock.family == getattr(socket, "AF_UNIX", None):
        return False
    try:
        return leaves_host(sock)
    except OSError:  # the connection has ended, which the handshake reports
        return False


def leaves_host(sock: socket.socket) -> bool:
    """Return whether a TCP connection leaves this host."""
    return is_beyond_host(sock, sock.getpeername()[0])


def with_macs(sock: socket.socket, challenge: Challenge, layout: Layout | None = None) -> socket.socket:
    """Return the socket to use after the challenge: with MACs, if one end wants them.

    Args:
        sock: the socket; replaced by the returned one.
        challenge: this end of the challenge, complete.
        layout: see MacSocket.
    """
    if not challenge.macs:
        return sock
    of_client, of_server = (challenge.session_key(f"frames of the {end}") for end in ("client", "server"))
    sending, receiving = (of_client, of_server) if challenge.is_client else (of_server, of_client)
    return MacSocket(sock, sending, receiving, layout)


def _take(pending: deque[memoryview], nbytes: int) -> list[memoryview]:
    """Remove the first ``nbytes`` and return them."""
    taken = []
    while nbytes and pending:
        view = pending.popleft()
        if len(view) > nbytes:
            pending.appendleft(view[nbytes:])
            view = view[:nbytes]
        nbytes -= len(view)
        taken.append(view)
    return taken


def _first(pending: deque[memoryview], nbytes: int) -> list[memoryview]:
    """Return the first ``nbytes``, or as many of them as fit in one system call."""
    found: list[memoryview] = []
    for view in pending:
        if not nbytes or len(found) == _MAX_BUFFERS:
            break
        found.append(view[:nbytes])
        nbytes -= len(found[-1])
    return found
