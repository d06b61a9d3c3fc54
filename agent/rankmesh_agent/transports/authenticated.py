"""Connection without TLS between hosts: a MAC of each frame shows what was changed on its way.

::

    header   64 bytes
    MAC      16 bytes: keyed BLAKE2b of the frame's number, the header, and the payload unless that is bulk data
    payload

Each direction has a key of its own, from the challenge, and numbers its frames. So a frame that was changed, repeated,
left out, or moved ends the connection. Bulk data, which only TLS protects, is data in buffers that the receiver has
posted (PART, BULK), and that of more than 4 KiB in other frames: BLAKE2b takes 3 ns a byte, longer than AES-GCM, and
with all else 6 us a frame. HMAC-SHA256 takes four times as long for a header.
"""

from __future__ import annotations

import hmac
from collections import deque
from collections.abc import Sequence
from hashlib import blake2b
from typing import ClassVar

from rankmesh_agent.transports.base import Buffer, Connection, connection_lost
from rankmesh_agent.wire import frames
from rankmesh_agent.wire.errors import DistNetworkError
from rankmesh_agent.wire.frames import HEADER_BYTES, Opcode

MAC_BYTES = 16
_HEAD_BYTES = HEADER_BYTES + MAC_BYTES
_AHEAD_BYTES = _HEAD_BYTES + (1 << 12)
"""Bytes received where a frame begins; the rest of bulk data then needs no copy."""
_SHORT_DATA = 1 << 12
"""Maximum data with a MAC."""
_MAX_BUFFERS = 512


class FrameMac:
    """MACs of the frames of one direction, in order.

    Args:
        key: of 32 bytes.
    """

    def __init__(self, key: bytes) -> None:
        self._keyed = blake2b(key=key, digest_size=MAC_BYTES)
        self._number = 0

    def next(self, *parts: Buffer) -> bytes:
        """Return the MAC of the next frame."""
        mac = self._keyed.copy()
        mac.update(self._number.to_bytes(8, "big"))
        for part in parts:
            mac.update(part)
        self._number += 1
        return mac.digest()


