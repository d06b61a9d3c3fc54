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
"""Bytes that a rank receives before it reduces them. Fewer would still be in the cache, but each piece costs a sleep
and a wakeup, which cost more: with 64 MiB among 4 ranks on 2 cores, this size takes a fifth less processor time than
pieces of a quarter of it."""
Exchange = Any
"""Handle of the sends and receives that ``Link.start`` has begun."""


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
            payload: bytes for every rank.
            each: bytes for each rank, by rank, where the payloads differ.

        Returns:
            The payload from every rank, by rank.

        Raises:
            CollectiveMismatchError: the ranks did not make the same call.
        """

    @abstractmethod
    def via_root(
        self, payload: memoryview | bytes, decide: Callable[[list[memoryview | bytes]], memoryview | bytes]
    ) -> memoryview | bytes:
        """Arrive at the call via rank 0, which receives all payloads and sends its decision to every rank.

        This takes twice the steps of ``all_exchange``, but 2 (size - 1) messages in place of size (size - 1).

        Args:
            payload: bytes for rank 0, at most frames.SMALL.
            decide: callback of rank 0 that maps the payloads, by rank, to at most frames.SMALL bytes.

        Returns:
            The result of ``decide`` at rank 0.

        Raises:
            CollectiveMismatchError: the ranks did not make the same call.
        """

    @abstractmethod
    def start(self, sends: Sequence[tuple[int, memoryview]], receives: Sequence[tuple[int, memoryview]]) -> Exchange:
        """Begin sends and receives, each with the group rank of its peer; ``finish`` returns the buffers to the caller.

        The caller must have called ``all_exchange``. Between two ranks, messages of a call arrive in the order of the
        sends, and their sizes equal those of the receives.
        """

    @abstractmethod
    def finish(self, exchange: Exchange) -> None:
        """Wait until all sends and receives of an exchange are complete."""

    def exchange(self, sends: Sequence[tuple[int, memoryview]], receives: Sequence[tuple[int, memoryview]]) -> None:
        """Send and receive at the same time; return when both are complete."""
        self.finish(self.start(sends, receives))

    @abstractmethod
    def scratch(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Return memory for the rest of the call; every call reuses it."""

    def others(self) -> list[int]:
        """Return the other ranks, beginning with the successor, so that the ranks do not all address rank 0 first."""
        return [(self.rank + step) % self.size for step in range(1, self.size)]


def pipelined(link: Link, count: int, start: Callable[[int], Exchange]) -> Iterator[int]:
    """Yield the number of each of ``count`` exchanges when it is complete, after the next one has started.

    Args:
        link: messages among the ranks.
        count: number of exchanges.
        start: begins the exchange of a number and returns its handle, see ``Link.start``.
    """
    pending = start(0) if count else None
    for number in range(count):
        upcoming = start(number + 1) if number + 1 < count else None
        link.finish(pending)
        yield number
        pending = upcoming


def as_bytes(array: Array) -> memoryview:
    """Return the bytes of an array as a view, writable if the array is."""
    return array.view(np.uint8).data


def shards(count: int, size: int) -> list[slice]:
    """Return ``size`` slices that split ``count`` elements evenly; the last ones may be shorter or empty."""
    share = -(-count // size)
    return [slice(min(rank * share, count), min((rank + 1) * share, count)) for rank in range(size)]


def chunks(count: int, piece: int) -> list[slice]:
    """Return slices of at most ``piece`` elements that cover ``count`` elements; none for an empty array."""
    return [slice(begin, min(begin + piece, count)) for begin in range(0, count, piece)]
