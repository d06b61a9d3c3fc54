"""What is kept of every call and message: the latest ones (a flight recorder), and tallies of all.

Both are written on the way of a call of a few microseconds and read seldom, so what is written is the least: one tuple,
whose words are made when somebody asks, and three additions.
"""

from __future__ import annotations

import contextlib
import threading
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from rankmesh_agent.wire.dtypes import display
from rankmesh_agent.wire.ops import Call
from rankmesh_agent.wire.schemas import FlightRecord, FlightState, InFlight

KEPT = 1000
"""How many calls and messages the flight recorder keeps unless somebody says otherwise."""
BOUNDS = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
"""Upper bounds of the durations' histogram, in seconds; the last bucket is for what takes longer."""
ENDED_GROUPS = "ended"
"""What the tallies of the groups that are no more go under, together: sums over groups never go down."""


class Owner(Protocol):
    """Whose a call is: a group at one rank."""

    @property
    def id(self) -> str:
        """The group's id, as people are told."""

    @property
    def name(self) -> str:
        """Its name."""

    def is_called(self, name: str) -> bool:
        """Whether that is the group's name or id."""

    def number(self, rank: int) -> int:
        """Return the number the user knows a member by."""


Message = tuple[str, np.dtype[Any], int, int, int]
"""A message between two ranks: ``send`` or ``recv``, dtype and elements, the other rank or -1 for any, tag."""
Entry = tuple[Owner, Call | Message, int, float, float | None, str, int]
"""A call or message: whose, what, its number, begin and end by the monotonic clock, its error's text, its bytes. The
end is None while it is under way. A bare tuple, as making one takes a fifth of what making a named one takes."""


class Tally:
    """The calls of one kind in one group, counted as they end.

    Attributes:
        nbytes: of all of them together.
        seconds: what they took together.
        failures: how many of them failed.
        buckets: how many took at most as long as each of BOUNDS, but longer than the one before; the last, longer.
    """

    __slots__ = ("buckets", "failures", "nbytes", "seconds")

    def __init__(self) -> None:
        self.nbytes = 0
        self.seconds = 0.0
        self.failures = 0
        self.buckets = [0] * (len(BOUNDS) + 1)

    def count(self, seconds: float, nbytes: int) -> None:
        """Count a call that has ended."""
        self.seconds += seconds
        self.nbytes += nbytes
        self.buckets[bisect_left(BOUNDS, seconds)] += 1

    def add(self, other: Tally) -> None:
        """Count another tally's calls, too."""
        self.nbytes += other.nbytes
        self.seconds += other.seconds
        self.failures += other.failures
        self.buckets = [mine + theirs for mine, theirs in zip(self.buckets, other.buckets, strict=True)]


class Recorded(Protocol):
    """A group whose calls are recorded."""

    name: str

    def tallies(self) -> Mapping[str, Tally]:
        """Return its tallies, by kind of call."""

    def under_way(self) -> list[Entry]:
        """Return its calls and messages that have begun and not ended."""


class Recorder:
    """One process's flight recorder and tallies.

    Args:
        kept: how many calls and messages to remember, 0 for none.
    """

    def __init__(self, kept: int = KEPT) -> None:
        self._entries: deque[Entry] = deque(maxlen=kept)
        self.record = self._entries.append
        """Takes a call or message that has ended."""
        self._since = time.time() - time.monotonic()
        self._lock = threading.Lock()
        self._groups: list[Recorded] = []
        self._ended: dict[str, Tally] = {}

    def taken(self) -> list[Entry]:
        """Return what is remembered of calls that have ended, and forget it."""
        found: list[Entry] = []
        with contextlib.suppress(IndexError):
            while len(found) < (self._entries.maxlen or 0):
                found.append(self._entries.popleft())
        return found

    def begin(self, group: Recorded) -> None:
        """Take note of a group."""
        with self._lock:
            self._groups.append(group)

    def end(self, group: Recorded) -> None:
        """Take note that a group is no more: its calls are counted with those of others that are no more."""
        with self._lock:
            self._groups.remove(group)
            for op, tally in group.tallies().items():
                self._ended.setdefault(op, Tally()).add(tally)

    def tallies(self) -> list[tuple[str, Mapping[str, Tally]]]:
        """Return the tallies of all groups by name, in the order they were made, and of ended groups last."""
        with self._lock:
            found = [(group.name, group.tallies()) for group in self._groups]
            return [*found, (ENDED_GROUPS, dict(self._ended))]

    def records(self, group: str | None = None, last: int | None = None) -> list[FlightRecord]:
        """Return what is remembered: what has ended, in that order, then what is under way.

        Args:
            group: only of the groups with this name or id.
            last: only so many, the latest.
        """
        with self._lock:
            entries = [*self._entries.copy(), *(entry for group in self._groups for entry in group.under_way())]
        wanted = [entry for entry in entries if group is None or entry[0].is_called(group)]
        return [
            _record(entry, self._since) for entry in wanted[max(0, len(wanted) - last) if last is not None else 0 :]
        ]


def in_flight(entry: Entry, now: float) -> InFlight:
    """Return a call under way as others are told."""
    _, _, seq, begun, _, _, nbytes = entry
    return InFlight(words(entry), seq, max(0.0, now - begun), nbytes)


def words(entry: Entry) -> str:
    """Return a call or message in words."""
    standing, what = entry[:2]
    if isinstance(what, Call):
        return str(what)
    op, _, _, rank, tag = what
    other = "any rank" if rank < 0 else f"rank {standing.number(rank)}"
    return f"{op} {'to' if op == 'send' else 'from'} {other} (tag {tag})"


def name_of(what: Call | Message) -> str:
    """Return a call's or message's name in the API."""
    return what.name if isinstance(what, Call) else what[0]


def error_text(error: BaseException) -> str:
    """Return an error as it is remembered: itself it would keep the frames it went through, and their arrays."""
    return f"{type(error).__name__}: {error}"


def _record(entry: Entry, since: float) -> FlightRecord:
    standing, what, seq, begun, ended, error, nbytes = entry
    dtype, elements = (what.dtype, what.count) if isinstance(what, Call) else what[1:3]
    state: FlightState = "failed" if error else "in-flight" if ended is None else "completed"
    return FlightRecord(
        standing.id,
        standing.name,
        seq,
        name_of(what),
        words(entry),
        "" if dtype is None else display(dtype),
        elements,
        nbytes,
        since + begun,
        None if ended is None else since + ended,
        state,
        error,
    )
