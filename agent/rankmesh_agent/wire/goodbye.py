"""End of a rank: how and why it leaves its job, or one group, in the part and the payload of a frame. Pure: no I/O.

The frame is a GOODBYE, or for one group an ABORT whose part has GROUP: it ends the waits that need the rank.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from rankmesh_agent.wire import json_text
from rankmesh_agent.wire.errors import DistError, from_frame, ranks_to_frame, to_frame
from rankmesh_agent.wire.ranges import numbers_in

_DIED, _RAISED, _JSON = 1, 2, 4
"""Bits of the part of the frame."""
GROUP = 8
"""The same: the rank leaves the group only. An ABORT without it ends the group."""
_SILENT = 16
_MAX_CHARACTERS = 4000
"""Of the reason: with a failure, it fits into a frame without a posted buffer."""


class Goodbye(NamedTuple):
    """End of a rank: the GOODBYE that it sends, or the loss that its peers detect.

    Attributes:
        reason: why, for the errors of ranks that wait for it; may be empty. Without a word: the connection's error.
        died: whether its process has not left by itself: its connection has ended, or the agent that holds its rank
            reports its death.
        raised: whether an exception ended the process.
        failure: the failure that made it leave and that names other ranks, None if there is none.
        ranks: without a failure: the ranks that errors name; the one that leaves if empty.
        silent: whether another rank reports that its host has only fallen silent: its process may be alive.
    """

    reason: str = ""
    died: bool = False
    raised: bool = False
    failure: DistError | None = None
    ranks: tuple[int, ...] = ()
    silent: bool = False

    @property
    def clean(self) -> bool:
        """True if the rank has left in order: only waits that need it end."""
        return not (self.died or self.raised)

    def encode(self) -> tuple[int, bytes]:
        """Return the part and the payload of the frame."""
        part = _DIED * self.died | _RAISED * self.raised | _SILENT * self.silent
        reason = self.reason[:_MAX_CHARACTERS]
        failure = self.failure
        if failure is None and not self.ranks:
            return part, reason.encode(errors="replace")
        document: dict[str, Any] = {"reason": reason, "ranks": ranks_to_frame(self.ranks)}
        if failure is not None:
            document["failure"] = to_frame(failure)
        return part | _JSON, json_text.encode(document)


def decode(part: int, payload: bytes) -> Goodbye:
    """Return the goodbye of a frame; what cannot be read is left out."""
    reason, failure = payload.decode(errors="replace"), None
    ranks: tuple[int, ...] = ()
    if part & _JSON:
        try:
            document: dict[str, Any] = json_text.loads(payload)
            reason, ranks = str(document["reason"]), tuple(numbers_in(document["ranks"]))
            error = document.get("failure")
            if error is not None:
                failure = from_frame(error)
        except (ValueError, KeyError, TypeError, AttributeError):
            reason = "its reason cannot be read"
    return Goodbye(reason, bool(part & _DIED), bool(part & _RAISED), failure, ranks, bool(part & _SILENT))
