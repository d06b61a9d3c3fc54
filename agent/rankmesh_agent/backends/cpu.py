"""CPU backends: over shared memory, over messages, or over both in a group on several hosts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from rankmesh_agent.backends import registered
from rankmesh_agent.backends.base import Backend, CallContext
from rankmesh_agent.backends.fingerprint import raise_mismatch
from rankmesh_agent.collectives.hosts import HierarchicalLink
from rankmesh_agent.collectives.reduction import ignore_fp_errors
from rankmesh_agent.collectives.select import HIERARCHICAL, Algorithm, Medium, algorithm
from rankmesh_agent.progress.message_link import DIRECT_RANKS, MessageLink
from rankmesh_agent.shared_memory.segment import Segment
from rankmesh_agent.shared_memory.slots import CallMismatchError
from rankmesh_agent.wire.errors import GroupAbortedError
from rankmesh_agent.wire.ops import Call, OpType


class CpuBackend(Backend):
    """Executes calls over a Segment, or over a Link."""

    name: ClassVar[str] = "mesh"
    allocates = True

    def __init__(self, link: MessageLink, segment: Segment | None = None) -> None:
        self.segment = segment
        self.direct = link if segment is None and link.size <= DIRECT_RANKS else None
        self.medium = "tcp" if segment is None else "shm"
        self._link = link
        self._context = ignore_fp_errors()

    def algorithm(self, call: Call) -> Algorithm:
        segment, size = self.segment, self._link.size
        if call.kind is OpType.EMPTY:
            return registered.over_link if segment is None else registered.over_segment
        if segment is None:
            return algorithm(call.kind, "link", call.nbytes, size, shares_cores=self._link.shares_cores)
        medium: Medium = "registered" if segment.regions else "reads" if segment.can_read else "segment"
        return algorithm(call.kind, medium, call.nbytes, size, segment.slot_bytes)

    def run(self, algorithm: Algorithm, arguments: Sequence[Any], context: CallContext) -> None:
        segment = self.segment
        try:
            if segment is not None:
                segment.begin(context.seq, context.call.fingerprint, context.check)
                self._context.run(algorithm, segment, *arguments)
            else:
                self._link.begin(context.seq, context.call.fingerprint, context.wait)
                self._context.run(algorithm, self._link, *arguments)
        except CallMismatchError:
            raise_mismatch(self._link, context)
        except BaseException:
            if segment is not None:
                segment.mark_left()
                segment.make_arrays_private(arguments)
            raise

    def close(self) -> None:
        self.segment = None


class HierarchicalCpuBackend(Backend):
    """Executes the calls of a group on several hosts: messages between the hosts, a Segment inside each.

    The ranks compare their calls at the Link: all of them, or the first ranks of the hosts, those of a host in its
    memory.

    Args:
        topology: the same link, and the segment of this rank's host.
    """

    name: ClassVar[str] = "mesh"
    medium = "shm+tcp"
    allocates = True

    def __init__(self, link: MessageLink, topology: HierarchicalLink) -> None:
        self._link = link
        self._topology: HierarchicalLink | None = topology
        self._context = ignore_fp_errors()

    def algorithm(self, call: Call) -> Algorithm:
        if call.kind is OpType.EMPTY:
            return registered.over_link
        slot_bytes = None if self._topology is None else self._topology.local.slot_bytes
        return algorithm(call.kind, "hosts", call.nbytes, self._link.size, slot_bytes)

    def run(self, algorithm: Algorithm, arguments: Sequence[Any], context: CallContext) -> None:
        topology = self._topology
        if topology is None:
            raise GroupAbortedError("the group has been destroyed")
        here = topology.local_ranks
        try:
            self._link.begin(context.seq, context.call.fingerprint, context.wait)
            topology.local.begin(
                context.seq,
                context.call.fingerprint,
                lambda missing: self._check(context, lambda: [here[local] for local in missing()]),
            )
            self._context.run(algorithm, topology if algorithm in HIERARCHICAL else self._link, *arguments)
        except CallMismatchError:
            try:
                raise_mismatch(self._link, context)
            finally:
                topology.local.restart(context.seq)

    def _check(self, context: CallContext, missing: Callable[[], list[int]]) -> None:
        """Check a wait for ranks of this host, which may wait for ranks of other hosts."""
        context.check(lambda: self._link.not_arrived(missing()) if missing() else [])
        self._link.check()

    def close(self) -> None:
        self._topology = None
