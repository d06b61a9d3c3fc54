"""End of a rank: how and why it leaves its job, or one group, as the JSON payload of a frame. Pure: no I/O.

The frame is a GOODBYE, or for one group an ABORT whose part is GROUP: it ends the waits that need the rank.
"""

from __future__ import annotations

from typing import NamedTuple

from rankmesh_agent.wire import json_text
from rankmesh_agent.wire.errors import DistError, from_frame, ranks_to_frame, to_frame
from rankmesh_agent.wire.ranges import numbers_in

GROUP = 1
"""Part of an ABORT by which the rank leaves the group only. An ABORT without it ends the group."""
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

    def encode(self) -> bytes:
        """Return the payload of the frame."""
        document = self._asdict() | {"reason": self.reason[:_MAX_CHARACTERS], "ranks": ranks_to_frame(self.ranks)}
        return json_text.encode(document | {"failure": self.failure and to_frame(self.failure)})


def decode(payload: bytes) -> Goodbye:
    """Return the goodbye of a frame; one that cannot be read is that of an exception."""
    try:
        document = json_text.loads(payload)
        reason, failure, ranks = document["reason"], document["failure"], tuple(numbers_in(document["ranks"]))
        died, raised, silent = (bool(document[name]) for name in ("died", "raised", "silent"))
        return Goodbye(str(reason), died, raised, failure and from_frame(failure), ranks, silent)
    except (ValueError, KeyError, TypeError, AttributeError):
        return Goodbye("its goodbye cannot be read", raised=True)
