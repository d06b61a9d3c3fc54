"""The calls of a group that another process makes in this rank's place: what they need of this one, and what it knows.

A process that is attached to an agent on its own host is lent the memory that the group's members share, and makes the
rank's collectives itself. The agent keeps the connections: it sees who is gone, carries the messages by which the ranks
find out what each of them called, and is told now and then what has been called, for whoever asks.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import NamedTuple

from rankmesh_agent.group.flight_recorder import OpStats, Record
from rankmesh_agent.group.pending import LocalActiveCall
from rankmesh_agent.group.state import LocalGroupState
from rankmesh_agent.progress.message_link import MessageLink
from rankmesh_agent.wire.errors import DistError
from rankmesh_agent.wire.ops import Call


class CallReport(NamedTuple):
    """What the other process tells of a group.

    Attributes:
        call: its latest call.
        seq: the call's number.
        tallies: of all its calls, by kind.
        under_way: its calls that have begun and not ended, each with its number, begin and bytes.
        ended: those that have ended since it told the last time, each with its number, begin, end, error and bytes.
    """

    call: Call
    seq: int
    op_stats: dict[str, OpStats]
    active: list[tuple[Call, int, float, int]]
    ended: list[tuple[Call, int, float, float, str, int]]


class DelegatedCalls:
    """This process's part in such calls, of one group.

    Args:
        standing: of the group.
        link: its messages.
    """

    def __init__(self, standing: LocalGroupState, link: MessageLink) -> None:
        self._state = standing
        self._link = link
        self._active = LocalActiveCall(standing)
        self._turn = threading.Lock()
        self._report: CallReport | None = None

    def check_peers(self, call: Call, seq: int, missing: list[int], seconds: float, left: float) -> None:
        """See whether a call can go on, as Watch.check does.

        Args:
            call: what it is.
            seq: its number.
            missing: the group ranks it waits for.
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
        """Have the members arrive at a call over messages, as Link.enter does.

        Raises:
            CallMismatchError: they did not make the same call.
        """
        with self._turn:
            self._begin(call, seq, seconds)
            try:
                self._link.begin(seq, fingerprint, self._active.wait)
                self._link.all_exchange()
            finally:
                self._state.started_at = None

    def exchange_descriptions(self, call: Call, seq: int, seconds: float, said: bytes) -> list[bytes]:
        """After a disagreement tell everyone ``said``, and return what they tell."""
        with self._turn:
            self._begin(call, seq, seconds)
            try:
                self._link.begin(seq, 0, self._active.wait)
                return [bytes(payload) for payload in self._link.exchange_descriptions(said)]
            finally:
                self._state.started_at = None

    def abort(self, call: Call | None, seq: int, busy: bool, error: BaseException) -> DistError | None:
        """End the group at all members because of an error in the other process; return the failure.

        Args:
            call: the latest call there, None if there was none.
            seq: the call's number.
            busy: whether it is under way.
            error: what happened.
        """
        standing = self._state
        if call is not None:
            standing.call, standing.seq = call, seq
            standing.started_at = self._active.deadline.started if busy else None
        standing.abort(error)
        if call is not None:
            standing.started_at = None
        return standing.failure

    def update(self, told: CallReport) -> None:
        """Take note of what the other process tells."""
        standing = self._state
        if standing.failure is None and told.seq > standing.seq:
            standing.call, standing.seq = told.call, told.seq
        self._report = told
        for call, seq, begun, ended, error, nbytes in told.ended:
            standing.recorder.record((standing, call, seq, begun, ended, error, nbytes))

    def active_records(self) -> list[Record]:
        """Return the calls that have begun and not ended, as far as is known."""
        told = self._report
        if told is None:
            return []
        return [(self._state, call, seq, begun, None, "", nbytes) for call, seq, begun, nbytes in told.active]

    def op_stats(self) -> Mapping[str, OpStats]:
        """Return the tallies, by kind of call, as far as they are known."""
        return {} if self._report is None else self._report.op_stats

    def _begin(self, call: Call, seq: int, seconds: float) -> None:
        self._active.begin(call, seq, call.nbytes, seconds)
        self._state.rename_lost_call()
