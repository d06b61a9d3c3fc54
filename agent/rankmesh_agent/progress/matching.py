"""Point-to-point messages of one group: matched to receives by (source, tag), in the order they were sent.

::

    up to the eager limit      EAGER ─────────────▶            queued until a receive matches, then CREDIT goes back
    above, or out of credit    RTS ───────────────▶            queued until a receive matches
                                   ◀──────────── CTS
                               BULK ──────────────▶            directly into the receiver's array
    where memory can be read   RTS with address ──▶            queued until a receive matches, which copies the array
                                   ◀──────────── DONE          or, if that fails or the exposure was revoked, CTS
    both sides wait for it     RTS, CTS, BULK                  each the next frame expected, no other one is looked for

    to this rank itself        announced without a frame      a receive that matches copies the array at once

A receiver without a matching receive holds at most WINDOW bytes from each sender, then only announcements (RTS), at
most MAX_ANNOUNCED: its memory is bounded, and a sender that exceeds these bounds is disconnected. A receive whose dtype
or size differs from the message's raises at both ends: the receiver sends a REFUSE. The send of an eager message has
returned by then: the group ends, and the sender's next call raises the error. Ranks are numbered as in the engine; all
methods but ``wait`` and ``progress`` are called with the engine's lock held.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from rankmesh_agent.native import core
from rankmesh_agent.net.deadline import Deadline
from rankmesh_agent.progress.engine import ProgressEngine
from rankmesh_agent.progress.framing import RemoteRead, Transfer
from rankmesh_agent.progress.message_queues import (
    ANY,
    UNANNOUNCED,
    Message,
    PostedReceives,
    Receive,
    UnexpectedMessages,
)
from rankmesh_agent.wire import dtypes, frames
from rankmesh_agent.wire.errors import DistBackendError, ProtocolError
from rankmesh_agent.wire.frames import Header, Opcode

WINDOW = 1 << 22
"""Maximum bytes of eager messages from one sender in the receiver's queue."""
MAX_ANNOUNCED = 1 << 18
"""Maximum number of announcements of one sender in the receiver's queue."""
_MIN_COST = 1 << 10
"""Minimum credit of a message, since an empty one occupies memory, too."""
_EAGER, _RTS, _CTS, _BULK = Opcode.EAGER, Opcode.RTS, Opcode.CTS, Opcode.BULK  # read off once, see communicator
_EMPTY = memoryview(bytearray())
_MAX_REASON_BYTES = 1 << 10


@dataclass(eq=False, slots=True)
class _AnnouncedSend:
    rank: int
    dtype: int
    tag: int
    view: memoryview
    transfer: Transfer


class _Credit(object if core is None else core.Credit):  # type: ignore[misc]  # of available and unreturned
    """Flow control with one peer: credit for messages to it, and counts of its messages in the queue."""

    def __init__(self) -> None:
        self.available = WINDOW
        self.unreturned = self.queued = self.announced = 0


