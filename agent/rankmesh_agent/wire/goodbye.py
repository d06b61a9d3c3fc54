"""GOODBYE of a rank: how and why it leaves its job, in the part and the payload of the frame. Pure: no I/O."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from rankmesh_agent.wire import frames
from rankmesh_agent.wire.errors import RankFailedError, from_code

_DIED, _RAISED, _JSON = 1, 2, 4
"""Bits of the part of the frame."""
_MAX_CHARACTERS = 4000
"""Of each text; all of them fit into a frame without a posted buffer."""


class Goodbye(NamedTuple):
    """How and why a rank leaves.

    Attributes:
        reason: why, for the errors of ranks that wait for it; may be empty.
        died: whether an agent reports the death of the process whose rank it holds.
        raised: whether an exception ended the process.
        failure: the failure of other ranks that made it leave, None if there is none.
    """

    reason: str = ""
    died: bool = False
    raised: bool = False
    failure: RankFailedError | None = None

    def encode(self) -> tuple[int, bytes]:
        """Return the part and the payload of the frame."""
        part = _DIED * self.died | _RAISED * self.raised
        reason = self.reason[:_MAX_CHARACTERS]
        if self.failure is None:
            return part, reason.encode(errors="replace")
        error = {"message": self.failure.message[:_MAX_CHARACTERS], **self.failure.details()}
        return part | _JSON, json.dumps({"reason": reason, "failure": error}).encode()[: frames.SMALL]


def decode(part: int, payload: bytes) -> Goodbye:
    """Return the goodbye of a frame; what cannot be read is left out."""
    reason, failure = payload.decode(errors="replace"), None
    if part & _JSON:
        try:
            document: dict[str, Any] = json.loads(payload)
            error = dict(document["failure"])
            found = from_code(RankFailedError.code, str(error.pop("message")), **error)
            reason, failure = str(document["reason"]), found
        except (ValueError, KeyError, TypeError):
            reason = "its reason cannot be read"
    assert failure is None or isinstance(failure, RankFailedError)
    return Goodbye(reason, bool(part & _DIED), bool(part & _RAISED), failure)
