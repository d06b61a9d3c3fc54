"""Link: the interface between the algorithms over messages and the progress engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
"""A one-dimensional, contiguous array of a supported dtype."""

CHUNK_BYTES = 1 << 20
"""Bytes received before they are reduced. They would be in the cache still if they were fewer, but each piece is a
time to sleep and be woken, which costs more: 64 MiB among 4 ranks on 2 cores take a fifth less processor time than by
pieces of a quarter."""
Exchange = Any
"""Something that a Link has begun to send and receive."""


class Link(ABC):
    """Messages among the ranks of a group, during one call.

    Attributes:
        rank: this rank in the group.
        size: ranks in the group.
    """

    rank: int
    size: int

    @abstractmethod
    def all_exchange(
        self, payload: memoryview | bytes = b"", each: Sequence[memoryview | bytes] | None = None
    ) -> list[memoryview | bytes]:
        """Arrive at the call: send at most frames.SMALL bytes to every rank, and wait for every rank.

        Args:
            payload: sent to every rank.
            each: sent to each rank, by rank, where the payloads differ.

        Returns:
            Every rank's payload for this one, by rank.

        Raises:
            CollectiveMismatchError: the ranks did not make the same call.
        """

    @abstractmethod
    def via_root(
        self, payload: memoryview | bytes, decide: Callable[[list[memoryview | bytes]], memoryview | bytes]
    ) -> memoryview | bytes:
        """Arrive at the call via rank 0, which receives all payloads and sends its decision to every rank.

        Twice as many steps as ``all_exchange``, but 2 (size - 1) messages in place of size (size - 1).

        Args:
            payload: sent to rank 0, at most frames.SMALL bytes.
            decide: called at rank 0 with every rank's payload, by rank; returns at most frames.SMALL bytes.

        Returns:
            What ``decide`` returned at rank 0.

        Raises:
            CollectiveMismatchError: the ranks did not make the same call.
        """

    @abstractmethod
    def start(self, sends: Sequence[tuple[int, memoryview]], receives: Sequence[tuple[int, memoryview]]) -> Exchange:
        """Begin to send and receive, each with its rank; none of it may be touched before ``finish``.

        Between two ranks, messages of a call arrive in the order in which they were sent, and have the size that the
        receiver expects. Only after ``all_exchange``.
        """

    @abstractmethod
    def finish(self, exchange: Exchange) -> None:
        """Return when all of it has been sent and received."""

    def exchange(self, sends: Sequence[tuple[int, memoryview]], receives: Sequence[tuple[int, memoryview]]) -> None:
        """Send and receive at once; return when all is done."""
        self.finish(self.start(sends, receives))

    @abstractmethod
    def scratch(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Return memory for the rest of the call; the same for every call, so that it is made once."""

    def others(self) -> list[int]:
        """Return the other ranks, the next one first, so that not everyone turns to rank 0 at once."""
        return [(self.rank + step) % self.size for step in range(1, self.size)]


def pipelined(link: Link, count: int, start: Callable[[int], Exchange]) -> Iterator[int]:
    """Yield the number of each of ``count`` exchanges when it is done; the next one is under way by then.

    Args:
        link: the ranks.
        count: how many.
        start: begins the one with this number, and returns what ``Link.start`` did.
    """
    under_way = start(0) if count else None
    for number in range(count):
        following = start(number + 1) if number + 1 < count else None
        link.finish(under_way)
        yield number
        under_way = following


def as_bytes(array: Array) -> memoryview:
    """Return the bytes of an array, writable if it is."""
    return array.view(np.uint8).data


def shards(count: int, size: int) -> list[slice]:
    """Return ``size`` slices that split ``count`` elements evenly; the last ones may be shorter or empty."""
    share = -(-count // size)
    return [slice(min(rank * share, count), min((rank + 1) * share, count)) for rank in range(size)]


def chunks(count: int, piece: int) -> list[slice]:
    """Return slices of at most ``piece`` elements that cover ``count``; none for an empty array."""
    return [slice(begin, min(begin + piece, count)) for begin in range(0, count, piece)]
