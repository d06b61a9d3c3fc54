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
_SHARING_RANKS = 16
"""Of fewer ranks that share cores the pieces are longer, by as much as fewer of them come at once: each wakeup has a
cold cache there, and costs more than a part in a cache saves."""
FEW_RANKS = 16
"""Most ranks in a group of which every rank may address all others, which takes as many connections."""
Exchange = Any
"""Handle of the sends and receives that ``Link.start`` has begun."""


class Link(ABC):
    """Messages among the ranks of a group, during one call.

    Attributes:
        shares_cores: whether a host has more ranks than cores: then the number of all messages counts, not that of the
            steps. Equal at all ranks.
    """

    rank: int
    size: int
    shares_cores: bool = False

    @property
    def chunk_bytes(self) -> int:
        """Bytes that a rank receives from each other rank before it reduces them. Equal at all ranks."""
        return CHUNK_BYTES * max(1, _SHARING_RANKS // self.size) if self.shares_cores else CHUNK_BYTES

    @abstractmethod
    def arrive(self) -> None:
        """Arrive at the call, and wait for every rank.

        On shared cores by way of a binomial tree, in 2 (size - 1) messages and 2 log2 size steps; otherwise by
        dissemination, in log2 size steps of a message each: Hensgen, Finkel and Manber, Two algorithms for barrier
        synchronization, 1988. Few ranks of a DirectLink arrive in fewer steps.

        Raises:
            CallMismatchError: the ranks did not make the same call.
        """

    @abstractmethod
    def step(self, to: int | None, payload: memoryview | bytes, source: int | None) -> memoryview | bytes:
        """Send at most frames.SMALL bytes to one rank, and wait for the message of one rank.

        A rank that makes a step has found no call that differs from its own. So an algorithm that needs no other
        arrival has each rank receive, in a number of steps that is the same at all ranks, from ranks that have received
        from all the others.

        Args:
            to: group rank of the receiver, None for none in this step.
            source: group rank of the sender, None for none in this step.

        Returns:
            The payload received, empty without a source.

        Raises:
            CallMismatchError: the ranks did not make the same call.
        """

    @abstractmethod
    def start(self, sends: Sequence[tuple[int, memoryview]], receives: Sequence[tuple[int, memoryview]]) -> Exchange:
        """Begin sends and receives, each with the group rank of its peer; ``finish`` returns the buffers to the caller.

        The caller must have arrived. Between two ranks, messages of a call arrive in the order of the
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


class DirectLink(Link):
    """A Link whose ranks may all address each other, for the algorithms of few ranks."""

    @abstractmethod
    def via_root(
        self,
        root: int,
        payload: memoryview | bytes,
        respond: Callable[[list[memoryview | bytes]], memoryview | bytes | list[memoryview | bytes]],
    ) -> memoryview | bytes:
        """Arrive at the call by way of one rank, which receives all payloads and responds to every rank.

        For few ranks: 2 (size - 1) messages, the fewest of all arrivals, of which the root sends half.

        Args:
            payload: bytes for the root, at most frames.SMALL.
            respond: callback of the root that maps the payloads, by rank, to the response, or to those by rank, of at
                most frames.SMALL bytes.

        Returns:
            The response to this rank.

        Raises:
            CallMismatchError: the ranks did not make the same call.
        """

    @abstractmethod
    def all_exchange(
        self, payload: memoryview | bytes = b"", each: Sequence[memoryview | bytes] | None = None
    ) -> list[memoryview | bytes]:
        """Arrive at the call: send at most frames.SMALL bytes to every rank, and wait for every rank.

        For few ranks: size (size - 1) messages.

        Args:
            payload: bytes for every rank.
            each: bytes for each rank, by rank, where the payloads differ.

        Returns:
            The payload from every rank, by rank.

        Raises:
            CallMismatchError: the ranks did not make the same call.
        """

    @abstractmethod
    def arrive_with(
        self, sends: Sequence[tuple[int, memoryview]], receives: Sequence[tuple[int, memoryview]]
    ) -> Exchange:
        """Arrive at the call, as all_exchange does, with the first messages of an exchange; see Link.start.

        The data is on its way before any rank knows whether the others make the same call: an exchange and an arrival
        in one step. The buffers must not be those of the caller's results, and have at most ``chunk_bytes``.

        Args:
            sends: a message for every other rank, which may be empty.
            receives: a buffer for the message of every other rank.

        Raises:
            CallMismatchError: the ranks did not make the same call.
        """


def pipelined(link: Link, count: int, start: Callable[[int], Exchange]) -> Iterator[int]:
    """Yield the number of each of ``count`` exchanges when it is complete, after ``start`` has begun the next one."""
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
