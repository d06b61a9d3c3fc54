"""The log of what happened, for whoever watches: numbered, bounded, and without a buffer a listener."""

from __future__ import annotations

import contextlib
import itertools
import json
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

from rankmesh_agent.wire.errors import DistNetworkError

EventKind = Literal[
    "rank-joining",
    "world-complete",
    "rank-suspect",
    "rank-alive",
    "rank-failed",
    "rank-left",
    "group-made",
    "group-failed",
    "group-ended",
    "agent-registered",
    "agent-leased",
    "agent-freed",
    "agent-lost",
]
"""What may happen."""

KEPT_EVENTS = 1000
"""How many events are kept."""
MAX_LISTENERS = 100
"""How many may listen at a time."""


class TooManyListenersError(DistNetworkError):
    """As many listen to the gateway's events as may."""

    code = "too-many-listeners"
    status = 503


class Event(NamedTuple):
    """Something that happened.

    Attributes:
        id: larger than those of all events before, also of gateways that had this address before.
        kind: what.
        data: the rest of it, as JSON.
    """

    id: int
    kind: EventKind
    data: str


class EventLog:
    """What happened last. Thread-safe.

    Ids begin at the microseconds since 1970 when the log is made: so an id of an earlier log, of a gateway that was at
    the same address, is told from one of this.

    Args:
        clock: the registry's clock.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._kept: deque[Event] = deque(maxlen=KEPT_EVENTS)
        self._first = time.time_ns() // 1000
        self._ids = itertools.count(self._first + 1)
        self._last = self._first
        self._listeners: dict[object, Callable[[], None]] = {}
        self._counted: Counter[EventKind] = Counter()
        self._closed = False

    def append(
        self,
        kind: EventKind,
        detail: str,
        *,
        at: float | None = None,
        job: str = "",
        ranks: Sequence[int] = (),
        group: str = "",
        **more: Any,
    ) -> None:
        """Log an event.

        Args:
            kind: what happened.
            detail: the same in a sentence.
            at: the clock when it did, now if left out.
            job: the job concerned.
            ranks: the ranks concerned.
            group: the id of the group concerned.
            more: what else there is to say, fit for JSON.
        """
        ago = 0.0 if at is None else self._clock() - at
        said = {"time": time.time() - ago, "job": job, "ranks": list(ranks), "group": group, "detail": detail, **more}
        data = json.dumps(said)
        with self._lock:
            self._last = next(self._ids)
            self._kept.append(Event(self._last, kind, data))
            self._counted[kind] += 1
            listeners = list(self._listeners.values())
        for wake in listeners:
            wake()

    def counts(self) -> Counter[EventKind]:
        """How many events there have been, by what happened."""
        with self._lock:
            return self._counted.copy()

    @property
    def last(self) -> int:
        """The id of the last event, or one before the first."""
        return self._last

    def resume_position(self, seen: int | None) -> int:
        """Where somebody goes on who has seen an event: behind it.

        Args:
            seen: its id, None for somebody who wants what comes from now on. With one that is not of this log all that
                is kept comes.
        """
        if seen is None:
            return self._last
        return seen if self._first <= seen <= self._last else self._first

    def since(self, position: int) -> list[Event]:
        """The events behind a position that are still kept."""
        with self._lock:
            found = itertools.takewhile(lambda event: event.id > position, reversed(self._kept))
            return list(found)[::-1]

    def has_dropped(self, position: int) -> bool:
        """Whether events behind a position are kept no more."""
        with self._lock:
            return bool(self._kept) and position + 1 < self._kept[0].id and position > self._first

    @contextlib.contextmanager
    def subscribe(self, wake: Callable[[], None]) -> Iterator[None]:
        """Have a function called, in any thread, when there is something new, and when the log is closed.

        Raises:
            TooManyListenersError: MAX_LISTENERS do already.
        """
        key = object()
        with self._lock:
            self._check_capacity()
            self._listeners[key] = wake
        try:
            yield
        finally:
            with self._lock:
                del self._listeners[key]

    def check_capacity(self) -> None:
        """Raise TooManyListenersError if nobody more may listen."""
        with self._lock:
            self._check_capacity()

    @property
    def listeners(self) -> int:
        """How many listen."""
        return len(self._listeners)

    @property
    def closed(self) -> bool:
        """Whether it has been closed: listeners are to go."""
        return self._closed

    def close(self) -> None:
        """Send the listeners away."""
        with self._lock:
            self._closed = True
            listeners = list(self._listeners.values())
        for wake in listeners:
            wake()

    def _check_capacity(self) -> None:
        if len(self._listeners) >= MAX_LISTENERS:
            raise TooManyListenersError(
                f"{MAX_LISTENERS} clients listen to this gateway's events already; close a dashboard, or ask "
                "GET /v1/overview now and then"
            )
