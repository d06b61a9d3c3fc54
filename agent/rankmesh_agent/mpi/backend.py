"""Backend that passes a group's calls to MPI without a layer in between."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from rankmesh_agent.backends.base import MONITORED, Backend, CallContext
from rankmesh_agent.backends.fingerprint import raise_mismatch, verify
from rankmesh_agent.collectives.select import Algorithm
from rankmesh_agent.mpi.collectives import MAX_COUNT, Collectives
from rankmesh_agent.mpi.library import mpi
from rankmesh_agent.progress.message_link import MessageLink
from rankmesh_agent.transports.slots import CallMismatchError
from rankmesh_agent.wire.errors import DistBackendError
from rankmesh_agent.wire.ops import Call, OpType


class MpiBackend(Backend):
    """Runs calls in MPI. The ranks compare their calls first only where they have agreed to.

    Args:
        comm: mpi4py's communicator of the group; ``close`` frees it.
        link: messages among the members.
        lost: lost ranks of the mesh, for which MPI would wait without end.
        ranks: the members' ranks in the mesh.
        compare_calls: whether the ranks compare their calls over the link before each.
        max_count: see Collectives.

    Attributes:
        comm: see above.
        in_call: whether a call is inside MPI, where only its own end or the end of the process ends it.
    """

    name: ClassVar[str] = "mpi"
    medium = "mpi"
    monitored_subject = MONITORED

    def __init__(
        self,
        comm: Any,
        link: MessageLink,
        lost: Mapping[int, object],
        ranks: Sequence[int],
        compare_calls: bool = False,
        max_count: int = MAX_COUNT,
    ) -> None:
        self.in_call = False
        self.comm = comm
        self._collectives = Collectives(comm, max_count)
        self._link = link
        self._lost = lost
        self._ranks = ranks
        self._compare_calls = compare_calls
        self._error: type[Exception] = mpi().Exception

    def algorithm(self, call: Call) -> Algorithm:
        if call.kind is OpType.BARRIER and call.subject == MONITORED:
            return verify
        return self._collectives.algorithm(call)

    def run(self, algorithm: Algorithm, arguments: Sequence[Any], context: CallContext) -> None:
        if self._lost:
            context.check(lambda: self._link.lagging(context.seq))
        if self._compare_calls or algorithm is verify:
            verify(self._link, context)
            if algorithm is verify:
                return
        self.in_call = True
        try:
            algorithm(*arguments)
        except CallMismatchError:
            self.in_call = False
            raise_mismatch(self._link, context)
        except self._error as error:
            raise DistBackendError(
                f"{context.call} #{context.seq}: MPI error: {error}. If the ranks may not have made the same call, "
                "TORCH_DISTRIBUTED_DEBUG=DETAIL has them compare their calls",
                op=context.call.name,
                seq=context.seq,
            ) from error
        finally:
            self.in_call = False

    def close(self) -> None:
        comm, self.comm = self.comm, None
        # With a lost member or an active call, Free could wait without end.
        missing = any(rank in self._lost for rank in self._ranks)
        if comm is not None and not missing and not self.in_call and not mpi().Is_finalized():
            comm.Free()