class AuthenticatedConnection(Connection):
    """A stream of frames with MACs, which this object adds and removes.

    Args:
        connection: carries them; no byte has been sent after the handshake.
        sending: key of the frames that this side sends.
        receiving: key of those that it receives.
    """

    medium: ClassVar[str] = "tcp"

    def __init__(self, connection: Connection, sending: bytes, receiving: bytes) -> None:
        self.peer = connection.peer
        self._connection = connection
        self._sending = FrameMac(sending)
        self._receiving = FrameMac(receiving)
        self._unsent = memoryview(b"")
        """Rest of the frames that have their MAC."""
        self._frames: deque[tuple[int, int]] = deque()
        """Bytes without MAC and with it of each of those frames; of bulk data the header alone."""
        self._left = 0
        """Bytes of the first one that have left."""
        self._bulk_to_send = 0
        self._staging = memoryview(bytearray(_AHEAD_BYTES))
        self._begin = self._end = 0
        self._needed = _HEAD_BYTES
        """Bytes from ``_begin`` that make the next frame, or its header if that is not known yet."""
        self._verified = memoryview(b"")
        self._bulk_to_receive = 0
        self._error: DistNetworkError | None = None

    # Sending

    def send(self, buffers: Sequence[Buffer]) -> int:
        sent = self._send_rest() if self._unsent else 0
        total = sum(map(len, buffers))
        while sent < total and not self._unsent:
            following = _after(buffers, sent) if sent else buffers
            count = self._send_bulk(following) if self._bulk_to_send else self._send_frames(following)
            if not count:
                break
            sent += count
        return sent

    def committed(self) -> int:
        return sum(plain for plain, _ in self._frames)

    def _send_bulk(self, buffers: Sequence[Buffer]) -> int:
        room, views = self._bulk_to_send, []
        for buffer in buffers[:_MAX_BUFFERS]:
            views.append(memoryview(buffer)[:room])
            room -= len(views[-1])
            if not room:
                break
        sent = self._connection.send(views)
        self._bulk_to_send -= sent
        return sent

    def _send_frames(self, buffers: Sequence[Buffer]) -> int:
        """Send frames up to the first one of bulk data, with the bulk data if all fits."""
        out: list[Buffer] = []
        place = 0
        while place < len(buffers) and len(out) < _MAX_BUFFERS and not self._bulk_to_send:
            header = buffers[place]
            place += 1
            if not header:  # the empty payload of a frame
                continue
            opcode, length = frames.opcode_and_length(header)
            if _is_bulk(opcode, length):
                out += (header, self._sending.next(header))
                self._frames.append((HEADER_BYTES, _HEAD_BYTES))
                self._bulk_to_send = length
                break
            first, end = place, HEADER_BYTES + length
            while length > 0:
                length -= len(buffers[place])
                place += 1
            payload = buffers[first:place]
            out += (header, self._sending.next(header, *payload), *payload)
            self._frames.append((end, end + MAC_BYTES))
        with_macs = len(out)
        if self._bulk_to_send:
            room = self._bulk_to_send
            for buffer in buffers[place : place + _MAX_BUFFERS]:
                if not room:
                    break
                out.append(memoryview(buffer)[:room])
                room -= len(out[-1])
        with_mac = sum(length for _, length in self._frames)
        sent = self._connection.send(out)
        if sent >= with_mac:
            plain = sum(length for length, _ in self._frames)
            self._frames.clear()
            self._bulk_to_send -= sent - with_mac
            return plain + sent - with_mac
        self._unsent = memoryview(b"".join(out[:with_macs]))[sent:]
        return self._count(sent)

    def _send_rest(self) -> int:
        """Send more of the frames that have their MAC; return the bytes of those that have left, without MACs."""
        sent = 0
        while self._unsent:
            count = self._connection.send([self._unsent])
            if not count:
                break
            self._unsent = self._unsent[count:]
            sent += self._count(count)
        return sent

    def _count(self, sent: int) -> int:
        self._left += sent
        plain = 0
        while self._frames and self._left >= self._frames[0][1]:
            without, with_mac = self._frames.popleft()
            self._left -= with_mac
            plain += without
        return plain

    # Receiving

    def recv_into(self, buffer: memoryview) -> int:
        if self._error is not None:
            raise self._error
        filled, size = 0, len(buffer)
        try:
            while filled < size:
                if self._verified:
                    count = min(size - filled, len(self._verified))
                    buffer[filled : filled + count] = self._verified[:count]
                    self._verified = self._verified[count:]
                elif self._bulk_to_receive:
                    room = min(size - filled, self._bulk_to_receive)
                    count = self._receive_bulk(buffer[filled : filled + room])
                    if count < room and self._begin == self._end:  # no more has come
                        return filled + count
                elif self._verify_next():
                    continue
                elif filled or not self._fill():
                    break
                else:
                    continue
                filled += count
        except DistNetworkError as error:
            self._error = error
            if not filled:
                raise
        return filled

    def _receive_bulk(self, room: memoryview) -> int:
        count = min(len(room), self._end - self._begin)
        if count:
            room[:count] = self._staging[self._begin : self._begin + count]
            self._begin += count
        else:
            count = self._connection.recv_into(room)
        self._bulk_to_receive -= count
        return count

    def _fill(self) -> int:
        begin, left = self._begin, self._end - self._begin
        if begin:
            self._staging[:left] = bytes(self._staging[begin : self._end])
            self._begin, self._end = 0, left
        if self._needed > len(self._staging):  # as much as has come, and as much again
            larger = memoryview(bytearray(min(self._needed, 2 * len(self._staging))))
            larger[:left] = self._staging[:left]
            self._staging = larger
        count = self._connection.recv_into(self._staging[left : max(self._needed, _AHEAD_BYTES)])
        self._end += count
        return count

    def _verify_next(self) -> bool:
        """Verify the next frame, if all of it has come."""
        begin, come = self._begin, self._end - self._begin
        if come < self._needed:
            return False
        body = begin + _HEAD_BYTES
        header = bytes(self._staging[begin : begin + HEADER_BYTES])
        opcode, length = frames.opcode_and_length(header)
        bulk = _is_bulk(opcode, length)
        if not bulk and length > frames.SMALL:
            raise self._changed()
        payload_bytes = 0 if bulk else length
        if come < _HEAD_BYTES + payload_bytes:
            self._needed = _HEAD_BYTES + payload_bytes
            return False
        whole = header + bytes(self._staging[body : body + payload_bytes]) if payload_bytes else header
        if not hmac.compare_digest(self._staging[begin + HEADER_BYTES : body], self._receiving.next(whole)):
            raise self._changed()
        self._verified = memoryview(whole)
        self._bulk_to_receive = length if bulk else 0
        self._begin, self._needed = body + payload_bytes, _HEAD_BYTES
        return True

    def _changed(self) -> DistNetworkError:
        return connection_lost(
            self.peer, "a frame was changed, repeated, left out or moved on its way: its MAC is wrong"
        )

    # Of the connection that carries it

    def fileno(self) -> int:
        return self._connection.fileno()

    def events(self, writing: bool) -> int:
        return self._connection.events(writing)

    def has_work(self, writing: bool) -> bool:
        return bool(self._verified)

    def prepare_wait(self, writing: bool) -> bool:
        return self._connection.prepare_wait(writing)

    def on_wakeup(self) -> None:
        self._connection.on_wakeup()

    def silent_seconds(self) -> float:
        return self._connection.silent_seconds()

    def drain(self) -> bool:
        return self._connection.drain()

    def close(self) -> None:
        self._connection.close()

    def close_in_child(self) -> None:
        self._connection.close_in_child()


def _is_bulk(opcode: int, length: int) -> bool:
    return opcode in frames.POSTED or (length > _SHORT_DATA and opcode in (Opcode.ENTER, Opcode.EAGER))


def _after(buffers: Sequence[Buffer], sent: int) -> list[Buffer]:
    """Return the rest of ``buffers`` after their first ``sent`` bytes, without empty ones."""
    rest: list[Buffer] = []
    for buffer in buffers:
        if sent >= len(buffer):
            sent -= len(buffer)
        else:
            rest.append(memoryview(buffer)[sent:] if sent else buffer)
            sent = 0
    return rest
