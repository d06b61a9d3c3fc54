"""Flight recorder: the latest calls and messages of this process, and statistics of all of them.

Both are written on the way of a call of a few microseconds and rarely read, so the least is written: one tuple, which
is formatted when it is read, and three additions.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

from rankmesh_agent.native import core
from rankmesh_agent.wire.dtypes import display
from rankmesh_agent.wire.errors import DistError
from rankmesh_agent.wire.ops import Call
from rankmesh_agent.wire.schemas import FlightRecord, FlightState, InFlight
from rankmesh_agent.wire.stats import GroupOpStats, OpStats

DEFAULT_CAPACITY = 1000
MAX_GROUPS = 100
"""Groups that have statistics of their own; the others share OTHER_GROUPS."""
OTHER_GROUPS = "(other)"
_MAX_ERROR_CHARACTERS = 500
"""Of an error's text, where it explains what a rank did next."""
ENDED_GROUPS = "(ended)"
"""Label of the statistics of all groups that have ended: sums over groups never go down."""


class RecordOwner(Protocol):
    """The group of a call, at one rank."""

    @property
    def id(self) -> str:
        """The group's id, as documents show it."""

    @property
    def name(self) -> str:
        """The group's name."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks of the members in the job, by group rank."""

    @property
    def seq(self) -> int:
        """Number of the latest call."""

    def matches(self, name: str) -> bool:
        """Return whether ``name`` is the group's name or id."""

    def global_rank(self, rank: int) -> int:
        """Return the global rank of a member."""


MessageInfo = tuple[str, np.dtype[Any] | None, int, int, int]
"""A message between two ranks: ``send`` or ``recv``, dtype and elements, the other rank or -1 for any, tag. Or the mark
of a step: ``step``, no dtype, its number, -1, 0."""
Record = tuple[RecordOwner, Call | MessageInfo, int, float, float | None, str, int]
"""A call or message: group, call, number, start and end by the monotonic clock, its error's text, its bytes. The end
is None while it is under way. A bare tuple, because making a named one takes five times as long."""


class RecordedCalls(Protocol):
    """Calls or messages of a group at one rank: their statistics, and those under way."""

    def op_stats(self) -> Mapping[str, OpStats]:
        """Return the statistics, by operation. For any thread."""

    def active_records(self) -> list[Record]:
        """Return the calls and messages that have not ended. For any thread."""


class RecordedGroup(RecordedCalls, Protocol):
    """A group at one rank, as the flight recorder reads it."""

    @property
    def state(self) -> RecordOwner:
        """The group, as its records name it."""

    def algorithms(self) -> Mapping[Call, str]:
        """Return the names of the algorithms of calls, as far as they are known. For any thread."""


