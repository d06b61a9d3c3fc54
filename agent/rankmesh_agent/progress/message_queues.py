"""Queues of a group's messages that wait for their match: posted receives, and unexpected messages.

As in MPI, a message matches the receive that was posted first, and a receive the message that arrived first, of those
with the same tag and source, or any source. Each match takes one look-up, however long the queues are.
"""

from __future__ import annotations

import itertools
from bisect import insort
from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass

from rankmesh_agent.progress.framing import Transfer

ANY = -1
"""Source of a receive that matches messages from every rank."""
UNANNOUNCED = 0


@dataclass(eq=False, slots=True)
class Receive:
    """A posted receive; ``number`` counts them in their order."""

    source: int
    tag: int
    dtype: int
    view: memoryview
    transfer: Transfer
    number: int = 0

    def fits(self, dtype: int, nbytes: int) -> bool:
        """Return whether a message has the expected dtype and size."""
        return dtype == self.dtype and nbytes == len(self.view)


@dataclass(eq=False, slots=True)
class Message:
    """A message without a matching receive yet: whole (payload), or announced (id)."""

    source: int
    tag: int
    dtype: int
    nbytes: int
    id: int = UNANNOUNCED
    exposed: tuple[int, int] = (0, 0)
    payload: memoryview | bytes | None = None


class PostedReceives:
    """The receives that no message has matched yet."""

    def __init__(self) -> None:
        self.queues: dict[tuple[int, int], deque[Receive]] = {}
        self._numbers = itertools.count()

    def post(self, receive: Receive) -> None:
        """Add a receive behind all others."""
        receive.number = next(self._numbers)
        self.queues.setdefault((receive.source, receive.tag), deque()).append(receive)

    def restore(self, receive: Receive) -> None:
        """Add a receive again in its place."""
        queue = self.queues.setdefault((receive.source, receive.tag), deque())
        insort(queue, receive, key=lambda posted: posted.number)

    def first(self, source: int, tag: int) -> Receive | None:
        """Return the first receive that matches a message."""
        named, wild = self.queues.get((source, tag)), self.queues.get((ANY, tag))
        if named is None or wild is None:
            queue = named or wild
            return queue[0] if queue else None
        return min(named[0], wild[0], key=lambda posted: posted.number)

    def remove(self, receive: Receive) -> None:
        """Remove a receive."""
        queue = self.queues[receive.source, receive.tag]
        queue.remove(receive)
        if not queue:
            del self.queues[receive.source, receive.tag]

    def cancel(self, transfer: Transfer) -> bool:
        """Remove the receive of a transfer; return whether there was one."""
        for receive in itertools.chain.from_iterable(self.queues.values()):
            if receive.transfer is transfer:
                self.remove(receive)
                return True
        return False


class UnexpectedMessages:
    """The messages that have arrived and that no receive has matched yet."""

    def __init__(self) -> None:
        self.queues: dict[tuple[int, int], deque[Message]] = {}
        self._by_tag: dict[int, OrderedDict[Message, None]] = {}  # for receives from any source

    def __iter__(self) -> Iterator[Message]:
        return itertools.chain.from_iterable(self.queues.values())

    def add(self, message: Message) -> None:
        """Add a message behind all others."""
        self.queues.setdefault((message.source, message.tag), deque()).append(message)
        self._by_tag.setdefault(message.tag, OrderedDict())[message] = None

    def first(self, source: int, tag: int) -> Message | None:
        """Return the first message that matches a receive."""
        queue = self._by_tag.get(tag) if source == ANY else self.queues.get((source, tag))
        return next(iter(queue)) if queue else None

    def announced(self, source: int, number: int) -> Message | None:
        """Return the message that a rank has announced with an id."""
        return next((message for message in self if (message.source, message.id) == (source, number)), None)

    def remove(self, message: Message) -> None:
        """Remove a message."""
        queue, arrived = self.queues[message.source, message.tag], self._by_tag[message.tag]
        queue.remove(message)
        del arrived[message]
        if not queue:
            del self.queues[message.source, message.tag]
        if not arrived:
            del self._by_tag[message.tag]
