"""Event log of the gateway: numbered and bounded; a listener has a position in it, not a buffer."""

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
    "rank-slow",
    "rank-in-time",
    "group-made",
    "group-failed",
    "group-ended",
    "call-held-up",
    "call-ended",
    "job-restarted",
    "agent-registered",
    "agent-leased",
    "agent-freed",
    "agent-lost",
]
"""The kinds of events."""

KEPT_EVENTS = 1000
"""Limit of the events that are kept."""
MAX_LISTENERS = 100
"""Limit of concurrent listeners."""


class TooManyListenersError(DistNetworkError):
    """There are MAX_LISTENERS listeners already."""

    code = "too-many-listeners"
    status = 503


class Event(NamedTuple):
    """An event.

    Attributes:
        id: larger than those of all earlier events, also of earlier gateways at this address.
        job: the job among them; empty for none.
    """

    id: int
    kind: EventKind
    data: str
    job: str = ""


class EventLog:
    """The last events. Thread-safe.

    Ids begin at the microseconds since 1970 when the log is created, so an id of an earlier log, of a gateway that had
    the same address, differs from all of this one.

    Attributes:
        last: the id of the last event; before the first one, one less than its id.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._kept: deque[Event] = deque(maxlen=KEPT_EVENTS)
        self._first = self.last = time.time_ns() // 1000
        self._listeners: dict[object, Callable[[], None]] = {}
        self._counted: Counter[EventKind] = Counter()
        self.closed = False

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
        """Append an event; ``at``: the clock at the event; now if left out."""
        ago = 0.0 if at is None else self._clock() - at
        fields = {"time": time.time() - ago, "job": job, "ranks": list(ranks), "group": group, "detail": detail, **more}
        data = json.dumps(fields)
        with self._lock:
            self.last += 1
            self._kept.append(Event(self.last, kind, data, job))
            self._counted[kind] += 1
        self._wake_all()

    def restore(self, events: Sequence[Event]) -> None:
        """Put the events of an earlier log, the oldest first, before all of this one."""
        with self._lock:
            kept = [event._replace(job=_job_in(event.data)) for event in events if event.id <= self._first]
            self._kept.extendleft(reversed(kept[-KEPT_EVENTS:]))
            if self._kept:
                self._first = min(self._first, self._kept[0].id - 1)

    def counts(self) -> Counter[EventKind]:
        """Return the number of events so far, by kind."""
        with self._lock:
            return self._counted.copy()

    def resume_position(self, seen: int | None) -> int:
        """Return the position from which a listener continues that has seen an event; None: with the next event.

        After an id of another log, all events follow that are kept.
        """
        if seen is None:
            return self.last
        return seen if self._first <= seen <= self.last else self._first

    def since(self, position: int) -> list[Event]:
        """Return the events behind a position that are still kept."""
        with self._lock:
            found = itertools.takewhile(lambda event: event.id > position, reversed(self._kept))
            return list(found)[::-1]

    def has_dropped(self, position: int) -> bool:
        """Return whether events behind a position have been dropped."""
        with self._lock:
            return bool(self._kept) and position + 1 < self._kept[0].id and position > self._first

    @contextlib.contextmanager
    def subscribe(self, wake: Callable[[], None]) -> Iterator[None]:
        """Call a function, in any thread, after each event and when the log is closed."""
        key = object()
        with self._lock:
            if len(self._listeners) >= MAX_LISTENERS:
                raise TooManyListenersError(
                    f"{MAX_LISTENERS} clients listen to this gateway's events already; close a dashboard, or ask "
                    "GET /v1/overview now and then"
                )
            self._listeners[key] = wake
        try:
            yield
        finally:
            with self._lock:
                del self._listeners[key]

    @property
    def listeners(self) -> int:
        """The number of listeners."""
        return len(self._listeners)

    def close(self) -> None:
        """End all listeners."""
        self.closed = True
        self._wake_all()

    def _wake_all(self) -> None:
        with self._lock:
            listeners = list(self._listeners.values())
        for wake in listeners:
            wake()


def _job_in(data: str) -> str:
    """Return the job in an event's fields."""
    try:
        return str(json.loads(data)["job"])
    except (ValueError, LookupError, TypeError):
        return ""