@dataclass(eq=False)
class MessageMatcher:
    """One rank's end of the messages of a group; ``on_misfit`` ends it because of an eager message."""

    engine: ProgressEngine
    group: int
    global_rank: Callable[[int], int]
    on_misfit: Callable[[str], None]
    receives: PostedReceives = field(default_factory=PostedReceives)
    unexpected: UnexpectedMessages = field(default_factory=UnexpectedMessages)
    announced: dict[tuple[int, int], _AnnouncedSend] = field(default_factory=dict)
    cleared: dict[tuple[int, int], Receive] = field(default_factory=dict)
    credits: defaultdict[int, _Credit] = field(default_factory=lambda: defaultdict(_Credit))
    ids: defaultdict[int, itertools.count[int]] = field(default_factory=lambda: defaultdict(lambda: itertools.count(1)))
    latest: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))
    """The id of each rank's latest announcement."""

    # Calls

    def send(self, rank: int, view: memoryview, dtype: int, tag: int) -> Transfer:
        """Begin to send ``view`` to a rank; the caller must not change it until the transfer is done."""
        transfer = Transfer()
        if rank == self.engine.rank:
            number = self._announce(rank, view, dtype, tag, transfer)
            self._on_message(Message(rank, tag, dtype, len(view), number))
            return transfer
        credit = self.credits[rank]
        cost = max(len(view), _MIN_COST)
        if len(view) <= self.engine.eager_limit and cost <= credit.available:
            credit.available -= cost
            header = frames.encode(_EAGER, dtype, self.group, self.engine.epoch, 0, 0, tag, len(view))
            self.engine.send(rank, [header, view], transfer)
        else:
            number = self._announce(rank, view, dtype, tag, transfer)
            address, generation = self.engine.expose(rank, view) if len(view) else (0, 0)
            request = self._frame(
                Opcode.RTS, dtype=dtype, part=generation, seq=number, tag=tag, fingerprint=address, total=len(view)
            )
            self.engine.send(rank, [request])
        return transfer

    def send_soon(self, rank: int, view: memoryview, dtype: int, tag: int) -> Transfer:
        """Send as ``send`` does, but carry a long message through shared memory, if its receiver waits for it."""
        engine, peer, nbytes = self.engine, self.engine.rings.get(rank), len(view)
        if peer is None or nbytes <= engine.eager_limit or not peer.connection.streams(nbytes):
            return self.send(rank, view, dtype, tag)
        transfer = Transfer()
        number = self._announce(rank, view, dtype, tag, transfer)
        engine.send(rank, [frames.encode(_RTS, dtype, self.group, engine.epoch, 0, number, tag, 0, 0, nbytes)])
        bulk = frames.encode(_BULK, dtype, self.group, engine.epoch, 0, number, tag, nbytes)
        if engine.take(rank, self._frame(_CTS, seq=number), _EMPTY):
            self.announced.pop((rank, number), None)
            engine.send(rank, [bulk, view], transfer)
        return transfer

    def _announce(self, rank: int, view: memoryview, dtype: int, tag: int, transfer: Transfer) -> int:
        """Keep a message until its receiver has it, or asks for it; return its id."""
        number = next(self.ids[rank])
        self.announced[rank, number] = _AnnouncedSend(rank, dtype, tag, view, transfer)
        return number

    def receive(self, source: int, view: memoryview, dtype: int, tag: int) -> Transfer:
        """Begin to receive into ``view`` from a rank, or from ANY."""
        wanted = Receive(source, tag, dtype, view, Transfer())
        if not self._match(wanted):
            self.receives.post(wanted)
            if self.engine.on_demand and source != ANY:
                self.engine.connect((source,))
        return wanted.transfer

    def receive_soon(self, source: int, view: memoryview, dtype: int, tag: int) -> Transfer:
        """Receive as ``receive`` does, but wait a moment for a message that may come next."""
        if self.unexpected.first(source, tag) is None and self.receives.first(source, tag) is None:
            if len(view) > self.engine.eager_limit:
                return self._take_long(source, view, dtype, tag) or self.receive(source, view, dtype, tag)
            header = frames.encode(_EAGER, dtype, self.group, self.engine.epoch, 0, 0, tag, len(view))
            if self.engine.take(source, header, view):
                if self._return_credit(source, len(view)):
                    self.engine.poll_once(0)  # as the compiled core takes the other messages without a poll
                transfer = Transfer()
                transfer.source, transfer.done = source, True
                return transfer
        return self.receive(source, view, dtype, tag)

    def _take_long(self, source: int, view: memoryview, dtype: int, tag: int) -> Transfer | None:
        """Receive a long message that ``send_soon`` announces next; None if another frame comes, or none."""
        engine, number, nbytes = self.engine, self.latest[source] + 1, len(view)
        request = frames.encode(_RTS, dtype, self.group, engine.epoch, 0, number, tag, 0, 0, nbytes)
        clear = self._frame(_CTS, seq=number)
        bulk = frames.encode(_BULK, dtype, self.group, engine.epoch, 0, number, tag, nbytes)
        wanted = Receive(source, tag, dtype, view, Transfer())
        if not engine.take(source, request, _EMPTY):
            return None
        engine.send(source, [clear])
        self.latest[source], self.cleared[source, number], wanted.transfer.source = number, wanted, source
        if engine.take(source, bulk, view):
            self.cleared.pop((source, number), None)
            wanted.transfer.done = True
        return wanted.transfer

    def cancel(self, transfer: Transfer) -> bool:
        """Cancel a transfer that has not begun; return False if its bytes may be in flight."""
        if transfer.done:
            return True
        if not self._cancel_transfer(transfer):
            return False
        transfer.error = DistBackendError("this message was cancelled before")
        transfer.done = True
        return True

    def _cancel_transfer(self, transfer: Transfer) -> bool:
        if self.receives.cancel(transfer):
            return True
        for (rank, number), announced in self.announced.items():
            if announced.transfer is transfer:
                del self.announced[rank, number]
                if announced.rank == self.engine.rank:
                    self._on_withdraw(announced.rank, number)
                    return True
                self.engine.revoke(announced.rank)
                self.engine.send(announced.rank, [self._frame(Opcode.WITHDRAW, seq=number)])
                return True
        queued = self.engine.cancel_send(transfer)
        if queued is None:
            return False
        rank, header = queued
        if header.opcode is Opcode.EAGER:
            self.credits[rank].available += max(header.length, _MIN_COST)
        else:
            self.engine.send(rank, [self._frame(Opcode.WITHDRAW, seq=header.seq)])
        return True

    def progress_in_background(self, transfer: Transfer) -> None:
        """Let the background thread make progress on a message."""
        self.engine.background.add(self.group, transfer)

    def refuse(self, rank: int, why: str, number: int = UNANNOUNCED) -> None:
        """Refuse a message of a rank that does not fit."""
        if number == UNANNOUNCED:
            self.on_misfit(why)
        elif rank == self.engine.rank:
            self._on_refuse(rank, number, why)
        else:
            payload = why.encode()
            self.engine.send(rank, [self._frame(Opcode.REFUSE, seq=number, length=len(payload)), payload])

    # Without the lock

    def wait(self, ready: Callable[[], bool], deadline: Deadline) -> bool:
        """Wait until ``ready()``: see ProgressEngine.wait."""
        return self.engine.wait(ready, deadline)

    def progress(self) -> None:
        """Move the bytes that can be moved now."""
        self.engine.progress()

    # Received frames

    def buffer_for(self, rank: int, header: Header) -> memoryview | None:
        """Return the buffer of a BULK payload, or of an EAGER payload that has arrived only in part."""
        if header.opcode is Opcode.EAGER:
            return self._eager_buffer(rank, header)
        cleared = self.cleared.get((rank, header.seq))
        return None if cleared is None else cleared.view

    def on_frame(self, rank: int, header: Header, payload: memoryview | bytes) -> None:
        """Handle a received frame."""
        match header.opcode:
            case Opcode.EAGER:
                placed = self.cleared.pop((rank, UNANNOUNCED), None) if len(payload) < header.length else None
                if placed is not None:
                    self._return_credit(rank, header.length)
                    placed.transfer.done = True
                    return
                message = Message(rank, header.tag, header.dtype, header.length, payload=payload)
                self._on_message(message)
            case Opcode.RTS:
                self.latest[rank] = header.seq
                exposed = header.fingerprint, header.part
                self._on_message(Message(rank, header.tag, header.dtype, header.total, header.seq, exposed))
            case Opcode.CTS:
                announced = self.announced.pop((rank, header.seq), None)
                if announced is not None:
                    view = announced.view
                    bulk = self._frame(
                        _BULK, dtype=announced.dtype, seq=header.seq, tag=announced.tag, length=len(view)
                    )
                    self.engine.send(rank, [bulk, view], announced.transfer)
            case Opcode.BULK:
                self.cleared.pop((rank, header.seq)).transfer.done = True
            case Opcode.DONE:
                announced = self.announced.pop((rank, header.seq), None)
                if announced is not None:
                    announced.transfer.done = True
            case Opcode.CREDIT:
                credit = self.credits[rank]
                credit.available = min(WINDOW, credit.available + header.total)
            case Opcode.REFUSE:
                reason = bytes(payload[:_MAX_REASON_BYTES]).decode(errors="replace")
                self._on_refuse(rank, header.seq, reason)
            case Opcode.WITHDRAW:
                self._on_withdraw(rank, header.seq)

    def _eager_buffer(self, rank: int, header: Header) -> memoryview | None:
        posted = self.receives.first(rank, header.tag)
        if posted is None or not posted.fits(header.dtype, header.length):
            return None  # one that does not fit is refused once it has arrived
        self.receives.remove(posted)
        posted.transfer.source = rank
        self.cleared[rank, UNANNOUNCED] = posted
        return posted.view

    def _match(self, wanted: Receive) -> bool:
        message = self.unexpected.first(wanted.source, wanted.tag)
        if message is None:
            return False
        self.unexpected.remove(message)
        self._count_queued(message, -1)
        self._deliver(message, wanted)
        return True

    def _on_message(self, message: Message) -> None:
        posted = self.receives.first(message.source, message.tag)
        if posted is not None:
            self.receives.remove(posted)
            self._deliver(message, posted)
            return
        self.unexpected.add(message)
        credit = self._count_queued(message, 1)
        if credit.queued > WINDOW or credit.announced > MAX_ANNOUNCED:
            raise ProtocolError(
                f"rank {self.global_rank(message.source)} sent more messages than a receiver holds: {credit.queued} "
                f"bytes of eager messages, at most {WINDOW} are allowed, and {credit.announced} announcements, at most "
                f"{MAX_ANNOUNCED}"
            )

    def _count_queued(self, message: Message, sign: int) -> _Credit:
        """Count a message that comes into the queue or leaves it; return the counts of its sender."""
        credit = self.credits[message.source]
        if message.payload is None:
            credit.announced += sign
        else:
            credit.queued += sign * max(message.nbytes, _MIN_COST)
        return credit

    def _deliver(self, message: Message, wanted: Receive) -> None:
        transfer = wanted.transfer
        transfer.source = message.source
        fits = wanted.fits(message.dtype, message.nbytes)
        if message.payload is not None:
            self._return_credit(message.source, message.nbytes)
            if fits:
                wanted.view[:] = message.payload
        if not fits:
            source = self.global_rank(message.source)
            sent, expected = (message.dtype, message.nbytes), (wanted.dtype, len(wanted.view))
            mismatch = mismatch_reason(source, wanted.tag, sent, expected)
            self.refuse(message.source, mismatch, message.id)
            transfer.error = DistBackendError(mismatch)
        elif message.source == self.engine.rank:
            announced = self.announced.pop((message.source, message.id))
            wanted.view[:] = announced.view
            announced.transfer.done = True
        elif message.payload is None:
            self.cleared[message.source, message.id] = wanted
            if message.exposed[0]:
                on_done = partial(self._on_remote_read, message.source, message.id)
                remote_read = RemoteRead(self.group, message.id, message.exposed, wanted.view, on_done)
                self.engine.start_remote_read(message.source, remote_read)
            else:
                self.engine.send(message.source, [self._frame(Opcode.CTS, seq=message.id)])
            return
        transfer.done = True

    def _on_remote_read(self, rank: int, number: int, valid: bool) -> None:
        """Acknowledge a message that was read from the sender's memory; if the read failed, request its BULK."""
        read = self.cleared.pop((rank, number), None) if valid else None
        if read is not None:
            read.transfer.done = True
        self.engine.send(rank, [self._frame(Opcode.DONE if valid else Opcode.CTS, seq=number)])

    def _on_refuse(self, rank: int, number: int, why: str) -> None:
        announced = self.announced.pop((rank, number), None)
        if announced is not None:
            announced.transfer.error = DistBackendError(f"rank {self.global_rank(rank)} refused the message: {why}")
            announced.transfer.done = True

    def _on_withdraw(self, rank: int, number: int) -> None:
        """Drop a withdrawn message; its receive waits for the next message."""
        message = self.unexpected.announced(rank, number)
        if message is not None:
            self.unexpected.remove(message)
            self._count_queued(message, -1)
        waiting = self.cleared.pop((rank, number), None)
        self.engine.cancel_remote_read(rank, self.group, number)
        if waiting is not None and not self._match(waiting):
            self.receives.restore(waiting)

    def _return_credit(self, rank: int, nbytes: int) -> bool:
        credit = self.credits[rank]
        credit.unreturned += max(nbytes, _MIN_COST)
        if credit.unreturned < WINDOW // 4:
            return False
        self.engine.send(rank, [self._frame(Opcode.CREDIT, total=credit.unreturned)])
        credit.unreturned = 0
        return True

    def _frame(self, opcode: Opcode, **fields: int) -> bytes:
        return frames.encode(opcode, group=self.group, epoch=self.engine.epoch, **fields)


def mismatch_reason(rank: int, tag: int, sent: tuple[int, int], expected: tuple[int, int]) -> str:
    """Return the reason for a refusal, from dtype (wire code) and bytes of the message and of the receive."""
    return (
        f"rank {rank} sent {_described(*sent)} with tag {tag}, but the receive expects {_described(*expected)}: sizes "
        "and dtypes must be equal on both sides"
    )


def _described(dtype: int, nbytes: int) -> str:
    itemsize = dtypes.FROM_CODE[dtype].itemsize if dtype in dtypes.FROM_CODE else 1
    return f"{dtypes.name_of(dtype)}[{nbytes // itemsize}]"
