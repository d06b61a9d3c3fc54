"""Backend of a rank whose collectives an attached process executes: it refuses every call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, NoReturn

from rankmesh_agent.backends.base import Backend, CallContext
from rankmesh_agent.collectives.select import Algorithm
from rankmesh_agent.transports.segment import Segment
from rankmesh_agent.wire.errors import DistBackendError
from rankmesh_agent.wire.ops import Call


class DelegatedRankError(DistBackendError):
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
        self.segment: Segment | None = segment

    def algorithm(self, call: Call) -> Algorithm:
        self._refuse(call)

    def run(self, algorithm: Algorithm, arguments: Sequence[Any], context: CallContext) -> None:
        self._refuse(context.call)

    def close(self) -> None:
        """Drop this process's mapping of the segment; the attached process has its own."""
        segment, self.segment = self.segment, None
        if segment is not None:
            segment.close()

    def _refuse(self, call: Call) -> NoReturn:
        raise DelegatedRankError(
            f"{call.name}: the process that is attached to this agent executes this rank's collectives; make the call "
            "there, or end its lease first",
            op=call.name,
        )
