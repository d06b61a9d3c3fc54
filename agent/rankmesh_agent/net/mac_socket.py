"""Connection without TLS between hosts: a MAC of each record shows what was changed on its way.

::

    length   4 bytes   of the data
    zero     8 bytes   bytes that would follow without a MAC: none
    data
    MAC      16 bytes: keyed BLAKE2b of the record's number, the lengths and the data

Each direction has a key of its own, from the challenge, and numbers its records. So bytes that were changed, repeated,
left out, inserted or moved end the connection, before the receiver gets any of their record. BLAKE2b takes 1 ns a byte,
as long as TCP itself, and with all else 5 us a record. HMAC-SHA256 takes four times as long for a short one.
"""

from __future__ import annotations

import hmac
import logging
import socket
import struct
from collections import deque
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

from rankmesh_agent.config.tls import private_network
from rankmesh_agent.net.addresses import is_beyond_host, peer_name
from rankmesh_agent.net.record_socket import NO_SIGNAL, RecordChangedError, RecordSocket
from rankmesh_agent.net.tls import TlsSocket
from rankmesh_agent.wire.credentials import Credentials
from rankmesh_agent.wire.handshake import Challenge

_send, _recv_into = socket.socket.send, socket.socket.recv_into
MAC_BYTES = 16
_HEAD = struct.Struct("!IQ")
_HEAD_BYTES = _HEAD.size
OVERHEAD_BYTES = _HEAD_BYTES + MAC_BYTES
_MAX_DATA = 1 << 16
"""Maximum data of a record: the receiver uses none of it before all has come."""
_AHEAD_BYTES = OVERHEAD_BYTES + (1 << 12)
"""Bytes that are received at once, until a record is longer."""

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
    """

    def __init__(self, sock: socket.socket, sending: bytes, receiving: bytes) -> None:
        super().__init__(sock)
        self._sending = RecordMac(sending)
        self._receiving = RecordMac(receiving)
        self._unsent: memoryview | bytes = b""
        """Rest of the record that is being sent."""
        self._sealed = 0
        """Bytes of data in that record."""
        self._staging = memoryview(bytearray(_AHEAD_BYTES))
        self._begin = self._end = 0
        self._needed = OVERHEAD_BYTES
        """Bytes from ``_begin`` that make the next record, or an empty one if its length is not known yet."""
        self._verified = memoryview(b"")
        self._error: OSError | None = None

    def committed(self) -> int:
        return self._sealed

    def buffered(self) -> bool:
        if self._verified or self._error is not None:
            return True
        come = self._end - self._begin
        return come >= OVERHEAD_BYTES and come >= OVERHEAD_BYTES + min(self._head_of_next()[0], _MAX_DATA)

    # Sending

    def sendmsg(  # type: ignore[override]
        self, buffers: Any, ancdata: Sequence[Any] = (), flags: int = 0, address: Any = None
    ) -> int:
        if not self._sealed and 0 < (size := sum(map(len, buffers))) <= _MAX_DATA:  # mostly short frames, sent whole
            self._seal(size, buffers)
            pending: deque[memoryview] = deque()
        else:
            pending = deque(view for buffer in buffers if (view := memoryview(buffer)))
            _take(pending, self._sealed)
        sent = 0
        while self._unsent or pending:
            if not self._unsent:
                data = _take(pending, _MAX_DATA)
                self._seal(sum(map(len, data)), data)
            try:
                count = _send(self, self._unsent, flags | NO_SIGNAL)
            except BlockingIOError:
                if not sent:
                    raise
                break
            self._unsent = self._unsent[count:]
            if not self._unsent:
                sent += self._sealed
                self._sealed = 0
        return sent

    def _seal(self, size: int, data: Sequence[Any]) -> None:
        """Make the next record, of data of ``size`` bytes."""
        record = b"".join((_HEAD.pack(size, 0), *data))
        self._unsent = memoryview(record + self._sending.next(record))
        self._sealed = size

    # Receiving

    def recv(self, bufsize: int, flags: int = 0) -> bytes:
        """Receive as a socket does."""
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
                    filled += count
                elif self._verify_next():
                    continue
                elif (filled and not flags & socket.MSG_WAITALL) or not self._fill(flags):
                    break
        except (BlockingIOError, TimeoutError):
            if not filled:
                raise
        except OSError as error:
            self._error = error
            if not filled:
                raise
        return filled

    def _fill(self, flags: int) -> int:
        """Receive more of the next record; return the number of bytes, 0 at the end of the connection."""
        begin, left = self._begin, self._end - self._begin
        if begin:
            if left:
                self._staging[:left] = bytes(self._staging[begin : self._end])
            self._begin, self._end = 0, left
        if self._needed > len(self._staging):
            larger = memoryview(bytearray(OVERHEAD_BYTES + _MAX_DATA))
            larger[:left] = self._staging[:left]
            self._staging = larger
        count = _recv_into(self, self._staging[left:], 0, flags & _FILL_FLAGS)
        self._end += count
        return count

    def _verify_next(self) -> bool:
        """Verify the next record, if all of it has come."""
        if self._error is not None:
            raise self._error
        begin, come = self._begin, self._end - self._begin
        if come < self._needed:
            return False
        length, without = self._head_of_next()
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
        if without:
            self._error = ConnectionError("the other side sends data without a MAC, as RankMesh 0.2.0 does: upgrade it")
            raise self._error
        self._verified = self._staging[begin + _HEAD_BYTES : mac]
        self._begin, self._needed = end, OVERHEAD_BYTES
        return True

    def _head_of_next(self) -> tuple[int, int]:
        length, without = _HEAD.unpack_from(self._staging, self._begin)
        return length, without

    def _changed(self) -> RecordChangedError:
        reason = "a frame was changed, repeated, left out, inserted or moved on its way: its MAC is wrong"
        _log.warning("the connection to %s is closed: %s", peer_name(self), reason)
        self._error = RecordChangedError(reason)
        return self._error


def wants_macs(sock: socket.socket, token: str | Credentials) -> bool:
    """Return whether this end of a connection wants MACs: there is a token, and the connection leaves the host without
    TLS over a network that is not declared private.

    The other end may see another network, as behind a port forwarder: if one end wants MACs, both have them.
    """
    if not token or isinstance(sock, TlsSocket) or sock.family == getattr(socket, "AF_UNIX", None) or private_network():
        return False
    try:
        return leaves_host(sock)
    except OSError:  # the connection has ended, which the handshake reports
        return False


def leaves_host(sock: socket.socket) -> bool:
    """Return whether a TCP connection leaves this host."""
    return is_beyond_host(sock, sock.getpeername()[0])


def with_macs(sock: socket.socket, challenge: Challenge) -> socket.socket:
    """Return the socket to use after the challenge: with MACs, if one end wants them.

    Args:
        sock: the socket; replaced by the returned one.
        challenge: this end of the challenge, complete.
    """
    if not challenge.macs:
        return sock
    of_client, of_server = (challenge.session_key(f"frames of the {end}") for end in ("client", "server"))
    sending, receiving = (of_client, of_server) if challenge.is_client else (of_server, of_client)
    return MacSocket(sock, sending, receiving)


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
