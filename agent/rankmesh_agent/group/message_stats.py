"""What is kept of one group's messages between two ranks: which are under way, and the tallies of the others."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping

from rankmesh_agent.group.flight_recorder import FlightRecorder, OpStats, Record, error_text, op_name
from rankmesh_agent.progress.framing import Transfer
from rankmesh_agent.wire.schemas import MOST_IN_FLIGHT

_SWEPT = 2 * MOST_IN_FLIGHT
"""How many messages are under way, or have ended unnoticed, before a new one has those looked for that have ended."""


class MessageLog:
    """One rank's messages in a group. For any thread.

    Args:
        recorder: what remembers them.
    """

    def __init__(self, recorder: FlightRecorder) -> None:
        self._record = recorder.record
        self._tallies = {"send": OpStats(), "recv": OpStats()}
        self._lock = threading.Lock()
        self._under_way: dict[int, tuple[Record, Transfer]] = {}
        self._enough = _SWEPT

    def begin(self, entry: Record, transfer: Transfer) -> None:
        """Take note of a message."""
        if transfer.done:
            self._end(entry, transfer.error)
            return
        self._under_way[id(entry)] = entry, transfer
        if len(self._under_way) >= self._enough:
            self._sweep()
            self._enough = max(_SWEPT, 2 * len(self._under_way))

    def end(self, entry: Record, error: BaseException | None) -> None:
        """Take note that a message is over; the first time counts."""
        if self._under_way.pop(id(entry), None) is not None:
            self._end(entry, error)

    def active_records(self) -> list[Record]:
        """Return the messages that have begun and not ended, the oldest first."""
        self._sweep()
        return [entry for entry, _ in self._under_way.copy().values()]

    def op_stats(self) -> Mapping[str, OpStats]:
        """Return the tallies, by kind of call."""
        self._sweep()
        return {op: tally for op, tally in self._tallies.items() if any(tally.buckets)}

    def _sweep(self) -> None:
        """End the messages that are done, but that nobody has waited for."""
        for entry, transfer in self._under_way.copy().values():
            if transfer.done:
                self.end(entry, transfer.error)

    def _end(self, entry: Record, error: BaseException | None) -> None:
        standing, what, seq, begun, _, _, nbytes = entry
        ended = time.monotonic()
        tally = self._tallies[op_name(what)]
        with self._lock:
            tally.count(ended - begun, nbytes)
            if error is not None:
                tally.failures += 1
        self._record((standing, what, seq, begun, ended, "" if error is None else error_text(error), nbytes))
