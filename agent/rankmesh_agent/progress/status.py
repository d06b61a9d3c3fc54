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
"""Seconds between reports in a large group."""
_MAX_WAITS = 100
"""Ranks in a status."""
_Entries = list[tuple[int, int, int, str, tuple[tuple[int, int], ...], str]]
"""The statuses of a frame, as JSON; the last member has the ranks as hexadecimal bits."""


class Status(NamedTuple):
    """A call that a rank has come to, or a message that it waits for.

    Attributes:
        group: id of the group.
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

    Args:
        group: id of the group.
        rank: this rank in the group.
        size: ranks in the group.
        send: sends a report to group ranks.

    Attributes:
        calls: the calls, by group rank; this rank's own once it has reported one.
        differing: the latest calls of which ranks know that others have made different ones, which later ones leave.
        latest: the highest number of all.
        oldest: the first number that other ranks need to hear of.
        seconds: time that a rank waits before it reports.
    """

    def __init__(self, group: int, rank: int, size: int, send: Callable[[Sequence[int], bytes], object]) -> None:
        self.calls: dict[int, Status] = {}
        self.differing: dict[int, Status] = {}
        self.latest = self.oldest = -1
        self._few = size <= FEW_RANKS
        self.seconds = max(_SECONDS, _SECONDS_EACH * size) if self._few else _SECONDS_LARGE
        self._group, self._rank, self._size = group, rank, size
        self._neighbours = neighbours(rank, size, FEW_RANKS)
        self._send = send
        self._unshared = False

    def report(self, seq: int, fingerprint: int, text: str = "") -> None:
        """Report this rank's call to the other ranks, unless they know; pass on what this rank has heard."""
        status = Status(self._group, seq, fingerprint, text)
        if self._add(self._rank, status):
            if self._few:
                self._send(self._neighbours, encode([(status, 1 << self._rank)]))
            else:
                self._unshared = True
        self.share()

    def share(self) -> None:
        """Report all calls to the neighbours, if there are new ones."""
        if self._unshared:
            self._unshared = False
            self._send(self._neighbours, self.encode())

    def encode(self) -> bytes:
        """Return the calls as bytes: the latest first, those without text before the others, the rarest texts first."""
        bare: dict[Status, int] = {}
        described: dict[Status, int] = {}
        for rank, status in [*self.calls.items(), *self.differing.items()]:
            if status.seq >= self.oldest:
                short = status._replace(text="")
                bare[short] = bare.get(short, 0) | 1 << rank
                if status.text:
                    described[status] = described.get(status, 0) | 1 << rank
        return encode(
            [
                *sorted(bare.items(), key=lambda item: -item[0].seq),
                *sorted(described.items(), key=lambda item: (-item[0].seq, item[1].bit_count())),
            ]
        )

    def merge(self, payload: memoryview | bytes) -> None:
        """Add the calls of another rank's report."""
        for status, ranks in decode(payload):
            for rank in range(self._size):
                if ranks >> rank & 1 and rank != self._rank and self._add(rank, status) and not self._few:
                    self._unshared = True

    def _add(self, rank: int, status: Status) -> bool:
        """Keep a rank's call if it is later than the one known, or has a text that was missing; return whether so."""
        calls = self.differing if status.fingerprint == DIFFERENT else self.calls
        known = calls.get(rank)
        if known is not None and (status.seq, bool(status.text)) <= (known.seq, bool(known.text)):
            return False
        calls[rank] = status
        self.latest = max(self.latest, status.seq)
        return True

    def of_others(self) -> dict[int, Status]:
        """Return the calls of the other ranks."""
        return {rank: status for rank, status in self.calls.items() if rank != self._rank}

    def missing(self, seq: int, arrived: Collection[int] = ()) -> list[int]:
        """Return the other ranks that have not come to a call.

        Args:
            seq: the call's number.
            arrived: ranks that have, as messages show.
        """
        come = {rank for calls in (self.calls, self.differing) for rank, status in calls.items() if status.seq >= seq}
        return [rank for rank in range(self._size) if rank not in come and rank not in arrived and rank != self._rank]

    def differs(self, seq: int, fingerprint: int) -> bool:
        """Return whether a rank makes another call of a number, or knows of one that does."""
        statuses = [*self.calls.values(), *self.differing.values()]
        return any(status.seq == seq and status.fingerprint != fingerprint for status in statuses)

    def undescribed(self, seq: int) -> list[int]:
        """Return the ranks that have not reported that the calls of a number differ."""
        found = self.differing
        return [rank for rank in range(self._size) if rank not in found or found[rank].seq < seq]

    def descriptions(self) -> list[str]:
        """Return the texts of the calls that differ, by rank; empty where one did not fit into a frame."""
        return [self.differing[rank].text if rank in self.differing else "" for rank in range(self._size)]
