"""Point-to-point messages of one group: matched to receives by (source, tag), in the order they were sent.

::

    up to the eager limit      EAGER ─────────────▶            kept until a receive matches, then CREDIT goes back
    above, or out of credit    RTS ───────────────▶            kept until a receive matches
                                   ◀──────────── CTS
                               BULK ──────────────▶            straight into the receiver's array
    where memory can be read   RTS with address ──▶            kept until a receive matches, which copies the array
                                   ◀──────────── DONE          or, if that fails or the offer was taken back, CTS

A receiver that does not receive holds at most WINDOW bytes a sender, then only announcements: a slow receiver bounds
memory. A receive with another dtype or size than its message is refused, and the sender is told: where its send has
returned already, as that of an eager message has, its next message to or from that rank raises. Ranks are global here;
every method but wait and progress is called with the mesh's lock held.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from rankmesh_agent.net.deadline import Deadline
from rankmesh_agent.progress.engine import ProgressEngine
from rankmesh_agent.progress.framing import RemoteRead, Transfer
from rankmesh_agent.wire import dtypes, frames
from rankmesh_agent.wire.errors import DistBackendError
from rankmesh_agent.wire.frames import Header, Opcode

WINDOW = 1 << 22
"""Bytes of eager messages a sender may have in the receiver's queue."""
_MIN_COST = 1 << 10
"""What a message counts at least: empty ones take memory too."""
_EAGER = 0
"""Number of a message that was not announced."""
ANY = -1
"""Source of a receive that takes from every rank."""


@dataclass(eq=False, slots=True)
class _Receive:
    source: int
    tag: int
    dtype: int
    view: memoryview
    transfer: Transfer

    def fits(self, dtype: int, nbytes: int) -> bool:
        """Whether a message has the dtype and size that are expected."""
        return dtype == self.dtype and nbytes == len(self.view)

    def refusal(self, rank: int, dtype: int, nbytes: int) -> str:
        """Say why a message does not fit."""
        return mismatch_reason(rank, self.tag, (dtype, nbytes), (self.dtype, len(self.view)))


@dataclass(eq=False, slots=True)
class _Message:
    """A message nobody has asked for yet: whole (payload), or announced (id)."""

    source: int
    tag: int
    dtype: int
    nbytes: int
    id: int = _EAGER
    offered: tuple[int, int] = (0, 0)
    payload: memoryview | bytes | None = None


@dataclass(eq=False, slots=True)
class _Announced:
    rank: int
    dtype: int
    tag: int
    view: memoryview
    transfer: Transfer


@dataclass(eq=False)
class _Account:
    """Credit between this rank and one peer, in each direction."""

    available: int = WINDOW
    owed: int = 0


