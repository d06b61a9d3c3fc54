"""The calls of a group that another process makes in this rank's place: what they need of this one, and what it knows.

A process that is attached to an agent on its own host is lent the memory that the group's members share, and makes the
rank's collectives itself. The agent keeps the connections: it sees who is gone, carries the messages by which the ranks
find out what each of them called, and is told now and then what has been called, for whoever asks.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import NamedTuple

from rankmesh_agent.group.flight_recorder import Entry, Tally
from rankmesh_agent.group.pending import RunningCall
from rankmesh_agent.group.state import Standing
from rankmesh_agent.progress.message_link import MessageLink
from rankmesh_agent.wire.errors import DistError
from rankmesh_agent.wire.ops import Call


class Told(NamedTuple):
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
    tallies: dict[str, Tally]
    under_way: list[tuple[Call, int, float, int]]
    ended: list[tuple[Call, int, float, float, str, int]]


class Elsewhere:
    """This process's part in such calls, of one group.

    Args:
        standing: of the group.
        link: its messages.
    """

    def __init__(self, standing: Standing, link: MessageLink) -> None:
        self._standing = standing
        self._link = link
        self._running = RunningCall(standing)
        self._turn = threading.Lock()
        self._told: Told | None = None

    def look(self, call: Call, seq: int, missing: list[int], seconds: float, left: float) -> None:
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
            self._running.deadline.at -= seconds - left
            try:
                self._running.check(lambda: missing)
            finally:
                self._standing.begun = None

    def meet(self, call: Call, seq: int, fingerprint: int, seconds: float) -> None:
        """Have the members arrive at a call over messages, as Link.enter does.

        Raises:
            CallMismatchError: they did not make the same call.
        """
        with self._turn:
            self._begin(call, seq, seconds)
            try:
                self._link.begin(seq, fingerprint, self._running.wait)
                self._link.all_exchange()
            finally:
                self._standing.begun = None

    def retell(self, call: Call, seq: int, seconds: float, said: bytes) -> list[bytes]:
        """After a disagreement tell everyone ``said``, and return what they tell."""
        with self._turn:
            self._begin(call, seq, seconds)
            try:
                self._link.begin(seq, 0, self._running.wait)
                return [bytes(payload) for payload in self._link.exchange_descriptions(said)]
            finally:
                self._standing.begun = None

    def abort(self, call: Call | None, seq: int, busy: bool, error: BaseException) -> DistError | None:
        """End the group at all members because of an error in the other process; return the failure.

        Args:
            call: the latest call there, None if there was none.
            seq: the call's number.
            busy: whether it is under way.
            error: what happened.
        """
        standing = self._standing
        if call is not None:
            standing.call, standing.seq = call, seq
            standing.begun = self._running.deadline.started if busy else None
        standing.give_up(error)
        if call is not None:
            standing.begun = None
        return standing.failure

    def tell(self, told: Told) -> None:
        """Take note of what the other process tells."""
        standing = self._standing
        if standing.failure is None and told.seq > standing.seq:
            standing.call, standing.seq = told.call, told.seq
        self._told = told
        for call, seq, begun, ended, error, nbytes in told.ended:
            standing.recorder.record((standing, call, seq, begun, ended, error, nbytes))

    def under_way(self) -> list[Entry]:
        """Return the calls that have begun and not ended, as far as is known."""
        told = self._told
        if told is None:
            return []
        return [(self._standing, call, seq, begun, None, "", nbytes) for call, seq, begun, nbytes in told.under_way]

    def tallies(self) -> Mapping[str, Tally]:
        """Return the tallies, by kind of call, as far as they are known."""
        return {} if self._told is None else self._told.tallies

    def _begin(self, call: Call, seq: int, seconds: float) -> None:
        self._running.begin(call, seq, call.nbytes, seconds)
        self._standing.say_loss_anew()
