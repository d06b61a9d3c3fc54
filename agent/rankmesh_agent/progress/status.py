"""Status of the ranks: the call that each rank of a group has come to, as far as a rank has heard, for errors of waits.

A rank that waits for long reports its call to the others. Of few ranks each reports its own to all. Of many, each
reports all that it has heard of to its neighbours in the overlay, and again when there is more, so that after some
log2 size reports every rank that waits knows which ranks are missing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

from rankmesh_agent.collectives.link import FEW_RANKS
from rankmesh_agent.wire import frames, json_text
from rankmesh_agent.wire.overlay import neighbours

DIFFERENT = 0
"""The fingerprint of a rank that knows that the ranks' calls differ; no call has it."""
_SECONDS = 0.05
"""Seconds after which a rank that waits reports its call."""
_SECONDS_EACH = 0.02
"""The same for each member of a small group: there are many such reports, and the ranks arrive further apart."""
_SECONDS_LARGE = 0.3
_MAX_WAITS = 100
_Entries = list[tuple[int, int, int, str, tuple[tuple[int, int], ...], str]]
"""The statuses of a frame, as JSON; the last member has the ranks as hexadecimal bits."""


class Status(NamedTuple):
    """A call that a rank has come to, or a message that it waits for.

    Attributes:
        seq: number of the call, -1 for a message.
        fingerprint: of the call, or DIFFERENT.
        text: the call in words; empty where only its number counts.
        waits_for: the ranks that it waits for, each with the number by which errors name it.
        members: ranks of the group; not in frames.
    """

    group: int
    seq: int
    fingerprint: int
    text: str
    waits_for: tuple[tuple[int, int], ...] = ()
    members: tuple[int, ...] = ()


def encode(statuses: Iterable[tuple[Status, int]]) -> bytes:
    """Return statuses, each with the ranks that have it as bits, as bytes: the first ones that fit into a frame."""
    encoded: list[bytes] = []
    left = frames.SMALL - 2
    for status, ranks in statuses:
        entry = json_text.encode((*status[:4], status.waits_for[:_MAX_WAITS], f"{ranks:x}"))
        if len(entry) < left:
            encoded.append(entry)
            left -= len(entry) + 1
    return b"[%b]" % b",".join(encoded)


def decode(payload: memoryview | bytes) -> list[tuple[Status, int]]:
    """Return statuses as ``encode`` got them, none if the payload cannot be read."""
    try:
        return [
            (Status(group, seq, fingerprint, text, waits_for), int(ranks, 16))
            for group, seq, fingerprint, text, waits_for, ranks in json_text.read(_Entries, bytes(payload))
        ]
    except (ValueError, TypeError):
        return []


class CallTable:
    """The latest call that each rank of a group has reported. All methods are called with the engine's lock held.

    Attributes:
        latest: the highest number of a call.
        oldest: the first number that other ranks need to hear of.
        seconds: time that a rank waits before it reports.
    """

    def __init__(self, group: int, rank: int, size: int, send: Callable[[Sequence[int], bytes], object]) -> None:
        self.latest = self.oldest = -1
        self._few = size <= FEW_RANKS
        self.seconds = max(_SECONDS, _SECONDS_EACH * size) if self._few else _SECONDS_LARGE
        self._group, self._rank, self._size = group, rank, size
        self._neighbours = neighbours(rank, size, FEW_RANKS)
        self._send = send
        self._unshared = False
        self._ranks: dict[Status, int] = {}
        """The ranks of each call, as bits: those of its text, and of the call without a text, which always fits."""

    def report(self, seq: int, fingerprint: int, text: str = "") -> None:
        """Report this rank's call to the other ranks, unless they know; pass on what this rank has heard."""
        status, own = Status(self._group, seq, fingerprint, text), 1 << self._rank
        if self._add(status._replace(text=""), own) | self._add(status, own):
            if self._few:
                self._send(self._neighbours, encode([(status, own)]))
            else:
                self._unshared = True
        self.share()

    def share(self) -> None:
        """Report all calls to the neighbours, if there are new ones."""
        if self._unshared:
            self._unshared = False
            self._send(self._neighbours, self.encode())

    def encode(self) -> bytes:
        """Return the calls as bytes: first those without text, the latest first; then the rarest texts first."""
        needed = [(status, ranks) for status, ranks in self._ranks.items() if status.seq >= self.oldest]
        return encode(sorted(needed, key=lambda item: (bool(item[0].text), -item[0].seq, item[1].bit_count())))

    def merge(self, payload: memoryview | bytes) -> None:
        """Add the calls of another rank's report."""
        for status, ranks in decode(payload):
            if self._add(status, ranks & ((1 << self._size) - 1 & ~(1 << self._rank))) and not self._few:
                self._unshared = True

    def _add(self, status: Status, ranks: int) -> bool:
        """Add a call of those of the ranks of which no later one is known; return whether there are any."""
        # A call that a rank knows to differ stays until this rank goes on, even if that rank is at the next such one.
        ranks &= ~self._ranks.get(status, 0)
        if not ranks:
            return False
        differs = status.fingerprint == DIFFERENT
        alike = [item for item in self._ranks.items() if (item[0].fingerprint == DIFFERENT) == differs]
        for known, others in alike:
            is_later = known.seq > status.seq and not differs
            if is_later or (known.seq == status.seq and bool(known.text) == bool(status.text)):
                ranks &= ~others
        if not ranks:
            return False
        first = self.oldest if differs else status.seq
        for known, others in alike:
            if known.seq < first:
                self._ranks[known] = others & ~ranks
                if not self._ranks[known]:
                    del self._ranks[known]
        self._ranks[status] = self._ranks.get(status, 0) | ranks
        self.latest = max(self.latest, status.seq)
        return True

    def of_others(self) -> dict[int, Status]:
        """Return the latest call of each other rank that has reported one."""
        calls = sorted(self._ranks, key=lambda status: (status.seq, bool(status.text)))
        found = {rank: call for call in calls if call.fingerprint != DIFFERENT for rank in self._of(self._ranks[call])}
        found.pop(self._rank, None)
        return found

    def missing(self, seq: int, arrived: Collection[int] = ()) -> list[int]:
        """Return the other ranks that have not come to a call."""
        come = 1 << self._rank
        for status, ranks in self._ranks.items():
            if status.seq >= seq:
                come |= ranks
        return [rank for rank in self._of(~come) if rank not in arrived]

    def differs(self, seq: int, fingerprint: int) -> bool:
        """Return whether a rank makes another call of a number, or knows of one that does."""
        return any(status.seq == seq and status.fingerprint != fingerprint for status in self._ranks)

    def descriptions(self, seq: int) -> dict[int, str]:
        """Return the texts of the ranks that know that the calls of a number differ; empty where one does not fit."""
        calls = sorted(call for call in self._ranks if call.fingerprint == DIFFERENT and call.seq == seq)
        return {rank: call.text for call in calls for rank in self._of(self._ranks[call])}

    def _of(self, ranks: int) -> list[int]:
        return [rank for rank in range(self._size) if ranks >> rank & 1]