@dataclass(eq=False)
class MessageMatcher:
    """One rank's side of a group's messages."""

    engine: ProgressEngine
    group: int
    rank_number: Callable[[int], int]
    receives: list[_Receive] = field(default_factory=list)
    unexpected: deque[_Message] = field(default_factory=deque)
    announced: dict[int, _Announced] = field(default_factory=dict)
    cleared: dict[tuple[int, int], _Receive] = field(default_factory=dict)
    accounts: dict[int, _Account] = field(default_factory=dict)
    ids: itertools.count[int] = field(default_factory=lambda: itertools.count(1))
    refusals: dict[int, DistBackendError] = field(default_factory=dict)

    # What the caller asks for

    def send(self, rank: int, view: memoryview, dtype: int, tag: int) -> Transfer:
        """Begin to send ``view`` to a rank; it must not change until the transfer is done.

        Raises:
            DistBackendError: the rank refused an earlier message.
        """
        self.raise_refusal(rank)
        transfer = Transfer()
        account = self._account(rank)
        cost = max(len(view), _MIN_COST)
        if len(view) <= self.engine.eager_limit and cost <= account.available:
            account.available -= cost
            header = frames.encode(Opcode.EAGER, dtype, self.group, self.engine.epoch, 0, 0, tag, len(view))
            self.engine.send(rank, [header, view], transfer)
        else:
            number = next(self.ids)
            self.announced[number] = _Announced(rank, dtype, tag, view, transfer)
            address, generation = self.engine.expose(rank, view) if len(view) else (0, 0)
            self.engine.send(rank, [self._announcement(dtype, tag, number, len(view), address, generation)])
        return transfer

    def receive(self, source: int, view: memoryview, dtype: int, tag: int) -> Transfer:
        """Begin to receive into ``view`` from a rank, or from ANY.

        Raises:
            DistBackendError: the rank refused an earlier message.
        """
        self.raise_refusal(source)
        wanted = _Receive(source, tag, dtype, view, Transfer())
        if not self.unexpected or not self._match(wanted):
            self.receives.append(wanted)
        return wanted.transfer

    def cancel(self, transfer: Transfer) -> bool:
        """Undo a transfer that has not begun; False if data may be on its way."""
        if transfer.done:
            return True
        if not self._take_back(transfer):
            return False
        transfer.error = DistBackendError("this message was given up before, nobody waits for it any more")
        transfer.done = True
        return True

    def _take_back(self, transfer: Transfer) -> bool:
        for posted in self.receives:
            if posted.transfer is transfer:
                self.receives.remove(posted)
                return True
        for number, announced in self.announced.items():
            if announced.transfer is transfer:
                del self.announced[number]
                self.engine.revoke(announced.rank)
                self.engine.send(announced.rank, [self._frame(Opcode.WITHDRAW, seq=number)])
                return True
        queued = self.engine.cancel_send(transfer)
        if queued is None:
            return False
        rank, header = queued
        if header.opcode is Opcode.EAGER:
            self._account(rank).available += max(header.length, _MIN_COST)
        else:
            self.engine.send(rank, [self._frame(Opcode.WITHDRAW, seq=header.seq)])
        return True

    def progress_in_background(self, transfer: Transfer) -> None:
        """See to it that a message moves while nobody waits for it."""
        self.engine.progress_in_background(self.group, transfer)

    def refuse(self, rank: int, why: str) -> None:
        """Have the next message of a rank to or from this one fail, as its last was not what the receive expects."""
        self._refuse(rank, _EAGER, why)

    def raise_refusal(self, rank: int) -> None:
        """Raise why a rank refused an earlier message, if it did; once."""
        if self.refusals:
            error = self.refusals.pop(rank, None)
            if error is not None:
                raise error

    # Without the lock

    def wait(self, ready: Callable[[], bool], deadline: Deadline) -> bool:
        """Wait until ``ready()``: see ProgressEngine.wait."""
        return self.engine.wait(ready, deadline)

    def progress(self) -> None:
        """Move what can be moved now."""
        self.engine.progress()

    # What comes from the peers

    def buffer_for(self, rank: int, header: Header) -> memoryview | None:
        """Return where a BULK payload goes, or that of an EAGER frame that did not come as a whole."""
        if header.opcode is Opcode.EAGER:
            return self._place_eager(rank, header)
        cleared = self.cleared.get((rank, header.seq))
        return None if cleared is None else cleared.view

    def on_frame(self, rank: int, header: Header, payload: memoryview | bytes) -> None:
        """Take a frame."""
        match header.opcode:
            case Opcode.EAGER:
                placed = self.cleared.pop((rank, _EAGER), None) if len(payload) < header.length else None
                if placed is not None:
                    self._give_credit(rank, header.length)
                    placed.transfer.done = True
                    return
                self._arrive(_Message(rank, header.tag, header.dtype, header.length, payload=payload))
            case Opcode.RTS:
                offered = header.fingerprint, header.part
                self._arrive(_Message(rank, header.tag, header.dtype, header.total, header.seq, offered))
            case Opcode.CTS:
                announced = self.announced.pop(header.seq, None)
                if announced is not None:
                    self._send_bulk(rank, header.seq, announced)
            case Opcode.BULK:
                self.cleared.pop((rank, header.seq)).transfer.done = True
            case Opcode.DONE:
                announced = self.announced.pop(header.seq, None)
                if announced is not None:
                    announced.transfer.done = True
            case Opcode.CREDIT:
                account = self._account(rank)
                account.available = min(WINDOW, account.available + header.total)
            case Opcode.REFUSE:
                self._refused(rank, header.seq, bytes(payload).decode(errors="replace"))
            case Opcode.WITHDRAW:
                self._withdrawn(rank, header.seq)

    def _send_bulk(self, rank: int, number: int, announced: _Announced) -> None:
        view = announced.view
        header = self._frame(Opcode.BULK, dtype=announced.dtype, seq=number, tag=announced.tag, length=len(view))
        self.engine.send(rank, [header, view], announced.transfer)

    def _place_eager(self, rank: int, header: Header) -> memoryview | None:
        for posted in self.receives:
            if posted.tag == header.tag and posted.source in (ANY, rank):
                if not posted.fits(header.dtype, header.length):
                    return None  # to be refused when it is here
                self.receives.remove(posted)
                posted.transfer.source = rank
                self.cleared[rank, _EAGER] = posted
                return posted.view
        return None

    def _match(self, wanted: _Receive) -> bool:
        for message in self.unexpected:
            if message.tag == wanted.tag and wanted.source in (ANY, message.source):
                self.unexpected.remove(message)
                self._take(message, wanted)
                return True
        return False

    def _arrive(self, message: _Message) -> None:
        source, tag = message.source, message.tag
        for place, posted in enumerate(self.receives):
            if posted.tag == tag and (posted.source == source or posted.source == ANY):
                del self.receives[place]
                self._take(message, posted)
                return
        self.unexpected.append(message)

    def _take(self, message: _Message, wanted: _Receive) -> None:
        transfer = wanted.transfer
        transfer.source = message.source
        fits = wanted.fits(message.dtype, message.nbytes)
        if message.payload is not None:
            self._give_credit(message.source, message.nbytes)
            if fits:
                wanted.view[:] = message.payload
        if not fits:
            source = self.rank_number(message.source)
            refusal = wanted.refusal(source, message.dtype, message.nbytes)
            self._refuse(message.source, message.id, refusal)
            transfer.error = DistBackendError(refusal, ranks=[source])
        elif message.payload is None:
            self.cleared[message.source, message.id] = wanted
            if message.offered[0]:
                then = partial(self._fetched, message.source, message.id)
                fetch = RemoteRead(self.group, message.id, message.offered, wanted.view, then)
                self.engine.start_remote_read(message.source, fetch)
            else:
                self.engine.send(message.source, [self._frame(Opcode.CTS, seq=message.id)])
            return
        transfer.done = True

    def _fetched(self, rank: int, number: int, good: bool) -> None:
        """The array has been copied from the sender's memory; or not, then it is to send it."""
        if good:
            self.cleared.pop((rank, number)).transfer.done = True
        self.engine.send(rank, [self._frame(Opcode.DONE if good else Opcode.CTS, seq=number)])

    def _refused(self, rank: int, number: int, why: str) -> None:
        refuser = self.rank_number(rank)
        error = DistBackendError(f"rank {refuser} refused the message: {why}", ranks=[refuser])
        announced = self.announced.pop(number, None)
        if announced is not None:
            announced.transfer.error = error
            announced.transfer.done = True
        elif number == _EAGER:
            self.refusals.setdefault(rank, error)

    def _withdrawn(self, rank: int, number: int) -> None:
        """A message is not coming; the receive that was to take it waits for the next."""
        self.unexpected = deque(m for m in self.unexpected if (m.source, m.id) != (rank, number))
        waiting = self.cleared.pop((rank, number), None)
        self.engine.cancel_remote_read(rank, self.group, number)
        if waiting is not None and not self._match(waiting):
            self.receives.insert(0, waiting)

    def _refuse(self, rank: int, number: int, why: str) -> None:
        payload = why.encode()
        self.engine.send(rank, [self._frame(Opcode.REFUSE, seq=number, length=len(payload)), payload])

    def _give_credit(self, rank: int, nbytes: int) -> None:
        account = self._account(rank)
        account.owed += max(nbytes, _MIN_COST)
        if account.owed >= WINDOW // 4:
            self.engine.send(rank, [self._frame(Opcode.CREDIT, total=account.owed)])
            account.owed = 0

    def _account(self, rank: int) -> _Account:
        account = self.accounts.get(rank)
        if account is None:
            account = self.accounts[rank] = _Account()
        return account

    def _announcement(self, dtype: int, tag: int, number: int, nbytes: int, address: int, generation: int) -> bytes:
        return frames.encode(
            Opcode.RTS,
            dtype=dtype,
            group=self.group,
            epoch=self.engine.epoch,
            part=generation,
            seq=number,
            tag=tag,
            fingerprint=address,
            total=nbytes,
        )

    def _frame(
        self, opcode: Opcode, *, dtype: int = dtypes.NONE, seq: int = 0, tag: int = 0, length: int = 0, total: int = 0
    ) -> bytes:
        return frames.encode(
            opcode, dtype=dtype, group=self.group, epoch=self.engine.epoch, seq=seq, tag=tag, length=length, total=total
        )


def mismatch_reason(rank: int, tag: int, sent: tuple[int, int], expected: tuple[int, int]) -> str:
    """Say why a message of a rank is refused: dtype, as a wire code, and bytes of the message and of the receive."""
    return (
        f"rank {rank} sent {_described(*sent)} with tag {tag}, but the receive expects {_described(*expected)}: sizes "
        "and dtypes must be equal on both sides"
    )


def _described(dtype: int, nbytes: int) -> str:
    itemsize = dtypes.FROM_CODE[dtype].itemsize if dtype in dtypes.FROM_CODE else 1
    return f"{dtypes.name_of(dtype)}[{nbytes // itemsize}]"
