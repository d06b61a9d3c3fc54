"""The CPU data plane: shared memory where all members see the same, messages elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from rankmesh_agent.backends import registered
from rankmesh_agent.backends.base import Backend, CallContext
from rankmesh_agent.backends.fingerprint import raise_mismatch
from rankmesh_agent.collectives.reduction import ignore_fp_errors
from rankmesh_agent.collectives.select import Algorithm, Medium, algorithm
from rankmesh_agent.progress.message_link import VerifiedLink
from rankmesh_agent.transports.segment import Segment
from rankmesh_agent.transports.slots import CallMismatchError
from rankmesh_agent.wire.ops import Call, OpType


class CpuBackend(Backend):
    """Runs calls over a Segment, or over a Link.

    Args:
        link: messages among the members.
        ranks: global ranks of the members, by group rank.
        segment: their shared memory, None if they have none.
    """

    name: ClassVar[str] = "mesh"

    def __init__(self, link: VerifiedLink, ranks: Sequence[int], segment: Segment | None) -> None:
        self._link = link
        self._ranks = ranks
        self._segment = segment
        self._quiet = ignore_fp_errors()
        self.medium = "self" if len(ranks) == 1 else "shm" if segment is not None else "tcp"

    @property
    def segment(self) -> Segment | None:
        """The members' shared memory, None if they have none."""
        return self._segment

    def algorithm(self, call: Call) -> Algorithm:
        segment, size = self._segment, self._link.size
        if call.kind is OpType.EMPTY:
            return registered.over_link if segment is None else registered.over_segment
        if segment is None:
            return algorithm(call.kind, "link", call.nbytes, size)
        windows = segment.windows
        medium: Medium = "registered" if windows.regions else "reads" if windows.can_read else "segment"
        return algorithm(call.kind, medium, call.nbytes, size, segment.slot_bytes)

    def run(self, algorithm: Algorithm, arguments: Sequence[Any], watch: CallContext) -> None:
        segment = self._segment
        try:
            if segment is not None:
                segment.begin(watch.seq, watch.call.fingerprint, watch.check)
                self._quiet.run(algorithm, segment, *arguments)
            else:
                self._link.begin(watch.seq, watch.call.fingerprint, watch.wait)
                self._quiet.run(algorithm, self._link, *arguments)
        except CallMismatchError:
            raise_mismatch(self._link, watch)
        except BaseException:
            if segment is not None:
                segment.mark_left()
            raise

    def close(self) -> None:
        self._segment = None
