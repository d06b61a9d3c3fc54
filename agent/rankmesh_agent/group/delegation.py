"""Agent side of delegated collectives: an attached process runs them in shared memory; the agent checks its peers.

A process that is attached to an agent on its own host maps the segment that the group's members share, and executes
the rank's collectives itself. The agent keeps the connections: it knows which peers are lost, carries the messages by
which the ranks compare their calls, and mirrors the calls that the process reports.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, NoReturn

from rankmesh_agent.backends.base import Backend, CallContext
from rankmesh_agent.collectives.select import Algorithm
from rankmesh_agent.group.flight_recorder import OpStats, Record
from rankmesh_agent.group.pending import LocalActiveCall
from rankmesh_agent.group.state import LocalGroupState
from rankmesh_agent.progress.message_link import MessageLink
from rankmesh_agent.transports.segment import Segment
from rankmesh_agent.wire.errors import DistBackendError, DistError
from rankmesh_agent.wire.ops import Call


class RankElsewhereError(DistBackendError):
    """The process that is attached to the rank's agent executes the rank's collectives."""

    code = "rank-elsewhere"
    status = 409


class DelegatedBackend(Backend):
    """Refuses every call: an attached process takes this rank's part in it.

    Args:
        segment: memory that the members share, for the attached process to map.
    """

    name: ClassVar[str] = "mesh"
    medium = "shm"
    delegated = True

    def __init__(self, segment: Segment) -> None:
        self.segment = segment

    def algorithm(self, call: Call) -> Algorithm:
        self._refuse(call)

    def run(self, algorithm: Algorithm, arguments: Sequence[Any], context: CallContext) -> None:
        self._refuse(context.call)

    def close(self) -> None:
        """Does nothing: the attached process may still use the segment."""

    def _refuse(self, call: Call) -> NoReturn:
        raise RankElsewhereError(
            f"{call.name}: the process that is attached to this agent executes this rank's collectives; make the call "
            "there, or end its lease first",
            op=call.name,
        )


class CallReport(NamedTuple):
    """A report of the attached process on its calls in a group.

    Attributes:
        call: its latest call.
        seq: the call's number.
        op_stats: statistics of all its calls, by operation.
        active: its calls that have not ended, each with its number, begin and bytes.
        ended: those that have ended since the last report, each with its number, begin, end, error and bytes.
    """

    call: Call
    seq: int
    op_stats: dict[str, OpStats]
    active: list[tuple[Call, int, float, int]]
    ended: list[tuple[Call, int, float, float, str, int]]


class DelegatedCalls:
    """The agent's part in the calls of one group that an attached process executes.

    Args:
        state: failure state of the group.
        link: messages among the members.
    """

    def __init__(self, state: LocalGroupState, link: MessageLink) -> None:
        self._state = state
        self._link = link
        self._active = LocalActiveCall(state)
        self._turn = threading.Lock()
        self._report: CallReport | None = None

    def check_peers(self, call: Call, seq: int, missing: list[int], seconds: float, left: float) -> None:
        """Check whether a call can go on, as ``CallContext.check`` does.

        Args:
            call: the call.
            seq: its number.
            missing: the group ranks that it waits for.
            seconds: how long it may take.
            left: how much of that is left.
        """
        with self._turn:
            self._begin(call, seq, seconds)
            self._active.deadline.at -= seconds - left
            try:
                self._active.check(lambda: missing)
            finally:
                self._state.started_at = None

    def verify(self, call: Call, seq: int, fingerprint: int, seconds: float) -> None:
        """Wait until all members have arrived at a call, over messages.

        Raises:
            CallMismatchError: they made different calls.
        """
        with self._turn:
            self._begin(call, seq, seconds)
            try:
                self._link.begin(seq, fingerprint, self._active.wait)
                self._link.all_exchange()
            finally:
                self._state.started_at = None

    def exchange_descriptions(self, call: Call, seq: int, seconds: float, description: bytes) -> list[bytes]:
        """After a mismatch, send ``description`` to all members and return theirs."""
        with self._turn:
            self._begin(call, seq, seconds)
            try:
                self._link.begin(seq, 0, self._active.wait)
                return [bytes(payload) for payload in self._link.exchange_descriptions(description)]
            finally:
                self._state.started_at = None

    def abort(self, call: Call | None, seq: int, busy: bool, error: BaseException) -> DistError | None:
        """End the group at all members because of an error in the attached process; return the failure.

        Args:
            call: the latest call there, None if there was none.
            seq: the call's number.
            busy: whether it is under way.
            error: the error.
        """
        state = self._state
        if call is not None:
            state.call, state.seq = call, seq
            state.started_at = self._active.deadline.started if busy else None
        state.abort(error)
        if call is not None:
            state.started_at = None
        return state.failure

    def update(self, report: CallReport) -> None:
        """Mirror the calls of a report in the group's state and in the flight recorder."""
        state = self._state
        if state.failure is None and report.seq > state.seq:
            state.call, state.seq = report.call, report.seq
        self._report = report
        for call, seq, started, ended, error, nbytes in report.ended:
            state.recorder.record((state, call, seq, started, ended, error, nbytes))

    def active_records(self) -> list[Record]:
        """Return the calls that have not ended, as of the last report."""
        active = [] if self._report is None else self._report.active
        return [(self._state, call, seq, started, None, "", nbytes) for call, seq, started, nbytes in active]

    def op_stats(self) -> Mapping[str, OpStats]:
        """Return the statistics, by operation, as of the last report."""
        return {} if self._report is None else self._report.op_stats

    def _begin(self, call: Call, seq: int, seconds: float) -> None:
        self._active.begin(call, seq, seconds)
        self._state.rename_lost_call()