class FlightRecorder:
    """One process's flight recorder, and the statistics of its groups.

    Args:
        capacity: number of calls and messages to keep, 0 for none.

    Attributes:
        on_failure: called with the failure of a group; and with the timeout of a message, and its begin by the
            monotonic clock. It must not wait.
    """

    def __init__(self, capacity: int = DEFAULT_CAPACITY) -> None:
        self.latest: Any = deque(maxlen=capacity) if core is None else core.Records(capacity)
        self.record: Callable[[Record], None] = self.latest.append
        """Records a call or message that has ended."""
        self.on_failure: Callable[[DistError, float | None], None] = lambda error, begun: None
        self._since = time.time() - time.monotonic()
        self._lock = threading.Lock()
        self._groups: list[RecordedGroup] = []
        self._ended: dict[str, OpStats] = {}

    def mark_step(self, group: RecordOwner, number: int) -> None:
        """Record that a step of the program begins."""
        now = time.monotonic()
        self.record((group, ("step", None, number, -1, 0), 0, now, now, "", 0))

    def last_error(self) -> str:
        """Return the text of the error of the call or message that ended last, '' if it succeeded or none is kept."""
        record = self._last()
        return "" if record is None else record[5]

    def last_success(self) -> float:
        """Return when the call or message that ended last began, if it succeeded; otherwise 0."""
        record = self._last()
        return 0.0 if record is None or record[5] else record[3]

    def _last(self) -> Record | None:
        try:
            found: Record = self.latest[-1]
        except IndexError:
            return None
        return found

    def add_group(self, group: RecordedGroup) -> None:
        """Read a group from now on."""
        with self._lock:
            self._groups.append(group)

    def remove_group(self, group: RecordedGroup) -> None:
        """Stop reading a group that has ended: its statistics are added to those of the other ended groups."""
        with self._lock:
            self._groups.remove(group)
            for op, stats in group.op_stats().items():
                self._ended.setdefault(op, OpStats()).add(stats)

    def operations(self) -> list[GroupOpStats]:
        """Return the statistics and the calls in flight, by group in the order of their creation, ended ones last.

        There are at most MAX_GROUPS + 2 groups, to bound the number of metrics; groups of one name count as one.
        """
        found: dict[tuple[str, str], GroupOpStats] = {}

        def at(group: str, op: str) -> GroupOpStats:
            return found.setdefault((group, op), GroupOpStats(group=group, op=op))

        with self._lock:
            now = time.monotonic()
            names: set[str] = set()
            for group in self._groups:
                if len(names) < MAX_GROUPS:
                    names.add(group.state.name)
                name = group.state.name if group.state.name in names else OTHER_GROUPS
                for op, stats in sorted(group.op_stats().items()):
                    at(name, op).add(stats)
                for record in group.active_records():
                    counted = at(name, op_name(record[1]))
                    counted.in_flight += 1
                    counted.oldest = max(counted.oldest, now - record[3])
            for op, ended in self._ended.items():
                at(ENDED_GROUPS, op).add(ended)
        return list(found.values())

    def in_flight(self, group: str) -> list[InFlight] | None:
        """Return all calls and messages of a group that have not ended, in GroupInfo's form.

        Returns:
            None if there is no such group; a group that is being set up is one already.
        """
        now = time.monotonic()
        with self._lock:
            groups = [each for each in self._groups if each.state.matches(group)]
            return [in_flight(record, now) for each in groups for record in each.active_records()] if groups else None

    def snapshot(self) -> tuple[list[RecordOwner], list[Record], list[Record]]:
        """Return the groups, the calls and messages that have not ended, and those that have, in their order."""
        with self._lock:
            active = [record for group in self._groups for record in group.active_records()]
            return [group.state for group in self._groups], active, list(self.latest.copy())

    def algorithms(self) -> dict[str, Mapping[Call, str]]:
        """Return the names of the algorithms of calls, by the groups' ids."""
        with self._lock:
            return {group.state.id: group.algorithms() for group in self._groups}

    def records(self, group: str | None = None, last: int | None = None) -> list[FlightRecord]:
        """Return the records: of the calls that have ended, in that order, then of those that have not."""
        with self._lock:
            records = [*self.latest.copy(), *(record for group in self._groups for record in group.active_records())]
        wanted = [record for record in records if group is None or record[0].matches(group)]
        first = 0 if last is None else max(0, len(wanted) - last)
        return [_flight_record(record, self._since) for record in wanted[first:]]


def in_flight(record: Record, now: float) -> InFlight:
    """Return a record of a call that has not ended in GroupInfo's form."""
    _, _, seq, started, _, _, nbytes = record
    return InFlight(describe(record), seq, max(0.0, now - started), nbytes)


def describe(record: Record) -> str:
    """Return the description of a call or message."""
    owner, what = record[:2]
    if isinstance(what, Call):
        return str(what)
    op, _, number, rank, tag = what
    if op == "step":
        return f"step {number}"
    other = "any rank" if rank < 0 else f"rank {owner.global_rank(rank)}"
    return f"{op} {'to' if op == 'send' else 'from'} {other} (tag {tag})"


def op_name(what: Call | MessageInfo) -> str:
    """Return the name of a call's or message's function in the API."""
    return what.name if isinstance(what, Call) else what[0]


def error_text(error: BaseException) -> str:
    """Return an error's text for a record: the error itself would keep its traceback's frames, and their arrays."""
    return f"{type(error).__name__}: {error}"


def after_error(text: str, error: str) -> str:
    """Return the text of what a rank did, with the error of its latest call or message, if that failed."""
    if not error or error in text:
        return text
    return f"{text} after {error[:_MAX_ERROR_CHARACTERS]}".lstrip()


def _flight_record(record: Record, since: float) -> FlightRecord:
    owner, what, seq, started, ended, error, nbytes = record
    dtype, elements = (what.dtype, what.count) if isinstance(what, Call) else what[1:3]
    state: FlightState = "failed" if error else "in-flight" if ended is None else "completed"
    return FlightRecord(
        owner.id,
        owner.name,
        seq,
        op_name(what),
        describe(record),
        "" if dtype is None else display(dtype),
        elements,
        nbytes,
        since + started,
        None if ended is None else since + ended,
        state,
        error,
    )
